"""Processed logits in native code."""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.ops.backends.native import library
from foretoken.ops.backends.native.arguments import native_rows
from foretoken.ops.types import Rows


def process_logits(rows: Rows) -> Tensor:
    """Edits -> temperature -> min_p -> top_k -> top_p; see `Backend.process_logits`.

    Rows that are not finite (NaN, +inf or all -inf) are edited and scaled, not filtered.
    """
    out_NV = torch.empty(rows.logits_NV.shape, dtype=torch.float32)
    library.load().foretoken_process(native_rows(rows), out_NV.data_ptr())
    return out_NV

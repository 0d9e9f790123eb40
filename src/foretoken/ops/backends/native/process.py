"""Processed logits in native code.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor

from foretoken.ops.backends.native import library
from foretoken.ops.backends.native.arguments import native_params, native_rows
from foretoken.ops.checks import check_rows
from foretoken.ops.types import Edits, SlotParams


def process_logits(
    logits_NV: Tensor, params: SlotParams, slot_N: Tensor, edits: Edits | None
) -> Tensor:
    """Edits -> temperature -> min_p -> top_k -> top_p; see `Backend.process_logits`.

    Rows that are not finite (NaN, +inf or all -inf) are edited and scaled, not filtered.
    """
    check_rows(logits_NV, slot_N, params, edits)
    out_NV = torch.empty(logits_NV.shape, dtype=torch.float32)
    rows = native_rows(logits_NV, slot_N, edits)
    library.load().foretoken_process(byref(native_params(params)), byref(rows), out_NV.data_ptr())
    return out_NV

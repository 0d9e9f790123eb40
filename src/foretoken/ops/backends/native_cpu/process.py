"""Temperature in native code; rows with edits or filters are those of `torch_cpu`.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor

from foretoken.native import library
from foretoken.ops.backends import torch_cpu
from foretoken.ops.checks import check_rows
from foretoken.ops.types import Edits, SlotParams


def native_params(params: SlotParams) -> library.Params:
    """Addresses of the per-slot tensors, which the slot table never replaces."""
    return library.Params(
        params.key_S.data_ptr(),
        params.temperature_S.data_ptr(),
        params.top_k_S.data_ptr(),
        params.top_p_S.data_ptr(),
        params.min_p_S.data_ptr(),
    )


def process_logits(
    logits_NV: Tensor, params: SlotParams, slot_N: Tensor, edits: Edits | None
) -> Tensor:
    """Edits -> temperature -> min_p -> top_k -> top_p; see `Backend.process_logits`.

    Returns new float32 [N, V].
    """
    if edits is None:
        check_rows(logits_NV, slot_N, params)
        raw_NV, slot_N = logits_NV.float().contiguous(), slot_N.contiguous()
        out_NV = torch.empty_like(raw_NV)
        done = library.load().foretoken_scale(
            byref(native_params(params)),
            raw_NV.data_ptr(),
            slot_N.data_ptr(),
            *raw_NV.shape,
            out_NV.data_ptr(),
        )
        if done:
            return out_NV
    return torch_cpu.process_logits(logits_NV, params, slot_N, edits)

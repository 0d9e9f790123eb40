"""Gumbel-max sampling of processed logits in native code.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor

from foretoken.native import library
from foretoken.ops.backends import torch_cpu
from foretoken.ops.backends.native_cpu.process import native_params
from foretoken.ops.checks import INT64, check_rows, check_tensor
from foretoken.ops.types import SlotParams, Stream


def sample(
    logits_NV: Tensor,
    params: SlotParams,
    slot_N: Tensor,
    position_N: Tensor,
    draft_index_N: Tensor,
    streams: tuple[Stream, Stream],
    *,
    fp64_noise: bool = False,
) -> Tensor:
    """One token per row from softmax(logits), as the argmax of logits plus Gumbel noise.

    See `Backend.sample`. Returns int64 [N].
    """
    if fp64_noise:
        return torch_cpu.sample(
            logits_NV, params, slot_N, position_N, draft_index_N, streams, fp64_noise=True
        )
    check_rows(logits_NV, slot_N, params)
    check_tensor("position_N", position_N, slot_N.shape, INT64)
    check_tensor("draft_index_N", draft_index_N, slot_N.shape, INT64)
    logits_NV = logits_NV.float().contiguous()
    slot_N, position_N = slot_N.contiguous(), position_N.contiguous()
    draft_index_N = draft_index_N.contiguous()
    token_N = torch.empty_like(slot_N)
    rows = library.SampleRows(
        logits_NV.data_ptr(),
        slot_N.data_ptr(),
        position_N.data_ptr(),
        draft_index_N.data_ptr(),
        *logits_NV.shape,
        *streams,
    )
    library.load().foretoken_sample(byref(native_params(params)), byref(rows), token_N.data_ptr())
    return token_N

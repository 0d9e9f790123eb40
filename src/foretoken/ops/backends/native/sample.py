"""Gumbel-max sampling and drafting in native code.

Shapes: N rows, B requests, V vocabulary.
"""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor

from foretoken.ops.backends.native import library
from foretoken.ops.backends.native.arguments import (
    native_cache,
    native_params,
    native_places,
    native_rows,
)
from foretoken.ops.checks import check_draft, check_sample
from foretoken.ops.types import DraftCache, Edits, SlotParams, Stream


def sample(
    logits_NV: Tensor,
    params: SlotParams,
    slot_N: Tensor,
    position_N: Tensor,
    draft_index_N: Tensor,
    streams: tuple[Stream, Stream],
    *,
    edits: Edits | None = None,
    fp64_noise: bool = False,
) -> Tensor:
    """One token per row of raw logits, as the argmax of processed logits plus Gumbel noise.

    See `Backend.sample`. A row that is not finite gives 0. Returns int64 [N].
    """
    check_sample(logits_NV, params, slot_N, position_N, draft_index_N, streams, edits, fp64_noise)
    token_N = torch.empty(len(slot_N), dtype=torch.int64)
    rows = native_rows(logits_NV, slot_N, edits)
    places = native_places(position_N, draft_index_N, streams, fp64_noise)
    library.load().foretoken_sample(
        byref(native_params(params)), byref(rows), byref(places), token_N.data_ptr()
    )
    return token_N


def draft(
    logits_BV: Tensor,
    params: SlotParams,
    slot_B: Tensor,
    position_B: Tensor,
    draft_index_B: Tensor,
    cache: DraftCache | None,
    *,
    fp64_noise: bool = False,
) -> Tensor:
    """One draft per row of raw draft logits, and in `cache` the q it came from.

    See `Backend.draft`. Rows at T=0 leave threshold -inf and LSE 0: their q is never asked for.
    Returns int64 [B].
    """
    check_draft(logits_BV, params, slot_B, position_B, draft_index_B, cache, fp64_noise)
    token_B = torch.empty(len(slot_B), dtype=torch.int64)
    rows = native_rows(logits_BV, slot_B)
    streams = (Stream.DRAFT_TOKEN, Stream.DRAFT_BLOCK)
    places = native_places(position_B, draft_index_B, streams, fp64_noise)
    library.load().foretoken_draft(
        byref(native_params(params)),
        byref(rows),
        byref(places),
        native_cache(cache),
        token_B.data_ptr(),
    )
    if cache is not None and cache.logits_SKV.dtype is torch.float64:  # a copy was written
        cache.logits_SKV[slot_B, draft_index_B] = logits_BV
    return token_B

"""Gumbel-max sampling and drafting in native code."""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.ops.backends.native import library
from foretoken.ops.backends.native.arguments import native_cache, native_places, native_rows
from foretoken.ops.types import DraftCache, Noise, Rows


def sample(rows: Rows, noise: Noise) -> Tensor:
    """One token per row of raw logits, as the argmax of processed logits plus Gumbel noise.

    See `Backend.sample`. A row that is not finite gives 0. Returns int64 [N].
    """
    token_N = torch.empty(len(rows.slot_N), dtype=torch.int64)
    library.load().foretoken_sample(native_rows(rows), native_places(noise), token_N.data_ptr())
    return token_N


def draft(rows: Rows, noise: Noise, cache: DraftCache | None) -> Tensor:
    """One draft per row of raw draft logits, and in `cache` the q it came from.

    See `Backend.draft`. Rows at T=0 leave threshold -inf and LSE 0: their q is never read.
    Returns int64 [B].
    """
    token_B = torch.empty(len(rows.slot_N), dtype=torch.int64)
    library.load().foretoken_draft(
        native_rows(rows), native_places(noise), native_cache(cache), token_B.data_ptr()
    )
    if cache is not None and cache.logits_SKV.dtype is torch.float64:  # a copy was written
        cache.logits_SKV[rows.slot_N, noise.draft_index_N] = rows.logits_NV
    return token_B

"""Drawing drafts, and keeping the q they came from.

Shapes: B requests, V vocabulary of the draft model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.ops.backends.torch.noise import RowNoise
from foretoken.ops.backends.torch.sample import draw_rows
from foretoken.ops.types import DraftCache, Noise, Rows, Rule, Stream


def draft(rows: Rows, noise: Noise, cache: DraftCache | None) -> Tensor:
    """See `Backend.draft`. Returns int64 [B]."""
    slot_B, index_B = rows.slot_N, noise.draft_index_N
    coupled_B = rows.params.rule_S[slot_B] == Rule.COUPLED
    own = RowNoise(
        rows.params.key_S[slot_B],
        noise.position_N,
        index_B.masked_fill(coupled_B, 0),
        torch.where(coupled_B, Stream.TARGET_TOKEN, Stream.DRAFT_TOKEN),
        torch.where(coupled_B, Stream.TARGET_BLOCK, Stream.DRAFT_BLOCK),
        noise.fp64,
    )
    drawn = draw_rows(rows, torch.arange(len(slot_B), device=slot_B.device), own)
    if cache is not None:
        cache.logits_SKV[slot_B, index_B] = rows.logits_NV.detach()
        cache.threshold_SK[slot_B, index_B] = drawn.threshold_M
        cache.lse_SK[slot_B, index_B] = drawn.lse_M
    return drawn.token_M

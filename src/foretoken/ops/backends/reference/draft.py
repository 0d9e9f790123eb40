"""Drawing drafts, and the q they came from: written to the cache, and stated again from it.

Shapes: B requests, S slots, K drafts, V' draft vocabulary.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from foretoken.ops.backends.reference.process import Row, is_finite, process_logits
from foretoken.ops.backends.reference.sample import DRAFT, TARGET, Slot, draw, log_sum_exp
from foretoken.ops.checks import check_draft
from foretoken.ops.types import DraftCache, Rule, SlotParams


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
    """See `Backend.draft`. Returns int64 [B]. At T=0, where q is never asked for, lse is 0."""
    check_draft(logits_BV, params, slot_B, position_B, draft_index_B, cache, fp64_noise)
    rows = process_logits(logits_BV, params, slot_B, None).numpy()
    token_B = torch.empty(len(slot_B), dtype=torch.int64)
    for b, s in enumerate(slot_B.tolist()):
        slot = Slot.of(params, s, fp64_noise)
        position, i = int(position_B[b]), int(draft_index_B[b])
        if slot.rule == Rule.COUPLED:  # the target's own noise
            token_B[b] = draw(rows[b], slot, position, 0, TARGET)
        else:
            token_B[b] = draw(rows[b], slot, position, i, DRAFT)
        if cache is not None:
            raw = logits_BV[b].detach().double().numpy()
            cache.logits_SKV[s, i] = logits_BV[b].detach()
            cache.threshold_SK[s, i] = threshold_of(raw, rows[b])
            cache.lse_SK[s, i] = lse_of(rows[b]) if slot.temperature > 0 else 0.0
    return token_B


def threshold_of(raw: Row, filtered: Row) -> float:
    """The least raw logit that the filters kept, not above it in float32; -inf if they kept all."""
    kept = filtered > -np.inf
    if not is_finite(filtered) or not (raw[~kept] > -np.inf).any():
        return -math.inf
    least = raw[kept].min()
    threshold = np.float32(least)
    return float(threshold if threshold <= least else np.nextafter(threshold, np.float32(-np.inf)))


def lse_of(filtered: Row) -> float:
    """log sum exp of what the filters kept; NaN if the row is not finite."""
    return log_sum_exp(filtered) if is_finite(filtered) else math.nan


def q_of(cache: DraftCache, slot: int, i: int, temperature: float) -> Row:
    """q of a cached row over its V' tokens; all 0 if the row was not finite.

    q = exp(logit / T - lse) where logit >= threshold.
    """
    raw = cache.logits_SKV[slot, i].detach().double().numpy()
    threshold, lse = float(cache.threshold_SK[slot, i]), float(cache.lse_SK[slot, i])
    if not math.isfinite(lse):
        return np.zeros(len(raw))
    return np.asarray(np.where(raw >= threshold, np.exp(raw / temperature - lse), 0.0))

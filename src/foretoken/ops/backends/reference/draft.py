"""Drawing drafts, and the q they came from: written to the cache, and stated again from it.

Shapes: B requests, S slots, K drafts, V' draft vocabulary.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from foretoken.ops.backends.reference.process import Row, is_finite, process_logits
from foretoken.ops.backends.reference.sample import Slot, draw, log_sum_exp
from foretoken.ops.types import DRAFT, TARGET, DraftCache, Noise, Rows, Rule


def draft(rows: Rows, noise: Noise, cache: DraftCache | None) -> Tensor:
    """See `Backend.draft`. Returns int64 [B]. At T=0, where q is never asked for, lse is 0."""
    logits_BV = rows.logits_NV.detach()
    processed = process_logits(rows).numpy()
    token_B = torch.empty(len(processed), dtype=torch.int64)
    for b, s in enumerate(rows.slot_N.tolist()):
        slot = Slot.of(rows.params, s, noise.fp64)
        position, i = int(noise.position_N[b]), int(noise.draft_index_N[b])
        # Under COUPLED with the target's own noise.
        index, streams = (0, TARGET) if slot.rule == Rule.COUPLED else (i, DRAFT)
        token_B[b] = draw(processed[b], slot, position, index, streams)
        if cache is not None:
            raw = logits_BV[b].double().numpy()
            cache.logits_SKV[s, i] = logits_BV[b]
            cache.threshold_SK[s, i] = threshold_of(raw, processed[b])
            cache.lse_SK[s, i] = log_sum_exp(processed[b]) if slot.temperature > 0 else 0.0
    return token_B


def threshold_of(raw: Row, filtered: Row) -> float:
    """The least raw logit that the filters kept, not above it in float32; -inf if they kept all."""
    kept = filtered > -np.inf
    if not is_finite(filtered) or not (raw[~kept] > -np.inf).any():
        return -math.inf
    least = raw[kept].min()
    threshold = np.float32(least)
    return float(threshold if threshold <= least else np.nextafter(threshold, np.float32(-np.inf)))


def q_of(cache: DraftCache, slot: int, i: int, temperature: float) -> Row:
    """q of a cached row over its V' tokens; all 0 if the row was not finite.

    q = exp(logit / T - lse) where logit >= threshold.
    """
    raw = cache.logits_SKV[slot, i].detach().double().numpy()
    threshold, lse = float(cache.threshold_SK[slot, i]), float(cache.lse_SK[slot, i])
    if not math.isfinite(lse):
        return np.zeros(len(raw))
    return np.asarray(np.where(raw >= threshold, np.exp(raw / temperature - lse), 0.0))

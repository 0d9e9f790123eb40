"""Drawing drafts, and keeping the q they came from.

Shapes: B requests, V vocabulary of the draft model.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor, from_numpy

from foretoken.ops import types
from foretoken.ops.backends.torch.noise import address
from foretoken.ops.backends.torch.process import rows_of
from foretoken.ops.backends.torch.sample import Noise, draw
from foretoken.ops.types import DraftCache, Rule, Stream


def draft(given: types.Rows, where: types.Noise, cache: DraftCache | None) -> Tensor:
    """One draft per row of raw logits, and into `cache` the q it was drawn from.

    See `Backend.draft`. At T=0, where q is never asked for, no threshold and an LSE of 0 are left.
    Returns int64 [B].
    """
    logits_BV, params, slot_B, _ = given
    position_B, draft_index_B, _, fp64_noise = where
    slot = slot_B.numpy()
    rows = rows_of(logits_BV, params, slot, None)
    coupled_B = params.rule_S.numpy()[slot] == Rule.COUPLED
    noise = Noise(
        address(rows.key_N, position_B.numpy(), np.where(coupled_B, 0, draft_index_B.numpy())),
        np.where(coupled_B, Stream.TARGET_TOKEN, Stream.DRAFT_TOKEN).astype(np.uint32),
        np.where(coupled_B, Stream.TARGET_BLOCK, Stream.DRAFT_BLOCK).astype(np.uint32),
        fp64_noise,
    )
    drawn = draw(rows, np.arange(len(slot)), noise, want_lse=cache is not None)
    if cache is not None:
        to = slot_B, draft_index_B
        cache.logits_SKV[to] = rows.logits_NV
        cache.threshold_SK[to] = from_numpy(drawn.threshold_M)
        cache.lse_SK[to] = from_numpy(drawn.lse_M)
    return from_numpy(drawn.token_M)

"""Speculative sampling as in the papers, in fp64, one request at a time.

p is the target's distribution, q the one that the draft was sampled from. The rules are in
`_rules.py`; here is what they are given, and what is emitted after the drafts they accept:

    y ~ norm(max(w p - q, 0)) after a rejection, y ~ p after the last draft
"""

from __future__ import annotations

from itertools import takewhile

import numpy as np
import torch

from foretoken.ops.backends.reference._rules import RULES, residual
from foretoken.ops.backends.reference.draft import Draft, draft_of, one_hot
from foretoken.ops.backends.reference.noise import uniform_of
from foretoken.ops.backends.reference.process import Row, is_finite, process_logits
from foretoken.ops.backends.reference.sample import Slot, draw, softmax
from foretoken.ops.types import RESIDUAL, TARGET, DraftBlock, Rows, Stream, Verdict, VerifyBatch


def verify(batch: VerifyBatch) -> Verdict:
    """See `Backend.verify`. A request that is not finite gets -1 for its last token."""
    logits_NV, params, slot_B, position_B, drafts, edits, synthetic_rate_K, fp64_noise, _ = batch
    slot_N = slot_B.repeat_interleave(drafts.num_B + 1)
    rows = process_logits(Rows(logits_NV, params, slot_N, edits)).numpy()
    rates = [] if synthetic_rate_K is None else synthetic_rate_K.tolist()
    most = drafts.token_BK.shape[1]
    token_BK1 = torch.full((len(slot_B), most + 1), -1, dtype=drafts.token_BK.dtype)
    n_accept_B = torch.zeros(len(slot_B), dtype=torch.int64)
    finite_B = torch.ones(len(slot_B), dtype=torch.bool)
    start = 0
    for b, num in enumerate(drafts.num_B.tolist()):
        s, mine = int(slot_B[b]), rows[start : start + num + 1]
        slot = Slot.of(params, s, fp64_noise)
        own_drafts = _drafts(drafts, b, s, slot, mine)
        tau, y = _verify_one(mine, slot, int(position_B[b]), own_drafts, rates)
        token_BK1[b, :tau] = drafts.token_BK[b, :tau]
        n_accept_B[b], finite_B[b] = tau, all(is_finite(row) for row in mine[: tau + 1])
        token_BK1[b, tau] = y if finite_B[b] else -1
        start += num + 1
    return Verdict(token_BK1, n_accept_B, finite_B)


def _verify_one(
    rows: Row, slot: Slot, position: int, drafts: list[Draft], rates: list[float]
) -> tuple[int, int]:
    """tau and the token after the accepted drafts, of one request's K + 1 processed rows."""
    own, p = [], [np.zeros(len(row)) for row in rows]
    if slot.is_certain:
        own = [draw(row, slot, position + i, 0, TARGET) for i, row in enumerate(rows)]
    for i, row in enumerate(rows):
        if is_finite(row):
            p[i] = one_hot(own[i], len(row)) if own else softmax(row)
    u = [
        uniform_of(0, slot.key, position + i, i, Stream.ACCEPT, slot.fp64_noise)
        for i in range(len(drafts))
    ]
    tau, w = RULES[slot.rule](p, drafts, u, rates)
    if own:
        return tau, own[tau]
    if tau == len(drafts):  # all were accepted, or the next one has no q: q = 0, the residual is p
        return tau, draw(rows[tau], slot, position + tau, 0, TARGET)
    rest = residual(w, p[tau], drafts[tau].q)
    with np.errstate(divide="ignore"):
        logits = np.log(rest) if rest.sum() > 0 else rows[tau]
    return tau, draw(logits, slot, position + tau, 0, RESIDUAL)


def _drafts(block: DraftBlock, b: int, s: int, slot: Slot, rows: Row) -> list[Draft]:
    """The drafts of request b, up to the first that is a placeholder or has no q."""
    drafts = (draft_of(block, b, i, s, slot, rows.shape[1]) for i in range(len(rows) - 1))
    return list(takewhile(lambda draft: draft.q_x > 0, drafts))

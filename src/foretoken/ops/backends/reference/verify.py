"""Speculative sampling as in the papers, in fp64, one request at a time; evidence of a verdict.

p is the target's distribution, q the one that the draft was sampled from. The rules are in
`_rules.py`; this file prepares their input, and emits a token after the drafts they accept:

    y ~ norm(max(w p - q, 0)) after a rejection, y ~ p after the last draft

Shapes: R requests that need evidence, K most drafts, N rows, V vocabulary.
"""

from __future__ import annotations

import math
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor

from foretoken.ops.backends.reference._rules import RULES, at, residual
from foretoken.ops.backends.reference.noise import uniform_of
from foretoken.ops.backends.reference.process import Row, is_finite, process_logits, softmax
from foretoken.ops.backends.reference.sample import Draft, Slot, draft_of, draw, one_hot

from foretoken.ops.types import (  # isort: skip
    RESIDUAL, TARGET, DraftBlock, Evidence, Rows, Rule, Stream, Verdict, VerifyBatch,
)  # fmt: skip


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
    """tau and the token after the accepted drafts, for one request's K + 1 processed rows."""
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
    if tau == len(drafts):  # all are accepted, or the next has q = 0: the residual is p
        return tau, draw(rows[tau], slot, position + tau, 0, TARGET)
    rest = residual(w, p[tau], drafts[tau].q)
    with np.errstate(divide="ignore"):
        logits = np.log(rest) if rest.sum() > 0 else rows[tau]
    return tau, draw(logits, slot, position + tau, 0, RESIDUAL)


def _drafts(block: DraftBlock, b: int, s: int, slot: Slot, rows: Row) -> list[Draft]:
    """The drafts of request b, up to the first that is a placeholder or has no q."""
    drafts = (draft_of(block, b, i, s, slot, rows.shape[1]) for i in range(len(rows) - 1))
    return list(takewhile(lambda draft: draft.q_x > 0, drafts))


def evidence(batch: VerifyBatch, verdict: Verdict, request_R: Tensor) -> Evidence:
    """See `Backend.evidence`."""
    logits_NV, params, slot_B, position_B, drafts, edits, _, fp64_noise, _ = batch
    first_B = (drafts.num_B + 1).cumsum(0) - (drafts.num_B + 1)
    slot_N = slot_B.repeat_interleave(drafts.num_B + 1)
    rows = process_logits(Rows(logits_NV, params, slot_N, edits)).numpy()
    requests, most = len(request_R), drafts.token_BK.shape[1]

    def numbers(columns: int) -> Tensor:
        return torch.full((requests, columns), math.nan, dtype=torch.float64)

    out = Evidence(
        torch.full((requests, most), -1, dtype=torch.int64),
        *(numbers(most + 1), numbers(most + 1), numbers(most), numbers(most)),
        torch.zeros(requests, dtype=torch.bool),
    )
    for r, b in enumerate(request_R.tolist()):
        s, num = int(slot_B[b]), int(drafts.num_B[b])
        slot, start = Slot.of(params, s, fp64_noise), int(position_B[b])
        p = [_p(row, slot) for row in rows[int(first_B[b]) :][: num + 1]]
        mine = [draft_of(drafts, b, i, s, slot, rows.shape[1]) for i in range(num)]
        for i, (x, q_x, _) in enumerate(mine):
            out.token_RK[r, i], out.p_RK1[r, i], out.q_RK1[r, i] = x, at(p[i], x), q_x
            where = slot.key, start + i, i, Stream.ACCEPT, fp64_noise
            out.u_RK[r, i] = uniform_of(0, *where)
        if slot.rule == Rule.BLOCK:
            for i, mass in enumerate(_masses(p, mine)):
                out.mass_RK[r, i] = mass
        tau = int(verdict.n_accept_B[b])
        y = int(verdict.token_BK1[b, tau])
        out.p_RK1[r, most] = at(p[tau], y)
        out.q_RK1[r, most] = at(mine[tau].q, y) if tau < num and mine[tau].q_x > 0 else 0.0
        has_q = drafts.cache is not None and bool(drafts.real_q_B[b])
        out.real_q_R[r] = has_q and not slot.is_certain
    return out


def _p(row: Row, slot: Slot) -> Row:
    """p of a processed row; 0 everywhere if it is not finite, one-hot at the argmax at T=0."""
    if not is_finite(row):
        return np.zeros(len(row))
    if slot.temperature == 0:
        return one_hot(int(np.argmax(row)), len(row))
    return softmax(row)


def _masses(p: list[Row], drafts: list[Draft]) -> list[float]:
    """S_1 .. S_{K-1}: S_i = sum_x max(p_i p(x | x_1..x_i) - q(x | x_1..x_i), 0), with
    p_i = min(1, p_{i-1} p(x_i) / q(x_i)). K counts the drafts before the first with q = 0.
    """
    drafts = list(takewhile(lambda draft: draft.q_x > 0, drafts))
    masses, p_i = [], 1.0
    for i, (x, q_x, _) in enumerate(drafts[:-1]):
        p_i = min(1.0, p_i * at(p[i], x) / q_x)
        masses.append(float(residual(p_i, p[i + 1], drafts[i + 1].q).sum()))
    return masses

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

from foretoken.ops.backends.reference._rules import RULES, probability, residual
from foretoken.ops.backends.reference.noise import uniform_of
from foretoken.ops.backends.reference.process import Row, is_finite, process_logits, softmax
from foretoken.ops.backends.reference.sample import Draft, Slot, draft_of, draw, one_hot

from foretoken.ops.types import (  # isort: skip
    RESIDUAL, TARGET, DraftBlock, Evidence, Rows, Rule, Stream, Verdict, VerifyBatch,
)  # fmt: skip


def verify(batch: VerifyBatch) -> Verdict:
    """See `Backend.verify`. A request that is not finite gets -1 as its last token."""
    logits_NV, params, slot_B, position_B, drafts, edits, synthetic_rate_K, fp64_noise, _ = batch
    slot_N = slot_B.repeat_interleave(drafts.num_B + 1)
    rows = process_logits(Rows(logits_NV, params, slot_N, edits)).numpy()
    rates = [] if synthetic_rate_K is None else synthetic_rate_K.tolist()
    columns = drafts.token_BK.shape[1]
    token_BK1 = torch.full((len(slot_B), columns + 1), -1, dtype=drafts.token_BK.dtype)
    n_accept_B = torch.zeros(len(slot_B), dtype=torch.int64)
    finite_B = torch.ones(len(slot_B), dtype=torch.bool)
    start = 0
    for b, num in enumerate(drafts.num_B.tolist()):
        s, request_rows = int(slot_B[b]), rows[start : start + num + 1]
        slot = Slot.from_params(params, s, fp64_noise)
        request_drafts = _drafts(drafts, b, s, slot, request_rows)
        tau, y = _verify_one(request_rows, slot, int(position_B[b]), request_drafts, rates)
        token_BK1[b, :tau] = drafts.token_BK[b, :tau]
        n_accept_B[b] = tau
        finite_B[b] = all(is_finite(row) for row in request_rows[: tau + 1])
        token_BK1[b, tau] = y if finite_B[b] else -1
        start += num + 1
    return Verdict(token_BK1, n_accept_B, finite_B)


def _verify_one(
    rows: Row, slot: Slot, position: int, drafts: list[Draft], rates: list[float]
) -> tuple[int, int]:
    """tau and the token after the accepted drafts, for one request's K + 1 processed rows."""
    own_draws, p = [], [np.zeros(len(row)) for row in rows]
    if slot.is_certain:
        own_draws = [draw(row, slot, position + i, 0, TARGET) for i, row in enumerate(rows)]
    for i, row in enumerate(rows):
        if is_finite(row):
            p[i] = one_hot(own_draws[i], len(row)) if own_draws else softmax(row)
    u = [
        uniform_of(0, slot.key, position + i, i, Stream.ACCEPT, slot.fp64_noise)
        for i in range(len(drafts))
    ]
    tau, w = RULES[slot.rule](p, drafts, u, rates)
    if own_draws:
        return tau, own_draws[tau]
    if tau == len(drafts):  # all are accepted, or the next draft has q = 0: the residual is p
        return tau, draw(rows[tau], slot, position + tau, 0, TARGET)
    rest = residual(w, p[tau], drafts[tau].q)
    with np.errstate(divide="ignore"):
        logits = np.log(rest) if rest.sum() > 0 else rows[tau]
    return tau, draw(logits, slot, position + tau, 0, RESIDUAL)


def _drafts(block: DraftBlock, b: int, s: int, slot: Slot, rows: Row) -> list[Draft]:
    """The drafts of request b before the first one with q(x) = 0, such as a placeholder."""
    drafts = (draft_of(block, b, i, s, slot, rows.shape[1]) for i in range(len(rows) - 1))
    return list(takewhile(lambda draft: draft.q_x > 0, drafts))


def evidence(batch: VerifyBatch, verdict: Verdict, request_R: Tensor) -> Evidence:
    """See `Backend.evidence`."""
    logits_NV, params, slot_B, position_B, drafts, edits, _, fp64_noise, _ = batch
    first_B = (drafts.num_B + 1).cumsum(0) - (drafts.num_B + 1)
    slot_N = slot_B.repeat_interleave(drafts.num_B + 1)
    rows = process_logits(Rows(logits_NV, params, slot_N, edits)).numpy()
    requests, columns = len(request_R), drafts.token_BK.shape[1]

    def nans(width: int) -> Tensor:
        return torch.full((requests, width), math.nan, dtype=torch.float64)

    out = Evidence(
        torch.full((requests, columns), -1, dtype=torch.int64),
        *(nans(columns + 1), nans(columns + 1), nans(columns), nans(columns)),
        torch.zeros(requests, dtype=torch.bool),
    )
    for r, b in enumerate(request_R.tolist()):
        s, num = int(slot_B[b]), int(drafts.num_B[b])
        slot, start = Slot.from_params(params, s, fp64_noise), int(position_B[b])
        p = [_p(row, slot) for row in rows[int(first_B[b]) :][: num + 1]]
        request_drafts = [draft_of(drafts, b, i, s, slot, rows.shape[1]) for i in range(num)]
        for i, (x, q_x, _) in enumerate(request_drafts):
            out.token_RK[r, i], out.p_RK1[r, i], out.q_RK1[r, i] = x, probability(p[i], x), q_x
            out.u_RK[r, i] = uniform_of(0, slot.key, start + i, i, Stream.ACCEPT, fp64_noise)
        if slot.rule == Rule.BLOCK:
            for i, mass in enumerate(_masses(p, request_drafts)):
                out.mass_RK[r, i] = mass
        tau = int(verdict.n_accept_B[b])
        y = int(verdict.token_BK1[b, tau])
        replaces = tau < num and request_drafts[tau].q_x > 0
        out.p_RK1[r, columns] = probability(p[tau], y)
        out.q_RK1[r, columns] = probability(request_drafts[tau].q, y) if replaces else 0.0
        has_q = drafts.cache is not None and bool(drafts.real_q_B[b])
        out.real_q_R[r] = has_q and not slot.is_certain
    return out


def _p(row: Row, slot: Slot) -> Row:
    """p of a processed row: 0 everywhere if the row is not finite; at T=0 one-hot at its argmax."""
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
        p_i = min(1.0, p_i * probability(p[i], x) / q_x)
        masses.append(float(residual(p_i, p[i + 1], drafts[i + 1].q).sum()))
    return masses

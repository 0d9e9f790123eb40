"""Speculative sampling as in the papers, in fp64, one request at a time; evidence of a verdict.

After the accepted drafts comes y ~ norm(max(w p - q, 0)) if a draft was rejected, else y ~ p.
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
from foretoken.ops.types import RESIDUAL, TARGET, Evidence, Rows, Rule, Stream, Verdict, VerifyBatch


def verify(batch: VerifyBatch) -> Verdict:
    """See `Backend.verify`."""
    logits_NV, params, slot_B, position_B, drafts, edits, synthetic_rate_K, fp64_noise, _ = batch
    slot_N = slot_B.repeat_interleave(drafts.num_B + 1)
    rows = process_logits(Rows(logits_NV, params, slot_N, edits)).numpy()
    rates = [] if synthetic_rate_K is None else synthetic_rate_K.tolist()
    columns = drafts.token_BK.shape[1]
    token_BK1 = torch.full((len(slot_B), columns + 1), -1, dtype=drafts.token_BK.dtype)
    n_accept_B = torch.zeros(len(slot_B), dtype=torch.int64)
    finite_B = torch.ones(len(slot_B), dtype=torch.bool)
    start = 0
    for b, num_drafts in enumerate(drafts.num_B.tolist()):
        s, request_rows = int(slot_B[b]), rows[start : start + num_drafts + 1]
        slot = Slot.from_params(params, s, fp64_noise)
        request_drafts = _before_zero_q(
            [draft_of(drafts, b, i, s, slot, rows.shape[1]) for i in range(num_drafts)]
        )
        tau, y = _verify_one(request_rows, slot, int(position_B[b]), request_drafts, rates)
        token_BK1[b, :tau] = drafts.token_BK[b, :tau]
        n_accept_B[b] = tau
        finite_B[b] = all(is_finite(row) for row in request_rows[: tau + 1])
        token_BK1[b, tau] = y if finite_B[b] else -1
        start += num_drafts + 1
    return Verdict(token_BK1, n_accept_B, finite_B)


def _verify_one(
    rows: Row, slot: Slot, position: int, drafts: list[Draft], rates: list[float]
) -> tuple[int, int]:
    """tau and the token after the accepted drafts, for one request's K + 1 processed rows."""
    own_draws, p = [], [np.zeros(len(row)) for row in rows]
    if slot.is_one_hot:
        own_draws = [draw(row, slot, position + i, 0, TARGET) for i, row in enumerate(rows)]
    for i, row in enumerate(rows):
        if is_finite(row):
            p[i] = one_hot(own_draws[i], len(row)) if own_draws else softmax(row)
    noise = (Stream.ACCEPT, slot.fp64_noise)
    u = [uniform_of(0, slot.key, position + i, i, *noise) for i in range(len(drafts))]
    tau, w = RULES[slot.rule](p, drafts, u, rates)
    if own_draws:
        return tau, own_draws[tau]
    if tau == len(drafts):  # no draft with q > 0 follows: the residual is p
        return tau, draw(rows[tau], slot, position + tau, 0, TARGET)
    rest = residual(w, p[tau], drafts[tau].q)
    with np.errstate(divide="ignore"):
        logits = np.log(rest) if rest.sum() > 0 else rows[tau]
    return tau, draw(logits, slot, position + tau, 0, RESIDUAL)


def _before_zero_q(drafts: list[Draft]) -> list[Draft]:
    """The drafts before the first one with q(x) = 0 or NaN, such as a placeholder."""
    return list(takewhile(lambda draft: draft.q_x > 0, drafts))


def evidence(batch: VerifyBatch, verdict: Verdict, request_R: Tensor) -> Evidence:
    """See `Backend.evidence`."""
    logits_NV, params, slot_B, position_B, drafts, edits, _, fp64_noise, _ = batch
    first_row_B = (drafts.num_B + 1).cumsum(0) - (drafts.num_B + 1)
    slot_N = slot_B.repeat_interleave(drafts.num_B + 1)
    rows = process_logits(Rows(logits_NV, params, slot_N, edits)).numpy()
    requests, columns = len(request_R), drafts.token_BK.shape[1]
    token_RK = torch.full((requests, columns), -1, dtype=torch.int64)
    p_RK1, q_RK1, u_RK, mass_RK = (
        torch.full((requests, width), math.nan, dtype=torch.float64)
        for width in (columns + 1, columns + 1, columns, columns)
    )
    real_q_R = torch.zeros(requests, dtype=torch.bool)
    for r, b in enumerate(request_R.tolist()):
        s, num_drafts = int(slot_B[b]), int(drafts.num_B[b])
        slot, position = Slot.from_params(params, s, fp64_noise), int(position_B[b])
        p = [_p(row, slot) for row in rows[int(first_row_B[b]) :][: num_drafts + 1]]
        request_drafts = [draft_of(drafts, b, i, s, slot, rows.shape[1]) for i in range(num_drafts)]
        for i, (x, q_x, _) in enumerate(request_drafts):
            token_RK[r, i], p_RK1[r, i], q_RK1[r, i] = x, probability(p[i], x), q_x
            u_RK[r, i] = uniform_of(0, slot.key, position + i, i, Stream.ACCEPT, fp64_noise)
        if slot.rule == Rule.BLOCK:
            for i, mass in enumerate(_masses(p, request_drafts)):
                mass_RK[r, i] = mass
        tau = int(verdict.n_accept_B[b])
        y = int(verdict.token_BK1[b, tau])
        replaces_draft = tau < num_drafts and request_drafts[tau].q_x > 0
        p_RK1[r, columns] = probability(p[tau], y)
        q_RK1[r, columns] = probability(request_drafts[tau].q, y) if replaces_draft else 0.0
        has_q = drafts.cache is not None and bool(drafts.real_q_B[b])
        real_q_R[r] = has_q and not slot.is_one_hot
    return Evidence(token_RK, p_RK1, q_RK1, u_RK, mass_RK, real_q_R)


def _p(row: Row, slot: Slot) -> Row:
    """p of a processed row: at T=0 one-hot at the argmax; 0 everywhere if the row is not finite."""
    if not is_finite(row):
        return np.zeros(len(row))
    if slot.temperature == 0:
        return one_hot(int(np.argmax(row)), len(row))
    return softmax(row)


def _masses(p: list[Row], drafts: list[Draft]) -> list[float]:
    """S_1 .. S_{K-1} of the block rule; K counts the drafts before the first with q(x) = 0."""
    drafts = _before_zero_q(drafts)
    masses, p_i = [], 1.0
    for i, (x, q_x, _) in enumerate(drafts[:-1]):
        p_i = min(1.0, p_i * probability(p[i], x) / q_x)
        masses.append(float(residual(p_i, p[i + 1], drafts[i + 1].q).sum()))
    return masses

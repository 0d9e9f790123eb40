"""What a verdict rests on, in fp64 and in the papers' notation, one request at a time.

Shapes: R requests, K most drafts, N rows, V vocabulary.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from foretoken.ops.backends.reference._rules import at, residual
from foretoken.ops.backends.reference.draft import q_of
from foretoken.ops.backends.reference.noise import uniform_of
from foretoken.ops.backends.reference.process import Row, is_finite, process_logits
from foretoken.ops.backends.reference.sample import Slot, softmax
from foretoken.ops.types import (
    DraftBlock,
    Evidence,
    Rows,
    Rule,
    SlotParams,
    Stream,
    Verdict,
    VerifyBatch,
)


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
        p = [_p(row, params, s) for row in rows[int(first_B[b]) :][: num + 1]]
        q = [_q(drafts, b, s, i, params, rows.shape[1]) for i in range(num)]
        x = [int(token) for token in drafts.token_BK[b, :num]]
        slot, start = Slot.of(params, s, fp64_noise), int(position_B[b])
        for i in range(num):
            out.token_RK[r, i], out.p_RK1[r, i], out.q_RK1[r, i] = x[i], _of(p[i], x[i]), q[i][0]
            where = slot.key, start + i, i, Stream.ACCEPT, fp64_noise
            out.u_RK[r, i] = uniform_of(0, *where)
        if slot.rule == Rule.BLOCK:
            for i, mass in enumerate(_masses(p, x, q)):
                out.mass_RK[r, i] = mass
        tau = int(verdict.n_accept_B[b])
        y = int(verdict.token_BK1[b, tau])
        out.p_RK1[r, most] = _of(p[tau], y)
        out.q_RK1[r, most] = _of(q[tau][1], y) if tau < num and q[tau][0] > 0 else 0.0
        out.real_q_R[r] = _is_real(drafts, b, params, s)
    return out


def _of(p: Row, x: int) -> float:
    return at(p, x) if x >= 0 else 0.0


def _p(row: Row, params: SlotParams, s: int) -> Row:
    """p of a processed row; 0 everywhere if it is not finite, one-hot at the argmax at T=0."""
    if not is_finite(row):
        return np.zeros(len(row))
    if params.temperature_S[s] == 0:
        return np.asarray(np.arange(len(row)) == np.argmax(row), np.float64)
    return softmax(row)


def _is_real(drafts: DraftBlock, b: int, params: SlotParams, s: int) -> bool:
    own_draw = params.temperature_S[s] == 0 or params.rule_S[s] == Rule.COUPLED
    return not own_draw and drafts.cache is not None and bool(drafts.real_q_B[b])


def _q(
    drafts: DraftBlock, b: int, s: int, i: int, params: SlotParams, vocabulary: int
) -> tuple[float, Row]:
    """q(x_i), and q over the target's V ids; 0 of no draft, NaN of a row that is not finite."""
    x, temperature = int(drafts.token_BK[b, i]), float(params.temperature_S[s])
    q, none = np.zeros(vocabulary), np.zeros(vocabulary)
    if x < 0 or (x >= vocabulary and params.rule_S[s] == Rule.SYNTHETIC):
        return 0.0, none
    if drafts.cache is None or not _is_real(drafts, b, params, s):
        q[x : x + 1] = 1.0
        return 1.0, q
    if not math.isfinite(float(drafts.cache.lse_SK[s, i])):
        return math.nan, none
    whole = q_of(drafts.cache, s, i, temperature)
    shared = min(vocabulary, len(whole))
    q[:shared] = whole[:shared]
    return at(whole, x), q


def _masses(p: list[Row], x: list[int], q: list[tuple[float, Row]]) -> list[float]:
    """S_1 .. S_{K-1}: S_i = sum_x max(p_i p(x | x_1..x_i) - q(x | x_1..x_i), 0), with
    p_i = min(1, p_{i-1} p(x_i) / q(x_i)), K being the drafts before the first that is none.
    """
    count = next((i for i, (q_x, _) in enumerate(q) if not q_x > 0), len(q))
    masses, p_i = [], 1.0
    for i in range(1, count):
        p_i = min(1.0, p_i * _of(p[i - 1], x[i - 1]) / q[i - 1][0])
        masses.append(float(residual(p_i, p[i], q[i][1]).sum()))
    return masses

"""What a verdict rests on, in fp64 and in the papers' notation, one request at a time.

Shapes: R requests, K most drafts, N rows, V vocabulary.
"""

from __future__ import annotations

import math
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor

from foretoken.ops.backends.reference._rules import at, residual
from foretoken.ops.backends.reference.draft import Draft, draft_of, one_hot
from foretoken.ops.backends.reference.noise import uniform_of
from foretoken.ops.backends.reference.process import Row, is_finite, process_logits
from foretoken.ops.backends.reference.sample import Slot, softmax
from foretoken.ops.types import Evidence, Rows, Rule, Stream, Verdict, VerifyBatch


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
            out.token_RK[r, i], out.p_RK1[r, i], out.q_RK1[r, i] = x, _of(p[i], x), q_x
            where = slot.key, start + i, i, Stream.ACCEPT, fp64_noise
            out.u_RK[r, i] = uniform_of(0, *where)
        if slot.rule == Rule.BLOCK:
            for i, mass in enumerate(_masses(p, mine)):
                out.mass_RK[r, i] = mass
        tau = int(verdict.n_accept_B[b])
        y = int(verdict.token_BK1[b, tau])
        out.p_RK1[r, most] = _of(p[tau], y)
        out.q_RK1[r, most] = _of(mine[tau].q, y) if tau < num and mine[tau].q_x > 0 else 0.0
        has_q = drafts.cache is not None and bool(drafts.real_q_B[b])
        out.real_q_R[r] = has_q and not slot.is_certain
    return out


def _of(p: Row, x: int) -> float:
    return at(p, x) if x >= 0 else 0.0


def _p(row: Row, slot: Slot) -> Row:
    """p of a processed row; 0 everywhere if it is not finite, one-hot at the argmax at T=0."""
    if not is_finite(row):
        return np.zeros(len(row))
    if slot.temperature == 0:
        return one_hot(int(np.argmax(row)), len(row))
    return softmax(row)


def _masses(p: list[Row], drafts: list[Draft]) -> list[float]:
    """S_1 .. S_{K-1}: S_i = sum_x max(p_i p(x | x_1..x_i) - q(x | x_1..x_i), 0), with
    p_i = min(1, p_{i-1} p(x_i) / q(x_i)), K being the drafts before the first that is none.
    """
    drafts = list(takewhile(lambda draft: draft.q_x > 0, drafts))
    masses, p_i = [], 1.0
    for i, (x, q_x, _) in enumerate(drafts[:-1]):
        p_i = min(1.0, p_i * _of(p[i], x) / q_x)
        masses.append(float(residual(p_i, p[i + 1], drafts[i + 1].q).sum()))
    return masses

"""The verification rules as their papers state them: on whole distributions, for one request.

Each rule gets the rows p[0..K] of the target, the drafts x_1..x_K and their acceptance uniforms u.
Lists are indexed from 0: row p[i] and uniform u[i] decide `drafts[i]`, which is x_{i+1}. The drafts
end before the first one that counts as no draft. A rule returns (tau, w): the number of accepted
drafts, and the weight in the residual norm(max(w p - q, 0)).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from foretoken.ops.backends.reference.process import Row
from foretoken.ops.backends.reference.sample import Draft
from foretoken.ops.types import Rule

Outcome = tuple[int, float]


def probability(p: Row, x: int) -> float:
    """p(x); 0 for an id that is not in the target's vocabulary."""
    return float(p[x]) if 0 <= x < len(p) else 0.0


def residual(w: float, p: Row, q: Row) -> Row:
    """max(w p - q, 0), not normalised."""
    return np.maximum(w * p - q, 0)


def standard(p: list[Row], drafts: list[Draft], u: list[float], rates: list[float]) -> Outcome:
    """Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2.

    for i = 1..K: accept x_i if u_i < p(x_i) / q(x_i), else stop.
    """
    tau = 0
    while tau < len(drafts) and u[tau] < probability(p[tau], drafts[tau].x) / drafts[tau].q_x:
        tau += 1
    return tau, 1.0


def block(p: list[Row], drafts: list[Draft], u: list[float], rates: list[float]) -> Outcome:
    """Sun et al. 2024, "Block verification accelerates speculative decoding", algorithm 2.

    p_0 = 1; for i = 1..K: p_i = min(1, p_{i-1} p(x_i) / q(x_i));
    S_i = sum_x max(p_i p(x | x_1..x_i) - q(x | x_1..x_i), 0);
    h_i = S_i / (S_i + 1 - p_i), 0/0 = 1, but h_K = p_K;
    tau = i if u_i < h_i, else unchanged: no early stop. w = p_tau.
    """
    tau, w, p_i = 0, 1.0, 1.0
    for i in range(1, len(drafts) + 1):
        x, q_x, _ = drafts[i - 1]
        p_i = min(1.0, p_i * probability(p[i - 1], x) / q_x)
        if i == len(drafts):
            h = p_i
        else:
            mass = float(residual(p_i, p[i], drafts[i].q).sum())
            h = mass / (mass + 1 - p_i) if mass + 1 - p_i > 0 else 1.0
        if u[i - 1] < h:
            tau, w = i, p_i
    return tau, w


def synthetic(p: list[Row], drafts: list[Draft], u: list[float], rates: list[float]) -> Outcome:
    """for i = 1..K: accept x_i if u_i < c_i, else stop; c_i are the given `rates`."""
    tau = 0
    while tau < len(drafts) and u[tau] < rates[tau]:
        tau += 1
    return tau, 1.0


RULES: dict[Rule, Callable[[list[Row], list[Draft], list[float], list[float]], Outcome]] = {
    Rule.STANDARD: standard,
    Rule.BLOCK: block,
    # Daliri et al. 2024, "Coupling without communication and drafter-invariant speculative
    # decoding": p is one-hot at the target's draw and q at x_i: accept x_i if it is that draw.
    Rule.COUPLED: standard,
    Rule.SYNTHETIC: synthetic,
}

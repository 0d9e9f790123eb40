"""Verification rules: which drafts a request accepts, and how its residual is weighted.

There is one function per rule on [B, K] numbers, for backends in stock operators. Compiled backends
implement each rule again; all are tested against the reference. Reductions over the vocabulary and
noise are the backend's. A rule that needs a further reduction adds a field to `RuleInputs`.

Notation: p target, q draft distribution, x_i the draft i = 1..K of a request, u_i its acceptance
uniform, tau = n_accept, w the residual weight. Shapes: B requests, K most drafts of a request.
Column i - 1 of a [B, K] array is about x_i.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.ops.types import Rule


@dataclass(frozen=True, slots=True)
class RuleInputs:
    """What rules decide by: one float64 number per draft in each field.

    log_p_BK: log p(x_i); -inf where the target gives the draft no mass (or is not finite)
    log_q_BK: log q(x_i); 0 for a one-hot q; -inf after the request's last draft, and for an id that
        counts as no draft (`Backend.verify`): neither it nor any draft after it is accepted
    log_u_BK: log of the acceptance uniform
    synthetic_rate_K: c_i, the rates of SYNTHETIC; None if no request is under it
    residual_mass_BK: S_{i-1} = sum_x max(w p(x) - q(x), 0) of the row that decides x_i, with the
        weight w_{i-1} from `weights`; read by BLOCK only

    p and q are one-hot at T=0, and under COUPLED, where p is the target's own draw: log p is 0 or
    -inf, log q is 0 and the decision does not depend on u.
    """

    log_p_BK: Tensor
    log_q_BK: Tensor
    log_u_BK: Tensor
    synthetic_rate_K: Tensor | None = None
    residual_mass_BK: Tensor | None = None


Decide = Callable[[RuleInputs], Tensor]
"""A rule; returns accept_BK (bool): whether x_i is accepted."""


def log_ratio(x: RuleInputs) -> Tensor:
    """log p(x_i) - log q(x_i), -inf where q(x_i) = 0; exactly 0 where p = q, so that the draft is
    then accepted for every u < 1."""
    return (x.log_p_BK - x.log_q_BK).masked_fill_(x.log_q_BK.isneginf(), -torch.inf)


def standard(x: RuleInputs) -> Tensor:
    """Accept x_i while u_i < p(x_i) / q(x_i); w = 1. Leviathan et al. 2023, algorithm 1; Chen et
    al. 2023, algorithm 2."""
    return (x.log_u_BK < log_ratio(x)).cumprod(dim=1).bool()


def block(x: RuleInputs) -> Tensor:
    """Accept all drafts up to the last x_i with u_i < h_i (Sun et al. 2024, algorithm 2).

    p_0 = 1, p_i = min(1, p_{i-1} p(x_i) / q(x_i)); h_i = S_i / (S_i + 1 - p_i), 0/0 = 1, and h_K =
    p_K, which also follows from S_K = p_K. K is the number of drafts before the first one with
    q(x_i) = 0. w_i = p_i.
    """
    if x.residual_mass_BK is None:
        raise ValueError("the block rule needs `residual_mass_BK`")
    p_BK = block_weights(x)[:, 1:].exp()
    mass_BK = torch.cat([x.residual_mass_BK[:, 1:], p_BK[:, -1:]], dim=1)
    h_BK = mass_BK / (mass_BK + 1 - p_BK)
    last_BK = torch.cat([x.log_q_BK[:, 1:].isneginf(), torch.ones_like(p_BK[:, -1:]).bool()], dim=1)
    h_BK = torch.where(last_BK, p_BK, h_BK.nan_to_num(nan=1.0))
    passes_BK = (x.log_u_BK < h_BK.log()) & ~x.log_q_BK.isneginf().cummax(dim=1).values
    return passes_BK.flip(1).cummax(dim=1).values.flip(1)


def block_weights(x: RuleInputs) -> Tensor:
    """log p_i of the rule `block`, i = 0..K: [B, K + 1]."""
    log_p = x.log_p_BK.new_zeros(len(x.log_p_BK))
    columns = [log_p]
    for log_ratio_B in log_ratio(x).unbind(dim=1):
        log_p = (log_p + log_ratio_B).clamp(max=0.0)
        columns.append(log_p)
    return torch.stack(columns, dim=1)


def synthetic(x: RuleInputs) -> Tensor:
    """Accept x_i while u_i < c_i, whatever p and q are; w = 1. Not lossless."""
    if x.synthetic_rate_K is None:
        raise ValueError("the synthetic rule needs `synthetic_rate_K`")
    log_rate_K = x.synthetic_rate_K[: x.log_u_BK.shape[1]].log()
    return ((x.log_u_BK < log_rate_K) & ~x.log_q_BK.isneginf()).cumprod(dim=1).bool()


RULES: dict[Rule, Decide] = {
    Rule.STANDARD: standard,
    Rule.BLOCK: block,
    Rule.COUPLED: standard,  # Daliri et al. 2024: p is the target's own draw, one-hot
    Rule.SYNTHETIC: synthetic,
}


def weights(x: RuleInputs, rule_B: Tensor) -> Tensor:
    """log w_i, the residual's weight after i accepted drafts, [B, K + 1]: 0 except under BLOCK."""
    if bool((rule_B == Rule.BLOCK).any()):
        return torch.where((rule_B == Rule.BLOCK)[:, None], block_weights(x), 0.0)
    return x.log_p_BK.new_zeros(len(rule_B), x.log_p_BK.shape[1] + 1)


def rules_of(rule_B: Sequence[int]) -> list[Rule]:
    """The distinct rules of a batch; `NotImplementedError` for a rule that is not in `RULES`."""
    used = set(rule_B)
    if unknown := used - RULES.keys():
        raise NotImplementedError(f"`ops/rules.py` has no rules with these numbers: {unknown}")
    return [rule for rule in RULES if rule in used]


def accept(x: RuleInputs, rule_B: Tensor) -> Tensor:
    """n_accept_B (int64): the number of drafts that each request accepts under its rule."""
    n_accept_B = torch.zeros_like(rule_B)
    for rule in rules_of(rule_B.tolist()):
        if x.log_u_BK.shape[1]:  # without drafts there are no columns to decide
            n_accept_B = torch.where(rule_B == rule, RULES[rule](x).sum(dim=1), n_accept_B)
    return n_accept_B

"""Verification rules: which drafts a request accepts, and how its residual is weighted.

What belongs here: one function per rule on [B, K] numbers, the same for every backend. What does
not: anything that touches the vocabulary (a backend's reductions and its one residual sampler), or
noise (drawn by the backend, handed in as log u). A rule that needs a further reduction adds a
field to `RuleInputs`; its name goes into `RULES`.

Notation: p target, q draft distribution, x_i the draft i of a request, u_i its acceptance uniform,
tau = n_accept, w the residual weight. Shapes: B requests, K most drafts of a request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RuleInputs:
    """One float64 number per draft.

    log_p_BK: log p(x_i); -inf where the target gives the draft no mass (or is not finite)
    log_q_BK: log q(x_i); 0 for a one-hot q; -inf means q = 0 everywhere: past the request's last
              draft, a placeholder, a draft row that is not finite. Such a draft is never accepted
              and ends the prefix.
    log_u_BK: log of the acceptance uniform

    At T=0 both p and q are one-hot: log p is 0 or -inf, log q is 0, any u in (0, 1) decides alike.
    """

    log_p_BK: Tensor
    log_q_BK: Tensor
    log_u_BK: Tensor


Rule = Callable[[RuleInputs], tuple[Tensor, Tensor]]
"""RuleInputs -> (n_accept_B int64, log_w_B float64): the residual is norm(max(w p - q, 0))."""


def standard(x: RuleInputs) -> tuple[Tensor, Tensor]:
    """Accept x_i while u_i < p(x_i) / q(x_i); w = 1.

    Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2. Compared as
    log u < log p - log q, not log u + log q < log p: where p = q the right side is exactly 0, so
    a draft model equal to the target is accepted for every u < 1, whatever the rounding.
    """
    ratio_BK = x.log_p_BK - x.log_q_BK
    ratio_BK.masked_fill_(x.log_q_BK.isneginf(), -torch.inf)
    n_accept_B = (x.log_u_BK < ratio_BK).long().cumprod(dim=1).sum(dim=1)
    return n_accept_B, torch.zeros_like(n_accept_B, dtype=x.log_p_BK.dtype)


RULES: dict[str, Rule] = {"standard": standard}


def get_rule(name: str) -> Rule:
    """Look a rule up by name; `ConfigError` if there is none of that name."""
    if name not in RULES:
        raise ConfigError("rule", name, f"one of {', '.join(RULES)}")
    return RULES[name]

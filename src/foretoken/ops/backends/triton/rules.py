"""The verification rules of `ops/rules.py` on the device: how many drafts a request accepts.

Lane i of a vector belongs to draft i of the request. Names with `log_` are in base 2. `decide.py`
and `verify.py` call these functions; tests compare them with the oracle.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foretoken.ops.types import Rule

STANDARD = tl.constexpr(int(Rule.STANDARD))
BLOCK_RULE = tl.constexpr(int(Rule.BLOCK))  # `rows.py: BLOCK` is a number of ids
COUPLED = tl.constexpr(int(Rule.COUPLED))
SYNTHETIC = tl.constexpr(int(Rule.SYNTHETIC))


@triton.jit
def is_compiled(rule, UNDER_BLOCK: tl.constexpr, RATES: tl.constexpr):
    """Whether the kernel has this rule: BLOCK only if UNDER_BLOCK, SYNTHETIC only if RATES."""
    compiled = (rule == STANDARD) | (rule == COUPLED)
    if UNDER_BLOCK:
        compiled = compiled | (rule == BLOCK_RULE)
    if RATES:
        compiled = compiled | (rule == SYNTHETIC)
    return compiled


@triton.jit
def _prefix_length(accepted, i, num):
    """How many of the first `num` drafts come before the first one that is not `accepted`."""
    return tl.min(tl.where(accepted & (i < num), num, i), axis=0)


@triton.jit
def standard(log_p, log_q, log_u, i, num):
    """Accept x_i while u_i < p(x_i) / q(x_i). Leviathan et al. 2023, algorithm 1."""
    return _prefix_length((log_u < log_p - log_q) & (log_q > float("-inf")), i, num)


@triton.jit
def synthetic(rate, log_q, u, i, num):
    """Accept x_i while u_i is below the rate of draft i and q(x_i) > 0, whatever p(x_i) is."""
    return _prefix_length((u < rate) & (log_q > float("-inf")), i, num)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def block_weights(log_p, log_q):
    """log2 p_{i+1}, where p_0 = 1, p_{i+1} = min(1, p_i p(x_i) / q(x_i)). Sun et al. 2024, alg. 2.
    In log2 this is a walk reflected at 0: the sum so far, minus the highest sum so far."""
    ratio = tl.where(log_q > float("-inf"), log_p - log_q, float("-inf"))
    walk = tl.cumsum(ratio, axis=0)
    highest = tl.maximum(tl.associative_scan(walk, 0, _larger), 0.0)
    return tl.where(walk > float("-inf"), walk - highest, float("-inf"))


@triton.jit
def block_all(log_next, log_q, log_u, i, num):
    """num if BLOCK accepts every draft, else 0. This needs no residual mass, since h_i of the last
    draft is p_{i+1} (see `block`). log_next: log2 p_{i+1}."""
    with_q = _prefix_length(log_q > float("-inf"), i, num)
    last = tl.sum(((i == with_q - 1) & (log_u < log_next)).to(tl.int32), axis=0)
    return tl.where((with_q == num) & (last > 0), num, 0)


@triton.jit
def block(log_next, mass_next, is_last, log_q, log_u, i, num):
    """Accept all drafts up to the last one with u_i < h_i, even if an earlier u_j reaches h_j. For
    the last draft h_i = p_{i+1}, else S_{i+1} / (S_{i+1} + 1 - p_{i+1}), where 0/0 = 1 (the paper
    counts drafts from 1, so its h has the index i + 1). log_next: log2 p_{i+1}. mass_next: the
    residual mass S_{i+1}. is_last: whether no draft with a q follows."""
    p = tl.exp2(log_next)
    rest = mass_next + 1 - p
    h = tl.where(rest > 0, mass_next / tl.where(rest > 0, rest, 1.0), 1.0)
    h = tl.where(is_last, p, h)
    with_q = i < _prefix_length(log_q > float("-inf"), i, num)
    return tl.max(tl.where(with_q & (log_u < tl.log2(h)), i + 1, 0), axis=0)

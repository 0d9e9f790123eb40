"""One token of one row, from p or from the residual, as the row's state and its slot want it.

Tuples:
    at_  = (key, position, draft index), int64, int32, int32
    law  = (mode, token, q row pointer, q's V, q's threshold, q's lse in log2, log2 w):
           mode 0 draws from p, 1 from p without `token`, 2 from max(w p - q, 0)

Shapes: N rows, V vocabulary, NB blocks of a row, C list entries.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foretoken.ops.backends.triton.noise import (
    argmax_at,
    argmax_with,
    gumbel_at,
    gumbel_span,
    log2,
    noise_span,
)
from foretoken.ops.backends.triton.rows import (
    BLOCK,
    CAPACITY,
    load_masses,
    load_span,
    log2_sum,
    log2_sum_rows,
)


@triton.jit
def one_minus_exp2(d):
    """1 - 2^d for d < 0, by a series where the difference would lose its leading digits; else 0."""
    t = d * 0.6931471805599453
    series = -t * (1 + t * (0.5 + t * (1 / 6 + t * (1 / 24 + t * (1 / 120)))))
    return tl.where(d < 0, tl.where(t > -0.1, series, 1 - tl.exp2(d)), 0.0)


@triton.jit
def _against_q(x, off, threshold, scale, lse, law):
    """(log2(w p), d = log2 q - log2(w p)) of ids `off` in mode 2; NaN where both are -inf."""
    log_p = tl.where(x >= threshold, x * scale, float("-inf")) - lse + law[6]
    raw = tl.load(law[2] + off, mask=off < law[3], other=float("-inf")).to(tl.float32)
    return log_p, tl.where(raw >= law[4], raw * scale - law[5], float("-inf")) - log_p


@triton.jit
def weigh(x, off, threshold, scale, lse, law):
    """log2 weights of ids `off` whose edited logits are x; unnormalised but for mode 2.

    Mode 2: log2(w p - q) = log2(w p) + log2(1 - 2^d), d = log2 q - log2 (w p); Leviathan et al.
    2023, appendix A.1, with the weight of Sun et al. 2024.
    """
    weight = tl.where(x >= threshold, x * scale, float("-inf"))
    if law[0] == 1:
        weight = tl.where(off == law[1], float("-inf"), weight)
    if law[0] == 2:
        log_p, d = _against_q(x, off, threshold, scale, lse, law)
        weight = tl.where(d < 0, log_p + log2(one_minus_exp2(d)), float("-inf"))
    return weight


@triton.jit
def residual_masses(x, off, threshold, scale, lse, law, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """log2 masses of the residual in ROWS blocks: `weigh` summed, with one exponential less."""
    if law[0] == 2:
        log_p, d = _against_q(x, off, threshold, scale, lse, law)
        log_p = tl.reshape(log_p, (ROWS, WIDTH))
        top = tl.max(log_p, axis=1)
        base = tl.where(top == float("-inf"), 0.0, top)
        rest = tl.reshape(one_minus_exp2(d), (ROWS, WIDTH))
        mass = base + log2(tl.sum(tl.exp2(log_p - base[:, None]) * rest, axis=1))
    else:
        weight = weigh(x, off, threshold, scale, lse, law)
        mass = log2_sum_rows(tl.reshape(weight, (ROWS, WIDTH)))
    return mass


@triton.jit
def _compact(weight, id_, count, flat, at_, token_stream, block_stream, FP64: tl.constexpr):
    """A token of a short list with log2 weights; ids rise. Lowest id on ties."""
    c = tl.arange(0, CAPACITY)
    zero = tl.full((), 0, tl.int32)
    member = c < count
    if not flat:
        block = id_ // BLOCK
        top = tl.max(weight, axis=0)
        mine = (block[:, None] == block[None, :]) & member[None, :]
        mass = tl.sum(tl.where(mine, tl.exp2(weight - top)[None, :], 0.0), axis=1)
        at = (at_[0], at_[1], at_[2], zero + block_stream)
        score = log2(mass) + gumbel_at(at, block, FP64)
        best = tl.argmax(tl.where(member & (mass > 0), score, float("-inf")), axis=0)
        chosen = tl.max(tl.where(c == best, block, 0), axis=0)
        member = member & (block == chosen)
    at = (at_[0], at_[1], at_[2], zero + token_stream)
    best = argmax_at(tl.where(member, weight, float("-inf")), at, id_, FP64)
    return tl.max(tl.where(c == best, id_, 0), axis=0).to(tl.int64)


@triton.jit
def _from_list(
    row,
    found,
    count,
    threshold,
    scale,
    lse,
    flat,
    law,
    at_,
    token_stream,
    block_stream,
    FP64: tl.constexpr,
):
    """A token of a compact row; from p if the residual has no mass."""
    c = tl.arange(0, CAPACITY)
    x = tl.load(found[4] + row * CAPACITY + c, mask=c < count, other=float("-inf"))
    id_ = tl.load(found[3] + row * CAPACITY + c, mask=c < count, other=2147483647)
    weight = weigh(x, id_, threshold, scale, lse, law)
    if tl.max(weight, axis=0) == float("-inf"):
        weight = tl.where(x >= threshold, x * scale, float("-inf"))
    return _compact(weight, id_, count, flat, at_, token_stream, block_stream, FP64)


@triton.jit
def _within(
    logits,
    stride,
    row,
    V,
    edits,
    block,
    threshold,
    scale,
    lse,
    greedy,
    law,
    at_,
    stream,
    MASKS: tl.constexpr,
    ENTRIES: tl.constexpr,
    FP64: tl.constexpr,
):
    """The token of one block; at T=0 the first of the largest."""
    first = block * BLOCK
    off = first + tl.arange(0, BLOCK)
    x = load_span(logits, stride, row, first, V, edits, BLOCK, MASKS, ENTRIES, "evict_last")
    if greedy:
        best = tl.argmax(x, axis=0)
    else:
        at = (at_[0], at_[1], at_[2], tl.full((), 0, tl.int32) + stream)
        weight = weigh(x, off, threshold, scale, lse, law)
        best = argmax_with(weight, noise_span(at, first, BLOCK, FP64), FP64)
    return (first + best).to(tl.int64)


@triton.jit
def lots(at_, block_stream, NBP: tl.constexpr, FP64: tl.constexpr):
    """The noise by which a row's blocks draw. It needs no logits: best made while others wait."""
    at = (at_[0], at_[1], at_[2], tl.full((), 0, tl.int32) + block_stream)
    return noise_span(at, 0, NBP, FP64)


@triton.jit
def draw(
    logits, stride, row, V, edits, out, found, NB, scale, greedy, flat, law, at_, token_stream,
    block_stream, block_noise, MASKS: tl.constexpr, ENTRIES: tl.constexpr, FILTERS: tl.constexpr,
    NBP: tl.constexpr, FP64: tl.constexpr,
):  # fmt: skip
    """One token of a row; see the head of this file. `block_noise`: of all its blocks, by `lots`.

    Of a dense row with mode 2, or with mode 1 and flat noise, `out` must hold the residual's
    masses and best scores. Where the residual has no mass the row is drawn from p.
    """
    threshold, lse, compact = float("-inf"), 0.0, False
    token = tl.full((), 0, tl.int64)
    if law[0] == 2:
        lse = tl.load(found[1] + row)
    if FILTERS:
        count = tl.load(found[2] + row)
        threshold = tl.load(found[0] + row)
        compact = count >= 0
        if compact:
            token = _from_list(row, found, count, threshold, scale, lse, flat, law, at_,
                               token_stream, block_stream, FP64)  # fmt: skip
    if not compact:
        mass_J = load_masses(out[0], row, NB, NBP)
        j = tl.arange(0, NBP)
        if (law[0] == 1) & (law[1] < V) & (not flat):
            own = (law[1] // BLOCK).to(tl.int32)
            first = own * BLOCK
            x = load_span(logits, stride, row, first, V, edits, BLOCK, MASKS, ENTRIES, "evict_last")
            without = weigh(x, first + tl.arange(0, BLOCK), threshold, scale, lse, law)
            mass_J = tl.where(j == own, log2_sum(without), mass_J)
        mode = law[0]
        if (mode > 0) & (tl.max(mass_J, axis=0) == float("-inf")):
            mode = mode * 0
            _remass(logits, stride, row, V, edits, out, NB, threshold, scale, flat, at_,
                    token_stream, MASKS, ENTRIES, FP64)  # fmt: skip
            mass_J = load_masses(out[0], row, NB, NBP)
        if flat | greedy:
            score = mass_J
            if not greedy:
                score = load_masses(out[1], row, NB, NBP)
            block = tl.argmax(tl.where(mass_J > float("-inf"), score, float("-inf")), axis=0)
        else:
            block = argmax_with(mass_J, block_noise, FP64)
        kept = (mode, law[1], law[2], law[3], law[4], law[5], law[6])
        token = _within(logits, stride, row, V, edits, block, threshold, scale, lse, greedy, kept,
                        at_, token_stream, MASKS, ENTRIES, FP64)  # fmt: skip
    return tl.minimum(token, V - 1)


@triton.jit
def _remass(
    logits,
    stride,
    row,
    V,
    edits,
    out,
    NB,
    threshold,
    scale,
    flat,
    at_,
    stream,
    MASKS: tl.constexpr,
    ENTRIES: tl.constexpr,
    FP64: tl.constexpr,
):
    """Masses and best scores of p once more: the residual had none (p = q after rounding)."""
    at = (at_[0], at_[1], at_[2], tl.full((), 0, tl.int32) + stream)
    for first in range(0, V, BLOCK):
        x = load_span(logits, stride, row, first, V, edits, BLOCK, MASKS, ENTRIES, "evict_last")
        weight = tl.where(x >= threshold, x * scale, float("-inf"))
        tl.store(out[0] + row * NB + first // BLOCK, log2_sum(weight))
        if flat:
            score = weight + gumbel_span(at, first, BLOCK, FP64)
            tl.store(out[1] + row * NB + first // BLOCK, tl.max(score, axis=0).to(tl.float32))
    tl.debug_barrier()

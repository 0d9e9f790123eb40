"""Draws one token of one row, from p or from the residual.

A *compact* row is drawn from its short list, a *dense* one from its logits (`filters.py`). With
*flat* noise the token is the argmax of the score, log weight + Gumbel noise, over all ids; earlier
passes store each block's best score. Otherwise a block is drawn by its mass, with noise from the
block stream, and then a token of the block.
"""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from foretoken.ops.backends.triton.noise import (  # isort: skip
    RESIDUAL_TOKEN, TARGET_TOKEN, Address, argmax_with, block_address, gumbel_at, gumbel_span, log2,
    noise_at, noise_span,
)  # fmt: skip
from foretoken.ops.backends.triton.records import Batch, Filtered, Q, Requests

from foretoken.ops.backends.triton.rows import (  # isort: skip
    BLOCK, CAPACITY, Settings, load_blocks, load_span, log2_sum, log2_sum_rows, zero_like,
)  # fmt: skip
from foretoken.ops.backends.triton.rules import COUPLED

# Modes: a token is drawn by p; by p without the rejected draft (the residual of a one-hot q); by
# max(w p - q, 0) (the residual of a real q).
FROM_P, WITHOUT_TOKEN, RESIDUAL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_NO_ID = tl.constexpr(0x7FFFFFFF)

Softmax = namedtuple("Softmax", "threshold scale lse")
"""Turns a row's logits x into log2 p = x scale - lse if x reaches the threshold, else -inf."""

Source = namedtuple("Source", "mode token q_offset q_threshold q_lse log_w")
"""The distribution that a token is drawn from. q and w are read only in mode RESIDUAL.

mode:   FROM_P, WITHOUT_TOKEN, or RESIDUAL
token:  the draft that was rejected
q_offset, q_threshold, q_lse: where the draft's row of q's logits begins, and the `Softmax` of that
    row, with the scale of p
log_w:  log2 of the weight w
"""


@triton.jit
def with_mode(source: Source, mode):
    """The source with another mode."""
    _, token, offset, q_threshold, q_lse, log_w = source
    return Source(mode, token, offset, q_threshold, q_lse, log_w)


@triton.jit
def q_offset(q: Q | None, slot, index):
    """Where the q of a slot's draft `index` begins in the draft cache; 0 without a cache."""
    if q is not None:
        return (slot * q.K + index) * q.V
    else:
        return zero_like(slot + index)


@triton.jit
def token_address(requests: Requests, settings: Settings, b, i, token_stream, DRAFT: tl.constexpr):
    """The `Address` of the noise by which row i of request b draws its token.
    DRAFT: rows are drafts. Under COUPLED they use the noise by which the target will draw."""
    index = tl.full((), 0, tl.int32)
    stream = index + token_stream
    if DRAFT:
        coupled = settings.rule == COUPLED
        index = tl.where(coupled, 0, tl.load(requests.index_B + b).to(tl.int32))
        stream = tl.where(coupled, TARGET_TOKEN, stream)
    return Address(settings.key, tl.load(requests.position_B + b) + i, index, stream)


@triton.jit
def one_minus_exp2(d):
    """1 - 2^d for d < 0, else 0; by a series where digits would cancel."""
    t = d * 0.6931471805599453
    series = -t * (1 + t * (0.5 + t * (1 / 6 + t * (1 / 24 + t * (1 / 120)))))
    return tl.where(d < 0, tl.where(t > -0.1, series, 1 - tl.exp2(d)), 0.0)


@triton.jit
def _compare_with_q(x, off, p: Softmax, source: Source, q: Q):
    """(log2(w p), d = log2 q - log2(w p)) of ids `off`; NaN where both are -inf."""
    log_wp = tl.where(x >= p.threshold, x * p.scale, float("-inf")) - p.lse + source.log_w
    q_row = q.logits_SKV + source.q_offset
    raw = tl.load(q_row + off, mask=off < q.V, other=float("-inf")).to(tl.float32)
    log_q = tl.where(raw >= source.q_threshold, raw * p.scale - source.q_lse, float("-inf"))
    return log_wp, log_q - log_wp


@triton.jit
def log2_weights(x, off, p: Softmax, source: Source, q: Q | None):
    """log2 of the weights with which ids `off` of edited logits x are drawn.
    In mode RESIDUAL log2(w p - q) = log2(w p) + log2(1 - 2^d), d = log2 q - log2(w p), of
    normalised p and q: Leviathan et al. 2023, appendix A.1, with the factor w of Sun et al. 2024.
    In other modes log2 p plus a constant."""
    weight = tl.where(x >= p.threshold, x * p.scale, float("-inf"))
    if source.mode == WITHOUT_TOKEN:
        weight = tl.where(off == source.token, float("-inf"), weight)
    if q is not None:
        if source.mode == RESIDUAL:
            log_wp, d = _compare_with_q(x, off, p, source, q)
            weight = tl.where(d < 0, log_wp + log2(one_minus_exp2(d)), float("-inf"))
    return weight


@triton.jit
def block_masses(x, off, p: Softmax, source: Source, q: Q | None, PER: tl.constexpr):
    """log2 of the sums of weights [PER] of adjacent blocks; in mode RESIDUAL without their log2."""
    mass = tl.full((PER,), 0.0, tl.float32)
    if q is not None:
        if source.mode == RESIDUAL:
            log_wp, d = _compare_with_q(x, off, p, source, q)
            log_wp = tl.reshape(log_wp, (PER, BLOCK))
            top = tl.max(log_wp, axis=1)
            base = tl.where(top == float("-inf"), 0.0, top)
            share = tl.reshape(one_minus_exp2(d), (PER, BLOCK))
            mass = base + log2(tl.sum(tl.exp2(log_wp - base[:, None]) * share, axis=1))
    if source.mode != RESIDUAL:
        mass = log2_sum_rows(tl.reshape(log2_weights(x, off, p, source, q), (PER, BLOCK)))
    return mass


@triton.jit
def load_list(filtered: Filtered, row, count):
    """(logits, ids) of a compact row's short list, which has `count` entries."""
    c = tl.arange(0, CAPACITY)
    x = tl.load(filtered.list_x_NC + row * CAPACITY + c, mask=c < count, other=float("-inf"))
    return x, tl.load(filtered.list_id_NC + row * CAPACITY + c, mask=c < count, other=_NO_ID)


@triton.jit
def _draw_from_list(batch: Batch, row, count, settings: Settings, p: Softmax, source: Source,
                    address: Address, FP64: tl.constexpr):  # fmt: skip
    """Draw a token of a compact row; from p if the residual has no mass."""
    c = tl.arange(0, CAPACITY)
    x, id_ = load_list(batch.scratch.filtered, row, count)
    weight = log2_weights(x, id_, p, source, batch.q)
    if tl.max(weight, axis=0) == float("-inf"):
        weight = tl.where(x >= p.threshold, x * p.scale, float("-inf"))
    member = c < count
    if not settings.flat:  # draw a block first
        block = id_ // BLOCK
        top = tl.max(weight, axis=0)
        same_block = (block[:, None] == block[None, :]) & member[None, :]
        mass = tl.sum(tl.where(same_block, tl.exp2(weight - top)[None, :], 0.0), axis=1)
        score = log2(mass) + gumbel_at(block_address(address), block, FP64)
        best = tl.argmax(tl.where(member & (mass > 0), score, float("-inf")), axis=0)
        chosen = tl.max(tl.where(c == best, block, 0), axis=0)
        member = member & (block == chosen)
    weight = tl.where(member, weight, float("-inf"))
    best = argmax_with(weight, noise_at(address, id_, FP64), FP64)
    return tl.max(tl.where(c == best, id_, 0), axis=0).to(tl.int64)


@triton.jit
def _draw_in_block(batch: Batch, row, block, settings: Settings, p: Softmax, source: Source,
                   address: Address, FP64: tl.constexpr):  # fmt: skip
    """Draw a token of one block; at T=0 take the first of its largest logits."""
    first = block * BLOCK
    off = first + tl.arange(0, BLOCK)
    x = load_span(batch.rows, row, first, BLOCK, "evict_last")
    if settings.greedy:
        best = tl.argmax(x, axis=0)
    else:
        weight = log2_weights(x, off, p, source, batch.q)
        best = argmax_with(weight, noise_span(address, first, BLOCK, FP64), FP64)
    return (first + best).to(tl.int64)


@triton.jit
def draw(batch: Batch, row, settings: Settings, source: Source, address: Address, block_noise,
         NBP: tl.constexpr, FP64: tl.constexpr):  # fmt: skip
    """Draw one token of a row; from p if the residual has no mass.
    For a dense row in mode RESIDUAL, or WITHOUT_TOKEN under flat noise, `Scratch` must hold the
    residual's masses and best scores. block_noise: noise of the block stream, a value per block."""
    rows, scratch = batch.rows, batch.scratch
    threshold, lse, count = float("-inf"), 0.0, -1
    token = tl.full((), 0, tl.int64)
    if source.mode == RESIDUAL:
        lse = tl.load(scratch.lse_N + row)
    if scratch.filtered is not None:
        count = tl.load(scratch.filtered.count_N + row)
        threshold = tl.load(scratch.filtered.threshold_N + row)
    p = Softmax(threshold, settings.scale, lse)
    if scratch.filtered is not None:
        if count >= 0:
            token = _draw_from_list(batch, row, count, settings, p, source, address, FP64)
    if count < 0:
        mass_J = load_blocks(scratch.mass_NJ, row, rows.NB, NBP)
        if (source.mode == WITHOUT_TOKEN) & (source.token < rows.V) & (not settings.flat):
            block = (source.token // BLOCK).to(tl.int32)
            off = block * BLOCK + tl.arange(0, BLOCK)
            x = load_span(rows, row, block * BLOCK, BLOCK, "evict_last")
            mass_without = log2_sum(log2_weights(x, off, p, source, batch.q))
            mass_J = tl.where(tl.arange(0, NBP) == block, mass_without, mass_J)
        mode = source.mode
        if (mode != FROM_P) & (tl.max(mass_J, axis=0) == float("-inf")):
            mode = zero_like(mode) + FROM_P
            _measure_p_again(batch, row, settings, p, address, FP64)
            mass_J = load_blocks(scratch.mass_NJ, row, rows.NB, NBP)
        if settings.flat | settings.greedy:
            score = mass_J
            if scratch.best_NJ is not None:
                if not settings.greedy:
                    score = load_blocks(scratch.best_NJ, row, rows.NB, NBP)
            block = tl.argmax(tl.where(mass_J > float("-inf"), score, float("-inf")), axis=0)
        else:
            block = argmax_with(mass_J, block_noise, FP64)
        source = with_mode(source, mode)
        token = _draw_in_block(batch, row, block, settings, p, source, address, FP64)
    return tl.minimum(token, rows.V - 1)


@triton.jit
def draw_verified(batch: Batch, row, settings: Settings, source: Source, position,
                  NBP: tl.constexpr, FP64: tl.constexpr):  # fmt: skip
    """`draw` for a verified request, with noise of TARGET_TOKEN for p, else RESIDUAL_TOKEN."""
    stream = tl.where(source.mode == FROM_P, TARGET_TOKEN, RESIDUAL_TOKEN)
    address = Address(settings.key, position, 0, stream)
    block_noise = noise_span(block_address(address), 0, NBP, FP64)
    return draw(batch, row, settings, source, address, block_noise, NBP, FP64)


@triton.jit
def _measure_p_again(batch: Batch, row, settings: Settings, p: Softmax, address: Address,
                     FP64: tl.constexpr):  # fmt: skip
    """Write p's masses and best scores over those of a residual without mass (p = q, rounded)."""
    rows, scratch = batch.rows, batch.scratch
    for first in range(0, rows.V, BLOCK):
        x = load_span(rows, row, first, BLOCK, "evict_last")
        weight = tl.where(x >= p.threshold, x * p.scale, float("-inf"))
        place = row * rows.NB + first // BLOCK
        tl.store(scratch.mass_NJ + place, log2_sum(weight))
        if scratch.best_NJ is not None:
            if settings.flat:
                score = weight + gumbel_span(address, first, BLOCK, FP64)
                tl.store(scratch.best_NJ + place, tl.max(score, axis=0).to(tl.float32))
    tl.debug_barrier()

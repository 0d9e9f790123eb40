"""Heads of new tokens: loaded, normed, rotated, written; scores of keys, and their softmax."""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from foretoken.ops.backends.triton.attention.records import Cache, HeadInputs, Scores, TokenRows
from foretoken.ops.backends.triton.noise import LOG2E
from foretoken.ops.backends.triton.rows import let_next_start, wait_for_writes

# The score of a key that a row does not see. It is finite: a row that has seen no key yet has
# weights of 1, which vanish with the first key that it sees, and no NaN. Once it has seen one, a
# tile of unseen keys changes none of its bits.
UNSEEN = tl.constexpr(-1e30)


@triton.jit
def score(product, scores: Scores):
    """Scores, base 2, from products of queries and keys."""
    if scores.softcap is not None:
        # tanh(x) = 1 - 2 / (e^2x + 1), correct for large |x| of both signs
        twice = product * (scores.scale * (2 * LOG2E) / scores.softcap)
        return (1 - 2 / (tl.exp2(twice) + 1)) * (scores.softcap * LOG2E)
    return product * (scores.scale * LOG2E)


@triton.jit
def normalized(top, total, acc, h_R, live_R, scores: Scores):
    """The attended values of R rows of heads h: acc / total. A sink's weight is added to total."""
    if scores.sink_H is not None:
        sink = tl.load(scores.sink_H + h_R, mask=live_R, other=0.0).to(tl.float32) * LOG2E
        highest = tl.maximum(top, sink)
        mine = tl.exp2(top - highest)
        return acc * mine[:, None] / (total * mine + tl.exp2(sink - highest))[:, None]
    return acc / total[:, None]


Angles = namedtuple("Angles", "cos sin")
"""Cosines and sines, as wide as a head; 1 and 0 in dimensions that are not rotated."""


@triton.jit
def load_heads(p, live, D: tl.constexpr, WIDTH: tl.constexpr):
    """The heads at addresses p, with a last axis of WIDTH; 0 from D on, and where not live."""
    d = tl.arange(0, WIDTH)
    mask = tl.expand_dims(live, -1) & (d < D)
    return tl.load(tl.expand_dims(p, -1) + d, mask=mask, other=0.0)


@triton.jit
def load_angles(heads: HeadInputs, position, live, SHAPE: tl.constexpr, ROTARY: tl.constexpr):
    """The `Angles` of these positions. No kernel writes them, so they may be read before a wait."""
    HALF: tl.constexpr = ROTARY // 2
    d = tl.arange(0, SHAPE.WIDTH)
    turns = tl.expand_dims(live, -1) & (d < ROTARY)
    place = tl.expand_dims(position, -1) * HALF + d % HALF
    return Angles(
        tl.load(heads.cos_PR + place, mask=turns, other=1.0),
        tl.load(heads.sin_PR + place, mask=turns, other=0.0),
    )


@triton.jit
def rotated_heads(
    p, angles, live, norm_D, heads: HeadInputs, SHAPE: tl.constexpr, ROTARY: tl.constexpr
):  # fmt: skip
    """The query or key heads at addresses p, normed and rotated: float32, a last axis of WIDTH."""
    HALF: tl.constexpr = ROTARY // 2
    d = tl.arange(0, SHAPE.WIDTH)
    x = load_heads(p, live, SHAPE.D, SHAPE.WIDTH).to(tl.float32)
    partner = tl.where(d < HALF, d + HALF, d - HALF)
    turns = tl.expand_dims(live, -1) & (d < ROTARY)
    y = tl.load(tl.expand_dims(p, -1) + partner, mask=turns, other=0.0).to(tl.float32)
    if norm_D is not None:
        # In float64 the order of the sum, which depends on the shape, leaves no trace in float32.
        square = x.to(tl.float64) * x.to(tl.float64)
        mean = (tl.sum(square, len(x.shape) - 1, keep_dims=True) / SHAPE.D).to(tl.float32)
        rms = tl.rsqrt(mean + heads.eps)
        x *= rms * tl.load(norm_D + d, mask=d < SHAPE.D, other=0.0).to(tl.float32)
        y *= rms * tl.load(norm_D + partner, mask=d < ROTARY, other=0.0).to(tl.float32)
    return x * angles.cos + tl.where(d < HALF, -1.0, 1.0) * y * angles.sin


@triton.jit
def value_head(row_p, h, SHAPE: tl.constexpr):
    """The address of value head h in rows of qkv: after all query and key heads."""
    return row_p + (SHAPE.H + SHAPE.H_KV) * SHAPE.D + h * SHAPE.D_V


@triton.jit(do_not_specialize=["B"])
def write_new_kernel(
    rows: TokenRows, heads: HeadInputs, cache: Cache, query_start_B1, length_B, B,
    SHAPE: tl.constexpr, ROTARY: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program per ROWS tokens and K/V head writes keys and values, and replaces queries.

    AT_ONCE: to find each token's request, so many requests are compared at once.
    """
    let_next_start(OVERLAP)
    rows, cache = rows, cache  # makes values of 1s, see `triton/records.py`
    h = tl.program_id(1)
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    request = tl.zeros((ROWS,), tl.int32)
    for chunk in range(0, B, AT_ONCE):
        b = chunk + tl.arange(0, AT_ONCE)
        end = tl.load(query_start_B1 + b + 1, mask=b < B, other=2**40)
        request += tl.sum((end[None, :] <= t[:, None]).to(tl.int32), 1)
    live = request < B
    request = tl.minimum(request, B - 1)
    from_end = tl.load(query_start_B1 + request + 1) - t
    position = (tl.load(length_B + request) - from_end).to(tl.int32)
    angles = load_angles(heads, position, live, SHAPE, ROTARY)
    block = tl.load(
        cache.block_BL + request.to(tl.int64) * cache.columns + position // SHAPE.PAGE,
        mask=live, other=0,
    )  # fmt: skip
    place = (block.to(tl.int64) * SHAPE.PAGE + position % SHAPE.PAGE) * SHAPE.H_KV + h
    row_p = rows.query + t.to(tl.int64) * rows.stride
    wait_for_writes(OVERLAP)
    d, d_v = tl.arange(0, SHAPE.WIDTH), tl.arange(0, SHAPE.WIDTH_V)
    inside, inside_v = live[:, None] & (d < SHAPE.D), live[:, None] & (d_v < SHAPE.D_V)
    key_p = row_p + (SHAPE.H + h) * SHAPE.D
    key = rotated_heads(key_p, angles, live, heads.k_norm_D, heads, SHAPE, ROTARY)
    value = load_heads(value_head(row_p, h, SHAPE), live, SHAPE.D_V, SHAPE.WIDTH_V)
    tl.store(cache.key + place[:, None] * SHAPE.D + d, key.to(value.dtype), mask=inside)
    tl.store(cache.value + place[:, None] * SHAPE.D_V + d_v, value, mask=inside_v)
    for g in range(SHAPE.G):
        p = row_p + (h * SHAPE.G + g) * SHAPE.D
        query = rotated_heads(p, angles, live, heads.q_norm_D, heads, SHAPE, ROTARY)
        tl.debug_barrier()  # lanes have read partner dimensions that others replace
        tl.store(p[:, None] + d, query.to(value.dtype), mask=inside)

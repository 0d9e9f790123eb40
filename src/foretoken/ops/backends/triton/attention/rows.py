"""Loads, norms, rotates and writes the heads of new tokens; scores keys, and normalises softmax."""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from foretoken.ops.backends.triton.attention.records import Cache, HeadInputs, Scores, TokenRows
from foretoken.ops.backends.triton.noise import LOG2E
from foretoken.ops.backends.triton.rows import let_next_start, wait_for_writes

# The score of a key that a row does not see. It is finite: a row that has seen no key yet has no
# NaN, but weights of 1, which vanish with the first key that it sees. From then on a tile of unseen
# keys changes none of the row's bits.
UNSEEN = tl.constexpr(-1e30)


@triton.jit
def score(product, scores: Scores):
    """Scores, base 2, from products of queries and keys."""
    if scores.softcap is not None:
        # tanh(x) = 1 - 2 / (e^2x + 1), correct for large |x| of both signs
        two_x = product * (scores.scale * (2 * LOG2E) / scores.softcap)
        return (1 - 2 / (tl.exp2(two_x) + 1)) * (scores.softcap * LOG2E)
    return product * (scores.scale * LOG2E)


@triton.jit
def normalized(top, total, acc, h_R, live_R, scores: Scores):
    """The attended values of R rows of query heads h: acc / (total + the weight of the sink)."""
    if scores.sink_H is not None:
        sink = tl.load(scores.sink_H + h_R, mask=live_R, other=0.0).to(tl.float32) * LOG2E
        highest = tl.maximum(top, sink)
        rescale = tl.exp2(top - highest)
        return acc * rescale[:, None] / (total * rescale + tl.exp2(sink - highest))[:, None]
    return acc / total[:, None]


Angles = namedtuple("Angles", "cos sin")
"""Cosines and sines, as wide as a head; 1 and 0 in dimensions that are not rotated."""


@triton.jit
def load_heads(p, live, D: tl.constexpr, WIDTH: tl.constexpr):
    """The heads at addresses p, with a last axis of WIDTH; 0 from D on, and where not `live`."""
    d = tl.arange(0, WIDTH)
    mask = tl.expand_dims(live, -1) & (d < D)
    return tl.load(tl.expand_dims(p, -1) + d, mask=mask, other=0.0)


@triton.jit
def load_angles(heads: HeadInputs, position, live, SHAPE: tl.constexpr, ROTARY: tl.constexpr):
    """The `Angles` of these positions. No kernel writes them, so they may be read before a wait."""
    HALF: tl.constexpr = ROTARY // 2
    d = tl.arange(0, SHAPE.WIDTH)
    rotates = tl.expand_dims(live, -1) & (d < ROTARY)
    place = tl.expand_dims(position, -1) * HALF + d % HALF
    cos = tl.load(heads.cos_PR + place, mask=rotates, other=1.0)
    return Angles(cos, tl.load(heads.sin_PR + place, mask=rotates, other=0.0))


@triton.jit
def rotated_heads(p, angles, live, norm_D, heads: HeadInputs, SHAPE: tl.constexpr,
                  ROTARY: tl.constexpr):  # fmt: skip
    """The query or key heads at addresses p, normed and rotated: float32, a last axis of WIDTH."""
    HALF: tl.constexpr = ROTARY // 2
    d = tl.arange(0, SHAPE.WIDTH)
    x = load_heads(p, live, SHAPE.D, SHAPE.WIDTH).to(tl.float32)
    partner = tl.where(d < HALF, d + HALF, d - HALF)
    rotates = tl.expand_dims(live, -1) & (d < ROTARY)
    y = tl.load(tl.expand_dims(p, -1) + partner, mask=rotates, other=0.0).to(tl.float32)
    if norm_D is not None:
        # The order of the sum depends on the shape. Summed in float64, it changes no float32 bit.
        square = x.to(tl.float64) * x.to(tl.float64)
        mean = (tl.sum(square, len(x.shape) - 1, keep_dims=True) / SHAPE.D).to(tl.float32)
        rms = tl.rsqrt(mean + heads.eps)
        x *= rms * tl.load(norm_D + d, mask=d < SHAPE.D, other=0.0).to(tl.float32)
        y *= rms * tl.load(norm_D + partner, mask=d < ROTARY, other=0.0).to(tl.float32)
    return x * angles.cos + tl.where(d < HALF, -1.0, 1.0) * y * angles.sin


@triton.jit
def store_key_and_value(row_p, angles, place, live, heads: HeadInputs, cache: Cache, h,
                        SHAPE: tl.constexpr, ROTARY: tl.constexpr):  # fmt: skip
    """Write key head h, normed and rotated, and value head h of rows of qkv into the cache.
    row_p: addresses of the rows of qkv. place: the index of each row's head h in the cache."""
    d, d_v = tl.arange(0, SHAPE.WIDTH), tl.arange(0, SHAPE.WIDTH_V)
    inside, inside_v = live[:, None] & (d < SHAPE.D), live[:, None] & (d_v < SHAPE.D_V)
    key_p = row_p + (SHAPE.H + h) * SHAPE.D
    value_p = row_p + (SHAPE.H + SHAPE.H_KV) * SHAPE.D + h * SHAPE.D_V
    key = rotated_heads(key_p, angles, live, heads.k_norm_D, heads, SHAPE, ROTARY)
    value = load_heads(value_p, live, SHAPE.D_V, SHAPE.WIDTH_V)
    tl.store(cache.key + place[:, None] * SHAPE.D + d, key.to(value.dtype), mask=inside)
    tl.store(cache.value + place[:, None] * SHAPE.D_V + d_v, value, mask=inside_v)


@triton.jit(do_not_specialize=["B"])
def write_new_kernel(rows: TokenRows, heads: HeadInputs, cache: Cache, query_start_B1, length_B, B,
                     SHAPE: tl.constexpr, ROTARY: tl.constexpr, ROWS: tl.constexpr,
                     CHUNK: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """A program per ROWS tokens and K/V head writes keys and values, and replaces queries.
    CHUNK: how many requests are compared in one iteration to find each token's request."""
    let_next_start(OVERLAP)
    rows, cache = rows, cache  # makes values of 1s, see `triton/records.py`
    h = tl.program_id(1)
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    request = tl.zeros((ROWS,), tl.int32)
    for begin in range(0, B, CHUNK):
        b = begin + tl.arange(0, CHUNK)
        end = tl.load(query_start_B1 + b + 1, mask=b < B, other=2**40)
        request += tl.sum((end[None, :] <= t[:, None]).to(tl.int32), 1)
    live = request < B
    request = tl.minimum(request, B - 1)
    from_end = tl.load(query_start_B1 + request + 1) - t
    position = (tl.load(length_B + request) - from_end).to(tl.int32)
    angles = load_angles(heads, position, live, SHAPE, ROTARY)
    table = cache.block_BL + request.to(tl.int64) * cache.columns
    block = tl.load(table + position // SHAPE.PAGE, mask=live, other=0)
    place = (block.to(tl.int64) * SHAPE.PAGE + position % SHAPE.PAGE) * SHAPE.H_KV + h
    row_p = rows.query + t.to(tl.int64) * rows.stride
    wait_for_writes(OVERLAP)
    store_key_and_value(row_p, angles, place, live, heads, cache, h, SHAPE, ROTARY)
    d = tl.arange(0, SHAPE.WIDTH)
    inside = live[:, None] & (d < SHAPE.D)
    dtype: tl.constexpr = rows.query.dtype.element_ty  # type: ignore[attr-defined]
    for g in range(SHAPE.G):
        p = row_p + (h * SHAPE.G + g) * SHAPE.D
        query = rotated_heads(p, angles, live, heads.q_norm_D, heads, SHAPE, ROTARY)
        tl.debug_barrier()  # all lanes have read the partner dimensions that are replaced now
        tl.store(p[:, None] + d, query.to(dtype), mask=inside)

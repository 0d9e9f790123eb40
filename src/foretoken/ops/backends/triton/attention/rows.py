"""Heads of new tokens: loaded, normed, turned, written; scores of keys, and their softmax."""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from foretoken.ops.backends.triton.attention.records import Cache, HeadInputs, Rows, Scores
from foretoken.ops.backends.triton.noise import LOG2E
from foretoken.ops.backends.triton.rows import let_next_start, wait_for_writes

# The score of a key that is not seen. Finite, so that a row that has seen nothing yet has weights
# (of 1, gone as soon as it sees a key) and no NaN; a tile that is not seen changes no bit.
UNSEEN = tl.constexpr(-1e30)


@triton.jit
def score(product, scores: Scores):
    """Products of queries and keys as scores, base 2."""
    if scores.softcap is not None:
        # tanh(x) = 1 - 2 / (e^2x + 1), right at both ends
        twice = product * (scores.scale * (2 * LOG2E) / scores.softcap)
        return (1 - 2 / (tl.exp2(twice) + 1)) * (scores.softcap * LOG2E)
    return product * (scores.scale * LOG2E)


@triton.jit
def settled(top, total, acc, h_R, live_R, scores: Scores):
    """The values of R rows of heads h: acc / total, a sink's weight added."""
    if scores.sink_H is not None:
        sink = tl.load(scores.sink_H + h_R, mask=live_R, other=0.0).to(tl.float32) * LOG2E
        highest = tl.maximum(top, sink)
        mine = tl.exp2(top - highest)
        return acc * mine[:, None] / (total * mine + tl.exp2(sink - highest))[:, None]
    return acc / total[:, None]


Angles = namedtuple("Angles", "cos sin")
"""Of the rotations of some heads, as wide as they are; 1 and 0 in dimensions that do not turn."""


@triton.jit
def load_heads(p, live, D: tl.constexpr, WIDTH: tl.constexpr):
    """The heads at these addresses, a dimension of WIDTH more; 0 from D on, and where not live."""
    d = tl.arange(0, WIDTH)
    mask = tl.expand_dims(live, -1) & (d < D)
    return tl.load(tl.expand_dims(p, -1) + d, mask=mask, other=0.0)


@triton.jit
def load_angles(heads: HeadInputs, position, live, WIDTH: tl.constexpr, ROTARY: tl.constexpr):
    """The angles at these positions. They depend on no kernel before this one."""
    HALF: tl.constexpr = ROTARY // 2
    d = tl.arange(0, WIDTH)
    turns = tl.expand_dims(live, -1) & (d < ROTARY)
    place = tl.expand_dims(position, -1) * HALF + d % HALF
    return Angles(
        tl.load(heads.cos_PR + place, mask=turns, other=1.0),
        tl.load(heads.sin_PR + place, mask=turns, other=0.0),
    )


@triton.jit
def turned_heads(
    p, angles, live, norm_D, heads: HeadInputs,
    D: tl.constexpr, WIDTH: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """The heads at these addresses, normed and turned: float32, a dimension of WIDTH more."""
    HALF: tl.constexpr = ROTARY // 2
    d = tl.arange(0, WIDTH)
    x = load_heads(p, live, D, WIDTH).to(tl.float32)
    partner = tl.where(d < HALF, d + HALF, d - HALF)
    turns = tl.expand_dims(live, -1) & (d < ROTARY)
    y = tl.load(tl.expand_dims(p, -1) + partner, mask=turns, other=0.0).to(tl.float32)
    if norm_D is not None:
        # In float64 the order of the sum, which depends on the shape, leaves no trace in float32.
        square = x.to(tl.float64) * x.to(tl.float64)
        mean = (tl.sum(square, len(x.shape) - 1, keep_dims=True) / D).to(tl.float32)
        rms = tl.rsqrt(mean + heads.eps)
        x *= rms * tl.load(norm_D + d, mask=d < D, other=0.0).to(tl.float32)
        y *= rms * tl.load(norm_D + partner, mask=d < ROTARY, other=0.0).to(tl.float32)
    return x * angles.cos + tl.where(d < HALF, -1.0, 1.0) * y * angles.sin


@triton.jit(do_not_specialize=["B"])
def write_new_kernel(
    rows: Rows, heads: HeadInputs, cache: Cache, query_start_B1, length_B, B,
    H: tl.constexpr, H_KV: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, ROTARY: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, AT_ONCE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program per ROWS tokens and K/V head: its keys and values, and the queries in place.

    AT_ONCE: requests at once, in the search for each token's request.
    """
    let_next_start(OVERLAP)
    rows, cache = rows, cache  # see `triton/records.py`
    h = tl.program_id(1)
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    request = tl.zeros((ROWS,), tl.int32)
    for chunk in range(0, B, AT_ONCE):
        b = chunk + tl.arange(0, AT_ONCE)
        end = tl.load(query_start_B1 + b + 1, mask=b < B, other=2**40)
        request += tl.sum((end[None, :] <= t[:, None]).to(tl.int32), 1)
    live = request < B
    request = tl.minimum(request, B - 1)
    behind = tl.load(query_start_B1 + request + 1) - t
    position = (tl.load(length_B + request) - behind).to(tl.int32)
    angles = load_angles(heads, position, live, WIDTH, ROTARY)
    block = tl.load(
        cache.block_BL + request.to(tl.int64) * cache.columns + position // PAGE,
        mask=live, other=0,
    )  # fmt: skip
    place = (block.to(tl.int64) * PAGE + position % PAGE) * H_KV + h
    row_p = rows.query + t.to(tl.int64) * rows.stride
    wait_for_writes(OVERLAP)
    d, d_v = tl.arange(0, WIDTH), tl.arange(0, WIDTH_V)
    inside, inside_v = live[:, None] & (d < D), live[:, None] & (d_v < D_V)
    key = turned_heads(row_p + (H + h) * D, angles, live, heads.k_norm_D, heads, D, WIDTH, ROTARY)
    value = load_heads(row_p + (H + H_KV) * D + h * D_V, live, D_V, WIDTH_V)
    to = cache.key + place[:, None] * D + d
    tl.store(to, key.to(value.dtype), mask=inside)
    tl.store(cache.value + place[:, None] * D_V + d_v, value, mask=inside_v)
    for g in range(H // H_KV):
        p = row_p + (h * (H // H_KV) + g) * D
        query = turned_heads(p, angles, live, heads.q_norm_D, heads, D, WIDTH, ROTARY)
        tl.debug_barrier()  # a lane turns what another one replaces
        tl.store(p[:, None] + d, query.to(value.dtype), mask=inside)

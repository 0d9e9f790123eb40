"""Heads of new tokens: loaded, normed, turned to their positions, written to the cache."""

from __future__ import annotations

import triton
import triton.language as tl

from foretoken.ops.backends.triton.attention.records import Cache, HeadInputs, Rows


@triton.jit
def load_heads(p_R, live_R, D: tl.constexpr, WIDTH: tl.constexpr):
    """The R heads at these addresses, [R, WIDTH]; 0 from D on, and where not live."""
    d = tl.arange(0, WIDTH)
    return tl.load(p_R[:, None] + d[None, :], mask=live_R[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def turned_heads(
    p_R, position_R, live_R, norm_D, heads: HeadInputs,
    D: tl.constexpr, WIDTH: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """The R heads at these addresses, normed and turned: float32 [R, WIDTH]."""
    HALF: tl.constexpr = ROTARY // 2
    d = tl.arange(0, WIDTH)
    x = load_heads(p_R, live_R, D, WIDTH).to(tl.float32)
    partner = tl.where(d < HALF, d + HALF, d - HALF)
    turns = live_R[:, None] & (d < ROTARY)[None, :]
    y = tl.load(p_R[:, None] + partner[None, :], mask=turns, other=0.0).to(tl.float32)
    angle = position_R[:, None] * HALF + (d % HALF)[None, :]
    cos = tl.load(heads.cos_PR + angle, mask=turns, other=1.0)
    sin = tl.load(heads.sin_PR + angle, mask=turns, other=0.0)
    if norm_D is not None:
        # In float64 the order of the sum, which depends on R, leaves no trace in float32.
        square = x.to(tl.float64) * x.to(tl.float64)
        rms = tl.rsqrt((tl.sum(square, 1) / D).to(tl.float32) + heads.eps)
        weight = tl.load(norm_D + d, mask=d < D, other=0.0).to(tl.float32)
        weight_y = tl.load(norm_D + partner, mask=d < ROTARY, other=0.0).to(tl.float32)
        x, y = x * rms[:, None] * weight[None, :], y * rms[:, None] * weight_y[None, :]
    return x * cos + tl.where(d < HALF, -1.0, 1.0)[None, :] * y * sin


@triton.jit
def write_heads(
    rows: Rows, heads: HeadInputs, cache: Cache, row_R, position_R, live_R, request_R, h,
    H: tl.constexpr, H_KV: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, ROTARY: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Write head h of the K/V of R new tokens, from their rows of qkv, to their places."""
    key_p = rows.query + row_R.to(tl.int64) * rows.stride + (H + h) * D
    value_p = rows.query + row_R.to(tl.int64) * rows.stride + (H + H_KV) * D + h * D_V
    table = cache.block_BL + request_R.to(tl.int64) * cache.columns + position_R // PAGE
    block = tl.load(table, mask=live_R, other=0).to(tl.int64)
    place = (block * PAGE + position_R % PAGE) * H_KV + h
    key = turned_heads(
        key_p, position_R, live_R, heads.k_norm_D, heads, D, WIDTH, ROTARY
    )  # fmt: skip
    value = load_heads(value_p, live_R, D_V, WIDTH_V)
    d, d_v = tl.arange(0, WIDTH), tl.arange(0, WIDTH_V)
    to = cache.key + place[:, None] * D + d[None, :]
    tl.store(to, key.to(cache.key.dtype.element_ty), mask=live_R[:, None] & (d < D)[None, :])
    to = cache.value + place[:, None] * D_V + d_v[None, :]
    tl.store(to, value, mask=live_R[:, None] & (d_v < D_V)[None, :])

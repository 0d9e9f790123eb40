"""Heads of new tokens: loaded, normed, turned to their positions."""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from foretoken.ops.backends.triton.attention.records import HeadInputs

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

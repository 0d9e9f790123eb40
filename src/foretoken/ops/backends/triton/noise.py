"""Noise by `Address` on the device: Philox4x32-10, uniforms and Gumbel noise in base 2.

An `Address` names a stream of noise. Draw i of a stream is word i mod 4 of group i div 4; in FP64
it is word pair i mod 2 of group i div 2. Noise is scaled by log2 e, since logits are in units of
log 2 (exp2 and log2 are instructions).
"""

from __future__ import annotations

from collections import namedtuple

import torch
import triton
import triton.language as tl

from foretoken.ops.types import Stream

# Streams. The number of a token stream's block stream is one higher than its own number.
TARGET_TOKEN = tl.constexpr(int(Stream.TARGET_TOKEN))
RESIDUAL_TOKEN = tl.constexpr(int(Stream.RESIDUAL_TOKEN))
ACCEPT = tl.constexpr(int(Stream.ACCEPT))
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
_ONE_INSTRUCTION = tl.constexpr(not triton.knobs.runtime.interpret and not torch.version.hip)
_LANE = tl.constexpr(65536)  # more than a block has lanes
# Bounds for `sure_argmax`, which treats all noise below _LOWEST as equal.
_LOWEST = tl.constexpr(-2.79)
_SLACK = tl.constexpr(1.2207e-4)  # 2 * 2^-14
_ROUNDING = tl.constexpr(2.384185791015625e-7)  # 2^-22

Address = namedtuple("Address", "key position draft_index stream")

Noise64 = namedtuple("Noise64", "high low near")
"""Gumbel noise in FP64: the two words that define it, and its approximation in FP32."""


@triton.jit
def block_address(address: Address):
    """The block stream that belongs to a token stream."""
    return Address(address.key, address.position, address.draft_index, address.stream + 1)


@triton.jit
def words(address: Address, group):
    """The four Philox words of each group in an int32 block."""
    zero = tl.full((), 0, tl.int32)
    index, stream = zero + address.draft_index, zero + address.stream
    return tl.philox(address.key, group, address.position.to(tl.int32), index, stream)


@triton.jit
def uniform32(word):
    """(h + 1/2) 2^-32 of a word h, in FP32 and at most 1 - 2^-24: never 0 or 1."""
    return tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)


@triton.jit
def uniform64(high, low):
    """The upper 53 bits of two words, (h + 1/2) 2^-53 in FP64, at most 1 - 2^-53."""
    h = (high.to(tl.uint64) << 21) | (low.to(tl.uint64) >> 11)
    half = tl.full((1,), 0.5, tl.float64)
    step = tl.full((1,), 1.1102230246251565e-16, tl.float64)
    return tl.minimum((h.to(tl.float64) + half) * step, 1.0 - step)


@triton.jit
def log2(x):
    """The hardware's log2 of FP32, to 2^-22 of max(1, |log2 x|); subnormal numbers count as 0.
    It is one instruction. `tl.log2` takes 30: they were most instructions of a draw."""
    if _ONE_INSTRUCTION:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)


@triton.jit
def gumbel(u):
    """-log2(-ln(1 - u)): standard Gumbel noise -ln(-ln(1 - u)) in units of ln 2.
    The highest noise comes from u near 0. There -ln(1 - u) is summed as a series: the hardware's
    log2 has an absolute error of 2^-22, which is 2 % of -ln(1 - u) at u = 1e-5."""
    series = u * (1 + u * (0.5 + u * (1 / 3 + u * (0.25 + u * (0.2 + u * (1 / 6 + u * (1 / 7)))))))
    return -log2(tl.where(u < 0.1, series, log2(1 - u) * -LN2))


@triton.jit
def gumbel64(u):
    """`gumbel` in FP64, with the series where 1 - u would round u away."""
    series = u * (1 + u * (0.5 + u * (1 / 3)))
    return -tl.log(tl.where(u < 1e-6, series, -tl.log(1 - u))) * LOG2E


@triton.jit
def _pairs_span(address: Address, first, COUNT: tl.constexpr):
    """Word pairs (high, low) of FP64 draws first, first + 1, ...; `first` is a multiple of 2."""
    a, b, c, d = words(address, (first // 2 + tl.arange(0, COUNT // 2)).to(tl.int32))
    return tl.reshape(tl.join(a, c), (COUNT,)), tl.reshape(tl.join(b, d), (COUNT,))


@triton.jit
def _pairs_at(address: Address, index):
    """Word pairs (high, low) of any FP64 draws."""
    a, b, c, d = words(address, (index // 2).to(tl.int32))
    odd = index % 2 == 1
    return tl.where(odd, c, a), tl.where(odd, d, b)


@triton.jit
def gumbel_span(address: Address, first, COUNT: tl.constexpr, FP64: tl.constexpr):
    """Gumbel noise of draws first, first + 1, ... [COUNT]; `first` is a multiple of 4."""
    if FP64:
        high, low = _pairs_span(address, first, COUNT)
        return gumbel64(uniform64(high, low))
    else:
        a, b, c, d = words(address, (first // 4 + tl.arange(0, COUNT // 4)).to(tl.int32))
        even, odd = tl.join(uniform32(a), uniform32(c)), tl.join(uniform32(b), uniform32(d))
        return gumbel(tl.reshape(tl.join(even, odd), (COUNT,)))


@triton.jit
def uniform_at(address: Address, index, FP64: tl.constexpr):
    """The uniforms of any draws (int block) of a stream."""
    if FP64:
        high, low = _pairs_at(address, index)
        return uniform64(high, low)
    else:
        a, b, c, d = words(address, (index // 4).to(tl.int32))
        word = index % 4
        low, high = tl.where(word == 0, a, b), tl.where(word == 2, c, d)
        return uniform32(tl.where(word < 2, low, high))


@triton.jit
def gumbel_at(address: Address, index, FP64: tl.constexpr):
    """Gumbel noise of any draws (int block) of a stream."""
    u = uniform_at(address, index, FP64)
    if FP64:
        return gumbel64(u)
    else:
        return gumbel(u)


@triton.jit
def _ordered(score):
    """int32 in the order of scores: a warp reduces integers in one instruction, floats in five."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def near_gumbel64(high, low):
    """`gumbel64` of word pairs, computed in FP32 to within 2^-14, and at least -2.79."""
    u = high.to(tl.float32) * 2.3283064365386963e-10
    u += ((low >> 11).to(tl.float32) + 0.5) * 1.1102230246251565e-16
    return tl.maximum(gumbel(u), _LOWEST)


@triton.jit
def sure_argmax(weight, near):
    """`argmax64` if FP32 noise (`near`) can decide it; else -1, once in about 1000 calls.

    Let ulp = 2^-24, n the FP64 noise of a lane, m its noise in FP32. u, both words in FP32, is
    rounded twice: a relative error of 2 ulp. dn / d(ln u) = u / ((1 - u) L ln 2), L = -ln(1 - u),
    grows from 1.45 to 211 where n = -2.79 (u = 0.99901): an error of 2.6e-5 there, below 2e-6 for
    u < 0.9. Errors of L: of the series (u < 0.1) 3 ulp and 1.3e-8 (its end); of 1 - u 1 ulp of 1;
    of the hardware's log2 2^-22 of max(1, its value): 2.3e-6 relatively at worst, at u = 0.1. Error
    of the last log2 and its rounding: 2^-22 max(1, |m|) + ulp |m| < 1.7e-5, |m| <= 54 (u >= 2^-54).
    No u is worst for two of these errors: |m - n| < 4e-5 if n > -2.8, which is below 2^-14. For
    lower noise m = -2.79 is an upper bound.

    A score s = weight + m is rounded by ulp |s|. Let t be the largest score of lanes with noise
    above that bound. A lane with s < t - (2 * 2^-14 + 4 ulp |t|) loses to that lane in FP64, too.
    So if only one lane reaches this limit, that lane is the answer. With ties, close scores, or
    rows that are not finite, no lane or several lanes reach it.
    """
    score = tl.where(weight > float("-inf"), weight + near, float("-inf"))
    top = tl.max(_ordered(tl.where(near > _LOWEST, score, float("-inf"))), axis=0)
    top = (top ^ ((top >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    lane = tl.arange(0, weight.shape[0])
    reached = tl.where(score >= top - (_SLACK + tl.abs(top) * _ROUNDING), lane + _LANE, 0)
    total = tl.sum(reached, axis=0)  # the number of lanes times _LANE, plus the sum of the lanes
    return tl.where((total >= _LANE) & (total < 2 * _LANE), total - _LANE, -1)


@triton.jit
def argmax64(weight, noise: Noise64):
    """The lane with the largest weight + FP64 noise, the first of equal ones."""
    best = sure_argmax(weight, noise.near)
    if best < 0:
        score = weight + gumbel64(uniform64(noise.high, noise.low))
        best = tl.argmax(tl.where(weight > float("-inf"), score, float("-inf")), axis=0)
    return best


@triton.jit
def noise_span(address: Address, first, COUNT: tl.constexpr, FP64: tl.constexpr):
    """The noise of `gumbel_span`, in the form that `argmax_with` takes."""
    if FP64:
        high, low = _pairs_span(address, first, COUNT)
        return Noise64(high, low, near_gumbel64(high, low))
    else:
        return gumbel_span(address, first, COUNT, False)


@triton.jit
def noise_at(address: Address, index, FP64: tl.constexpr):
    """The noise of `gumbel_at`, in the form that `argmax_with` takes."""
    if FP64:
        high, low = _pairs_at(address, index)
        return Noise64(high, low, near_gumbel64(high, low))
    else:
        return gumbel_at(address, index, False)


@triton.jit
def argmax_with(weight, noise, FP64: tl.constexpr):
    """The lane with the largest weight + noise, the first of equal ones; ignores NaN."""
    if FP64:
        return argmax64(weight, noise)
    else:
        key = _ordered(tl.where(weight > float("-inf"), weight + noise, float("-inf")))
        lane = tl.arange(0, weight.shape[0])
        return tl.min(tl.where(key == tl.max(key, axis=0), lane, _LANE), axis=0)

"""Noise by name on the device: Philox4x32-10, uniforms and Gumbel noise in base 2.

A stream of noise is named by a tuple `at` = (key, position, draft index, stream); see design,
"noise by name". Draw i is word i mod 4 of group i div 4; in FP64 word pair i mod 2 of group i div 2.
Noise is scaled by log2 e, since logits are held in units of log 2 (exp2 and log2 are instructions).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def words(at, group):
    """The four words of each group (int32 block)."""
    return tl.philox(at[0], group, at[1], at[2], at[3])


@triton.jit
def uniform32(word):
    """(h + 1/2) 2^-32 in FP32, at most 1 - 2^-24: open at both ends."""
    return tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)


@triton.jit
def uniform64(high, low):
    """The upper 53 bits of two words, (h + 1/2) 2^-53 in FP64, at most 1 - 2^-53."""
    h = (high.to(tl.uint64) << 21) | (low.to(tl.uint64) >> 11)
    half = tl.full((1,), 0.5, tl.float64)
    step = tl.full((1,), 1.1102230246251565e-16, tl.float64)
    return tl.minimum((h.to(tl.float64) + half) * step, 1.0 - step)


@triton.jit
def gumbel(u):
    """-log2(-ln(1 - u)): standard Gumbel noise -ln(-ln(1 - u)) in units of ln 2.

    The winning tail comes from u -> 0, where -ln(1 - u) is summed as a series: the hardware's log2
    is exact to 2^-22 absolutely, 2 % of it at u = 1e-5.
    """
    series = u * (1 + u * (0.5 + u * (1 / 3 + u * (0.25 + u * (0.2 + u * (1 / 6 + u * (1 / 7)))))))
    return -tl.log2(tl.where(u < 0.1, series, -tl.log(1 - u)))


@triton.jit
def gumbel64(u):
    """The same in FP64, with the series where 1 - u would round u away."""
    series = u * (1 + u * (0.5 + u * (1 / 3)))
    return -tl.log(tl.where(u < 1e-6, series, -tl.log(1 - u))) * LOG2E


@triton.jit
def gumbel_span(at, first, COUNT: tl.constexpr, FP64: tl.constexpr):
    """Draws first, first + 1, ... [COUNT]; `first` is a multiple of 4."""
    if FP64:
        a, b, c, d = words(at, (first // 2 + tl.arange(0, COUNT // 2)).to(tl.int32))
        return gumbel64(tl.reshape(tl.join(uniform64(a, b), uniform64(c, d)), (COUNT,)))
    else:
        a, b, c, d = words(at, (first // 4 + tl.arange(0, COUNT // 4)).to(tl.int32))
        even, odd = tl.join(uniform32(a), uniform32(c)), tl.join(uniform32(b), uniform32(d))
        return gumbel(tl.reshape(tl.join(even, odd), (COUNT,)))


@triton.jit
def uniform_at(at, index, FP64: tl.constexpr):
    """Draw `index` (int block) of a stream."""
    if FP64:
        a, b, c, d = words(at, (index // 2).to(tl.int32))
        odd = index % 2 == 1
        return uniform64(tl.where(odd, c, a), tl.where(odd, d, b))
    else:
        a, b, c, d = words(at, (index // 4).to(tl.int32))
        word = index % 4
        low, high = tl.where(word == 0, a, b), tl.where(word == 2, c, d)
        return uniform32(tl.where(word < 2, low, high))


@triton.jit
def gumbel_at(at, index, FP64: tl.constexpr):
    """Gumbel noise of any ids, one group computed for each."""
    if FP64:
        return gumbel64(uniform_at(at, index, True))
    else:
        return gumbel(uniform_at(at, index, False))


@triton.jit
def _uniform_kernel(index, key, position, draft_index, stream, out, FP64: tl.constexpr):
    m = tl.program_id(0)
    at = (
        tl.load(key + m),
        tl.load(position + m).to(tl.int32),
        tl.load(draft_index + m).to(tl.int32),
        tl.full((), 0, tl.int32) + stream,
    )
    u = uniform_at(at, tl.load(index + m) + tl.zeros((1,), tl.int64), FP64)
    tl.store(out + m + tl.arange(0, 1), u)


def uniform(
    index_M: Tensor,
    key_M: Tensor,
    position_M: Tensor,
    draft_index_M: Tensor,
    stream: int,
    fp64: bool = False,
) -> Tensor:
    """Draw index_M[m] of the stream named by (key, position, draft index): [M] in (0, 1)."""
    out = torch.empty(
        len(index_M), dtype=torch.float64 if fp64 else torch.float32, device=index_M.device
    )
    where = [x.contiguous() for x in (index_M, key_M, position_M, draft_index_M)]
    if len(index_M):
        _uniform_kernel[(len(index_M),)](*where, int(stream), out, fp64)
    return out

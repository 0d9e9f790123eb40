"""y = f(x W^T) for one row, on CUDA cores: a program takes BN rows of W, a thread 16 bytes of one.

For one row this is faster than feeding tensor cores: 3.5 to 4.6 TB/s of weights, where `streamk.py`
reaches 3.3 to 4.4. The first weights are on their way before the kernel before this one has ended.

In the names of tensors: N columns of y, K of x, P parts of a sum of squares.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from foretoken.ops.backends.triton.decoder.epilogue import RESIDUAL, SILU


@triton.jit
def gemv_kernel(
    weight, x, y, bias, residual, gain, scaled, squares_in, squares_out,
    N: tl.constexpr, K: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, EPS: tl.constexpr,
    EPILOGUE: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """As `epilogue.py` says; N / BN programs, each of which is one part of `squares_out`."""
    tile = tl.program_id(0)
    n = tile * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    rows = weight + n[:, None].to(tl.int64) * K + k[None, :]
    if OVERLAP:
        gdc_launch_dependents()
    w = tl.load(rows)
    w_up = w
    if EPILOGUE == SILU:
        w_up = tl.load(rows + N * K)
    if OVERLAP:
        gdc_wait()
    sums = tl.zeros([BN, BK], tl.float32)
    sums_up = tl.zeros([BN, BK], tl.float32)
    for start in range(BK, K, BK):  # the next block is asked for before this one is used
        w_next = tl.load(rows + start)
        part = tl.load(x + start - BK + k)[None, :].to(tl.float32)
        sums += w.to(tl.float32) * part
        w = w_next
        if EPILOGUE == SILU:
            up_next = tl.load(rows + N * K + start)
            sums_up += w_up.to(tl.float32) * part
            w_up = up_next
    part = tl.load(x + K - BK + k)[None, :].to(tl.float32)
    out = tl.sum(sums + w.to(tl.float32) * part, 1)
    inverse_rms = 1.0
    if P > 0:
        p = tl.arange(0, PP)
        squares = tl.load(squares_in + p, mask=p < P, other=0.0)
        inverse_rms = tl.rsqrt(tl.sum(squares, 0) / K + EPS)
        out *= inverse_rms
    if bias is not None:
        out += tl.load(bias + n).to(tl.float32)
    if EPILOGUE == SILU:
        up = tl.sum(sums_up + w_up.to(tl.float32) * part, 1) * inverse_rms
        if bias is not None:
            up += tl.load(bias + N + n).to(tl.float32)
        out = out / (1 + tl.exp(-out)) * up
    dtype: tl.constexpr = y.dtype.element_ty
    if EPILOGUE == RESIDUAL:
        out += tl.load(residual + n).to(tl.float32)
        out = out.to(dtype).to(tl.float32)  # as the norm reads it
        tl.store(scaled + n, (out * tl.load(gain + n).to(tl.float32)).to(dtype))
        tl.store(squares_out + tile, tl.sum(out * out, 0))
    tl.store(y + n, out.to(dtype))

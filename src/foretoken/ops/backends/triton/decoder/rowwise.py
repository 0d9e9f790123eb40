"""Products of one row, and the kernels between products: each program handles one row.

Letters of shapes: T packed tokens, N selected rows or columns of y, H hidden size, K columns of x,
V vocabulary, P parts of a sum of squares, Q ids of an EAGLE-3 head; HP, PP: H and P, padded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foretoken.ops.backends.triton.decoder.tiles import RESIDUAL, SILU, Operands
from foretoken.ops.backends.triton.rows import let_next_start, wait_for_writes


@triton.jit
def gemv_kernel(weight, x, operands: Operands, N: tl.constexpr, K: tl.constexpr, P: tl.constexpr,
                PP: tl.constexpr, EPS: tl.constexpr, EPILOGUE: tl.constexpr, BN: tl.constexpr,
                BK: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """A product of one row, as in `tiles.py`. A program multiplies BN rows of weights by x."""
    y, bias, residual, gain, scaled, squares_in, squares_out = operands
    tile = tl.program_id(0)
    n = tile * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    rows = weight + n[:, None].to(tl.int64) * K + k[None, :]
    let_next_start(OVERLAP)
    w = tl.load(rows)
    w_up = w
    if EPILOGUE == SILU:
        w_up = tl.load(rows + N * K)
    wait_for_writes(OVERLAP)
    sums = tl.zeros([BN, BK], tl.float32)
    sums_up = tl.zeros([BN, BK], tl.float32)
    for start in range(BK, K, BK):  # the next block's load starts before this block is used
        w_next = tl.load(rows + start)
        x_part = tl.load(x + start - BK + k)[None, :].to(tl.float32)
        sums += w.to(tl.float32) * x_part
        w = w_next
        if EPILOGUE == SILU:
            up_next = tl.load(rows + N * K + start)
            sums_up += w_up.to(tl.float32) * x_part
            w_up = up_next
    x_part = tl.load(x + K - BK + k)[None, :].to(tl.float32)
    out = tl.sum(sums + w.to(tl.float32) * x_part, 1)
    inverse_rms = 1.0
    if P > 0:
        p = tl.arange(0, PP)
        squares = tl.load(squares_in + p, mask=p < P, other=0.0)
        inverse_rms = tl.rsqrt(tl.sum(squares, 0) / K + EPS)
        out *= inverse_rms
    if bias is not None:
        out += tl.load(bias + n).to(tl.float32)
    if EPILOGUE == SILU:
        up = tl.sum(sums_up + w_up.to(tl.float32) * x_part, 1) * inverse_rms
        if bias is not None:
            up += tl.load(bias + N + n).to(tl.float32)
        out = out / (1 + tl.exp(-out)) * up
    dtype: tl.constexpr = y.dtype.element_ty  # type: ignore[attr-defined]
    if EPILOGUE == RESIDUAL:
        out += tl.load(residual + n).to(tl.float32)
        out = out.to(dtype).to(tl.float32)  # as the norm reads it
        tl.store(scaled + n, (out * tl.load(gain + n).to(tl.float32)).to(dtype))
        tl.store(squares_out + tile, tl.sum(out * out, 0))
    tl.store(y + n, out.to(dtype))


@triton.jit
def embed_kernel(token_T, table_VH, x_TH, V: tl.constexpr, H: tl.constexpr, HP: tl.constexpr):
    """The vectors of tokens; 0 for an invalid id."""
    t = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, HP)
    token = tl.load(token_T + t)
    valid = (h < H) & (token >= 0) & (token < V)
    x = tl.load(table_VH + token * H + h, mask=valid, other=0.0)
    tl.store(x_TH + t * H + h, x, mask=h < H)


@triton.jit(do_not_specialize=["T"])
def scale_kernel(x_TH, gain_H, scaled_TH, squares_PT, T, H: tl.constexpr, HP: tl.constexpr,
                 P: tl.constexpr, PP: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """Write `scaled`, and each row's sum of squares as the first of P parts; parts 1..P-1 are 0.
    All earlier kernels have ended when this one starts: it lets the next kernel start at once."""
    t = tl.program_id(0).to(tl.int64)
    let_next_start(OVERLAP)
    h, p = tl.arange(0, HP), tl.arange(0, PP)
    x = tl.load(x_TH + t * H + h, mask=h < H, other=0.0).to(tl.float32)
    scaled = x * tl.load(gain_H + h, mask=h < H, other=0.0).to(tl.float32)
    tl.store(scaled_TH + t * H + h, scaled.to(scaled_TH.dtype.element_ty), mask=h < H)
    tl.store(squares_PT + p * T + t, tl.where(p == 0, tl.sum(x * x, 0), 0.0), mask=p < P)


@triton.jit
def norm_kernel(x_TH, row_N, gain_H, normed_NH, H: tl.constexpr, HP: tl.constexpr,
                EPS: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """RMSNorm of the rows `row_N` of x, or of all if None. Can start before x is written."""
    n = tl.program_id(0).to(tl.int64)
    wait_for_writes(OVERLAP)
    t = n
    if row_N is not None:
        t = tl.load(row_N + n)
    h = tl.arange(0, HP)
    x = tl.load(x_TH + t * H + h, mask=h < H, other=0.0).to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(x * x, 0) / H + EPS)
    gain = tl.load(gain_H + h, mask=h < H, other=0.0).to(tl.float32)
    tl.store(normed_NH + n * H + h, (x * inverse_rms * gain).to(x_TH.dtype.element_ty), mask=h < H)


@triton.jit
def silu_kernel(gate_up, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """silu(gate) * up replaces gate: a copy of 8192 rows of an 8B model would take 235 MB."""
    t, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    valid = column < WIDTH
    gate_p = gate_up + t * (2 * WIDTH) + column
    gate = tl.load(gate_p, mask=valid, other=0.0).to(tl.float32)
    up = tl.load(gate_p + WIDTH, mask=valid, other=0.0).to(tl.float32)
    out = gate / (1 + tl.exp(-gate)) * up
    tl.store(gate_p, out.to(gate_up.dtype.element_ty), mask=valid)


@triton.jit
def join_kernel(token_T, table_VH, token_gain_H, feature_TH, feature_gain_H, both_T2H, normed_TH,
                V: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, EPS: tl.constexpr,
                OVERLAP: tl.constexpr):  # fmt: skip
    """Write a token's vector (half 0) or its feature (half 1), normed. Programs: (row, half).
    normed_TH: None, or receives the normed features, too. As the first kernel of a pass this one
    waits before it lets the next kernel start: attention reads the cache before it waits."""
    t, half = tl.program_id(0).to(tl.int64), tl.program_id(1)
    h = tl.arange(0, HP)
    wait_for_writes(OVERLAP)
    let_next_start(OVERLAP)
    if half == 0:
        token = tl.load(token_T + t)
        valid = (h < H) & (token >= 0) & (token < V)
        x = tl.load(table_VH + token * H + h, mask=valid, other=0.0).to(tl.float32)
        gain = tl.load(token_gain_H + h, mask=h < H, other=0.0).to(tl.float32)
    else:
        x = tl.load(feature_TH + t * H + h, mask=h < H, other=0.0).to(tl.float32)
        gain = tl.load(feature_gain_H + h, mask=h < H, other=0.0).to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(x * x, 0) / H + EPS)
    normed = (x * inverse_rms * gain).to(both_T2H.dtype.element_ty)
    tl.store(both_T2H + t * (2 * H) + half * H + h, normed, mask=h < H)
    if normed_TH is not None:
        tl.store(normed_TH + t * H + h, normed, mask=(h < H) & (half == 1))


@triton.jit
def spread_kernel(logits_NQ, target_id_Q, wide_NV, Q: tl.constexpr, V: tl.constexpr,
                  BLOCK: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """Write each logit to the column of its target id. Programs: (row, BLOCK of the head's ids)."""
    n, j = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    target_id = tl.load(target_id_Q + j, mask=j < Q, other=0)
    wait_for_writes(OVERLAP)
    let_next_start(OVERLAP)
    tl.store(wide_NV + n * V + target_id, tl.load(logits_NQ + n * Q + j, mask=j < Q), mask=j < Q)

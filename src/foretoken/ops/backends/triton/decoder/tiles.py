"""The products of the fused chain: what each computes, which kernel multiplies, in which tiles.

    PLAIN     y = n(x) W^T + b
    SILU      y = silu(n(x) G^T + b_g) * (n(x) U^T + b_u), the rows of U after those of G
    RESIDUAL  y = r + x W^T + b: the residual stream, before and after; also
              scaled = y * gain, and of each tile of columns the sum of squares of y

RMSNorm costs no kernel and no pass over memory. A product that adds to the residual stream also
writes `scaled` and `squares`; the next product that reads the normed stream multiplies `scaled`
instead and scales its rows by n = 1 / sqrt(mean of squares + eps). Without parts of squares
(P = 0), n is 1.

Tiles were measured on an H200 within whole decode steps of an 8B model, where a product's first
loads overlap the end of the product before it: alone, products are faster with other tiles.
"""

from __future__ import annotations

from enum import IntEnum
from functools import cache
from typing import NamedTuple

import triton.language as tl
from torch import Tensor


class Epilogue(IntEnum):
    """The three kinds of products of the module's docstring, as kernels know them."""

    PLAIN = 0
    RESIDUAL = 1
    SILU = 2


RESIDUAL, SILU = tl.constexpr(1), tl.constexpr(2)

MOST_ROWS = 64  # upper bound for `streamk.py`; with more rows cuBLAS is faster
_BUCKETS = (8, 16, 32, 64)  # rows that x is padded to in shared memory
_SAME_BUCKET = 16  # deterministic steps of up to so many rows share one bucket
_SHARED = 200 << 10  # most bytes of a ring; an SM's shared memory has 227 KiB


class Operands(NamedTuple):
    """The tensors of a product except x and its weights; names as in the module's docstring.

    residual_TN, gain_N, scaled_TN, new_squares_PT: None unless the epilogue is RESIDUAL
    squares_PT: parts of the sums of squares of x's rows; None: n is 1
    """

    y_TN: Tensor
    bias_N: Tensor | None
    residual_TN: Tensor | None = None
    gain_N: Tensor | None = None
    scaled_TN: Tensor | None = None
    squares_PT: Tensor | None = None
    new_squares_PT: Tensor | None = None


class Shape(NamedTuple):
    """A product: N columns of the result (SILU has 2 N rows of weights), K of the input."""

    N: int
    K: int
    epilogue: Epilogue


class GemvTile(NamedTuple):
    """A program of `gemv_kernel`: block_n rows of weights, block_k of their columns at a time."""

    block_n: int
    block_k: int
    num_warps: int


class StreamTile(NamedTuple):
    """Blocks and stages of the ring of `streamk.py`, number of programs, registers of a thread.

    With rings below some 113 KB two programs of a launch can run on one SM. Fewer programs than SMs
    are faster if each program then gets a whole number of tiles, or tiles divide into whole shares.
    """

    block_n: int
    block_k: int
    stages: int
    programs: int
    registers: int


ProductTile = GemvTile | StreamTile

_QKV, _O = Shape(6144, 4096, Epilogue.PLAIN), Shape(4096, 4096, Epilogue.RESIDUAL)
_GATE_UP, _DOWN = Shape(14336, 4096, Epilogue.SILU), Shape(4096, 14336, Epilogue.RESIDUAL)
_HEAD = Shape(128256, 4096, Epilogue.PLAIN)

_GEMV = {
    _QKV: GemvTile(4, 1024, 4),
    _O: GemvTile(4, 1024, 4),
    _GATE_UP: GemvTile(2, 4096, 8),
    _DOWN: GemvTile(2, 1024, 4),
    _HEAD: GemvTile(4, 2048, 8),
}
_FEW_ROWS = {  # up to 16
    _QKV: StreamTile(64, 128, 8, 132, 64),
    _O: StreamTile(64, 128, 5, 128, 64),
    _GATE_UP: StreamTile(64, 128, 6, 132, 64),
    _DOWN: StreamTile(64, 128, 11, 128, 64),
    _HEAD: StreamTile(64, 128, 8, 132, 64),
}
_MANY_ROWS = {  # 17 to 64
    _QKV: StreamTile(64, 128, 6, 96, 96),
    _O: StreamTile(64, 128, 6, 128, 96),
    _GATE_UP: StreamTile(64, 64, 5, 112, 96),
    _DOWN: StreamTile(64, 128, 6, 128, 96),
    _HEAD: StreamTile(128, 64, 7, 132, 128),
    Shape(6144, 8192, Epilogue.PLAIN): StreamTile(64, 128, 6, 96, 96),  # of an EAGLE-3 head
    Shape(32000, 4096, Epilogue.PLAIN): StreamTile(128, 64, 7, 125, 128),
}


def bucket(rows: int, deterministic: bool) -> int:
    """The number of rows to which `rows` (up to `MOST_ROWS`) are padded."""
    least = _SAME_BUCKET if deterministic else 1
    return next(b for b in _BUCKETS if max(rows, least) <= b)


@cache
def gemv_tile(shape: Shape) -> GemvTile | None:
    """The tile for one row. None: the shape does not divide into tiles."""
    if shape in _GEMV:
        return _GEMV[shape]
    block_k = min(2048, shape.K & -shape.K)
    if shape.N % 4 or block_k < 64:
        return None
    return GemvTile(4, block_k, 8 if block_k == 2048 else 4)


@cache
def stream_tile(shape: Shape, rows: int, processors: int) -> StreamTile | None:
    """The tile for `rows` rows, a bucket. None: the shape does not divide into tiles."""
    measured = _FEW_ROWS if rows <= _SAME_BUCKET else _MANY_ROWS
    if shape in measured and measured[shape].programs <= processors:
        return measured[shape]
    block_n, block_k = 64, 128 if rows <= _SAME_BUCKET else 64
    if shape.N % block_n or shape.K % block_k:
        return None
    halves = 2 if shape.epilogue is Epilogue.SILU else 1
    stages = min(8, _SHARED // (2 * block_k * (halves * block_n + rows)))
    programs = _even_programs(shape.N // block_n, shape.K // block_k, processors)
    return StreamTile(block_n, block_k, stages, programs, 64 if rows <= _SAME_BUCKET else 96)


def _even_programs(tiles: int, blocks: int, processors: int) -> int:
    """How many programs share the tiles: one per processor, or fewer, see `StreamTile`."""
    for programs in range(processors, processors * 5 // 6 - 1, -1):
        share, rest = divmod(tiles * blocks, programs)
        if not rest and share and (share % blocks == 0 or blocks % share == 0):
            return programs
    return min(processors, tiles * blocks)

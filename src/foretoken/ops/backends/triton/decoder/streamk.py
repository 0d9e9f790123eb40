"""y = f(x W^T) for 1 to 64 rows: a persistent kernel in Gluon that loads weights without a pause.

Few rows are bound by the memory's speed: every SM should always have loads in flight. A *unit* is
the product of one block of weights and one block of x: a tile of W's rows has K / BK units. Each
program, at most one per SM, takes an equal, contiguous share of all units ("stream-K"), so that no
SM is idle whatever the number of tiles. In a program one warp loads blocks by TMA through a ring of
STAGES buffers, and four warps multiply them with wgmma: W is the wide operand, so that 8 rows cost
no more than one. The first STAGES blocks of weights are loaded while the previous kernel runs.

Where several programs share a tile, the last to finish adds up the parts that all stored, in the
order of K: equal input gives equal bits. A row's bits depend on the tile's shape and on the number
of programs, not on other rows.

Letters of shapes: M rows of x, N columns of y, K columns of x, P parts of a sum of squares;
MP, PP: M and P, padded to powers of 2; BN, BK: a block of weights; KT = K / BK units of a tile.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from triton.experimental.gluon.language.nvidia.hopper import (  # isort: skip
    fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait,
)  # fmt: skip
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from foretoken.ops.backends.triton.decoder.tiles import RESIDUAL, SILU, Operands

WARPS = 4  # warps that multiply; one more loads
_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # renamed by Triton 3.7


@gluon.jit
def _start_weights(weight, full, weights, unit, stage, N: gl.constexpr, KT: gl.constexpr,
                   BN: gl.constexpr, BK: gl.constexpr, MP: gl.constexpr,
                   HALVES: gl.constexpr):  # fmt: skip
    """Start to load a unit's weights; the barrier `full` also counts the bytes of the unit's x."""
    mbarrier.expect(full.index(stage), (HALVES * BN + MP) * BK * 2)
    for half in gl.static_range(HALVES):
        tma.async_copy_global_to_shared(
            weight, [half * N + unit // KT * BN, unit % KT * BK], full.index(stage),
            weights.index(stage * HALVES + half),
        )  # fmt: skip


@gluon.jit
def _load(weight, x, full, free, weights, xs, begin, end, N: gl.constexpr, KT: gl.constexpr,
          BN: gl.constexpr, BK: gl.constexpr, MP: gl.constexpr, STAGES: gl.constexpr,
          HALVES: gl.constexpr):  # fmt: skip
    """Fill the ring. Loads of x wait for the previous kernel, loads of weights do not."""
    early = min(begin + STAGES, end)
    for unit in range(begin, early):
        _start_weights(weight, full, weights, unit, unit - begin, N, KT, BN, BK, MP, HALVES)
    gdc_wait()
    for unit in range(begin, early):
        stage = unit - begin
        tma.async_copy_global_to_shared(x, [0, unit % KT * BK], full.index(stage), xs.index(stage))
    for unit in range(early, end):
        stage = (unit - begin) % STAGES
        mbarrier.wait(free.index(stage), ((unit - begin) // STAGES & 1) ^ 1)
        _start_weights(weight, full, weights, unit, stage, N, KT, BN, BK, MP, HALVES)
        tma.async_copy_global_to_shared(x, [0, unit % KT * BK], full.index(stage), xs.index(stage))


@gluon.jit
def _inverse_rms(squares_PM, M, K: gl.constexpr, P: gl.constexpr, PP: gl.constexpr,
                 EPS: gl.constexpr, MP: gl.constexpr, LAYOUT: gl.constexpr):  # fmt: skip
    """1 / rms of each row, from the parts of its sum of squares: [1, MP]."""
    tall: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [gl.num_warps(), 1], [1, 0])
    part = gl.arange(0, PP, gl.SliceLayout(1, tall))
    row = gl.arange(0, MP, gl.SliceLayout(0, tall))
    valid = (part < P)[:, None] & (row < M)[None, :]
    squares = gl.load(squares_PM + part[:, None] * M + row[None, :], mask=valid, other=0.0)
    inverse = gl.rsqrt(gl.sum(squares, 0) / K + EPS)
    return gl.convert_layout(inverse, gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.jit
def _multiply(full, free, weights, xs, begin, end, operands: Operands, partial, arrived, M,
              N: gl.constexpr, K: gl.constexpr, P: gl.constexpr, PP: gl.constexpr,
              EPS: gl.constexpr, EPILOGUE: gl.constexpr, MP: gl.constexpr, BN: gl.constexpr,
              KT: gl.constexpr, STAGES: gl.constexpr, HALVES: gl.constexpr):  # fmt: skip
    """Multiply units begin..end - 1 as they arrive; write the tiles that are then complete."""
    y, bias, residual, gain, scaled, squares_in, squares_out = operands
    UNITS: gl.constexpr = N // BN * KT
    WARPS: gl.constexpr = gl.num_warps()
    program, programs = gl.program_id(0), gl.num_programs(0)
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, MP, 16])
    # A thread holds WIDTH neighbours of a row of y, a warp 64 columns of WIDTH // 2 rows.
    WIDTH: gl.constexpr = 4 if MP < 16 else 8
    flat: gl.constexpr = gl.BlockedLayout([WIDTH, 1], [64 // WIDTH, WIDTH // 2], [1, WARPS], [0, 1])
    column = gl.arange(0, BN, gl.SliceLayout(1, wide))
    offset = column[:, None] * MP + gl.arange(0, MP, gl.SliceLayout(0, wide))[None, :]
    m = gl.arange(0, MP, gl.SliceLayout(0, flat))
    valid = (m < M)[None, :]
    gdc_wait()
    inverse_rms = 1.0
    if P > 0:
        inverse_rms = _inverse_rms(squares_in, M, K, P, PP, EPS, MP, wide)
    unit = begin
    while unit < end:
        tile = unit // KT
        tile_end = min((tile + 1) * KT, end)
        acc = gl.zeros([BN, MP], gl.float32, wide)
        up = gl.zeros([BN, MP], gl.float32, wide)
        for u in range(unit, tile_end):
            stage = (u - begin) % STAGES
            mbarrier.wait(full.index(stage), (u - begin) // STAGES & 1)
            rows = xs.index(stage).permute((1, 0))
            acc = warpgroup_mma(weights.index(stage * HALVES), rows, acc, is_async=True)
            if HALVES == 2:
                up = warpgroup_mma(weights.index(stage * HALVES + 1), rows, up, is_async=True)
                acc, up = warpgroup_mma_wait(0, deps=[acc, up])
            else:
                acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(free.index(stage))
        first = ((tile * KT + 1) * programs - 1) // UNITS  # first, last: the programs of this tile
        last = ((tile * KT + KT) * programs - 1) // UNITS
        complete = first == last
        if first != last:
            own_slot = 2 * program + (begin < tile * KT).to(gl.int32)
            at = partial + own_slot * (HALVES * BN * MP) + offset
            gl.store(at, acc)
            if HALVES == 2:
                gl.store(at + BN * MP, up)
            _barrier()
            complete = gl.atomic_add(arrived + tile, 1, sem="acq_rel") == last - first
            if complete:
                acc = gl.zeros([BN, MP], gl.float32, wide)
                up = gl.zeros([BN, MP], gl.float32, wide)
                for p in range(first, last + 1):
                    slot = 2 * p + (p * UNITS // programs < tile * KT).to(gl.int32)
                    at = partial + slot * (HALVES * BN * MP) + offset
                    acc += gl.load(at)
                    if HALVES == 2:
                        up += gl.load(at + BN * MP)
                gl.store(arrived + tile, 0)
        if complete:
            if P > 0:
                acc *= inverse_rms
                up *= inverse_rms
            if bias is not None:
                acc += gl.load(bias + tile * BN + column).to(gl.float32)[:, None]
                if HALVES == 2:
                    up += gl.load(bias + N + tile * BN + column).to(gl.float32)[:, None]
            if EPILOGUE == SILU:
                acc = acc / (1 + gl.exp(-acc)) * up
            out = gl.convert_layout(acc, flat)
            n = tile * BN + gl.arange(0, BN, gl.SliceLayout(1, flat))
            at = m[None, :] * N + n[:, None]
            if EPILOGUE == RESIDUAL:
                out += gl.load(residual + at, mask=valid, other=0.0).to(gl.float32)
                out = out.to(gl.bfloat16).to(gl.float32)  # as the norm reads it
                norm_gain = gl.load(gain + n).to(gl.float32)[:, None]
                gl.store(scaled + at, (out * norm_gain).to(gl.bfloat16), mask=valid)
                gl.store(squares_out + tile * M + m, gl.sum(out * out, 0), mask=m < M)
            gl.store(y + at, out.to(gl.bfloat16), mask=valid)
        unit = tile_end


@gluon.jit(do_not_specialize=["M"])
def streamk_kernel(weight, x, operands: Operands, partial, arrived, M, N: gl.constexpr,
                   K: gl.constexpr, P: gl.constexpr, PP: gl.constexpr, EPS: gl.constexpr,
                   EPILOGUE: gl.constexpr, MP: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
                   STAGES: gl.constexpr):  # fmt: skip
    """Compute one of the three products of `tiles.py`; EPILOGUE says which.

    Args:
        weight, x: tensor maps with blocks [BN, BK] of [N or 2 N, K] and [MP, BK] of [M, K]; bf16.
        partial: float32 [2 * programs, 1 or 2, BN, MP]: parts of shared tiles, which can be the
            first and the last tile of each program.
        arrived: int32 [N / BN]: how many programs have stored a part; all 0 before and after.
    """
    KT: gl.constexpr = K // BK
    UNITS: gl.constexpr = N // BN * KT
    HALVES: gl.constexpr = 2 if EPILOGUE == SILU else 1
    program, programs = gl.program_id(0), gl.num_programs(0)
    begin, end = program * UNITS // programs, (program + 1) * UNITS // programs
    weights = gl.allocate_shared_memory(gl.bfloat16, [STAGES * HALVES, BN, BK], weight.layout)
    xs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, MP, BK], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    fence_async_shared()
    gdc_launch_dependents()
    gl.warp_specialize([
        (_multiply, (full, free, weights, xs, begin, end, operands, partial, arrived, M, N, K, P,
                     PP, EPS, EPILOGUE, MP, BN, KT, STAGES, HALVES)),
        (_load, (weight, x, full, free, weights, xs, begin, end, N, KT, BN, BK, MP, STAGES,
                 HALVES)),
    ], [1], [40])  # fmt: skip


def tensor_map(matrix: Tensor, rows: int, columns: int) -> Any:
    """A descriptor for TMA loads of [rows, columns] of a bf16 matrix; 0 beyond the last row."""
    size, layout = list(matrix.shape), _layout(rows, columns)
    return TensorDescriptor(matrix, size, [size[1], 1], [rows, columns], layout)


@cache
def _layout(rows: int, columns: int) -> Any:
    return gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)

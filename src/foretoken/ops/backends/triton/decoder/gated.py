"""y = silu(x G^T) * (x U^T) for up to 384 rows: what cuBLAS would write and a kernel for SiLU read
again stays in registers. A persistent kernel in Gluon.

So many rows are bound by tensor cores and by what the L2 cache delivers, so a program multiplies a
block of weights with all rows at once: W is the wide operand, and every weight is read once. One
warp brings blocks by TMA through a ring of STAGES buffers; eight multiply, and the products of one
block run while the next one is waited for. Accumulators are the limit: 128 columns x 384 rows.

The columns of a tile are BN / 2 of gate and as many of up, by turns of 8: in wgmma's layout, a
thread then holds both factors of a result. The tensor map sees G and U as one matrix of such rows.

In the names of tensors: M rows of x, N columns of y, K of x. Sizes of blocks are powers of 2, so M
is covered by two: the first MA rows, and MB more or none.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_wait

WARPS = 8  # that multiply
REGISTERS = 168  # of a thread: all that an SM has, for 12 warps; four need few, the rest is moved
_TURN = gl.constexpr(8)


@gluon.jit
def _ask_weights(
    weight, full, weights, unit, stage, KT: gl.constexpr, ROWS: gl.constexpr, SHIFT: gl.constexpr
):
    """ROWS: of weights and of x, that arrive in one buffer."""
    TURNS: gl.constexpr = weights.shape[1]
    k = (unit + SHIFT * gl.program_id(0)) % KT * weights.shape[4]
    mbarrier.expect(full.index(stage), ROWS * weights.shape[4] * 2)
    tma.async_copy_global_to_shared(
        weight, [unit // KT * TURNS, 0, 0, k], full.index(stage), weights.index(stage)
    )


@gluon.jit
def _ask_x(
    x, more, full, xs, mores, unit, stage, KT: gl.constexpr, MA: gl.constexpr, MB: gl.constexpr,
    SHIFT: gl.constexpr,
):  # fmt: skip
    k = (unit + SHIFT * gl.program_id(0)) % KT * xs.shape[2]
    tma.async_copy_global_to_shared(x, [0, k], full.index(stage), xs.index(stage))
    if MB > 0:
        tma.async_copy_global_to_shared(more, [MA, k], full.index(stage), mores.index(stage))


@gluon.jit
def _load(
    weight, x, more, full, free, weights, xs, mores, begin, end, KT: gl.constexpr,
    BN: gl.constexpr, MA: gl.constexpr, MB: gl.constexpr, STAGES: gl.constexpr,
    SHIFT: gl.constexpr,
):  # fmt: skip
    """Fill the ring: weights need not wait for the kernel before this one, x must."""
    ROWS: gl.constexpr = BN + MA + MB
    early = min(begin + STAGES, end)
    for unit in range(begin, early):
        _ask_weights(weight, full, weights, unit, unit - begin, KT, ROWS, SHIFT)
    gdc_wait()
    for unit in range(begin, early):
        _ask_x(x, more, full, xs, mores, unit, unit - begin, KT, MA, MB, SHIFT)
    for unit in range(early, end):
        stage = (unit - begin) % STAGES
        mbarrier.wait(free.index(stage), ((unit - begin) // STAGES & 1) ^ 1)
        _ask_weights(weight, full, weights, unit, stage, KT, ROWS, SHIFT)
        _ask_x(x, more, full, xs, mores, unit, stage, KT, MA, MB, SHIFT)


@gluon.jit
def _store(acc, y, tile, start, M, N: gl.constexpr):
    """SiLU of the accumulators of rows `start` and following."""
    BN: gl.constexpr = acc.shape[0]
    ROWS: gl.constexpr = acc.shape[1]
    WARPS: gl.constexpr = gl.num_warps()
    # Neighbours in a row of y in one thread; a warp has 64 of them, of 4 rows.
    flat: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, WARPS], [0, 1])
    by_turns = acc.reshape([BN // (2 * _TURN), 2, _TURN, ROWS]).permute((0, 2, 3, 1))
    gate, up = gl.split(by_turns)
    gated = (gate / (1 + gl.exp(-gate)) * up).to(gl.bfloat16)
    out = gl.convert_layout(gated.reshape([BN // 2, ROWS]), flat)
    n = tile * (BN // 2) + gl.arange(0, BN // 2, gl.SliceLayout(1, flat))
    m = start + gl.arange(0, ROWS, gl.SliceLayout(0, flat))
    gl.store(y + m[None, :] * N + n[:, None], out, mask=(m < M)[None, :])


@gluon.jit
def _multiply(
    full, free, weights, xs, mores, begin, end, y, M, N: gl.constexpr, KT: gl.constexpr,
    BN: gl.constexpr, MA: gl.constexpr, MB: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    WARPS: gl.constexpr = gl.num_warps()
    BK: gl.constexpr = xs.shape[2]
    of_x: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, MA, 16])
    of_more: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, max(8, MB), 16])
    for tile in range(begin // KT, end // KT):
        acc = gl.zeros([BN, MA], gl.float32, of_x)
        acc_more = gl.zeros([BN, max(8, MB)], gl.float32, of_more)
        for k in range(KT):
            unit = tile * KT + k - begin
            stage = unit % STAGES
            mbarrier.wait(full.index(stage), unit // STAGES & 1)
            block = weights.index(stage).reshape([BN, BK])
            acc = warpgroup_mma(block, xs.index(stage).permute((1, 0)), acc, is_async=True)
            if MB > 0:
                rows = mores.index(stage).permute((1, 0))
                acc_more = warpgroup_mma(block, rows, acc_more, is_async=True)
                acc, acc_more = warpgroup_mma_wait(2, deps=[acc, acc_more])
            else:
                acc = warpgroup_mma_wait(1, deps=[acc])
            # The products of the block before this one have ended.
            mbarrier.arrive(free.index((unit + STAGES - 1) % STAGES), pred=k > 0)
        acc, acc_more = warpgroup_mma_wait(0, deps=[acc, acc_more])
        mbarrier.arrive(free.index((tile * KT + KT - 1 - begin) % STAGES))
        _store(acc, y, tile, 0, M, N)
        if MB > 0:
            _store(acc_more, y, tile, MA, M, N)


@gluon.jit(do_not_specialize=["M"])
def gated_kernel(
    weight, x, more, y, M, N: gl.constexpr, K: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    MA: gl.constexpr, MB: gl.constexpr, STAGES: gl.constexpr, SHIFT: gl.constexpr,
):  # fmt: skip
    """Programs share the tiles evenly; no tile is shared.

    Args:
        weight: a map as `weight_map` makes it, of [2 N, K], the N rows of up behind those of gate.
        x, more: tensor maps with blocks [MA, BK] and [MB, BK] of [M, K]; `more` unread if MB is 0.
        y: bf16 [M, N].
        SHIFT: blocks of K that a program begins behind the one before it: they read the same rows.
    """
    KT: gl.constexpr = K // BK
    TILES: gl.constexpr = 2 * N // BN
    TURNS: gl.constexpr = BN // (2 * _TURN)
    program, programs = gl.program_id(0), gl.num_programs(0)
    begin = program * TILES // programs * KT
    end = (program + 1) * TILES // programs * KT
    weights = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TURNS, 2, _TURN, BK], weight.layout)
    xs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, MA, BK], x.layout)
    mores = xs
    if MB > 0:
        mores = gl.allocate_shared_memory(gl.bfloat16, [STAGES, MB, BK], more.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    fence_async_shared()
    gl.warp_specialize([
        (_multiply, (full, free, weights, xs, mores, begin, end, y, M, N, KT, BN, MA, MB, STAGES)),
        (_load, (weight, x, more, full, free, weights, xs, mores, begin, end, KT, BN, MA, MB,
                 STAGES, SHIFT)),
    ], [1], [40])  # fmt: skip


def weight_map(weight_2NK: Tensor, block_n: int, block_k: int) -> Any:
    """How TMA brings block_n rows, gate and up by turns of 8, in block_k columns."""
    turn = _TURN.value
    rows, K = weight_2NK.shape
    block = [block_n // (2 * turn), 2, turn, block_k]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    strides = [turn * K, rows // 2 * K, K, 1]
    return TensorDescriptor(weight_2NK, [rows // (2 * turn), 2, turn, K], strides, block, layout)

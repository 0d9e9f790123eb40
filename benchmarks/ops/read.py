"""A Triton kernel that reads a tensor once and does nothing else worth naming: the read floor."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK, STEPS = 4096, 4
WHOLE = BLOCK * STEPS


@triton.jit
def _sums(x_ptr, out_ptr, BLOCK: tl.constexpr, STEPS: tl.constexpr):  # type: ignore[no-untyped-def]
    first = tl.program_id(0).to(tl.int64) * BLOCK * STEPS
    total = tl.zeros((BLOCK,), tl.float32)
    for step in range(STEPS):
        total += tl.load(x_ptr + first + step * BLOCK + tl.arange(0, BLOCK))
    tl.store(out_ptr + tl.program_id(0), tl.sum(total, axis=0))


def read(x: Tensor, out: Tensor) -> None:
    """Sums of WHOLE numbers each: `x` is float32 [n * WHOLE], `out` float32 [n]."""
    _sums[(len(out),)](x, out, BLOCK, STEPS, num_warps=8)

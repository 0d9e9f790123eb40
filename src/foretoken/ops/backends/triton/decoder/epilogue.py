"""What every product of the fused chain does besides multiplying, and what it is called.

    PLAIN     y = n(x) W^T + b
    SILU      y = silu(n(x) G^T + b_g) * (n(x) U^T + b_u), the rows of U behind those of G
    RESIDUAL  y = r + x W^T + b: the residual stream, before and after; besides
              scaled = y * gain, and of each tile of columns the sum of squares of y

RMSNorm costs no kernel and no pass over memory. Whoever adds to the residual stream also writes
`scaled` and `squares`; whoever multiplies the normed stream next multiplies `scaled` instead and
scales its rows by n = 1 / sqrt(mean of squares + eps). Without parts of squares (P = 0), n is 1:
x is multiplied as it is.
"""

from __future__ import annotations

from enum import IntEnum

import triton.language as tl


class Epilogue(IntEnum):
    """By number, as kernels know them."""

    PLAIN = 0
    RESIDUAL = 1
    SILU = 2


RESIDUAL, SILU = tl.constexpr(1), tl.constexpr(2)

"""The residual stream of one pass, and the kernels that multiply it by a model's weights.

Shape suffixes: T packed tokens, H hidden size, N columns of a result, K of an input, P parts of a
sum of squares, V vocabulary, I columns of a gated layer.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from foretoken.ops.backends.triton.compiled import launch

from foretoken.ops.backends.triton.decoder.rowwise import (  # isort: skip
    embed_kernel, gemv_kernel, norm_kernel, scale_kernel, silu_kernel,
)  # fmt: skip
from foretoken.ops.backends.triton.decoder.tiles import (  # isort: skip
    MOST_ROWS, Epilogue, GemvTile, Operands, ProductTile, Shape, bucket, gemv_tile, stream_tile,
)  # fmt: skip
from foretoken.ops.backends.triton.launch import dependent, overlaps
from foretoken.ops.stack import Linear, Weight, plain


class Products:
    """Launches the kernels of one model's products, and keeps the memory that these share.

    All passes of a model share one object, one after the other on one stream. deterministic: in
    passes of up to 16 rows, a row's bits do not depend on the number of rows.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, eps: float, deterministic: bool = False
    ) -> None:
        self.dtype, self.eps, self.deterministic = dtype, eps, deterministic
        self.overlap = overlaps(device)
        self.dependent = dependent(self.overlap)
        self._processors = 0
        self._weight_maps: dict[tuple[int, int, int], Any] = {}  # a map keeps its weights alive
        if self.overlap and dtype is torch.bfloat16:
            self._processors = torch.cuda.get_device_properties(device).multi_processor_count
            # More than 132 programs * 2 slots * 128 * 64 (or 2 halves of 64 * 64).
            self._partial = torch.empty(1 << 22, dtype=torch.float32, device=device)
            # More tiles than a product has: a vocabulary has up to 262 144 / 64.
            self._arrived = torch.zeros(1 << 15, dtype=torch.int32, device=device)

    def tile(self, rows: int, shape: Shape) -> ProductTile | None:
        """The tile for a product of `rows` rows; None: cuBLAS and small kernels compute it.
        In float16 it is None: rows that are multiplied before they are normed can overflow."""
        if rows == 1 and not self.deterministic and self.dtype is not torch.float16:
            return gemv_tile(shape)
        if rows > MOST_ROWS or not self._processors:
            return None
        return stream_tile(shape, bucket(rows, self.deterministic), self._processors)

    def multiply(self, x_TK: Tensor, linear: Linear) -> Tensor:
        """x times a layer, without a norm: [T, N]."""
        shape = _shape(linear, Epilogue.PLAIN)
        tile = self.tile(len(x_TK), shape)
        if tile is None:
            return _multiply(x_TK, linear)
        y_TN = x_TK.new_empty(len(x_TK), shape.N)
        self.launch(tile, shape, linear.weight, x_TK, Operands(y_TN, linear.bias))
        return y_TN

    def launch(
        self, tile: ProductTile, shape: Shape, weight: Weight, x_TK: Tensor, operands: Operands
    ) -> None:
        """Launch the kernel that `tile` is for; see `tiles.py`."""
        weight_NK = plain(weight)
        parts = 0 if operands.squares_PT is None else operands.squares_PT.shape[0]
        parts_padded = triton.next_power_of_2(max(1, parts))
        constants = shape.N, shape.K, parts, parts_padded, self.eps, int(shape.epilogue)
        if isinstance(tile, GemvTile):
            launch(
                gemv_kernel, (shape.N // tile.block_n,), weight_NK, x_TK, operands, *constants,
                tile.block_n, tile.block_k, self.overlap, num_warps=tile.num_warps,
                **self.dependent,
            )  # fmt: skip
            return
        # Gluon is imported only where it runs: Triton's interpreter lacks it.
        from foretoken.ops.backends.triton.decoder import streamk

        rows = bucket(len(x_TK), self.deterministic)
        key = weight_NK.data_ptr(), tile.block_n, tile.block_k
        if key not in self._weight_maps:
            self._weight_maps[key] = streamk.tensor_map(weight_NK, tile.block_n, tile.block_k)
        launch(
            streamk.streamk_kernel, (tile.programs,), self._weight_maps[key],
            streamk.tensor_map(x_TK, rows, tile.block_k), operands, self._partial, self._arrived,
            len(x_TK), *constants, rows, tile.block_n, tile.block_k, tile.stages,
            num_warps=streamk.WARPS, maxnreg=tile.registers, **self.dependent,
        )  # fmt: skip


class ResidualStream:
    """The hidden states of T tokens on their way through layers, `state_TH`.

    Products read the stream after a norm of weight `gain_H`. A fused product uses `scaled` and
    `squares`, which the product before it wrote; cuBLAS reads rows that a kernel has normed. Each
    of these forms is made when a product first needs it.
    """

    def __init__(self, products: Products, state_TH: Tensor, gain_H: Tensor) -> None:
        self._products, self._gain_H = products, gain_H
        self.state_TH = state_TH
        self._must_keep = True  # the state belongs to the caller
        self._scaled_squares: tuple[Tensor, Tensor] | None = None
        self._normed_TH: Tensor | None = None

    def project(self, linear: Linear) -> Tensor:
        """The normed stream times a layer: [T, N]."""
        y_TN = self._fused(linear, Epilogue.PLAIN)
        return _multiply(self._normed(), linear) if y_TN is None else y_TN

    def gate(self, linear: Linear) -> Tensor:
        """silu(gate) * up of the normed stream: [T, I], with any stride between rows."""
        y_TN = self._fused(linear, Epilogue.SILU)
        if y_TN is not None:
            return y_TN
        gate_up = _multiply(self._normed(), linear)
        rows, size = len(gate_up), gate_up.shape[1] // 2
        block = 4096 if rows <= 512 else 1024  # 320 rows: 5 us a layer less than with 1024
        launch(silu_kernel, (rows, triton.cdiv(size, block)), gate_up, size, block, num_warps=4)
        return gate_up[:, :size]

    def add(self, linear: Linear, x_TK: Tensor, gain_H: Tensor, keep: bool = False) -> None:
        """Add the product of x and a layer; the norm of the next products has the weight `gain_H`.
        keep: later additions do not overwrite the new state."""
        shape = _shape(linear, Epilogue.RESIDUAL)
        tile = self._products.tile(len(x_TK), shape)
        old, new = self.state_TH, self.state_TH
        if self._must_keep or keep:
            new = torch.empty_like(old)
        self.state_TH, self._gain_H, self._must_keep = new, gain_H, keep
        self._normed_TH, self._scaled_squares = None, None
        if tile is None:
            torch.addmm(old, x_TK, plain(linear.weight).T, out=new)
            if linear.bias is not None:
                new += linear.bias
            return
        scaled, squares = torch.empty_like(old), _squares(old, shape.N // tile.block_n)
        operands = Operands(new, linear.bias, old, gain_H, scaled, new_squares_PT=squares)
        self._products.launch(tile, shape, linear.weight, x_TK.contiguous(), operands)
        self._scaled_squares = scaled, squares

    def narrow(self, row_N: Tensor) -> None:
        """Keep only the rows `row_N`, in this order; N can be 0."""
        self.state_TH, self._must_keep = self.state_TH[row_N], False
        self._normed_TH, self._scaled_squares = None, None

    def head(self, linear: Linear, row_N: Tensor | None) -> Tensor:
        """The normed rows `row_N`, or all, times a layer: [N, V]; N can be 0."""
        if not len(self.state_TH if row_N is None else row_N):
            return self.state_TH.new_empty(0, len(plain(linear.weight)))
        if row_N is None:
            return self.project(linear)
        return self._products.multiply(self.normed(row_N), linear)

    def normed(self, row_N: Tensor | None = None) -> Tensor:
        """The rows `row_N` of the stream, or all, after the norm."""
        x_TH = self.state_TH
        rows, size = len(x_TH) if row_N is None else len(row_N), x_TH.shape[1]
        normed_NH = x_TH.new_empty(rows, size)
        launch(
            norm_kernel, (rows,), x_TH, row_N, self._gain_H, normed_NH, size,
            triton.next_power_of_2(size), self._products.eps, self._products.overlap, num_warps=8,
            **self._products.dependent,
        )  # fmt: skip
        return normed_NH

    def _normed(self) -> Tensor:
        if self._normed_TH is None:
            self._normed_TH = self.normed()
        return self._normed_TH

    def _fused(self, linear: Linear, epilogue: Epilogue) -> Tensor | None:
        """The normed stream times a layer, in one kernel; None: cuBLAS multiplies."""
        shape = _shape(linear, epilogue)
        tile = self._products.tile(len(self.state_TH), shape)
        if tile is None:
            return None
        y_TN = self.state_TH.new_empty(len(self.state_TH), shape.N)
        scaled_TH, squares_PT = self._scaled_and_squares(tile)
        operands = Operands(y_TN, linear.bias, squares_PT=squares_PT)
        self._products.launch(tile, shape, linear.weight, scaled_TH, operands)
        return y_TN

    def _scaled_and_squares(self, tile: ProductTile) -> tuple[Tensor, Tensor]:
        """`scaled` and `squares` of the state; a kernel writes both if no product has."""
        if self._scaled_squares is None:
            x_TH, size = self.state_TH, self.state_TH.shape[1]
            # As many parts of squares as in later layers: one kernel less to compile.
            shape = Shape(size, size, Epilogue.RESIDUAL)
            later_tile = self._products.tile(len(x_TH), shape) or tile
            squares = _squares(x_TH, max(1, size // later_tile.block_n))
            self._scaled_squares = torch.empty_like(x_TH), squares
            launch(
                scale_kernel, (len(x_TH),), x_TH, self._gain_H, *self._scaled_squares, len(x_TH),
                size, triton.next_power_of_2(size), len(squares),
                triton.next_power_of_2(len(squares)), self._products.overlap, num_warps=8,
            )  # fmt: skip
        return self._scaled_squares


def embed(token_T: Tensor, table_VH: Tensor) -> Tensor:
    """The vectors of tokens, [T, H]; 0 for an invalid id."""
    vocabulary, size = table_VH.shape
    x_TH = table_VH.new_empty(len(token_T), size)
    launch(
        embed_kernel, (len(token_T),), token_T, table_VH, x_TH, vocabulary, size,
        triton.next_power_of_2(size), num_warps=4,
    )  # fmt: skip
    return x_TH


def _shape(linear: Linear, epilogue: Epilogue) -> Shape:
    N, K = plain(linear.weight).shape
    return Shape(N // 2 if epilogue is Epilogue.SILU else N, K, epilogue)


def _multiply(x_TK: Tensor, linear: Linear) -> Tensor:
    if linear.bias is None:
        return torch.mm(x_TK, plain(linear.weight).T)
    return torch.addmm(linear.bias, x_TK, plain(linear.weight).T)


def _squares(like: Tensor, parts: int) -> Tensor:
    return torch.empty(parts, len(like), dtype=torch.float32, device=like.device)

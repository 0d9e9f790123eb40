"""The memory of keys and values: one pair of tensors per layer, cut into blocks."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from foretoken.ops.pinned import to_device

_PAST_END = 16  # elements allocated after the end of a tensor: kernels load whole vectors

LayerShape = tuple[int, int, int]
"""(H_kv, D of keys, D of values); layers of one model may differ."""


class KVPool:
    """Paged K and V of every layer.

    keys, values: one tensor per layer, [num_blocks, block_size, H_kv, D] and [..., D_v]. They start
        as zeros: attention reads whole blocks, and models that multiply masked keys (all except the
        native decoder) would turn a NaN at a masked position into a NaN result.
    """

    def __init__(
        self,
        layer_shapes: Sequence[LayerShape],
        num_blocks: int,
        block_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size, self.num_blocks, self._device = block_size, num_blocks, device

        def zeros(heads: int, head_size: int) -> Tensor:
            shape = (num_blocks, block_size, heads, head_size)
            count = prod(shape)
            return torch.zeros(count + _PAST_END, dtype=dtype, device=device)[:count].view(shape)

        self.keys = tuple(zeros(heads, key_size) for heads, key_size, _ in layer_shapes)
        self.values = tuple(zeros(heads, value_size) for heads, _, value_size in layer_shapes)

    @staticmethod
    def bytes_per_block(
        layer_shapes: Sequence[LayerShape], block_size: int, dtype: torch.dtype
    ) -> int:
        """Bytes of one block's keys and values in all layers."""
        sizes = (heads * (size_k + size_v) for heads, size_k, size_v in layer_shapes)
        return sum(sizes) * block_size * dtype.itemsize

    def clear(self, block_ids: Sequence[int]) -> None:
        """Zero these blocks: a NaN in them could spread to the request that gets them next."""
        index = to_device(np.array(block_ids, dtype=np.int64), self._device)
        for cache in (*self.keys, *self.values):
            cache.index_fill_(0, index, 0)

"""The memory of keys and values: one pair of tensors per layer, cut into blocks.

Belongs here: tensors and their size. Does not: which request owns a block (block pool).

Shape suffixes: T packed tokens, H heads, D head size; shapes are [num_blocks, block_size, H_kv, D].
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

import numpy as np
import torch
from torch import Tensor

from foretoken.ops import AttentionBatch
from foretoken.ops.pinned import to_device
from foretoken.ops.types import PagedKV

_PAST_END = 16  # numbers that can be read after a tensor's own: kernels load whole vectors

LayerShape = tuple[int, int, int]
"""(H_kv, D of keys, D of values); layers of one model may differ."""


class KVPool:
    """Paged K and V of every layer.

    keys, values: per layer, [num_blocks, block_size, H_kv, D] and [..., D_v]. Memory starts at
    zero: attention reads whole blocks, and if the model multiplies masked keys (all but the native
    decoder), a masked position holding NaN would still give NaN.
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
        self._flat_keys = [keys.flatten(0, 1) for keys in self.keys]
        self._flat_values = [values.flatten(0, 1) for values in self.values]

    @staticmethod
    def bytes_per_block(
        layer_shapes: Sequence[LayerShape], block_size: int, dtype: torch.dtype
    ) -> int:
        """Bytes that one block takes over all layers, keys and values."""
        numbers = sum(heads * (key + value) for heads, key, value in layer_shapes)
        return numbers * block_size * dtype.itemsize

    def of(self, batch: AttentionBatch) -> PagedKV[Sequence[Tensor]]:
        """All layers, for a pass of this batch."""
        return PagedKV(batch, self.keys, self.values)

    def only_layer(self, batch: AttentionBatch) -> PagedKV[Tensor]:
        """The same of a pool of one layer."""
        return PagedKV(batch, self.keys[0], self.values[0])

    def write(self, layer: int, index_T: Tensor, key_THD: Tensor, value_THD: Tensor) -> None:
        """Store new tokens' keys and values at the flat indices of `write_index`."""
        self._flat_keys[layer].index_copy_(0, index_T, key_THD)
        self._flat_values[layer].index_copy_(0, index_T, value_THD)

    def clear(self, block_ids: Sequence[int]) -> None:
        """Zero blocks that change hands, if the model multiplies masked keys: they may hold NaN."""
        index = to_device(np.array(block_ids, dtype=np.int64), self._device)
        for cache in (*self.keys, *self.values):
            cache.index_fill_(0, index, 0)


def write_index(batch: AttentionBatch, num_tokens: int, num_blocks: int) -> Tensor:
    """Where each layer writes new tokens: int64 [T], block * block_size + offset.

    Padding after the last request's tokens goes to the pool's last block. On a CPU in plain
    numbers: as operators there, a pass of one token took 40 us instead of 9.
    """
    size, trash = batch.block_size, (num_blocks - 1) * batch.block_size
    if batch.length_B.device.type == "cpu":
        index_T: list[int] = []
        starts = batch.query_start_B1.tolist()
        columns = (pairwise(starts), batch.length_B.tolist(), batch.block_BL.tolist())
        for (start, end), length, blocks in zip(*columns, strict=True):
            index_T += [
                blocks[i // size] * size + i % size for i in range(length - end + start, length)
            ]
        return torch.tensor(index_T + [trash] * (num_tokens - len(index_T)))
    token_T = torch.arange(num_tokens, device=batch.length_B.device)
    end_B = batch.query_start_B1[1:]
    owner_T = torch.searchsorted(end_B, token_T, right=True)
    is_real_T, owner_T = owner_T < len(end_B), owner_T.clamp(max=len(end_B) - 1)
    position_T = torch.where(is_real_T, token_T + (batch.length_B - end_B)[owner_T], 0)
    block_T = batch.block_BL[owner_T, position_T // size]
    return torch.where(is_real_T, block_T * size + position_T % size, trash)

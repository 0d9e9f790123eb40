"""The weights of a GGUF file for a stack, in the file's own format."""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretoken.models.gguf.names import parameters, row_order
from foretoken.models.gguf.reader import GgufFile, GgufTensor
from foretoken.models.stored import StoredWeights
from foretoken.ops.formats import BLOCKS, decode_blocks
from foretoken.ops.stack import Blocks, Dense

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufWeights(StoredWeights):
    """The weights of a GGUF file; see `StoredWeights`.

    Args:
        module: Transformers' module of the model. `CheckpointError` or `UnsupportedModelError` if
            the module's parameters are not those of the file.
    """

    def __init__(self, file: GgufFile, module: Any) -> None:
        self.file, self._tensors = file, parameters(file)
        super().__init__(file.path, {*self._tensors})
        config = module.config.to_dict()
        sizes = ("num_attention_heads", "num_key_value_heads", "head_dim")
        self._head_sizes: Mapping[str, int] = {name: config[name] for name in sizes}
        self.check_shapes(module, {name: tensor.shape for name, tensor in self._tensors.items()})

    def weight(self, name: str) -> Dense | Blocks:
        tensor = self._tensors[name]
        rows, order = _byte_rows(tensor), self._order(name)
        if tensor.kind in BLOCKS:
            return Blocks(tensor.kind, rows, order)
        values = rows.view(_PLAIN[tensor.kind])
        return Dense(values if order is None else values[order])

    def vector(self, name: str) -> Tensor:
        tensor, order = self._tensors[name], self._order(name)
        if tensor.kind in BLOCKS:
            values = decode_blocks(tensor.kind, _byte_rows(tensor))[0]
        else:
            values = _byte_rows(tensor).view(_PLAIN[tensor.kind])[0]
        return values if order is None else values[order]

    def release(self) -> None:
        maps = (_memory_map(tensor) for tensor in self._tensors.values())
        for memory_map in {id(each): each for each in maps if each is not None}.values():
            memory_map.madvise(mmap.MADV_DONTNEED)

    def _order(self, name: str) -> Tensor | None:
        architecture = str(self.file.metadata["general.architecture"])
        order = row_order(architecture, name, self._head_sizes)
        return None if order is None else torch.from_numpy(order)


def _memory_map(tensor: GgufTensor) -> mmap.mmap | None:
    """The memory map that holds a tensor's bytes; None if there is no memory map."""
    base: Any = tensor.data
    while isinstance(base, np.ndarray):
        base = base.base
    owner = base.obj if isinstance(base, memoryview) else base
    return owner if isinstance(owner, mmap.mmap) else None


def _byte_rows(tensor: GgufTensor) -> Tensor:
    """The bytes of a tensor's rows, uint8 [rows, bytes]: a view of the memory map."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the map is read-only, and no code writes to it
        return torch.from_numpy(tensor.rows())

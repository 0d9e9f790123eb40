"""The weights of a GGUF file on their way into a stack.

Belongs here: which tensor of the file each weight is, in the file's own format or as plain numbers,
and giving the file's memory back once a backend has its own copy. Does not: where a stack puts them
(`families.py`), products (`ops/`).
"""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretoken.errors import CheckpointError
from foretoken.models.families import check_biases
from foretoken.models.gguf.names import parameters, row_order
from foretoken.models.gguf.reader import GgufTensor
from foretoken.models.gguf.split import GgufFile
from foretoken.models.sizes import check_fit
from foretoken.ops.formats import BLOCKS, decode_blocks
from foretoken.ops.stack import Blocks, Dense, Joined, Linear

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufWeights:
    """Weights by the names of Transformers' parameters: a `families.Source`.

    Matrices stay as the file has them, and where it is mapped; norms and biases are float32.

    Args:
        module: the twin, whose parameters say what there must be.

    Raises:
        CheckpointError: tensors are missing, too many, or of other shapes than the module's.
        UnsupportedModelError: a tensor that no parameter is.
    """

    def __init__(self, file: GgufFile, module: Any) -> None:
        self.file, self._tensors = file, parameters(file)
        config = module.config.to_dict()
        sizes = ("num_attention_heads", "num_key_value_heads", "head_dim")
        self._heads: Mapping[str, int] = {name: config[name] for name in sizes}
        wanted = {name: tuple(weight.shape) for name, weight in module.named_parameters()}
        found = {name: tensor.shape for name, tensor in self._tensors.items()}
        problems = {
            "missing": sorted(wanted.keys() - found.keys()),
            "unexpected": sorted(found.keys() - wanted.keys()),
            "mismatched": sorted(n for n in wanted.keys() & found.keys() if wanted[n] != found[n]),
        }
        check_fit(file.path, problems)

    def tensor(self, name: str) -> Tensor:
        """See `Source`; float32."""
        values = self.numbers(name)
        if not bool(values.isfinite().all()):
            raise CheckpointError(
                f"`{self._tensors[name].name}` in `{self.file.path}` is not finite: the file is "
                "damaged. Download it again."
            )
        return values

    def embedding(self, path: str) -> Dense | Blocks:
        """See `Source`."""
        return self._weight(f"{path}.weight")

    def linear(self, *paths: str) -> Linear:
        """See `Source`."""
        parts = tuple(self._weight(f"{path}.weight") for path in paths)
        has = [f"{path}.bias" in self._tensors for path in paths]
        check_biases(paths, has)
        bias = torch.cat([self.tensor(f"{path}.bias") for path in paths]) if all(has) else None
        split = tuple(part.shape[0] for part in parts) if len(parts) > 1 else ()
        return Linear(Joined(parts) if len(parts) > 1 else parts[0], bias, split)

    def numbers(self, name: str) -> Tensor:
        """A parameter as float32."""
        tensor = self._tensors[name]
        if tensor.kind in BLOCKS:
            values = decode_blocks(tensor.kind, _mapped(tensor))
        else:
            values = _mapped(tensor).view(_PLAIN[tensor.kind]).float()
        values = values.reshape(tensor.shape)
        order = self._order(name)
        return values if order is None else values[order]

    def _weight(self, name: str) -> Dense | Blocks:
        tensor = self._tensors[name]
        rows, order = _mapped(tensor), self._order(name)
        if tensor.kind in BLOCKS:
            return Blocks(tensor.kind, rows, order)
        values = rows.view(_PLAIN[tensor.kind])
        return Dense(values if order is None else values[order])

    def _order(self, name: str) -> Tensor | None:
        architecture = str(self.file.metadata["general.architecture"])
        order = row_order(architecture, name, self._heads)
        return None if order is None else torch.from_numpy(order)


def release(file: GgufFile) -> None:
    """Give back the memory that was read of a file: what is read again comes from it again."""
    maps = {id(found): found for t in file.tensors.values() if (found := _map_of(t)) is not None}
    for found in maps.values():
        found.madvise(mmap.MADV_DONTNEED)


def _map_of(tensor: GgufTensor) -> mmap.mmap | None:
    """The map of the file that a tensor's bytes are a view of; no bytes are of none."""
    base: Any = tensor.data
    while isinstance(base, np.ndarray):
        base = base.base
    found = base.obj if isinstance(base, memoryview) else base
    return found if isinstance(found, mmap.mmap) else None


def _mapped(tensor: GgufTensor) -> Tensor:
    """The bytes of a tensor's rows, uint8 [rows, bytes], where they are mapped."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nobody writes to it, and the system would not have it
        return torch.from_numpy(tensor.rows())

"""A stack's weights in the format of their file: what `gguf/weights.py` and `compressed.py`
share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.errors import CheckpointError
from foretoken.models.families import check_biases
from foretoken.models.sizes import Shape, check_fit
from foretoken.ops.formats import decode_blocks, decode_groups, has_finite_scales

from foretoken.ops.stack import (  # isort: skip
    Blocks, Dense, Grouped, Joined, Linear, Stack, format_of, linears, parts_of,
)  # fmt: skip


class StoredWeights(ABC):
    """The weights of a checkpoint, by the names of Transformers' parameters: a `families.Source`.

    Matrices keep the file's format, as views of the file's memory map where possible. Norms and
    biases are float32.

    Args:
        path: of the file or folder, for messages.
        names: of all stored parameters.
    """

    def __init__(self, path: Path, names: set[str]) -> None:
        self.path, self.names = path, names

    @abstractmethod
    def weight(self, name: str) -> Dense | Blocks | Grouped:
        """A matrix in its stored format."""

    @abstractmethod
    def vector(self, name: str) -> Tensor:
        """A norm's gains, or a bias, in any dtype."""

    @abstractmethod
    def release(self) -> None:
        """Free the memory of the mapped files. Data that is still needed is read again."""

    def tensor(self, name: str) -> Tensor:
        values = self.vector(name).float()
        if not bool(values.isfinite().all()):
            raise CheckpointError(
                f"`{name}` in `{self.path}` is not finite: the weights are damaged. Download them "
                "again."
            )
        return values

    def embedding(self, path: str) -> Dense | Blocks | Grouped:
        return self.weight(f"{path}.weight")

    def linear(self, *paths: str) -> Linear:
        parts = tuple(self.weight(f"{path}.weight") for path in paths)
        have_bias = [f"{path}.bias" in self.names for path in paths]
        check_biases(paths, have_bias)
        biases = [self.tensor(f"{path}.bias") for path in paths] if all(have_bias) else []
        bias = torch.cat(biases) if biases else None
        split = tuple(part.shape[0] for part in parts) if len(parts) > 1 else ()
        return Linear(Joined(parts) if len(parts) > 1 else parts[0], bias, split)

    def numbers(self, name: str) -> Tensor:
        """A parameter as plain numbers. A matrix of floats keeps its dtype; other matrices, norms
        and biases become float32."""
        if name.endswith(("norm.weight", ".bias")):
            return self.tensor(name)
        return numbers_of(self.weight(name))

    def check_shapes(self, module: Any, stored: dict[str, Shape]) -> None:
        """Raise `CheckpointError` unless the parameters of the module and of the file (`stored`)
        have the same names and shapes."""
        needed = {name: tuple(weight.shape) for name, weight in module.named_parameters()}
        common = needed.keys() & stored.keys()
        problems = {
            "missing": sorted(needed.keys() - stored.keys()),
            "unexpected": sorted(stored.keys() - needed.keys()),
            "mismatched": sorted(name for name in common if needed[name] != stored[name]),
        }
        check_fit(self.path, problems)


def check_finite_stack(path: Path, stack: Stack, *, blocks: bool) -> None:
    """Raise `CheckpointError` for a matrix with a number or a scale that is not finite.

    Args:
        path: of the checkpoint, for messages.
        blocks: whether to check the scales of blocks outside of the embedding, too, which takes a
            second for 4 GB. Kernels that change the layout of blocks check these scales themselves.
    """
    matrices = [("embedding", Linear(stack.embedding)), *linears(stack)]
    for index, (name, linear) in enumerate(matrices):
        for part in parts_of(linear.weight):
            if isinstance(part, Blocks):
                is_finite = (not blocks and index > 0) or has_finite_scales(part.kind, part.rows)
            else:
                values = part.values if isinstance(part, Dense) else part.scale_NG
                is_finite = bool(torch.stack(values.aminmax()).isfinite().all())
            if not is_finite:
                raise CheckpointError(
                    f"A number of `{name}` in `{path}` (matrix {index} of {len(matrices)}, stored "
                    f"as {format_of(part)}) is NaN or infinite: the weights are damaged. Download "
                    "them again."
                )


def numbers_of(weight: Dense | Blocks | Grouped) -> Tensor:
    """The numbers of a weight as floats, decoded from blocks or groups."""
    if isinstance(weight, Dense):
        return weight.values
    if isinstance(weight, Grouped):
        return decode_groups(weight.codes, weight.scale_NG)
    rows = weight.rows if weight.order_N is None else weight.rows[weight.order_N]
    return decode_blocks(weight.kind, rows)

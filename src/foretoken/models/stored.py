"""Weights in the format of their file, for a stack.

Belongs here: code that all such formats share: several matrices as one layer, and matrices as plain
numbers. Does not: a format (`gguf/weights.py`, `compressed.py`), where a stack puts the weights
(`families.py`).
"""

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
    """Weights by the names of Transformers' parameters: a `families.Source`.

    Matrices are views of the file's memory map, in its format; norms and biases are float32.

    Args:
        path: of the file, or the folder, for messages.
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
        """Free the memory of the mapped files; it is read again from them if needed."""

    def tensor(self, name: str) -> Tensor:
        """See `Source`; float32.

        Raises:
            CheckpointError: a number is not finite.
        """
        values = self.vector(name).float()
        if not bool(values.isfinite().all()):
            raise CheckpointError(
                f"`{name}` in `{self.path}` is not finite: the weights are damaged. Download them "
                "again."
            )
        return values

    def embedding(self, path: str) -> Dense | Blocks | Grouped:
        """See `Source`."""
        return self.weight(f"{path}.weight")

    def linear(self, *paths: str) -> Linear:
        """See `Source`."""
        parts = tuple(self.weight(f"{path}.weight") for path in paths)
        has = [f"{path}.bias" in self.names for path in paths]
        check_biases(paths, has)
        bias = torch.cat([self.tensor(f"{path}.bias") for path in paths]) if all(has) else None
        split = tuple(part.shape[0] for part in parts) if len(parts) > 1 else ()
        return Linear(Joined(parts) if len(parts) > 1 else parts[0], bias, split)

    def numbers(self, name: str) -> Tensor:
        """A parameter as plain numbers, in its stored dtype or float32."""
        if name.endswith(("norm.weight", ".bias")):
            return self.tensor(name)
        return numbers_of(self.weight(name))

    def check_shapes(self, module: Any, found: dict[str, Shape]) -> None:
        """Raise `CheckpointError` unless the stored parameters are exactly the module's."""
        wanted = {name: tuple(weight.shape) for name, weight in module.named_parameters()}
        problems = {
            "missing": sorted(wanted.keys() - found.keys()),
            "unexpected": sorted(found.keys() - wanted.keys()),
            "mismatched": sorted(n for n in wanted.keys() & found.keys() if wanted[n] != found[n]),
        }
        check_fit(self.path, problems)


def check_stack(path: Path, stack: Stack, *, blocks: bool) -> None:
    """Raise `CheckpointError` for a matrix with a number, or a scale, that is not finite.

    Args:
        blocks: whether to check the scales of blocks, too; not needed where kernels check them
            while they change the layout. (Checking 4 GB of blocks takes a second.)
    """
    named = [("embedding", Linear(stack.embedding)), *linears(stack)]
    for number, (name, linear) in enumerate(named):
        for part in parts_of(linear.weight):
            if isinstance(part, Blocks):
                is_finite = (not blocks and number > 0) or has_finite_scales(part.kind, part.rows)
            else:
                numbers = part.values if isinstance(part, Dense) else part.scale_NG
                is_finite = bool(torch.stack(numbers.aminmax()).isfinite().all())
            if not is_finite:
                raise CheckpointError(
                    f"A number of `{name}` in `{path}` (matrix {number} of {len(named)}, stored as "
                    f"{format_of(part)}) is NaN or infinite: the weights are damaged. Download "
                    "them again."
                )


def numbers_of(weight: Dense | Blocks | Grouped) -> Tensor:
    """A weight as plain numbers."""
    if isinstance(weight, Dense):
        return weight.values
    if isinstance(weight, Grouped):
        return decode_groups(weight.codes, weight.scale_NG)
    rows = weight.rows if weight.order_N is None else weight.rows[weight.order_N]
    return decode_blocks(weight.kind, rows)

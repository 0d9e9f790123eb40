"""Weights of compressed-tensors: small integers with scales, in safetensors.

Belongs here: their tensors as weights. Does not: which schemes are read (`compressed_scheme.py`),
matrix products (`ops/`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.errors import CheckpointError
from foretoken.models.checkpoint import reading
from foretoken.models.compressed_scheme import group_sizes
from foretoken.models.sizes import check_leftovers
from foretoken.models.stored import StoredWeights
from foretoken.ops.stack import Blocks, Dense, Grouped

_PACKED, _SCALE, _SHAPE = "_packed", "_scale", "_shape"
_BITS = 32  # of the words that codes are packed into


class CompressedWeights(StoredWeights):
    """See `StoredWeights`.

    Args:
        headers: of the safetensors files.
        module: the twin; the files must have exactly its parameters.

    Raises:
        CheckpointError: tensors are missing, left over, or of other shapes than the module's.
    """

    def __init__(
        self, folder: Path, headers: Mapping[Path, Mapping[str, Any]], module: Any
    ) -> None:
        self._stored = CompressedTensors(headers)
        names = self._stored.parameters()
        known = {name for name, _ in module.named_parameters()}
        # Of a model with a tied head, the files may hold a copy of the embedding as `lm_head`.
        check_leftovers(module, names - known - {"lm_head.weight"}, folder)
        super().__init__(folder, names & known)
        shapes = {name: tuple(self._stored.shape(name)) for name in self.names}
        self.check_shapes(module, shapes)
        self._groups = group_sizes(module.config.quantization_config)

    def weight(self, name: str) -> Dense | Blocks | Grouped:
        """See `StoredWeights`."""
        weight = self._stored.weight(name)
        if isinstance(weight, Grouped):
            bits, groups = 4 if weight.codes.dtype is torch.uint8 else 8, weight.scale_NG.shape[1]
            found = bits, weight.shape[1] // groups if groups > 1 else 0
            if found not in self._groups and (bits, weight.shape[1]) not in self._groups:
                raise CheckpointError(
                    f"`{name}` is stored in {bits} bits with {groups} scales a row, which is not "
                    "what `config_groups` of `config.json` says: the weights are damaged."
                )
        return weight

    def vector(self, name: str) -> Tensor:
        """See `StoredWeights`."""
        return self._stored.tensor(name)

    def release(self) -> None:
        """See `StoredWeights`: nothing to do, each tensor's map is freed with it."""


class CompressedTensors:
    """The tensors of safetensors files; a compressed one is stored in parts."""

    def __init__(self, headers: Mapping[Path, Mapping[str, Any]]) -> None:
        names = {name: path for path, header in headers.items() for name in header}
        self._paths = {name: path for name, path in names.items() if name != "__metadata__"}
        self._shapes = {name: headers[path][name]["shape"] for name, path in self._paths.items()}

    def parameters(self) -> set[str]:
        """The names of the parameters that the tensors are, or are parts of."""
        found = {name.removesuffix(_PACKED) for name in self._paths}
        return {name for name in found if not self._is_part(name)}

    def shape(self, name: str) -> list[int]:
        """The shape of a parameter."""
        if name in self._shapes:
            return list(self._shapes[name])
        sizes = self.tensor(name + _SHAPE)
        if sizes.is_floating_point():
            raise CheckpointError(f"`{name}{_SHAPE}` is {sizes.dtype}: must be whole numbers.")
        return [int(size) for size in sizes.flatten().tolist()]

    def tensor(self, name: str) -> Tensor:
        """A tensor as stored."""
        from safetensors import safe_open

        if name not in self._paths:
            raise CheckpointError(f"The weights lack `{name}`, which goes with a packed one.")
        with reading(path := self._paths[name]), safe_open(path, "pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    def weight(self, name: str) -> Dense | Grouped:
        """A matrix, or a vector.

        Raises:
            CheckpointError: its parts do not fit each other, or a scale is not finite.
        """
        if name in self._paths and name + _SCALE not in self._paths:
            values = self.tensor(name)
            if values.dim() == 2 and not values.is_floating_point():
                raise CheckpointError(f"`{name}` is stored as {values.dtype}, without scales.")
            return Dense(values)
        shape, scale = self.shape(name), self.tensor(name + _SCALE)
        if len(shape) != 2 or min(shape) < 1:
            raise CheckpointError(f"`{name}` has the shape {shape}: must be a matrix.")
        out, inputs = shape
        if name in self._paths:
            codes = self.tensor(name)
            if codes.dtype is not torch.int8:
                raise CheckpointError(f"`{name}` is stored as {codes.dtype}: must be int8.")
        else:
            codes = _unpacked(name, self.tensor(name + _PACKED), out, inputs)
        return Grouped(codes, _scales(name, scale, out, inputs))

    def _is_part(self, name: str) -> bool:
        for suffix in (_SCALE, _SHAPE):
            whole = name.removesuffix(suffix)
            if whole != name and (whole in self._paths or whole + _PACKED in self._paths):
                return True
        return False


def _scales(name: str, scale: Tensor, out: int, inputs: int) -> Tensor:
    """Scales of each row's groups, float32 [out, groups]; stored per tensor, row or group."""
    wide = scale.float().reshape(1, 1) if scale.numel() == 1 else scale.float()
    if wide.dim() == 1:
        wide = wide[:, None]
    fits = wide.dim() == 2 and len(wide) in (1, out) and wide.shape[1] >= 1
    if not fits or inputs % wide.shape[1] or not bool(wide.isfinite().all()):
        raise CheckpointError(
            f"`{name}{_SCALE}` is {[*scale.shape]} for a matrix of {[out, inputs]}, or not all "
            "finite: must be a number for all, for each row, or for equal groups of each row."
        )
    return wide.expand(out, -1).contiguous()


def _unpacked(name: str, packed: Tensor, out: int, inputs: int) -> Tensor:
    """Codes in the layout of `Grouped`: one of eight bits per byte, or two of four bits.

    A word of 32 bits holds them lowest bits first, each with half of its range added.
    """
    bits = _BITS * packed.shape[-1] // inputs if packed.dim() == 2 else 0
    fits = packed.shape == (out, -(-inputs * bits // _BITS)) and inputs * bits % 8 == 0
    if packed.dtype is not torch.int32 or bits not in (4, 8) or not fits:
        raise CheckpointError(
            f"`{name}{_PACKED}` is {packed.dtype} {[*packed.shape]}, which is not a matrix of "
            f"{[out, inputs]} in four or eight bits."
        )
    stored = packed.contiguous().view(torch.uint8)[:, : inputs * bits // 8].contiguous()
    return stored if bits == 4 else (stored ^ 128).view(torch.int8)

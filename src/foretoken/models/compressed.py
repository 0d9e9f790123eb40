"""Weights of compressed-tensors: small integers with scales, in safetensors."""

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
_WORD_BITS = 32  # codes are packed into words of this size


class CompressedWeights(StoredWeights):
    """The weights of a checkpoint of compressed-tensors; see `StoredWeights`.

    Args:
        headers: of the safetensors files.
        module: Transformers' module of the model. `CheckpointError` if the module's parameters are
            not those of the files.
    """

    def __init__(
        self, folder: Path, headers: Mapping[Path, Mapping[str, Any]], module: Any
    ) -> None:
        self._stored = CompressedTensors(headers)
        names = self._stored.parameters()
        known = {name for name, _ in module.named_parameters()}
        # If the head is tied, the files may hold a copy of the embedding as `lm_head`.
        check_leftovers(module, names - known - {"lm_head.weight"}, folder)
        super().__init__(folder, names & known)
        shapes = {name: tuple(self._stored.shape(name)) for name in self.names}
        self.check_shapes(module, shapes)
        self._group_sizes = group_sizes(module.config.quantization_config)

    def weight(self, name: str) -> Dense | Blocks | Grouped:
        weight = self._stored.weight(name)
        if isinstance(weight, Grouped):
            bits, groups = 4 if weight.codes.dtype is torch.uint8 else 8, weight.scale_NG.shape[1]
            row_size = weight.shape[1]
            scheme = bits, row_size // groups if groups > 1 else 0
            # A single scale per row may also be described as a group of the whole row.
            if scheme not in self._group_sizes and (bits, row_size) not in self._group_sizes:
                raise CheckpointError(
                    f"`{name}` is stored in {bits} bits with {groups} scales a row, which is not "
                    "what `config_groups` of `config.json` says: the weights are damaged."
                )
        return weight

    def vector(self, name: str) -> Tensor:
        return self._stored.tensor(name)

    def release(self) -> None:
        """Do nothing: each tensor's memory map is freed with the tensor."""


class CompressedTensors:
    """The tensors of safetensors files. A compressed parameter is stored as several tensors."""

    def __init__(self, headers: Mapping[Path, Mapping[str, Any]]) -> None:
        names = {name: path for path, header in headers.items() for name in header}
        self._paths = {name: path for name, path in names.items() if name != "__metadata__"}
        self._shapes = {name: headers[path][name]["shape"] for name, path in self._paths.items()}

    def parameters(self) -> set[str]:
        """The names of all parameters, compressed or not."""
        names = {name.removesuffix(_PACKED) for name in self._paths}
        return {name for name in names if not self._is_part(name)}

    def shape(self, name: str) -> list[int]:
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
            raise CheckpointError(f"The weights lack `{name}`, a part of a packed matrix.")
        with reading(path := self._paths[name]), safe_open(path, "pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    def weight(self, name: str) -> Dense | Grouped:
        """A parameter as stored: a matrix or vector of plain numbers, or a compressed matrix.

        Raises:
            CheckpointError: tensors are missing, have a wrong dtype or do not fit each other, or a
                scale is not finite.
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
            codes = _unpack(name, self.tensor(name + _PACKED), out, inputs)
        return Grouped(codes, _expand_scales(name, scale, out, inputs))

    def _is_part(self, name: str) -> bool:
        """Whether a tensor is the scale or the shape of a compressed parameter."""
        for suffix in (_SCALE, _SHAPE):
            parameter = name.removesuffix(suffix)
            stored_names = (parameter, parameter + _PACKED)
            if parameter != name and any(stored in self._paths for stored in stored_names):
                return True
        return False


def _expand_scales(name: str, scale: Tensor, out: int, inputs: int) -> Tensor:
    """The scales of each row's groups, float32 [out, groups], from the stored scales: a single one,
    one per row, or one per group of a row. `name`: of the matrix [out, inputs]."""
    scale_NG = scale.float().reshape(1, 1) if scale.numel() == 1 else scale.float()
    if scale_NG.dim() == 1:
        scale_NG = scale_NG[:, None]
    fits = scale_NG.dim() == 2 and len(scale_NG) in (1, out) and scale_NG.shape[1] >= 1
    if not fits or inputs % scale_NG.shape[1] or not bool(scale_NG.isfinite().all()):
        raise CheckpointError(
            f"`{name}{_SCALE}` has shape {[*scale.shape]} for a matrix of {[out, inputs]}, or is "
            "not finite: must be one number for all, for each row, or for equal groups of each row."
        )
    return scale_NG.expand(out, -1).contiguous()


def _unpack(name: str, packed: Tensor, out: int, inputs: int) -> Tensor:
    """The codes of a packed matrix [out, inputs] in the layout of `Grouped`: a byte holds one code
    of eight bits, or two codes of four bits.

    In the file a word of 32 bits holds several codes, the first code in the lowest bits. Half of
    the range was added to each code, so that no code is negative.
    """
    bits = _WORD_BITS * packed.shape[-1] // inputs if packed.dim() == 2 else 0
    fits = packed.shape == (out, -(-inputs * bits // _WORD_BITS)) and inputs * bits % 8 == 0
    if packed.dtype is not torch.int32 or bits not in (4, 8) or not fits:
        raise CheckpointError(
            f"`{name}{_PACKED}` is {packed.dtype} {[*packed.shape]}, which is not a matrix of "
            f"{[out, inputs]} in four or eight bits."
        )
    stored = packed.contiguous().view(torch.uint8)[:, : inputs * bits // 8].contiguous()
    return stored if bits == 4 else (stored ^ 128).view(torch.int8)

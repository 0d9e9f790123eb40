"""Weights of compressed-tensors: small integers with scales, in safetensors.

Belongs here: which of its schemes are served, and their tensors as weights. Does not: products
(`ops/`), all other quantised checkpoints, which Transformers' quantisers load.

Served are integers of four or eight bits, symmetric, with one scale per tensor, channel or group,
packed (`pack-quantized`) or not (`int-quantized`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.models.checkpoint import reading
from foretoken.models.stored import StoredWeights
from foretoken.ops.stack import Blocks, Dense, Grouped

_FORMATS = ("pack-quantized", "int-quantized")
_STRATEGIES = ("tensor", "channel", "group")
_PACKED, _SCALE, _SHAPE = "_packed", "_scale", "_shape"
_BITS = 32  # of what codes are packed into


def is_compressed(given: Mapping[str, Any] | None) -> bool:
    """Whether a `quantization_config` is of this kind."""
    return bool(given) and (given or {}).get("quant_method") == "compressed-tensors"


def why_not(given: Mapping[str, Any]) -> str | None:
    """What of a `quantization_config` is not served here; None: nothing."""
    if (name := given.get("format")) not in _FORMATS:
        return f"its format is `{name}`, not one of {', '.join(_FORMATS)}"
    if given.get("kv_cache_scheme"):
        return "its keys and values are quantised, too"
    if given.get("sparsity_config"):
        return "its weights are sparse, too"
    for group in (given.get("config_groups") or {}).values():
        weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
        if weights.get("type", "int") != "int" or weights.get("num_bits") not in (4, 8):
            return f"weights are {weights.get('type')}{weights.get('num_bits')}, not int4 or int8"
        if not weights.get("symmetric", True):
            return "weights have zero points (`symmetric` is false)"
        if (strategy := weights.get("strategy")) not in _STRATEGIES:
            return f"scales are by `{strategy}`, not by one of {', '.join(_STRATEGIES)}"
        if weights.get("actorder") in ("group", True):
            return "groups are of inputs in another order (`actorder`)"
        if inputs and not inputs.get("dynamic"):
            return "inputs have scales of their own (`input_activations` is not dynamic)"
        if group.get("output_activations"):
            return "outputs are quantised, too"
    return None


class CompressedWeights(StoredWeights):
    """See `StoredWeights`.

    Args:
        headers: of the safetensors files.
        module: the twin, whose parameters say what there must be.

    Raises:
        CheckpointError: tensors are missing, too many, or of other shapes than the module's.
    """

    def __init__(
        self, folder: Path, headers: Mapping[Path, Mapping[str, Any]], module: Any
    ) -> None:
        self._stored = Stored(headers)
        super().__init__(folder, self._stored.parameters())
        shapes = {name: tuple(self._stored.shape(name)) for name in self.names}
        self.check_shapes(module, shapes)

    def weight(self, name: str) -> Dense | Blocks | Grouped:
        """See `StoredWeights`."""
        return self._stored.weight(name)

    def vector(self, name: str) -> Tensor:
        """See `StoredWeights`."""
        return self._stored.tensor(name)

    def release(self) -> None:
        """See `StoredWeights`: each tensor's map ends with it."""


class Stored:
    """The tensors of safetensors files, some of them in parts."""

    def __init__(self, headers: Mapping[Path, Mapping[str, Any]]) -> None:
        names = {name: path for path, header in headers.items() for name in header}
        self._paths = {name: path for name, path in names.items() if name != "__metadata__"}
        self._shapes = {name: headers[path][name]["shape"] for name, path in self._paths.items()}

    def parameters(self) -> set[str]:
        """The names of what the tensors are parts of."""
        found = {name.removesuffix(_PACKED) for name in self._paths}
        return {name for name in found if not self._is_part(name)}

    def shape(self, name: str) -> list[int]:
        """Of a parameter."""
        if name in self._shapes:
            return list(self._shapes[name])
        return [int(size) for size in self.tensor(name + _SHAPE).tolist()]

    def tensor(self, name: str) -> Tensor:
        """A tensor as it is stored."""
        from safetensors import safe_open

        if name not in self._paths:
            raise CheckpointError(f"The weights lack `{name}`, which goes with a packed one.")
        with reading(path := self._paths[name]), safe_open(path, "pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    def weight(self, name: str) -> Dense | Grouped:
        """A matrix.

        Raises:
            CheckpointError: its parts do not fit each other, or a scale is not finite.
            UnsupportedModelError: it is stored in another way.
        """
        if name in self._paths and name + _SCALE not in self._paths:
            return Dense(self.tensor(name))
        out, inputs = self.shape(name)
        scale_NG = self.tensor(name + _SCALE).float().reshape(-1, self._groups(name))
        scale_NG = scale_NG.expand(out, -1).contiguous()
        if name in self._paths:
            codes = self.tensor(name)
            if codes.dtype is not torch.int8:
                raise UnsupportedModelError(f"`{name}` is stored as {codes.dtype}, not as int8.")
        else:
            codes = _unpacked(name, self.tensor(name + _PACKED), out, inputs)
        if inputs % scale_NG.shape[1] or not bool(scale_NG.isfinite().all()):
            raise CheckpointError(
                f"`{name}{_SCALE}` has {scale_NG.shape[1]} scales for {inputs} numbers of a row, "
                "or they are not all finite: the weights are damaged."
            )
        return Grouped(codes, scale_NG)

    def _is_part(self, name: str) -> bool:
        for suffix in (_SCALE, _SHAPE):
            whole = name.removesuffix(suffix)
            if whole != name and (whole in self._paths or whole + _PACKED in self._paths):
                return True
        return False

    def _groups(self, name: str) -> int:
        """Scales of a row."""
        shape = self._shapes[name + _SCALE]
        return int(shape[1]) if len(shape) == 2 else 1


def _unpacked(name: str, packed: Tensor, out: int, inputs: int) -> Tensor:
    """Codes as `Grouped` has them: of eight bits one a byte, of four bits two.

    A word of 32 bits holds them lowest bits first, each with half of its range added.
    """
    bits = _BITS * packed.shape[1] // inputs if inputs else 0
    if packed.dtype is not torch.int32 or packed.shape != (out, -(-inputs * bits // _BITS)):
        raise CheckpointError(
            f"`{name}{_PACKED}` is {packed.dtype} {[*packed.shape]}, which is not a matrix of "
            f"{[out, inputs]} in four or eight bits."
        )
    stored = packed.contiguous().view(torch.uint8)[:, : inputs * bits // 8].contiguous()
    if bits == 4:
        return stored
    if bits == 8:
        return (stored ^ 128).view(torch.int8)
    raise CheckpointError(f"`{name}{_PACKED}` packs {bits} bits a number: must be 4 or 8.")

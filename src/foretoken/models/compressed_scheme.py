"""Which schemes of compressed-tensors are read in their stored format, by `quantization_config`.

These schemes are symmetric integers of four or eight bits, packed (`pack-quantized`) or not
(`int-quantized`), with one scale per tensor, channel or group. Transformers' quantisers load all
other schemes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

_FORMATS = ("pack-quantized", "int-quantized")
_STRATEGIES = ("tensor", "channel", "group")


def is_compressed(config: object) -> TypeGuard[Mapping[str, Any]]:
    """Whether a `quantization_config` is one of compressed-tensors."""
    return isinstance(config, Mapping) and config.get("quant_method") == "compressed-tensors"


def unsupported_reason(config: Mapping[str, Any]) -> str | None:
    """Why weights with this `quantization_config` of compressed-tensors are not read in their
    stored format; None if they are."""
    if (name := config.get("format")) not in _FORMATS:
        return f"its format is `{name}`, not one of {', '.join(_FORMATS)}"
    for key in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if config.get(key):
            return f"it has a `{key}`"
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        return "its `config_groups` are not given one by one"
    for group in groups.values():
        if not isinstance(group, Mapping):
            return "its `config_groups` are names of presets"
        if group.get("output_activations"):
            return "outputs are quantised, too"
        if reason := _unsupported_weights(group.get("weights")):
            return reason
        if reason := _unsupported_inputs(group.get("input_activations")):
            return reason
    return None


def _unsupported_weights(weights: Any) -> str | None:
    values = weights if isinstance(weights, Mapping) else {}
    kind, bits = values.get("type"), values.get("num_bits")
    if values.get("type", "int") != "int" or bits not in (4, 8):
        return f"weights are `{kind}` of {bits} bits, not int of 4 or 8"
    if not values.get("symmetric", True):
        return "weights have zero points (`symmetric` is false)"
    if (strategy := values.get("strategy")) not in _STRATEGIES:
        return f"scales are by `{strategy}`, not by one of {', '.join(_STRATEGIES)}"
    if values.get("actorder") not in (None, False, "static", "weight"):
        return "groups are of inputs in another order (`actorder`)"
    return None


def _unsupported_inputs(inputs: Any) -> str | None:
    if not inputs:
        return None
    values = inputs if isinstance(inputs, Mapping) else {}
    # Our matrix products round each row of their inputs to int8 by a scale of its own.
    is_int8 = values.get("num_bits") == 8 and values.get("type", "int") == "int"
    if not (is_int8 and values.get("dynamic") and values.get("symmetric", True)):
        return "`input_activations` is not symmetric, dynamic int8"
    return None


def group_sizes(config: Any) -> set[tuple[int, int]]:
    """The pairs (bits, numbers per group) in which weights may be stored; 0 numbers per group means
    one scale per row or tensor.

    Args:
        config: a `quantization_config` for which `unsupported_reason` returns None.
    """
    values = config if isinstance(config, Mapping) else config.to_dict()
    sizes = set[tuple[int, int]]()
    for scheme in (entry["weights"] for entry in values["config_groups"].values()):
        group_size = int(scheme.get("group_size") or 0) if scheme["strategy"] == "group" else 0
        sizes.add((int(scheme["num_bits"]), group_size))
    return sizes

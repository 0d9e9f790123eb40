"""Which schemes of compressed-tensors are read as stored.

Belongs here: reading a `quantization_config`. Does not: tensors (`compressed.py`); other quantised
checkpoints, which Transformers' quantisers load.

The schemes are symmetric integers of four or eight bits with one scale per tensor, channel or
group, packed (`pack-quantized`) or not (`int-quantized`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

_FORMATS = ("pack-quantized", "int-quantized")
_STRATEGIES = ("tensor", "channel", "group")


def is_compressed(given: object) -> TypeGuard[Mapping[str, Any]]:
    """Whether a `quantization_config` is one of compressed-tensors."""
    return isinstance(given, Mapping) and given.get("quant_method") == "compressed-tensors"


def why_not(given: Mapping[str, Any]) -> str | None:
    """Why weights with this `quantization_config` are not read as stored; None: they are."""
    if (name := given.get("format")) not in _FORMATS:
        return f"its format is `{name}`, not one of {', '.join(_FORMATS)}"
    for key in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if given.get(key):
            return f"it has a `{key}`"
    groups = given.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        return "its `config_groups` are not given one by one"
    for group in groups.values():
        if not isinstance(group, Mapping):
            return "its `config_groups` are names of presets"
        if group.get("output_activations"):
            return "outputs are quantised, too"
        found = _why_not_weights(group.get("weights")) or _why_not_inputs(
            group.get("input_activations")
        )
        if found is not None:
            return found
    return None


def _why_not_weights(weights: Any) -> str | None:
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


def _why_not_inputs(inputs: Any) -> str | None:
    """Our products round their inputs to eight bits; a checkpoint may ask for that or nothing."""
    if not inputs:
        return None
    values = inputs if isinstance(inputs, Mapping) else {}
    is_eight = values.get("num_bits") == 8 and values.get("type", "int") == "int"
    if not (is_eight and values.get("dynamic") and values.get("symmetric", True)):
        return "inputs are not rounded to eight bits as they come (`input_activations`)"
    return None


def group_sizes(given: Any) -> set[tuple[int, int]]:
    """Pairs in which weights may be stored: bits, and numbers per group, 0 for one scale per row.

    Args:
        given: a `quantization_config` for which `why_not` returns None.
    """
    values = given if isinstance(given, Mapping) else given.to_dict()
    schemes = [group["weights"] for group in values["config_groups"].values()]
    return {
        (int(w["num_bits"]), int(w.get("group_size") or 0) if w["strategy"] == "group" else 0)
        for w in schemes
    }

"""Which schemes of compressed-tensors are read as they are stored.

Belongs here: what a `quantization_config` says. Does not: tensors (`compressed.py`); all other
quantised checkpoints, which Transformers' quantisers load.

Read are integers of four or eight bits, symmetric, with one scale per tensor, channel or group,
packed (`pack-quantized`) or not (`int-quantized`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

_FORMATS = ("pack-quantized", "int-quantized")
_STRATEGIES = ("tensor", "channel", "group")


def is_compressed(given: object) -> TypeGuard[Mapping[str, Any]]:
    """Whether a `quantization_config` is of this kind."""
    return isinstance(given, Mapping) and given.get("quant_method") == "compressed-tensors"


def why_not(given: Mapping[str, Any]) -> str | None:
    """What of a `quantization_config` is not read here; None: nothing."""
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
    told = weights if isinstance(weights, Mapping) else {}
    if told.get("type", "int") != "int" or told.get("num_bits") not in (4, 8):
        return f"weights are `{told.get('type')}` of {told.get('num_bits')} bits, not int of 4 or 8"
    if not told.get("symmetric", True):
        return "weights have zero points (`symmetric` is false)"
    if (strategy := told.get("strategy")) not in _STRATEGIES:
        return f"scales are by `{strategy}`, not by one of {', '.join(_STRATEGIES)}"
    if told.get("actorder") not in (None, False, "static", "weight"):
        return "groups are of inputs in another order (`actorder`)"
    return None


def _why_not_inputs(inputs: Any) -> str | None:
    """Products round what they read to eight bits: so may a checkpoint, but in no other way."""
    if not inputs:
        return None
    told = inputs if isinstance(inputs, Mapping) else {}
    is_eight = told.get("num_bits") == 8 and told.get("type", "int") == "int"
    if not (is_eight and told.get("dynamic") and told.get("symmetric", True)):
        return "inputs are not rounded to eight bits as they come (`input_activations`)"
    return None


def group_sizes(given: Any) -> set[tuple[int, int]]:
    """What weights may be stored in: bits, and numbers of a group, 0 where a row has one scale.

    Args:
        given: a `quantization_config` of which `why_not` finds nothing.
    """
    told = given if isinstance(given, Mapping) else given.to_dict()
    schemes = [group["weights"] for group in told["config_groups"].values()]
    return {
        (int(w["num_bits"]), int(w.get("group_size") or 0) if w["strategy"] == "group" else 0)
        for w in schemes
    }

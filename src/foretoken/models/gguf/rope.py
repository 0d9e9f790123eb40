"""RoPE of a GGUF file as Transformers' `rope_parameters`.

Belongs here: its types, and the factors of frequencies that Llama 3 files bring as a tensor. Does
not: frequencies that are computed with (Transformers' modules have them).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretoken.errors import UnsupportedModelError
from foretoken.models.gguf.keys import Keys
from foretoken.models.gguf.names import ROPE_FACTORS
from foretoken.models.gguf.split import GgufFile

_THETA = 10_000.0  # of llama.cpp and Transformers, where nothing is said
# What Llama 3.1, 3.2 and 3.3 were published with; the largest factor is in the tensor itself.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_CLOSE = 1e-5  # relative; the converter computes the factors in float32, from frequencies in it
# Multipliers that Transformers lacks or means otherwise.
_MULTIPLIERS = {
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "rope.scaling.alpha": 0.0,
}


def rope_parameters(file: GgufFile, keys: Keys, head_dim: int) -> dict[str, Any]:
    """The values of `rope_parameters` in `config.json`.

    Raises:
        CheckpointError: a value that no model can have.
        UnsupportedModelError: a type, or factors, that are not served.
    """
    theta = keys.number("rope.freq_base", _THETA)
    kind = keys.get("rope.scaling.type", "none")
    linear = "rope.scaling.factor" if "rope.scaling.factor" in keys else "rope.scale_linear"
    if kind == "none" and linear == "rope.scale_linear" and keys.get(linear, 1.0) != 1.0:
        kind = "linear"  # as files of before `rope.scaling.type` say it
    for name, inert in _MULTIPLIERS.items():
        if (value := keys.get(name, inert)) != inert:
            keys.refuse(name, value, f"{inert}, or left out")
    if sections := keys.get("rope.dimension_sections"):
        keys.refuse("rope.dimension_sections", sections, "left out")
    if kind not in ("none", "linear", "yarn"):
        keys.refuse("rope.scaling.type", kind, "none, linear or yarn")
    if ROPE_FACTORS in file.tensors:
        if kind != "none":
            keys.refuse("rope.scaling.type", kind, f"none next to `{ROPE_FACTORS}`")
        return {"rope_theta": theta, **_llama3(file, theta, head_dim)}
    if kind == "none":
        return {"rope_theta": theta, "rope_type": "default"}
    factor = keys.number(linear)
    if factor < 1:
        keys.wrong(linear, factor, "at least 1")
    scaled = {"rope_theta": theta, "rope_type": kind, "factor": factor}
    if kind == "linear":
        return scaled
    scaled["original_max_position_embeddings"] = keys.whole("rope.scaling.original_context_length")
    for name in ("beta_fast", "beta_slow"):
        if f"rope.scaling.yarn_{name}" in keys:
            scaled[name] = keys.number(f"rope.scaling.yarn_{name}")
    return scaled


def _llama3(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    """The parameters of type `llama3` that make the factors in the file, if there are any such."""
    tensor = file.tensors[ROPE_FACTORS]
    if tensor.kind != "F32" or tensor.shape != (head_dim // 2,):
        raise UnsupportedModelError(
            f"`{tensor.path}` has `{ROPE_FACTORS}` as {tensor.kind} of shape {[*tensor.shape]}: "
            f"must be F32 of [{head_dim // 2}], half the size of a head."
        )
    found = tensor.values().astype(np.float64)
    if np.array_equal(found, np.ones_like(found)):
        return {"rope_type": "default"}
    # A non-finite or absurd factor makes no factors that are close to those found.
    factor = float(found.max())
    if math.isfinite(factor) and factor > 1:
        made = llama3_factors(theta, head_dim, factor)
        if np.allclose(made, found, rtol=_CLOSE, atol=0):
            return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    raise UnsupportedModelError(
        f"`{tensor.path}` has factors of RoPE (`{ROPE_FACTORS}`) that are not those of Llama 3 "
        f"({_LLAMA3}), which is not served."
    )


def llama3_factors(theta: float, head_dim: int, factor: float) -> NDArray[np.float64]:
    """What each frequency is divided by, as Llama 3.1 was published."""
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    length = _LLAMA3["original_max_position_embeddings"]
    waves = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (length / waves - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    return np.where(waves < length / high, 1.0, np.where(waves > length / low, factor, between))

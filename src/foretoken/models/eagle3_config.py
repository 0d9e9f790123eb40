"""The `config.json` of an EAGLE-3 head, in either of two formats."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.models.checkpoint import first_line, parse_config, quiet_transformers, read_json
from foretoken.models.compressed_scheme import is_compressed, unsupported_reason

# First in EAGLE's own format (EAGLE, SpecForge, vLLM, NeMo), then in the format of `speculators`.
_ARCHITECTURES = (
    "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM",
    "LlamaEagle3DraftModel", "Eagle3DraftModel", "Eagle3Speculator",
)  # fmt: skip
_LAYER_TYPES = ("llama", "qwen3")
_PARTS = ("eagle_config", "transformer_layer_config", "speculators_config")
_REQUIRED = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
# Switches that change what a head computes, with the values that are implemented here.
# (`kv_lora_rank` belongs to MLA.)
_SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    "bias": (None, False), "hidden_act": (None, "silu"), "kv_lora_rank": (None,),
    "logit_scale": (None, 1), "mlp_bias": (None, False), "num_hidden_layers": (None, 1),
    "parallel_draft_step": (None, 1), "qkv_bias": (None, False),
    "use_aux_hidden_state": (None, True), "use_input_layernorm_in_first_layer": (None, True),
    "use_last_layernorm": (None, True), "use_mtp_layernorm": (None, False),
}  # fmt: skip
# Settings of `speculators` that can make verification lossy, with their lossless values.
_LOSSLESS_VALUES: dict[str, tuple[Any, ...]] = {
    "verifier_accept_k": (None, 1), "accept_tolerance": (None, 0),
}  # fmt: skip
_MAX_HEAD_DIM = 2**16  # RoPE frequencies are computed before weights show if `head_dim` is right
# RoPE types with constant frequencies. Other types depend on a batch's longest request.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """The content of the `config.json` of an EAGLE-3 head.

    aux_layers: the target's hidden states that the head reads, numbered as in `ForwardOutput.aux`;
        None: `default_aux_layers`
    frequency_R: float32, radians per position; RoPE rotates the first 2R numbers of each attention
        head
    norm_before_residual: the residual stream starts with the normed feature, instead of the feature
    norm_output: the output of a row is normed also for the next row, not only for the logits
    """

    hidden_size: int  # of the EAGLE-3 head
    target_hidden_size: int
    vocab_size: int  # of the target
    draft_vocab_size: int  # number of ids that the EAGLE-3 head can draft
    aux_layers: tuple[int, ...] | None
    layer: Any  # Transformers' configuration of the only layer
    frequency_R: Tensor
    rotary_scale: float  # factor of RoPE's cosines and sines
    sliding_window: int | None  # as in `AttentionOptions`
    norm_before_residual: bool
    norm_output: bool
    fc_norm: bool  # each hidden state of the target is normed separately before `fc`
    norm_before_fc: bool  # all hidden states of the target are normed before `fc` as one vector
    attention_bias: bool  # the projections of queries, keys and values have biases
    qk_norm: bool  # each query and key is normed before RoPE, as in Qwen3

    @property
    def num_aux(self) -> int:
        """Number of the target's hidden states from which a feature is made."""
        return 3 if self.aux_layers is None else len(self.aux_layers)


def read_eagle3_config(folder: Path) -> Eagle3Config:
    """Read `config.json` of an EAGLE-3 head, in EAGLE's own format or in that of `speculators`.

    Raises:
        CheckpointError: the file cannot be read or does not describe a head, or a value is missing
            or not valid.
        UnsupportedModelError: the architecture or the value of a switch is not supported.
    """
    path = folder / "config.json"
    raw = read_json(path)
    parts = {name: raw.get(name) or {} for name in _PARTS}
    for name, part in parts.items():
        if not isinstance(part, dict):
            raise CheckpointError(f"`{path}` gives `{name}` as {part!r}: must be an object.")
    eagle, nested, _ = parts.values()
    # `speculators` nests the layer's values in an object; EAGLE's own format does not.
    layer_values = {"model_type": "llama", **nested} if nested else raw
    merged = {**eagle, **raw, **layer_values}
    _check_supported(path, raw, merged)
    for name in _REQUIRED:
        if name not in merged:
            raise CheckpointError(f"`{path}` has no `{name}`: it does not describe a head.")
    model_type = layer_values["model_type"]
    with quiet_transformers():
        layer = parse_config(folder, model_type, {**layer_values, "num_hidden_layers": 1})
    _size(path, {"head_dim": layer.head_dim}, "head_dim", high=_MAX_HEAD_DIM)
    _size(path, merged, "intermediate_size")
    frequency_R, rotary_scale = _rotary(path, layer)
    draft_vocab_size = _size(path, merged, "draft_vocab_size", layer.vocab_size)
    if draft_vocab_size > layer.vocab_size:
        raise CheckpointError(
            f"`{path}` has a `draft_vocab_size` of {draft_vocab_size}, more than its "
            f"`vocab_size` of {layer.vocab_size}."
        )
    return Eagle3Config(
        hidden_size=layer.hidden_size,
        target_hidden_size=_size(path, merged, "target_hidden_size", layer.hidden_size),
        vocab_size=layer.vocab_size,
        draft_vocab_size=draft_vocab_size,
        aux_layers=_aux_layers(path, raw, eagle),
        layer=layer,
        frequency_R=frequency_R,
        rotary_scale=rotary_scale,
        sliding_window=_sliding_window(path, merged, layer),
        norm_before_residual=_flag(path, merged, "norm_before_residual"),
        norm_output=_flag(path, merged, "norm_output"),
        fc_norm=_flag(path, merged, "fc_norm"),
        norm_before_fc=_flag(path, merged, "norm_before_fc"),
        attention_bias=_flag(path, merged, "attention_bias"),
        qk_norm=model_type == "qwen3",
    )


def _check_supported(path: Path, raw: dict[str, Any], merged: dict[str, Any]) -> None:
    """Raise errors for heads that would draft wrongly and settings that make verification lossy.

    Args:
        raw: the content of `config.json`.
        merged: `raw` together with the values of nested objects.
    """
    is_speculators, stated = "speculators_model_type" in raw, raw.get("architectures")
    [architecture] = stated if isinstance(stated, list) and len(stated) == 1 else [stated]
    layer_type = merged.get("model_type")
    head_kind = raw.get("speculators_model_type", "eagle3")
    is_known = architecture in _ARCHITECTURES and layer_type in _LAYER_TYPES
    if not is_known or head_kind != "eagle3":
        known = ", ".join(f"`{name}`" for name in _ARCHITECTURES)
        hint = " Heads with MLA are not supported." if "Deepseek" in str(architecture) else ""
        raise UnsupportedModelError(
            f"`{path}` is of architecture {architecture}, type `{layer_type}`, kind `{head_kind}`: "
            f"method `eagle3` takes {known} of type `llama` or `qwen3`, kind `eagle3`.{hint}"
        )
    why = "is not implemented: the drafts would be wrong. Use another head"
    _check_switches(path, merged, _SUPPORTED_VALUES, why)
    settings = raw.get("speculators_config") or {}
    for method in settings.get("proposal_methods") or ():
        if isinstance(method, dict):
            why = "is lossy: only lossless rules of acceptance are supported. Remove this setting"
            _check_switches(path, method, _LOSSLESS_VALUES, why)
    quantization = raw.get("quantization_config") or merged.get("quantization_config")
    reason: str | None = "it is of another kind"
    if is_compressed(quantization):
        reason = unsupported_reason(quantization)
    if quantization and reason is not None:
        raise UnsupportedModelError(
            f"`{path}` sets `quantization_config` to {quantization!r}: must be compressed-tensors "
            f"of int4 or int8, but {reason}."
        )
    if merged.get("fc_norm") and merged.get("norm_before_fc"):
        raise UnsupportedModelError(f"`{path}` sets both `fc_norm` and `norm_before_fc`.")
    if is_speculators and "norm_before_residual" not in merged:
        # There is no safe default: it is False in `speculators`, True in vLLM.
        raise CheckpointError(
            f"`{path}` does not say `norm_before_residual`: must be true or false."
        )


def _check_switches(
    path: Path, values: dict[str, Any], allowed: dict[str, tuple[Any, ...]], why: str
) -> None:
    for switch, allowed_values in allowed.items():
        if values.get(switch) not in allowed_values:
            raise UnsupportedModelError(
                f"`{path}` sets `{switch}` to {values[switch]!r}, which {why}."
            )


def _rotary(path: Path, layer: Any) -> tuple[Tensor, float]:
    """`frequency_R` and `rotary_scale` of `Eagle3Config`, as Transformers' Llama computes them.

    RoPE of type `mrope` rotates parts of an attention head by time, height and width. In a text all
    three are the token's position, so `mrope` equals `default`.
    """
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = dict(layer.rope_parameters)
    types = [name for name, value in rope.items() if isinstance(value, dict)]
    if types:
        raise UnsupportedModelError(
            f"`{path}` gives RoPE parameters by type of layer (`{types[0]}`), but an EAGLE-3 head "
            "has one layer: give the parameters of this layer without a type."
        )
    kind = rope["rope_type"]
    if kind == "mrope":
        rope["rope_type"] = kind = "default"
    if kind not in ROPE_TYPES:
        known = ", ".join(f"`{name}`" for name in (*ROPE_TYPES, "mrope"))
        raise UnsupportedModelError(
            f"`{path}` asks for RoPE of type `{kind}`: must be one of {known}."
        )
    # Transformers' class ignores `partial_rotary_factor` for some types of RoPE. So it gets the
    # size of the rotated part as `head_dim`.
    rotary_config, factor = copy(layer), rope.pop("partial_rotary_factor", None)
    rotary_config.rope_parameters = rope
    try:
        size = int(layer.head_dim * (1.0 if factor is None else float(factor)))
        rotary_config.head_dim = size
        # A `head_dim` of 0 would make Transformers use a default.
        rotary = LlamaRotaryEmbedding(rotary_config) if size > 0 else None
    except Exception as error:
        raise CheckpointError(f"`{path}`: invalid RoPE {rope}: {first_line(error)}") from error
    if rotary is None or size % 2 or size > layer.head_dim:
        raise CheckpointError(
            f"`{path}` rotates {size} numbers of each attention head: `head_dim` {layer.head_dim} "
            f"times `partial_rotary_factor` {factor} must be an even number in 2..{layer.head_dim}."
        )
    frequency_R, scale = rotary.inv_freq.float(), float(rotary.attention_scaling)
    if not bool((frequency_R * scale).isfinite().all()):
        raise CheckpointError(f"`{path}`: the angles of RoPE of {rope} are not finite.")
    return frequency_R, scale


def default_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """The hidden states that a head reads by default from a target with `num_layers` layers."""
    return 2, num_layers // 2, num_layers - 3


def _size(
    path: Path, data: dict[str, Any], name: str, default: int | None = None, high: int | None = None
) -> int:
    """The value of `name`, or `default`; `CheckpointError` unless it is an integer in 1..high."""
    value = default if data.get(name) is None else data[name]
    if type(value) is not int or value < 1 or (high is not None and value > high):
        bound = ">= 1" if high is None else f"in 1..{high}"
        raise CheckpointError(f"`{path}` gives `{name}` as {value!r}: must be an integer {bound}.")
    return value


def _flag(path: Path, data: dict[str, Any], name: str) -> bool:
    """The value of `name`, a bool; False if it is missing."""
    if data.get(name) not in (None, False, True):
        raise CheckpointError(f"`{path}` gives `{name}` as {data[name]!r}: must be true or false.")
    return bool(data.get(name))


def _sliding_window(path: Path, merged: dict[str, Any], layer: Any) -> int | None:
    """The sliding window of the only layer; None: no window. `layer_types` takes precedence over
    `use_sliding_window`."""
    window, is_used = merged.get("sliding_window"), merged.get("use_sliding_window") is not False
    default = "sliding_attention" if window is not None and is_used else "full_attention"
    layer_type = (merged.get("layer_types") or getattr(layer, "layer_types", None) or [default])[0]
    if layer_type == "full_attention":
        return None
    if layer_type != "sliding_attention":
        raise UnsupportedModelError(
            f"`{path}` has a layer of type `{layer_type}`: must be full_attention or "
            "sliding_attention."
        )
    return _size(path, merged, "sliding_window")


def _aux_layers(path: Path, raw: dict[str, Any], eagle: dict[str, Any]) -> tuple[int, ...] | None:
    """The hidden states that `config.json` lists, numbered as in `ForwardOutput.aux`; None if there
    is no list.

    Some lists number a state by the layer that outputs it (see docs/drafters.md): i means state
    i + 1. A list in `eagle_config` that begins with 1 is such a list.
    """
    ids = raw.get(_AUX_LAYERS) or eagle.get(_AUX_LAYERS)
    if not ids:
        return None
    if not isinstance(ids, list) or any(type(i) is not int for i in ids):
        raise CheckpointError(
            f"`{path}` gives `{_AUX_LAYERS}` as {ids!r}: must be a list of layer numbers."
        )
    by_output = not raw.get(_AUX_LAYERS) and ids[0] == 1
    return tuple(i + by_output for i in ids)

"""The `config.json` of an EAGLE-3 head.

Belongs here: its two formats, its switches, and which of them are refused. Does not: weights
(`eagle3.py`).
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.models.checkpoint import first_line, parse_config, quiet_transformers, read_json
from foretoken.models.compressed_scheme import is_compressed, unsupported_reason

# EAGLE's own format, as written by EAGLE, SpecForge, vLLM and NeMo; then `speculators`.
_ARCHITECTURES = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3Qwen3ForCausalLM",
    "LlamaEagle3DraftModel",
    "Eagle3DraftModel",
    "Eagle3Speculator",
)
_LAYER_TYPES = ("llama", "qwen3")
_PARTS = ("eagle_config", "transformer_layer_config", "speculators_config")
_REQUIRED = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
# Switches that change what a head computes, with the values that agree with this implementation.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "bias": (None, False),
    "hidden_act": (None, "silu"),
    "kv_lora_rank": (None,),  # of MLA
    "logit_scale": (None, 1),
    "mlp_bias": (None, False),
    "num_hidden_layers": (None, 1),
    "parallel_draft_step": (None, 1),
    "qkv_bias": (None, False),
    "use_aux_hidden_state": (None, True),
    "use_input_layernorm_in_first_layer": (None, True),
    "use_last_layernorm": (None, True),
    "use_mtp_layernorm": (None, False),
}
# Settings of `speculators` that make its verification lossy, with the lossless values.
_LOSSLESS: dict[str, tuple[Any, ...]] = {
    "verifier_accept_k": (None, 1),
    "accept_tolerance": (None, 0),
}
_MAX_HEAD_DIM = 2**16  # frequencies are computed before the weights show whether it is right
# Types with constant frequencies; those of other types depend on a batch's longest request.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """The content of a head's `config.json`.

    target_hidden_size, vocab_size: the target's
    draft_vocab_size: number of ids that the head can draft
    aux_layers: the target's hidden states that it reads, numbered as in `ForwardOutput.aux`; None:
        `default_aux_layers`
    layer: Transformers' configuration of the layer
    frequency_R: float32, radians per position by which the first 2R numbers of a head are rotated
    rotary_scale: factor of their cosines and sines
    sliding_window: as in `AttentionOptions`
    norm_before_residual: the residual starts at the normed feature, not at the feature
    norm_output: a row's output is normed for the next row, too, not only for its logits
    fc_norm: each hidden state is normed before `fc`
    norm_before_fc: all hidden states are normed before `fc` as one vector
    attention_bias: projections of queries, keys and values have biases
    qk_norm: each head's query and key is normed before it is rotated, as in Qwen3
    """

    hidden_size: int
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    aux_layers: tuple[int, ...] | None
    layer: Any
    frequency_R: Tensor
    rotary_scale: float
    sliding_window: int | None
    norm_before_residual: bool
    norm_output: bool
    fc_norm: bool
    norm_before_fc: bool
    attention_bias: bool
    qk_norm: bool

    @property
    def num_aux(self) -> int:
        """Number of the target's hidden states in a feature."""
        return 3 if self.aux_layers is None else len(self.aux_layers)


def read_eagle3_config(folder: Path) -> Eagle3Config:
    """Read `config.json` of a head, in EAGLE's own format or that of `speculators`.

    Raises:
        CheckpointError: it does not describe a head, lacks a size, or has an invalid one.
        UnsupportedModelError: another architecture, or a switch that would change the result.
    """
    path = folder / "config.json"
    raw = read_json(path)
    parts = {name: raw.get(name) or {} for name in _PARTS}
    for name, part in parts.items():
        if not isinstance(part, dict):
            raise CheckpointError(f"`{path}` gives `{name}` as {part!r}: must be an object.")
    eagle, inner, _ = parts.values()
    values = {"model_type": "llama", **inner} if inner else raw  # of the layer
    merged = {**eagle, **raw, **values}
    _check_supported(path, raw, merged)
    for name in _REQUIRED:
        if name not in merged:
            raise CheckpointError(f"`{path}` has no `{name}`: it does not describe a head.")
    model_type = values["model_type"]
    with quiet_transformers():
        layer = parse_config(folder, model_type, {**values, "num_hidden_layers": 1})
    _size(path, {"head_dim": layer.head_dim}, "head_dim", most=_MAX_HEAD_DIM)
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
    """Refuse heads that would draft wrongly, and settings that ask for lossy verification."""
    speculators, names = "speculators_model_type" in raw, raw.get("architectures")
    [name] = names if isinstance(names, list) and len(names) == 1 else [names]
    kinds = (merged.get("model_type"), raw.get("speculators_model_type", "eagle3"))
    if name not in _ARCHITECTURES or kinds[0] not in _LAYER_TYPES or kinds[1] != "eagle3":
        known = ", ".join(f"`{known}`" for known in _ARCHITECTURES)
        hint = " Heads with MLA are not among them." if "Deepseek" in str(name) else ""
        raise UnsupportedModelError(
            f"`{path}` is of architecture {name}, type `{kinds[0]}`, kind `{kinds[1]}`: method "
            f"`eagle3` takes {known} of type `llama` or `qwen3`, kind `eagle3`.{hint}"
        )
    rules = raw.get("speculators_config") or {}
    for values, neutral, why in (
        (merged, _NEUTRAL, "heads do not have here: its drafts would be wrong"),
        *((rule, _LOSSLESS, "is lossy: here drafts are accepted by lossless rules alone")
          for rule in rules.get("proposal_methods") or () if isinstance(rule, dict)),
    ):  # fmt: skip
        for switch, allowed in neutral.items():
            if values.get(switch) not in allowed:
                raise UnsupportedModelError(
                    f"`{path}` sets `{switch}` to {values[switch]!r}, which {why}."
                )
    given = raw.get("quantization_config") or merged.get("quantization_config")
    reason = unsupported_reason(given) if is_compressed(given) else "it is of another kind"
    if given and reason is not None:
        raise UnsupportedModelError(
            f"`{path}` sets `quantization_config` to {given!r}: must be compressed-tensors of int4 "
            f"or int8, and {reason}."
        )
    if merged.get("fc_norm") and merged.get("norm_before_fc"):
        raise UnsupportedModelError(f"`{path}` sets both `fc_norm` and `norm_before_fc`.")
    if speculators and "norm_before_residual" not in merged:
        # False in `speculators`, True in vLLM.
        raise CheckpointError(
            f"`{path}` does not say `norm_before_residual`: must be true or false."
        )


def _rotary(path: Path, layer: Any) -> tuple[Tensor, float]:
    """`frequency_R` and `rotary_scale` as in Transformers' Llama.

    `mrope` rotates parts of a head by time, height and width. In a text all three are the token's
    position, so it equals `default`, however the parts are arranged.
    """
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = dict(layer.rope_parameters)
    types = [name for name, value in rope.items() if isinstance(value, dict)]
    if types:
        raise UnsupportedModelError(
            f"`{path}` gives RoPE by type of layer (`{types[0]}`); a head has one layer: give its "
            "parameters alone."
        )
    kind = rope["rope_type"]
    if kind == "mrope":
        rope["rope_type"] = kind = "default"
    if kind not in ROPE_TYPES:
        known = ", ".join(f"`{name}`" for name in (*ROPE_TYPES, "mrope"))
        raise UnsupportedModelError(f"`{path}` asks for RoPE of type `{kind}`; heads have {known}.")
    # Transformers' class ignores a partial rotation for some types of RoPE: set `head_dim` instead.
    rotated, part = copy(layer), rope.pop("partial_rotary_factor", None)
    rotated.rope_parameters = rope
    try:
        count = rotated.head_dim = int(layer.head_dim * (1.0 if part is None else float(part)))
        rotary = LlamaRotaryEmbedding(rotated) if count > 0 else None  # for 0 it uses a default
    except Exception as error:
        raise CheckpointError(f"`{path}`: no RoPE of {rope}: {first_line(error)}") from error
    if rotary is None or count % 2 or count > layer.head_dim:
        raise CheckpointError(
            f"`{path}` has RoPE turn {count} numbers of each head: `head_dim` {layer.head_dim} "
            f"times `partial_rotary_factor` {part} must be an even number in 2..{layer.head_dim}."
        )
    frequency_R, scale = rotary.inv_freq.float(), float(rotary.attention_scaling)
    if not bool((frequency_R * scale).isfinite().all()):
        raise CheckpointError(f"`{path}`: the angles of RoPE of {rope} are not finite.")
    return frequency_R, scale


def default_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """The hidden states that a head reads by default, for a target of so many layers."""
    return 2, num_layers // 2, num_layers - 3


def _size(
    path: Path, data: dict[str, Any], name: str, default: int | None = None, most: int | None = None
) -> int:
    value = default if data.get(name) is None else data[name]
    if type(value) is not int or value < 1 or (most is not None and value > most):
        bound = ">= 1" if most is None else f"in 1..{most}"
        raise CheckpointError(f"`{path}` gives `{name}` as {value!r}: must be an integer {bound}.")
    return value


def _flag(path: Path, data: dict[str, Any], name: str) -> bool:
    if data.get(name) not in (None, False, True):
        raise CheckpointError(f"`{path}` gives `{name}` as {data[name]!r}: must be true or false.")
    return bool(data.get(name))


def _sliding_window(path: Path, merged: dict[str, Any], layer: Any) -> int | None:
    """The only layer's window; `layer_types` overrides `use_sliding_window`."""
    window, is_used = merged.get("sliding_window"), merged.get("use_sliding_window") is not False
    default = "sliding_attention" if window is not None and is_used else "full_attention"
    kind = (merged.get("layer_types") or getattr(layer, "layer_types", None) or [default])[0]
    if kind == "full_attention":
        return None
    if kind != "sliding_attention":
        raise UnsupportedModelError(f"`{path}` has a layer of type `{kind}`, unknown here.")
    return _size(path, merged, "sliding_window")


def _aux_layers(path: Path, raw: dict[str, Any], eagle: dict[str, Any]) -> tuple[int, ...] | None:
    """The hidden states that `config.json` names, by our numbers (conventions: docs/drafters.md).

    In `eagle_config`, a list that begins with 1 numbers layers by their output: state i + 1.
    """
    ids = raw.get(_AUX_LAYERS) or eagle.get(_AUX_LAYERS)
    if not ids:
        return None
    if not isinstance(ids, list) or any(type(i) is not int for i in ids):
        raise CheckpointError(
            f"`{path}` gives `{_AUX_LAYERS}` as {ids!r}: must be a list of layers."
        )
    by_output = not raw.get(_AUX_LAYERS) and ids[0] == 1
    return tuple(i + by_output for i in ids)

"""Reading an EAGLE-3 head from its folder: configuration, weights, ids it drafts.

Belongs here: the layout of the checkpoints, and what of it is refused. Does not: what the head
computes (`eagle3.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.models.checkpoint import (
    check_weights,
    parse_config,
    quiet_transformers,
    read_config,
    reading,
)
from foretoken.models.eagle3 import Eagle3Config, Eagle3Head
from foretoken.models.leftovers import check_fit
from foretoken.ops import Backend
from foretoken.ops.decoder import HeadWeights

ARCHITECTURE = "LlamaForCausalLMEagle3"
_REQUIRED = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
# Switches that change what a head computes. None of them is read yet, so a head that sets one of
# them to anything else is refused.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_bias": (None, False),
    "fc_norm": (None, False),
    "hidden_act": (None, "silu"),
    "mlp_bias": (None, False),
    "norm_output": (None, False),
    "num_hidden_layers": (None, 1),
    "partial_rotary_factor": (None, 1),
    "quantization_config": (None,),
    "sliding_window": (None,),
    "speculators_model_type": (None,),
}
# Of these types the frequencies are constants; others look at the longest request of a batch.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_DUMMY_LOGIT_STD = 2.0
_MAP, _INVERSE_MAP = "d2t", "t2d"


def read_eagle3_config(folder: Path) -> Eagle3Config:
    """Read `config.json` of a head in the original layout.

    Raises:
        CheckpointError: it is none, lacks a size, or has one that cannot be.
        UnsupportedModelError: another architecture, or a switch that would change the result.
    """
    path, raw = folder / "config.json", read_config(folder)
    if raw.get("architectures") != [ARCHITECTURE] or raw["model_type"] != "llama":
        raise UnsupportedModelError(
            f"`{path}` is of architecture {raw.get('architectures')}, type `{raw['model_type']}`: "
            f"method `eagle3` takes heads of architecture `{ARCHITECTURE}`, type `llama`."
        )
    for name, neutral in _NEUTRAL.items():
        if raw.get(name) not in neutral:
            raise UnsupportedModelError(
                f"`{path}` sets `{name}` to {raw[name]!r}, which heads do not have here: its "
                "drafts would be wrong."
            )
    for name in _REQUIRED:
        if name not in raw:
            raise CheckpointError(f"`{path}` has no `{name}`: it does not describe a head.")
    with quiet_transformers():
        layer = parse_config(folder, "llama")
    kind = layer.rope_parameters["rope_type"]
    if kind not in _ROPE_TYPES:
        known = ", ".join(f"`{name}`" for name in _ROPE_TYPES)
        raise UnsupportedModelError(f"`{path}` asks for RoPE of type `{kind}`; heads have {known}.")
    target_hidden_size = _size(path, raw, "target_hidden_size", layer.hidden_size)
    draft_vocab_size = _size(path, raw, "draft_vocab_size", layer.vocab_size)
    if draft_vocab_size > layer.vocab_size:
        raise CheckpointError(
            f"`{path}` has a `draft_vocab_size` of {draft_vocab_size}, more than its "
            f"`vocab_size` of {layer.vocab_size}."
        )
    return Eagle3Config(
        hidden_size=layer.hidden_size,
        target_hidden_size=target_hidden_size,
        vocab_size=layer.vocab_size,
        draft_vocab_size=draft_vocab_size,
        aux_layers=_aux_layers(path, raw),
        norm_before_residual=raw.get("norm_before_residual") is True,
        layer=layer,
    )


def default_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """The hidden states that heads read unless they say otherwise, by the target's layers."""
    return 2, num_layers // 2, num_layers - 3


def _size(path: Path, raw: dict[str, Any], name: str, default: int) -> int:
    value = default if raw.get(name) is None else raw[name]
    if type(value) is not int or value < 1:
        raise CheckpointError(f"`{path}` gives `{name}` as {value!r}: must be an integer >= 1.")
    return value


def _aux_layers(path: Path, raw: dict[str, Any]) -> tuple[int, ...] | None:
    """Those that `eagle_config` names, by the layer that puts them out: one less than our number.

    So lmsys's head for Qwen3-235B with 94 layers, which says [1, 46, 90], has the default ones.
    """
    given = raw.get("eagle_config") or {}
    if not isinstance(given, dict) or given.get("use_aux_hidden_state", True) is not True:
        raise UnsupportedModelError(
            f"`{path}` has `eagle_config` {given!r}: a head without the target's auxiliary hidden "
            "states is not EAGLE-3."
        )
    ids = given.get("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        return None
    if not isinstance(ids, list) or not ids or any(type(i) is not int for i in ids):
        raise CheckpointError(
            f"`{path}` gives `eagle_aux_hidden_state_layer_ids` as {ids!r}: must be a list of "
            "layers."
        )
    return tuple(i + 1 for i in ids)


def load_eagle3(
    folder: Path,
    config: Eagle3Config,
    *,
    embedding: Tensor,
    backend: Backend,
    dummy_seed: int | None = None,
) -> Eagle3Head:
    """Load the weights of a head in the original layout.

    Args:
        config: of this folder.
        embedding: the target's, [V, C]; the head takes its dtype and its device, too.
        dummy_seed: if given, weights are random numbers of this seed, the ids that it drafts are
            spread evenly over the target's, and `config.json` is all that the folder must have.

    Raises:
        CheckpointError: the weights cannot be read, or are not those of `config.json`.
    """
    shapes = _shapes(config)
    drafted, known = config.draft_vocab_size, config.vocab_size
    if dummy_seed is None:
        stored = _read_weights(folder)
        target_ids = _target_ids(folder, stored.pop(_MAP, None), config)
        _check_names(folder, stored, shapes)
    else:
        stored = _random_weights(shapes, dummy_seed, embedding)
        target_ids = torch.arange(drafted) * known // drafted
    tensors = {name: stored[name].to(embedding.device, embedding.dtype) for name in shapes}
    is_identity = drafted == known and bool((target_ids == torch.arange(known)).all())
    to_target = None if is_identity else target_ids.to(embedding.device)
    return Eagle3Head(config, _join(tensors), to_target, embedding, backend)


def _shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Every tensor of the original layout except the two maps of ids."""
    layer, width = config.layer, config.hidden_size
    queries = layer.num_attention_heads * layer.head_dim
    keys, inner = layer.num_key_value_heads * layer.head_dim, layer.intermediate_size
    return {
        "fc.weight": (width, config.num_aux * config.target_hidden_size),
        "midlayer.input_layernorm.weight": (width,),
        "midlayer.hidden_norm.weight": (width,),
        "midlayer.self_attn.q_proj.weight": (queries, 2 * width),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * width),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * width),
        "midlayer.self_attn.o_proj.weight": (width, queries),
        "midlayer.post_attention_layernorm.weight": (width,),
        "midlayer.mlp.gate_proj.weight": (inner, width),
        "midlayer.mlp.up_proj.weight": (inner, width),
        "midlayer.mlp.down_proj.weight": (width, inner),
        "norm.weight": (width,),
        "lm_head.weight": (config.draft_vocab_size, width),
    }


def _join(tensors: dict[str, Tensor]) -> HeadWeights:
    """Tensors of `_shapes`, in its order, as the head reads them."""
    fc, input_norm, hidden_norm, q, k, v, o, post_norm, gate, up, down, norm, head = (
        tensors.values()
    )
    qkv, gate_up = torch.cat([q, k, v]), torch.cat([gate, up])
    return HeadWeights(fc, input_norm, hidden_norm, qkv, o, post_norm, gate_up, down, norm, head)


def _read_weights(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    for path in check_weights(folder):
        with reading(path):
            tensors |= load_file(path)
    tensors.pop(_INVERSE_MAP, None)
    return tensors


def _check_names(
    folder: Path, stored: dict[str, Tensor], shapes: dict[str, tuple[int, ...]]
) -> None:
    """Raise `CheckpointError` unless exactly these tensors are there, in these shapes."""
    problems = {
        "missing": [name for name in shapes if name not in stored],
        "unexpected": [name for name in stored if name not in shapes],
        "mismatched": [
            f"{name} {[*stored[name].shape]} in place of {[*shape]}"
            for name, shape in shapes.items()
            if name in stored and stored[name].shape != shape
        ],
    }
    check_fit(folder, problems)


def _target_ids(folder: Path, offset: Tensor | None, config: Eagle3Config) -> Tensor:
    """The target's id of each id of the head's: stored as what is to be added."""
    drafted, known = config.draft_vocab_size, config.vocab_size
    if offset is None:
        if drafted != known:
            raise CheckpointError(
                f"The weights in `{folder}` lack `{_MAP}`, which says what the {drafted} ids of "
                f"the head are among the {known} of the target."
            )
        return torch.arange(known)
    if offset.shape != (drafted,) or offset.is_floating_point():
        raise CheckpointError(
            f"`{_MAP}` in `{folder}` is {offset.dtype} {[*offset.shape]}: must be one integer for "
            f"each of {drafted} ids."
        )
    target_ids = torch.arange(drafted) + offset.long()
    low, high, different = int(target_ids.min()), int(target_ids.max()), {*target_ids.tolist()}
    if low < 0 or high >= known or len(different) < drafted:
        raise CheckpointError(
            f"`{_MAP}` in `{folder}` maps {drafted} ids to {len(different)} in {low}..{high}: must "
            f"be as many, in 0..{known - 1}."
        )
    return target_ids


def _random_weights(
    shapes: dict[str, tuple[int, ...]], seed: int, like: Tensor
) -> dict[str, Tensor]:
    """Norms of one, products that keep the size of what they read, logits that are no near-ties."""
    generator = torch.Generator(like.device).manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        tensors[name] = torch.ones(shape, dtype=like.dtype, device=like.device)
        if len(shape) == 2:
            scale = (_DUMMY_LOGIT_STD if name == "lm_head.weight" else 1.0) * shape[1] ** -0.5
            tensors[name].normal_(std=scale, generator=generator)
    return tensors

"""Tiny EAGLE-3 heads as checkpoints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

LAYOUTS = {
    "original": ("", "midlayer."),
    "speculators": ("", "layers.0."),
    "model": ("model.", "model.layers.0."),
}
"""What names of tensors begin with, and those of the layer."""
OF_HEAD = {
    "draft_vocab_size", "fc_norm", "norm_before_fc", "norm_before_residual", "norm_output",
    "target_hidden_size",
}  # fmt: skip


def save_head(
    folder: Path,
    *,
    hidden: int,
    vocabulary: int,
    drafted: int | None = None,
    seed: int = 0,
    aux_layers: Sequence[int] | None = None,
    layout: str = "original",
    **config: Any,
) -> Path:
    """A random head; deterministic in its arguments.

    Args:
        drafted: ids that it drafts, some of the target's; None: all of them, without a map.
        aux_layers: numbered as in `ForwardOutput.aux`.
        layout: one of `LAYOUTS`.
        config: of the layer and of the head; switches bring their tensors with them. A
            `target_hidden_size` brings an embedding of the head's own.
    """
    folder.mkdir(exist_ok=True)
    told = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "vocab_size": vocabulary,
        "draft_vocab_size": drafted or vocabulary,
        **config,
    }
    ids = None if aux_layers is None else [*aux_layers]
    (folder / "config.json").write_text(json.dumps(_described(told, ids, layout)))
    tensors = _tensors(told, len(aux_layers or (0, 1, 2)), seed, mapped=drafted is not None)
    outside, inside = LAYOUTS[layout]
    stored = {
        inside + name.removeprefix("layer.") if name.startswith("layer.") else outside + name: w
        for name, w in tensors.items()
    }
    save_file(stored, folder / "model.safetensors")
    return folder


def _described(told: dict[str, Any], ids: list[int] | None, layout: str) -> dict[str, Any]:
    """`config.json` of a head that reads these states of its target."""
    key = "eagle_aux_hidden_state_layer_ids"
    if layout == "speculators":
        of_head = {"norm_before_residual": False} | {k: told[k] for k in told.keys() & OF_HEAD}
        return {
            **of_head,
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": {k: v for k, v in told.items() if k not in of_head},
            key: ids,
        }
    if ids is not None:
        by_output = ids[0] == 2  # as most write it: by the layer whose output it is
        told["eagle_config"] = {key: [i - by_output for i in ids]}
    return told


def _tensors(told: dict[str, Any], states: int, seed: int, *, mapped: bool) -> dict[str, Tensor]:
    """By name, the layer's behind `layer.`."""
    generator = torch.Generator().manual_seed(seed)
    hidden, vocabulary = told["hidden_size"], told["vocab_size"]
    drafted, size = told["draft_vocab_size"], told["head_dim"]
    queries, keys = told["num_attention_heads"] * size, told["num_key_value_heads"] * size
    target = told.get("target_hidden_size") or hidden

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * scale * columns**-0.5

    def norm(size: int = hidden) -> Tensor:
        return 1 + 0.2 * torch.randn(size, generator=generator)

    tensors = {
        "fc.weight": matrix(hidden, states * target),
        "layer.input_layernorm.weight": norm(),
        "layer.hidden_norm.weight": norm(),
        "layer.self_attn.q_proj.weight": matrix(queries, 2 * hidden, 2.0),
        "layer.self_attn.k_proj.weight": matrix(keys, 2 * hidden, 2.0),
        "layer.self_attn.v_proj.weight": matrix(keys, 2 * hidden),
        "layer.self_attn.o_proj.weight": matrix(hidden, queries),
        "layer.post_attention_layernorm.weight": norm(),
        "layer.mlp.gate_proj.weight": matrix(told["intermediate_size"], hidden),
        "layer.mlp.up_proj.weight": matrix(told["intermediate_size"], hidden),
        "layer.mlp.down_proj.weight": matrix(hidden, told["intermediate_size"]),
        "norm.weight": norm(),
        "lm_head.weight": matrix(drafted, hidden, 3.0),
    }
    if mapped:
        ids = torch.randperm(vocabulary, generator=generator)[:drafted].sort().values
        tensors["d2t"] = ids - torch.arange(drafted)
        tensors["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, ids, True)
    if told.get("attention_bias"):
        for name, rows in {"q": queries, "k": keys, "v": keys, "o": hidden}.items():
            tensors[f"layer.self_attn.{name}_proj.bias"] = norm(rows) - 1
    if told["model_type"] == "qwen3":
        tensors |= {f"layer.self_attn.{name}_norm.weight": norm(size) for name in "qk"}
    if told.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": norm(target) for i in range(states)}
    if told.get("norm_before_fc"):
        tensors["input_norm.weight"] = norm(states * target)
    if told.get("target_hidden_size"):
        tensors["embed_tokens.weight"] = matrix(vocabulary, hidden) * hidden**0.5
    return tensors

"""The folder of a head: `config.json` and weights as other engines read them, and a model card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken import __version__
from foretoken.errors import ConfigError, UnsupportedModelError
from foretoken.models.eagle3_config import ROPE_TYPES, default_aux_layers

_SHARED = (
    "hidden_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps",
    "max_position_embeddings", "vocab_size", "rope_parameters",
)  # fmt: skip


def describe_head(
    target: Any,
    *,
    draft_vocab_size: int | None = None,
    intermediate_size: int | None = None,
    fc_norm: bool = False,
    norm_output: bool = False,
) -> dict[str, Any]:
    """`config.json` of a head for a target: one Llama layer of the target's own sizes.

    Args:
        target: its Transformers configuration.

    Raises:
        ConfigError: `draft_vocab_size` is more than the target has.
        UnsupportedModelError: a target of too few layers, or without the sizes of a Llama.
    """
    text = target.get_text_config()
    missing = [name for name in _SHARED[:-1] if getattr(text, name, None) is None]
    if text.num_hidden_layers < 3 or missing:
        raise UnsupportedModelError(
            f"No head can be trained for this `{text.model_type}`: it takes 3 layers or more (here "
            f"{text.num_hidden_layers}), and sizes as Llama names them (missing: {missing})."
        )
    drafted = draft_vocab_size or text.vocab_size
    if drafted > text.vocab_size:
        bound = f"at most {text.vocab_size}, the target's"
        raise ConfigError("draft_vocab_size", draft_vocab_size, bound)
    shared = {name: getattr(text, name, None) for name in _SHARED}
    rope = shared["rope_parameters"] or {}
    if rope.get("rope_type") not in ROPE_TYPES:  # a head's positions may be turned in its own way
        shared["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    heads = text.num_attention_heads
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **shared,
        "head_dim": getattr(text, "head_dim", None) or text.hidden_size // heads,
        "intermediate_size": intermediate_size or text.intermediate_size,
        "hidden_act": "silu",
        "num_hidden_layers": 1,
        "draft_vocab_size": drafted,
        "fc_norm": fc_norm,
        "norm_output": norm_output,
        "norm_before_residual": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [*default_aux_layers(text.num_hidden_layers)],
            "use_aux_hidden_state": True,
        },
    }


def save_weights(folder: Path, weights: dict[str, Tensor], target_ids: Tensor | None) -> None:
    """Write `model.safetensors` in bfloat16, in the layout of the original heads.

    Args:
        weights: by the names of `speculators`.
        target_ids: as in `Trainer`.
    """
    from safetensors.torch import save_file

    stored = {
        name.replace("layers.0.", "midlayer."): weight.detach().to("cpu", torch.bfloat16)
        for name, weight in weights.items()
    }
    if target_ids is not None:
        ids = target_ids.cpu()
        known = json.loads((folder / "config.json").read_text())["vocab_size"]
        stored["d2t"] = ids - torch.arange(len(ids))
        stored["t2d"] = torch.zeros(known, dtype=torch.bool).index_fill_(0, ids, True)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})


def write_card(folder: Path, facts: dict[str, Any], history: list[dict[str, float]]) -> None:
    """Write `README.md`: what the head is for, how it was trained, what came of it."""
    rows = "\n".join(f"| `{name}` | {value} |" for name, value in facts.items())
    losses = "\n".join(f"| {int(row['step'])} | {row['loss']:.4f} |" for row in history)
    (folder / "README.md").write_text(
        f"""# An EAGLE-3 head for `{facts["model"]}`

It drafts for that model and no other: `{{"method": "eagle3", "model": "this folder"}}`.
Trained by `foretoken train-eagle3` {__version__}.

| | |
|---|---|
{rows}

| step | loss |
|---|---|
{losses}
""",
        encoding="utf-8",
    )

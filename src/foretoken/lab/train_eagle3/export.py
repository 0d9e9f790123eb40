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
        UnsupportedModelError: the target has too few layers.
    """
    text = target.get_text_config()
    if text.num_hidden_layers < 3:
        raise UnsupportedModelError(
            f"No head can be trained for this `{text.model_type}`: it takes 3 layers or more, the "
            f"target has {text.num_hidden_layers}."
        )
    drafted = draft_vocab_size or text.vocab_size
    if drafted > text.vocab_size:
        bound = f"at most {text.vocab_size}, the target's"
        raise ConfigError("draft_vocab_size", draft_vocab_size, bound)

    width, heads = text.hidden_size, text.num_attention_heads
    rope = _told(text, "rope_parameters", {})
    if rope.get("rope_type") not in ROPE_TYPES:
        rope = {"rope_type": "default", "rope_theta": 10000.0}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": intermediate_size or _told(text, "intermediate_size", 4 * width),
        "num_attention_heads": heads,
        "num_key_value_heads": _told(text, "num_key_value_heads", heads),
        "head_dim": _told(text, "head_dim", width // heads),
        "max_position_embeddings": _told(text, "max_position_embeddings", 2048),
        "rms_norm_eps": _told(text, "rms_norm_eps", 1e-6),
        # Turned whole: that is what fused heads know.
        "rope_parameters": {k: v for k, v in rope.items() if k != "partial_rotary_factor"},
        "vocab_size": text.vocab_size,
        "hidden_act": "silu",
        "num_hidden_layers": 1,
        "draft_vocab_size": drafted,
        "fc_norm": fc_norm,
        "norm_output": norm_output,
        "norm_before_residual": False,
        "dtype": "bfloat16",
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [*default_aux_layers(text.num_hidden_layers)],
            "use_aux_hidden_state": True,
        },
    }


def _told(config: Any, name: str, default: Any) -> Any:
    value = getattr(config, name, None)
    return default if value is None else value


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
    path = folder / "model.safetensors"
    save_file(stored, path, {"format": "pt"})
    path.chmod(0o644)  # as the files next to it: it was written for its owner alone


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

"""Tiny EAGLE-3 heads as checkpoints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

LAYER = "midlayer."


def save_head(
    folder: Path,
    *,
    hidden: int,
    vocabulary: int,
    drafted: int | None = None,
    seed: int = 0,
    aux_layers: Sequence[int] | None = None,
    **config: Any,
) -> Path:
    """A random head in the original layout; deterministic in its arguments.

    Args:
        drafted: ids that it drafts, some of the target's; None: all of them, without a map.
        aux_layers: numbered as in `ForwardOutput.aux`.
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
    if aux_layers is not None:
        told["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [i - 1 for i in aux_layers]}
    (folder / "config.json").write_text(json.dumps(told))
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * scale * columns**-0.5

    def norm() -> Tensor:
        return 1 + 0.2 * torch.randn(hidden, generator=generator)

    queries, keys = 4 * told["head_dim"], told["num_key_value_heads"] * told["head_dim"]
    tensors = {
        "fc.weight": matrix(hidden, len(aux_layers or (0, 1, 2)) * hidden),
        LAYER + "input_layernorm.weight": norm(),
        LAYER + "hidden_norm.weight": norm(),
        LAYER + "self_attn.q_proj.weight": matrix(queries, 2 * hidden, 2.0),
        LAYER + "self_attn.k_proj.weight": matrix(keys, 2 * hidden, 2.0),
        LAYER + "self_attn.v_proj.weight": matrix(keys, 2 * hidden),
        LAYER + "self_attn.o_proj.weight": matrix(hidden, queries),
        LAYER + "post_attention_layernorm.weight": norm(),
        LAYER + "mlp.gate_proj.weight": matrix(2 * hidden, hidden),
        LAYER + "mlp.up_proj.weight": matrix(2 * hidden, hidden),
        LAYER + "mlp.down_proj.weight": matrix(hidden, 2 * hidden),
        "norm.weight": norm(),
        "lm_head.weight": matrix(drafted or vocabulary, hidden, 3.0),
    }
    if drafted is not None:
        ids = torch.randperm(vocabulary, generator=generator)[:drafted].sort().values
        tensors["d2t"] = ids - torch.arange(drafted)
        tensors["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, ids, True)
    save_file(tensors, folder / "model.safetensors")
    return folder

"""Tiny EAGLE-3 heads as checkpoints, and the published equations on them, one row at a time.

Shapes: C the head's hidden size, D head size, V the target's vocabulary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
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


class NaiveHead:
    """The equations in float64: whole sequences, every row from the beginning, no cache."""

    def __init__(self, folder: Path, embedding: Tensor) -> None:
        self.told = json.loads((folder / "config.json").read_text())
        self.tensors = load_file(folder / "model.safetensors")
        self.embedding = embedding.double()

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[f"{name}.weight"].double()

    def norm(self, x_C: Tensor, name: str) -> Tensor:
        return x_C / (x_C.pow(2).mean() + self.told["rms_norm_eps"]).sqrt() * self[name]

    def feature(self, aux: Sequence[Tensor]) -> Tensor:
        """Of one position, from its hidden states in the order of layers."""
        return self["fc"] @ torch.cat([state.double() for state in aux])

    def turned(self, x_D: Tensor, position: int) -> Tensor:
        half = len(x_D) // 2
        out = x_D.clone()
        for i in range(half):
            angle = position * self.told.get("rope_theta", 10000.0) ** (-i / half)
            a, b = x_D[i], x_D[i + half]
            out[i] = a * math.cos(angle) - b * math.sin(angle)
            out[i + half] = b * math.cos(angle) + a * math.sin(angle)
        return out

    def run(self, features: Sequence[Tensor], next_tokens: Sequence[int]) -> list[Tensor]:
        """What each row puts out, from its position's feature and the token behind it."""
        size, heads = self.told["head_dim"], self.told["num_attention_heads"]
        group = heads // self.told["num_key_value_heads"]
        keys: list[Tensor] = []
        values: list[Tensor] = []
        outputs = []
        for position, (feature_C, token) in enumerate(zip(features, next_tokens, strict=True)):
            normed_C = self.norm(feature_C, LAYER + "hidden_norm")
            token_C = self.norm(self.embedding[token], LAYER + "input_layernorm")
            both = torch.cat([token_C, normed_C])
            q, k, v = ((self[f"{LAYER}self_attn.{n}_proj"] @ both).view(-1, size) for n in "qkv")
            keys.append(torch.stack([self.turned(head, position) for head in k]))
            values.append(v)
            seen = []
            for head in range(heads):
                query_D = self.turned(q[head], position) / math.sqrt(size)
                weights = torch.stack([key[head // group] @ query_D for key in keys]).softmax(0)
                seen.append(sum(w * v[head // group] for w, v in zip(weights, values, strict=True)))
            residual_C = normed_C if self.told.get("norm_before_residual") else feature_C
            hidden_C = residual_C + self[LAYER + "self_attn.o_proj"] @ torch.cat(seen)
            inner_C = self.norm(hidden_C, LAYER + "post_attention_layernorm")
            gate, up = (self[f"{LAYER}mlp.{n}_proj"] @ inner_C for n in ("gate", "up"))
            outputs.append(hidden_C + self[LAYER + "mlp.down_proj"] @ (gate * gate.sigmoid() * up))
        return outputs

    def logits(self, hidden_C: Tensor) -> Tensor:
        """[V] by the target's ids, -inf for those that it does not draft."""
        own = self["lm_head"] @ self.norm(hidden_C, "norm")
        if "d2t" not in self.tensors:
            return own
        out = torch.full((self.told["vocab_size"],), -torch.inf, dtype=torch.float64)
        for i, offset in enumerate(self.tensors["d2t"].tolist()):
            out[i + offset] = own[i]
        return out

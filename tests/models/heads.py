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

from foretoken.engine.runner import Runner
from foretoken.ops import DraftBlock
from foretoken.ops.steps import DraftRows
from tests.models import families

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


def head_of(target: Path, **given: Any) -> Path:
    """A head for a target's checkpoint, made beside it when it is first asked for."""
    told = json.loads((target / "config.json").read_text())
    layers = told["num_hidden_layers"]
    sizes = {"hidden": told["hidden_size"], "vocabulary": told["vocab_size"]}
    name = "-".join([target.name, "head", *map(str, given.values())])
    if not (target.parent / name / "model.safetensors").exists():
        save_head(target.parent / name, **{**sizes, "aux_layers": (0, 1, layers), **given})
    return target.parent / name


class NaiveHead:
    """The equations in float64, a row at a time, on lists."""

    def __init__(self, folder: Path, embedding: Tensor) -> None:
        self.told = json.loads((folder / "config.json").read_text())
        stored = load_file(folder / "model.safetensors")
        self.tensors = {name.removesuffix(".weight"): t.double() for name, t in stored.items()}
        self.embedding = embedding.double()

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def norm(self, x_C: Tensor, name: str) -> Tensor:
        return x_C / (x_C.pow(2).mean() + self.told["rms_norm_eps"]).sqrt() * self[name]

    def feature(self, aux: Sequence[Tensor]) -> Tensor:
        """Of one position, from its hidden states in the order of layers."""
        return self["fc"] @ torch.cat([state.double() for state in aux])

    def logits(self, hidden_C: Tensor) -> Tensor:
        """[V] by the target's ids, -inf for those that it does not draft."""
        own = self["lm_head"] @ self.norm(hidden_C, "norm")
        if "d2t" not in self.tensors:
            return own
        out = torch.full((self.told["vocab_size"],), -torch.inf, dtype=torch.float64)
        for i, offset in enumerate(self["d2t"].tolist()):
            out[i + int(offset)] = own[i]
        return out


class NaiveRows:
    """The rows of one text, from its first position on."""

    def __init__(self, head: NaiveHead, before: NaiveRows | None = None) -> None:
        self.head = head
        self.keys: list[Tensor] = [] if before is None else before.keys[:]
        self.values: list[Tensor] = [] if before is None else before.values[:]

    def fork(self) -> NaiveRows:
        """The same rows, to go on with others."""
        return NaiveRows(self.head, self)

    def append(self, feature_C: Tensor, next_token: int) -> Tensor:
        """What the next position's row puts out, from its feature and the token behind it."""
        head, told, position = self.head, self.head.told, len(self.keys)
        size, heads = told["head_dim"], told["num_attention_heads"]
        group = heads // told["num_key_value_heads"]
        normed_C = head.norm(feature_C, LAYER + "hidden_norm")
        token_C = head.norm(head.embedding[next_token], LAYER + "input_layernorm")
        both = torch.cat([token_C, normed_C])
        q, k, v = ((head[f"{LAYER}self_attn.{n}_proj"] @ both).view(-1, size) for n in "qkv")
        self.keys.append(self.turned(k, position))
        self.values.append(v)
        seen, turned = [], self.turned(q, position) / math.sqrt(size)
        for h in range(heads):
            scores = torch.stack([key[h // group] @ turned[h] for key in self.keys])
            values = torch.stack([value[h // group] for value in self.values])
            seen.append(scores.softmax(0) @ values)
        residual_C = normed_C if told.get("norm_before_residual") else feature_C
        hidden_C = residual_C + head[LAYER + "self_attn.o_proj"] @ torch.cat(seen)
        inner_C = head.norm(hidden_C, LAYER + "post_attention_layernorm")
        gate, up = (head[f"{LAYER}mlp.{n}_proj"] @ inner_C for n in ("gate", "up"))
        return hidden_C + head[LAYER + "mlp.down_proj"] @ (gate * gate.sigmoid() * up)

    def turned(self, x_HD: Tensor, position: int) -> Tensor:
        half = x_HD.shape[1] // 2
        out = x_HD.clone()
        for i in range(half):
            angle = position * self.head.told.get("rope_theta", 10000.0) ** (-i / half)
            a, b = x_HD[:, i], x_HD[:, i + half]
            out[:, i] = a * math.cos(angle) - b * math.sin(angle)
            out[:, i + half] = b * math.cos(angle) + a * math.sin(angle)
        return out


class Checked:
    """Compares what a runner's drafter proposes with the equations, request by request.

    Features are what plain Transformers gives for the request's own text.
    """

    def __init__(self, runner: Runner, target: Path, head: Path) -> None:
        self.plain = families.plain_model(target)
        self.naive = NaiveHead(head, self.plain.get_input_embeddings().weight.detach())
        self.layers = runner.model.aux_layers
        self.num_checked, self.worst = 0, 0.0
        self.rows: dict[tuple[int, ...], Any] = {}
        self.drafter: Any = runner.drafter
        self._propose = self.drafter.propose
        self.drafter.propose = self.propose

    def propose(self, rows: DraftRows) -> DraftBlock:
        state, block = self.drafter.slots.state, self._propose(rows)
        for b, slot in enumerate(rows.slot_B.tolist()):
            text = state.token_SL[slot, : int(rows.position_B[b])].tolist()
            drafts = block.token_BK[b, : int(block.num_B[b])].tolist()
            if drafts and block.cache is not None:
                self.check(text, drafts, block.cache.logits_SKV[slot].cpu())
        return block

    def check(self, text: list[int], drafts: list[int], q_KV: Tensor) -> None:
        rows, hidden_C = self.known(text)
        rows = rows.fork()
        for i, draft in enumerate(drafts):
            want_V, found_V = self.naive.logits(hidden_C).float(), q_KV[i]
            never_V = want_V == -torch.inf
            assert torch.equal(never_V, found_V == -torch.inf)
            error = (want_V - found_V)[~never_V].abs().max().item()
            assert error == error, "not a number"
            self.worst, self.num_checked = max(self.worst, error), self.num_checked + 1
            hidden_C = rows.append(hidden_C, draft)

    def known(self, text: list[int]) -> Any:
        """The rows of a text and what the last one puts out."""
        key = tuple(text)
        if key not in self.rows:
            with torch.inference_mode():
                output = self.plain(torch.tensor([text]), output_hidden_states=True)
            aux = torch.stack([output.hidden_states[i][0] for i in self.layers], dim=1)
            cut = next((c for c in range(len(text) - 1, 1, -1) if key[:c] in self.rows), 1)
            rows = self.rows[key[:cut]][0].fork() if cut > 1 else NaiveRows(self.naive)
            for position in range(cut - 1, len(text) - 1):
                feature_C = self.naive.feature(aux[position].unbind())
                hidden_C = rows.append(feature_C, text[position + 1])
            self.rows[key] = rows, hidden_C
        return self.rows[key]

    def done(self, least: int) -> None:
        """At least so many drafts were checked, and all were right."""
        assert self.num_checked >= least
        assert self.worst < 2e-4

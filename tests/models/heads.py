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
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.heads import LAYER, save_head
from foretoken.engine.runner import Runner
from foretoken.ops import DraftBlock
from foretoken.ops.steps import DraftRows
from tests.models import families


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

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

from benchmarks.heads import save_head
from foretoken.engine.runner import Runner
from foretoken.ops import DraftBlock, ForwardOutput
from foretoken.ops.steps import DraftRequests, ForwardBatch
from foretoken.slots.step import StepRequests, StepResult
from tests.models import families

SWITCHES: dict[str, dict[str, Any]] = {
    "none": {},
    "some of the vocabulary": {"drafted": 7},
    "normed residual": {"drafted": 7, "norm_before_residual": True},
    "a norm of each state": {"fc_norm": True, "norm_output": True},
    "a norm of all states": {"norm_before_fc": True, "norm_before_residual": True},
    "output normed": {"norm_output": True, "drafted": 7},
    "norms of queries and keys": {"model_type": "qwen3", "head_dim": 8},
    "biases": {"attention_bias": True},
    "a window": {"sliding_window": 5},
    "a window by the layer": {
        "model_type": "qwen3", "sliding_window": 3, "layer_types": ["sliding_attention"],
    },
    "no window": {"sliding_window": 3, "layer_types": ["full_attention"]},
    "half of each head turned": {"partial_rotary_factor": 0.5},
    "other heads": {"num_key_value_heads": 4, "head_dim": 8, "rope_theta": 5e5},
    "an embedding of its own": {"hidden": 48, "target_hidden_size": 32},
    "all at once": {
        "drafted": 7, "model_type": "qwen3", "attention_bias": True, "fc_norm": True,
        "norm_output": True, "norm_before_residual": True, "partial_rotary_factor": 0.25,
        "sliding_window": 7, "layer_types": ["sliding_attention"], "hidden": 24,
        "target_hidden_size": 32, "aux_layers": (2, 0),
    },
}  # fmt: skip
"""Of `save_head`, for a target of 12 tokens or more and a hidden size of 32."""


def head_of(target: Path, *, name: str = "", **given: Any) -> Path:
    told = json.loads((target / "config.json").read_text())
    layers = told["num_hidden_layers"]
    sizes = {"hidden": told["hidden_size"], "vocabulary": told["vocab_size"]}
    name = "-".join([target.name, "head", name, *map(str, given.values())])
    if not (target.parent / name / "model.safetensors").exists():
        save_head(target.parent / name, **{**sizes, "aux_layers": (0, 1, layers - 1), **given})
    return target.parent / name


def drafter_options(target: Path, model: Path) -> dict[str, dict[str, Any]]:
    return {
        "draft_model": {"model": str(model)},
        "draft_text": {"model": str(model)},
        "eagle3": {"model": str(head_of(target))},
        "ngram": {"prompt_lookup_min": 1},
    }


class NaiveHead:
    """The equations in float64, a row at a time, on lists."""

    def __init__(self, folder: Path, embedding: Tensor) -> None:
        raw = json.loads((folder / "config.json").read_text())
        self.told = {**raw, **raw.get("transformer_layer_config", {})}
        self.tensors = {}
        for name, tensor in load_file(folder / "model.safetensors").items():
            name = name.removeprefix("model.").replace("midlayer.", "").replace("layers.0.", "")
            self.tensors[name.removesuffix(".weight")] = tensor.double()
        self.embedding = self.tensors.get("embed_tokens", embedding.double())

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean() + self.told["rms_norm_eps"]).sqrt() * self[name]

    def project(self, x: Tensor, name: str) -> Tensor:
        out = self[f"self_attn.{name}_proj"] @ x
        return out + self.tensors.get(f"self_attn.{name}_proj.bias", 0)

    def feature(self, aux: Sequence[Tensor]) -> Tensor:
        """The feature of one position, from its hidden states in the order of layers."""
        states = [state.double() for state in aux]
        if self.told.get("fc_norm"):
            states = [self.norm(state, f"fc_norm.{i}") for i, state in enumerate(states)]
        every = torch.cat(states)
        if self.told.get("norm_before_fc"):
            every = self.norm(every, "input_norm")
        return self["fc"] @ every

    def logits(self, hidden_C: Tensor) -> Tensor:
        """[V] by the target's ids; -inf for ids that the head does not draft."""
        normed_C = hidden_C if self.told.get("norm_output") else self.norm(hidden_C, "norm")
        own = self["lm_head"] @ normed_C
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
        return NaiveRows(self.head, self)

    def append(self, feature_C: Tensor, next_token: int) -> Tensor:
        """The hidden state of the next position, from its feature and the token after it."""
        head, told, position = self.head, self.head.told, len(self.keys)
        size, heads = told["head_dim"], told["num_attention_heads"]
        group = heads // told["num_key_value_heads"]
        normed_C = head.norm(feature_C, "hidden_norm")
        token_C = head.norm(head.embedding[next_token], "input_layernorm")
        both = torch.cat([token_C, normed_C])
        q, k, v = (head.project(both, name).view(-1, size) for name in "qkv")
        if told["model_type"] == "qwen3":
            q, k = (
                torch.stack([head.norm(one, f"self_attn.{name}_norm") for one in x])
                for name, x in (("q", q), ("k", k))
            )
        self.keys.append(self.turned(k, position))
        self.values.append(v)
        first = 0
        if told.get("layer_types") != ["full_attention"]:
            first = max(0, position + 1 - told.get("sliding_window", position + 1))
        seen, turned = [], self.turned(q, position) / math.sqrt(size)
        for h in range(heads):
            scores = torch.stack([key[h // group] @ turned[h] for key in self.keys[first:]])
            values = torch.stack([value[h // group] for value in self.values[first:]])
            seen.append(scores.softmax(0) @ values)
        residual_C = normed_C if told.get("norm_before_residual") else feature_C
        hidden_C = residual_C + head.project(torch.cat(seen), "o")
        inner_C = head.norm(hidden_C, "post_attention_layernorm")
        gate, up = (head[f"mlp.{n}_proj"] @ inner_C for n in ("gate", "up"))
        hidden_C = hidden_C + head["mlp.down_proj"] @ (gate * gate.sigmoid() * up)
        return head.norm(hidden_C, "norm") if told.get("norm_output") else hidden_C

    def turned(self, x_HD: Tensor, position: int) -> Tensor:
        told = self.head.told
        half = int(x_HD.shape[1] * told.get("partial_rotary_factor", 1)) // 2
        out = x_HD.clone()
        for i in range(half):
            angle = position * told.get("rope_theta", 10000.0) ** (-i / half)
            a, b = x_HD[:, i], x_HD[:, i + half]
            out[:, i] = a * math.cos(angle) - b * math.sin(angle)
            out[:, i + half] = b * math.cos(angle) + a * math.sin(angle)
        return out


class Checked:
    """Compares what a runner's drafter computes with the equations, request by request.
    Features are from plain Transformers on the request's own text. With `own_states` they are from
    the hidden states of the engine's target, so that no difference is the target's.
    """

    def __init__(
        self, runner: Runner, target: Path, head: Path, *, own_states: bool = False
    ) -> None:
        self.plain = families.plain_model(target)
        self.naive = NaiveHead(head, self.plain.get_input_embeddings().weight.detach())
        self.layers = runner.model.aux_layers
        self.num_checked, self.worst = 0, 0.0
        self.rows: dict[tuple[int, ...], Any] = {}
        self.states: dict[tuple[int, ...], Tensor] | None = {} if own_states else None
        self.drafter: Any = runner.drafter
        self.hidden_BC: list[Tensor] = []
        self._propose, self._run = self.drafter.propose, self.drafter.head.run
        self._observe = self.drafter.observe
        self.drafter.propose, self.drafter.head.run = self.propose, self.run
        self.drafter.observe = self.observe

    def observe(self, rows: StepRequests, batch: ForwardBatch, result: StepResult) -> None:
        if self.states is not None:
            state, starts = self.drafter.slots.state, batch.attention.query_start_B1.tolist()
            aux = torch.stack(result.aux, dim=1)
            for b, slot in enumerate(rows.slot_B.tolist()):
                span = slice(starts[b], starts[b + 1])
                before = int(batch.attention.length_B[b]) - (span.stop - span.start)
                text = state.token_SL[slot, :before].tolist() + batch.token_T[span].tolist()
                for i in range(before, len(text)):
                    self.states[tuple(text[: i + 1])] = aux[span.start + i - before].clone()
        self._observe(rows, batch, result)

    def run(self, *given: Any, logits: bool = True, **named: Any) -> ForwardOutput:
        output = self._run(*given, logits=logits, **named)
        if logits:  # else the target's rows, not a draft's
            self.hidden_BC.append(output.hidden_NC)
        return output

    def propose(self, rows: DraftRequests) -> DraftBlock:
        self.hidden_BC = [self.drafter._hidden_SC[rows.slot_B]]
        state, block = self.drafter.slots.state, self._propose(rows)
        for b, slot in enumerate(rows.slot_B.tolist()):
            text = state.token_SL[slot, : int(rows.position_B[b])].tolist()
            drafts = block.token_BK[b, : int(block.num_B[b])].tolist()
            if drafts:
                hidden_KC = [hidden_BC[b].cpu() for hidden_BC in self.hidden_BC]
                q_KV = None if block.cache is None else block.cache.logits_SKV[slot].cpu()
                self.check(text, drafts, q_KV, hidden_KC)
        return block

    def check(
        self, text: list[int], drafts: list[int], q_KV: Tensor | None, hidden_KC: Sequence[Tensor]
    ) -> None:
        """Compare drafts with the equations. Without a q, drafts must be the likeliest tokens.
        Of a round in one native call only the first hidden state is known.
        """
        rows, hidden_C = self.known(text)
        rows = rows.fork()
        for i, draft in enumerate(drafts):
            want_V = self.naive.logits(hidden_C).float()
            if q_KV is None:
                assert draft == want_V.argmax()
            else:
                never_V = want_V == -torch.inf
                assert torch.equal(never_V, q_KV[i] == -torch.inf)
                self.compare(want_V[~never_V], q_KV[i][~never_V])
            if i < len(hidden_KC):
                self.compare(hidden_C.float(), hidden_KC[i])
            self.num_checked += 1
            hidden_C = rows.append(hidden_C, draft)

    def compare(self, want: Tensor, found: Tensor) -> None:
        """Record the difference, relative to the largest number, or to 1 if all are smaller."""
        error = ((want - found).abs().max() / want.abs().max().clamp(min=1)).item()
        assert error == error, "not a number"
        self.worst = max(self.worst, error)

    def known(self, text: list[int]) -> Any:
        key = tuple(text)
        if key not in self.rows:
            aux = self.aux(text)
            cut = next((c for c in range(len(text) - 1, 1, -1) if key[:c] in self.rows), 1)
            rows = self.rows[key[:cut]][0].fork() if cut > 1 else NaiveRows(self.naive)
            for position in range(cut - 1, len(text) - 1):
                feature_C = self.naive.feature(aux[position].unbind())
                hidden_C = rows.append(feature_C, text[position + 1])
            self.rows[key] = rows, hidden_C
        return self.rows[key]

    def aux(self, text: list[int]) -> Sequence[Tensor]:
        """[num_aux, hidden] of each position except the last, which may have no state yet."""
        if self.states is not None:
            return [self.states[tuple(text[:end])] for end in range(1, len(text))]
        with torch.inference_mode():
            output = self.plain(torch.tensor([text]), output_hidden_states=True)
        return torch.stack([output.hidden_states[i][0] for i in self.layers], dim=1).unbind()

    def done(self, least: int, most: float = 2e-4) -> None:
        """At least so many drafts were checked, and all were right."""
        assert self.num_checked >= least
        assert self.worst < most

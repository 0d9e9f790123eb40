"""The training loop: a frozen target, a head that learns to draft for it, optimiser, checkpoints.

Shape suffixes: B texts, T tokens of a text, S positions to draft from, X positions of all texts
(B S), J draft steps, V ids that the head drafts, N rows of text, L tokens of a row.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foretoken.errors import CheckpointError
from foretoken.lab.train_eagle3.unroll import Fuse, LogitFunctions, Unroll, agreement, loss_of
from foretoken.models.checkpoint import reading
from foretoken.models.eagle3 import OUTPUT_LAYER, stack_of, tensor_shapes
from foretoken.models.eagle3_config import Eagle3Config
from foretoken.ops.backends.torch.stack import output
from foretoken.ops.stack import Dense, Stack


def adamw(weights: Iterable[Tensor], lr: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only (norm gains and biases have one dimension)."""
    weights = list(weights)
    groups = [
        {"params": [w for w in weights if w.ndim >= 2], "weight_decay": weight_decay},
        {"params": [w for w in weights if w.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8, fused=weights[0].is_cuda)


class HeadOptimizer:
    """Muon (Jordan 2024) for the matrices inside the layer, AdamW for all other weights.

    output_layer: name of the output layer, which AdamW trains, since its rows are tokens
    muon_share: Muon's learning rate in units of AdamW's; 0: AdamW trains all weights
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        output_layer: str,
        weight_decay: float,
        muon_share: float,
    ) -> None:
        inner = {n for n, w in weights.items() if w.ndim == 2 and n != output_layer and muon_share}
        others = [w for n, w in weights.items() if n not in inner]
        # Each optimizer with its learning rate in units of AdamW's.
        self._parts: list[tuple[torch.optim.Optimizer, float]] = []
        self._parts.append((adamw(others, 0.0, weight_decay), 1.0))
        if inner:
            matrices = [weights[name] for name in sorted(inner)]
            decay, adjust = weight_decay, "match_rms_adamw"
            muon = torch.optim.Muon(matrices, lr=0.0, weight_decay=decay, adjust_lr_fn=adjust)
            self._parts.append((muon, muon_share))

    def step(self, lr: float) -> None:
        for optimizer, share in self._parts:
            set_learning_rate(optimizer, lr * share)
            optimizer.step()
            optimizer.zero_grad()

    def state(self) -> dict[str, Tensor]:
        """The state of both optimizers, by names such as `part.number of the weight.name`."""
        return {
            f"{part}.{i}.{name}": value
            for part, (optimizer, _) in enumerate(self._parts)
            for i, values in optimizer.state_dict()["state"].items()
            for name, value in values.items()
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        for part, (optimizer, _) in enumerate(self._parts):
            own_state: dict[int, dict[str, Tensor]] = {}
            for key, value in state.items():
                key_part, i, name = key.split(".")
                if int(key_part) == part:
                    own_state.setdefault(int(i), {})[name] = value
            optimizer.load_state_dict({**optimizer.state_dict(), "state": own_state})


def learning_rate(step: int, steps: int, peak: float, warmup: int, floor: float = 0.02) -> float:
    """The learning rate of a step: linear warmup, then a cosine from `peak` to `floor · peak`."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


# Temperatures of p and q, used in turn by steps; low temperatures stand for greedy decoding.
TEMPERATURES = (1.0, 0.8, 0.5, 0.8)
_WARMUP_SHARE = 0.05
_KL_WEIGHT = 0.05  # of `kl`, added to `tv` or `length`, which have no gradient where q is nearly 0
_WEIGHT_DECAY, _MAX_GRADIENT_NORM = 0.01, 1.0


class Recipe(NamedTuple):
    """All options that affect the training, except its texts; see `TrainOptions`."""

    steps: int
    unroll: int
    learning_rate: float
    loss: str
    kl_share: float
    seed: int
    muon_share: float = 0.0


class Target:
    """A Transformers module as a function from texts to hidden states and logits.

    module: the frozen module; its attention takes [B, T]
    embedding: the embedding of tokens, [V, hidden]
    head: the output layer, [V, hidden]
    aux_layers: the hidden states that the EAGLE-3 head reads, numbered as in `ForwardOutput.aux`
    norm: the weight of the norm before the output layer; None if the module has no `norm`
    """

    def __init__(
        self, module: Any, embedding: Tensor, head: Tensor, aux_layers: tuple[int, ...]
    ) -> None:
        self.module, self.aux_layers = module, aux_layers
        self.embedding, self.head = embedding.detach(), head.detach()
        norm = getattr(getattr(module.base_model, "norm", None), "weight", None)
        self.norm: Tensor | None = None if norm is None else norm.detach()

    @torch.no_grad()
    def __call__(self, token_BT: Tensor) -> tuple[list[Tensor], Tensor]:
        """The hidden states of `aux_layers`, [B, T, hidden] each, and the logits [B, T, V]."""
        output = self.module(input_ids=token_BT, use_cache=False, output_hidden_states=True)
        return [output.hidden_states[i] for i in self.aux_layers], output.logits


class Trainer:
    """The training of a head.

    Args:
        sample_BT: some texts, to find the magnitude of hidden states.
        target_ids: the ids that the head drafts, int64 [draft_vocab_size], ascending; None: all.
        tied: whether the head uses the target's output layer.
        fuse: see `Unroll`.

    Attributes:
        weights: the head's trained tensors in float32, by the names of `speculators`.
    """

    def __init__(
        self,
        config: Eagle3Config,
        target: Target,
        recipe: Recipe,
        sample_BT: Tensor,
        *,
        target_ids: Tensor | None = None,
        tied: bool = False,
        fuse: Fuse = lambda function: function,
    ) -> None:
        self.target, self.target_ids = target, target_ids
        embedding = target.embedding
        self.weights = _initial_weights(config, target, sample_BT, target_ids, recipe.seed)
        self._frozen = {OUTPUT_LAYER: self.weights.pop(OUTPUT_LAYER)} if tied else {}
        for weight in self.weights.values():
            weight.requires_grad_()
        self.begin(recipe, {})
        self._config = config
        self._unroll = Unroll(embedding.device, fuse)
        self._functions = LogitFunctions(*map(fuse, LogitFunctions()))

    @torch.no_grad()
    def begin(self, recipe: Recipe, weights: Mapping[str, Tensor]) -> None:
        """Begin a training from step 0, with a new optimizer.

        weights: initial weights by name; the current weights stay where there is no new weight
        """
        self.recipe, self.step, self.history = recipe, 0, list[dict[str, float]]()
        for name, weight in weights.items():
            self.weights[name].copy_(weight)
        settings = (OUTPUT_LAYER, _WEIGHT_DECAY, recipe.muon_share)
        self._optimizer = HeadOptimizer(self.weights, *settings)

    def head(self) -> Stack:
        """The head in the target's dtype, with the current weights, to which gradients flow."""
        embedding = self.target.embedding
        tensors = {n: w.to(embedding.dtype) for n, w in (self.weights | self._frozen).items()}
        # Without target ids, the logits are only for the drafted ids: p is gathered for these ids,
        # which is cheaper than scattering q.
        return stack_of(tensors, self._config, Dense(embedding), None)

    def train(self, token_BT: Tensor) -> Tensor:
        """Make one step on texts, int64 [B, T]; returns the loss without waiting for the device."""
        recipe = self.recipe
        warmup = max(1, int(_WARMUP_SHARE * recipe.steps))
        lr = learning_rate(self.step, recipe.steps, recipe.learning_rate, warmup)
        kind = recipe.loss if self.step >= recipe.kl_share * recipe.steps else "kl"
        temperature = TEMPERATURES[self.step % len(TEMPERATURES)]
        overlaps, entropies = self._measure(token_BT, temperature)
        loss = loss_of(kind, overlaps, entropies)
        if kind != "kl":
            loss = loss + _KL_WEIGHT * loss_of("kl", (), entropies)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.weights.values(), _MAX_GRADIENT_NORM)
        self._optimizer.step(lr)
        self.step += 1
        return loss.detach()

    def _measure(
        self, token_BT: Tensor, temperature: float
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The overlap and the cross-entropy (`agreement`) of each draft step, [B, S] each."""
        aux, logits_BTV = self.target(token_BT)
        p_BTV = (logits_BTV.float() / temperature).softmax(-1)
        if self.target_ids is not None:
            p_BTV = p_BTV[..., self.target_ids]
        head, size, results = self.head(), token_BT.shape[1] - self.recipe.unroll, []
        for j, hidden_XC in enumerate(self._unroll(head, aux, token_BT, self.recipe.unroll)):
            logits_BSV = output(head, hidden_XC).view(len(token_BT), size, -1)
            p_BSV = p_BTV[:, j + 1 : j + 1 + size]
            results.append(agreement(logits_BSV, p_BSV, temperature, self._functions))
        overlaps, entropies = zip(*results, strict=True)
        return overlaps, entropies

    @torch.no_grad()
    def evaluate(self, rows_NL: Tensor, batch_size: int, temperature: float) -> list[float]:
        """By draft position: the mean chance that this draft and all before it are accepted."""
        sums, count = torch.zeros(self.recipe.unroll, dtype=torch.float64), 0
        for i in range(0, len(rows_NL), batch_size):
            overlaps, _ = self._measure(rows_NL[i : i + batch_size].long(), temperature)
            sums += torch.stack(overlaps).cumprod(0).double().sum((1, 2)).cpu()
            count += overlaps[0].numel()
        return (sums / count).tolist()

    def save(self, path: Path) -> None:
        """Write a checkpoint; the former checkpoint stays until the new one is complete."""
        from safetensors.torch import save_file

        tensors = {name: weight.detach() for name, weight in self.weights.items()}
        tensors |= {f"optimizer.{name}": value for name, value in self._optimizer.state().items()}
        facts = {"recipe": self.recipe._asdict(), "step": self.step, "history": self.history}
        partial = path.with_suffix(".partial")
        save_file(tensors, partial, {"training": json.dumps(facts)})
        os.replace(partial, path)

    def load(self, path: Path) -> None:
        """Continue the training from a checkpoint.

        `CheckpointError`: the checkpoint cannot be read, or has another recipe or other shapes.
        """
        from safetensors import safe_open

        with reading(path), safe_open(path, "pt", device=str(self.target.embedding.device)) as file:
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            facts = json.loads((file.metadata() or {}).get("training", "{}"))
        shapes = {name: w.shape for name, w in stored.items() if not name.startswith("optimizer.")}
        own_shapes = {name: weight.shape for name, weight in self.weights.items()}
        if facts.get("recipe") != self.recipe._asdict() or shapes != own_shapes:
            options = f"{facts.get('recipe')}, not with {self.recipe._asdict()}"
            why = "or for a head of another shape: resume with the same options."
            raise CheckpointError(f"`{path}` was begun with {options}, {why}")
        state = {n.removeprefix("optimizer."): v for n, v in stored.items() if n not in shapes}
        self._optimizer.load(state)
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(stored[name])
        self.step, self.history = facts["step"], facts["history"]


def _initial_weights(
    config: Eagle3Config, target: Target, sample_BT: Tensor, target_ids: Tensor | None, seed: int
) -> dict[str, Tensor]:
    """The initial weights of a head, float32 on the target's device.

    With these weights a feature is nearly the last of the hidden states, scaled to size 1, and the
    layer adds little. The output layer and its norm are the target's.
    """
    device, width = target.embedding.device, config.hidden_size
    generator, weights = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    for name, shape in tensor_shapes(config).items():
        weight = torch.ones(shape)
        if len(shape) == 2:
            weight.normal_(std=shape[1] ** -0.5, generator=generator)
        if name.endswith(("fc.weight", "o_proj.weight", "down_proj.weight")):
            weight.mul_(0.1)
        weights[name] = weight.to(device)
    last_BTH = target(sample_BT)[0][-1].float()
    # The median, since the state of a first token may be a hundred times larger.
    size = last_BTH.pow(2).mean(-1).sqrt().median()
    fc = weights["fc.weight"]
    fc[:, -width:] += torch.eye(width, device=device)
    fc /= 1.0 if config.fc_norm else size
    if target.norm is not None:
        weights["norm.weight"] = target.norm.float().clone()
    head = target.head.float()
    weights[OUTPUT_LAYER] = (head if target_ids is None else head[target_ids]).clone()
    return weights

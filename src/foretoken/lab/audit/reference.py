"""An independent copy of the target: its module under eager attention, and its own sampling code.

It shares only the checkpoint with the engine: no paged attention, no kernels, no edits.
Shape suffixes: R rows (one per generated token), V vocabulary.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foretoken.errors import RequestError
from foretoken.models.loader import load_plain
from foretoken.models.locate import resolve_checkpoint
from foretoken.ops.formats import round_rows
from foretoken.sampling.params import SamplingParams

Ids = Sequence[int]
_BATCH = 16
_LIKELY = 32  # tokens of a row that may be drawn
# On busy cores, for example next to the server under audit, two OpenMP threads spent 22 s of CPU on
# work that one does in 1.5 s: with 15M parameters each has too little to do between two barriers.
_SMALL = 100_000_000
# Parameters that the reference cannot apply: ignoring them would look like a bug of the subject.
_UNKNOWN = ("structured_outputs", "bad_words", "min_tokens")


class Text(NamedTuple):
    """A prompt, the tokens generated after it, and their trace."""

    prompt: list[int]
    output: list[int]
    trace: Sequence[Any] = ()


class Reference:
    """Probabilities of a checkpoint, float32 on the CPU.

    Args:
        rounds: linear layers round their inputs to eight bits, as the engine's do where weights
            are quantised: that is part of such a model.
        plain_head: the output layer does not round.

    Raises:
        CheckpointError, UnsupportedModelError: see `load_plain`.
    """

    def __init__(
        self,
        model: str,
        revision: str | None = None,
        *,
        rounds: bool = False,
        plain_head: bool = False,
    ) -> None:
        self.module: Any = load_plain(resolve_checkpoint(model, revision=revision))
        spared = self.module.get_output_embeddings() if plain_head else None
        for layer in self.module.modules() if rounds else ():
            if isinstance(layer, torch.nn.Linear) and layer is not spared:
                layer.register_forward_pre_hook(lambda _, inputs: (round_rows(inputs[0]),))
        ends = self.module.generation_config.eos_token_id
        self.stop_ids = [*ends] if isinstance(ends, list) else [ends]
        self.vocabulary: int = self.module.config.get_text_config().vocab_size
        self._threads = 1 if self.module.num_parameters() < _SMALL else torch.get_num_threads()

    def logits(self, texts: Sequence[Text]) -> list[Tensor]:
        """Raw logits of each text's rows, float32 [R, V]."""
        rows: list[Tensor] = []
        torch.set_num_threads(self._threads)  # an engine sets its own for each step
        for start in range(0, len(texts), _BATCH):
            part = texts[start : start + _BATCH]
            ids = [[*text.prompt, *text.output][:-1] for text in part]
            wide = max(map(len, ids))
            padded = torch.tensor([[*line, *[0] * (wide - len(line))] for line in ids])
            with torch.inference_mode():  # causal: padding after a text changes nothing
                logits = self.module(padded, use_cache=False).logits
            for text, each in zip(part, logits, strict=True):
                first = len(text.prompt) - 1
                rows.append(each[first : first + len(text.output)].float())
        return rows

    def rounding(self, prompts: Sequence[list[int]]) -> float:
        """Standard deviation of the change in likely tokens' logits due to bfloat16.

        Weights and every module's outputs are rounded to nearest; everything else is computed in
        float32. So the result is the same on each machine, whatever its own bfloat16 arithmetic.
        """
        texts = [Text(ids, [0]) for ids in prompts]
        exact, plain = self.module, self.logits(texts)
        self.module = copy.deepcopy(exact)
        for parameter in self.module.parameters():
            parameter.data = _bfloat16(parameter.data)
        for module in self.module.modules():
            module.register_forward_hook(lambda module, inputs, output: _bfloat16(output))
        try:
            rounded = self.logits(texts)
        finally:
            self.module = exact
        moved = []
        for row_1V, other_1V in zip(plain, rounded, strict=True):
            likely = row_1V[0].topk(min(_LIKELY, self.vocabulary)).indices
            moved.append((other_1V - row_1V)[0, likely].var(correction=0))
        return float(torch.stack(moved).mean().sqrt())

    def probabilities(self, texts: Sequence[Text], params: SamplingParams) -> list[Tensor]:
        """p of each text's rows, after edits, temperature and filters: float64 [R, V]."""
        check_known(params)
        return [
            filtered(edited(logits.double(), text, params), params)
            for text, logits in zip(texts, self.logits(texts), strict=True)
        ]


def _bfloat16(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_bfloat16, value))
    is_rounded = isinstance(value, Tensor) and value.is_floating_point()
    return value.bfloat16().float() if is_rounded else value


def check_known(params: SamplingParams) -> None:
    """Raise `RequestError` for a parameter that the reference cannot apply."""
    for name in _UNKNOWN:
        if getattr(params, name):
            raise RequestError(name, getattr(params, name), "left out in an audit")


def edited(logits_RV: Tensor, text: Text, params: SamplingParams) -> Tensor:
    """Logits after bias and allowed tokens, then after penalties for the tokens before each row."""
    logits_RV = logits_RV.clone()
    for token, bias in (params.logit_bias or {}).items():
        logits_RV[:, token] += bias
    if params.allowed_token_ids is not None:
        banned_V = torch.ones(logits_RV.shape[1], dtype=torch.bool)
        banned_V[list(params.allowed_token_ids)] = False
        logits_RV[:, banned_V] = -math.inf
    repetition, presence = params.repetition_penalty, params.presence_penalty
    frequency = params.frequency_penalty
    if (repetition, presence, frequency) == (1.0, 0.0, 0.0):
        return logits_RV
    counts = Counter[int]()
    for row_V, token in zip(logits_RV, text.output, strict=True):
        seen = sorted({*text.prompt, *counts})
        values = row_V[seen]
        row_V[seen] = torch.where(values > 0, values / repetition, values * repetition)
        for other, count in counts.items():
            row_V[other] -= presence + frequency * count
        counts[token] += 1
    return logits_RV


def filtered(logits_RV: Tensor, params: SamplingParams) -> Tensor:
    """p after temperature, min-p, top-k, top-p; ties at a threshold stay. One-hot at T = 0."""
    if params.temperature == 0:
        return torch.nn.functional.one_hot(logits_RV.argmax(dim=1), logits_RV.shape[1]).double()
    x_RV = logits_RV / params.temperature
    least_R = x_RV.amax(dim=1) + (math.log(params.min_p) if params.min_p > 0 else -math.inf)
    x_RV = x_RV.masked_fill(x_RV < least_R[:, None], -math.inf)
    if 0 < params.top_k < x_RV.shape[1]:
        kth_R1 = x_RV.topk(params.top_k, dim=1).values[:, -1:]
        x_RV = x_RV.masked_fill(x_RV < kth_R1, -math.inf)
    if params.top_p < 1:
        ordered_RV = x_RV.sort(dim=1, descending=True).values
        mass_RV = ordered_RV.softmax(dim=1)
        inside_RV = mass_RV.cumsum(dim=1) - mass_RV < params.top_p
        edge_R1 = ordered_RV.masked_fill(~inside_RV, math.inf).amin(dim=1, keepdim=True)
        x_RV = x_RV.masked_fill(x_RV < edge_R1, -math.inf)
    return x_RV.softmax(dim=1)


def ranks(p_RV: Tensor, output: Ids, generator: torch.Generator) -> Tensor:
    """Randomised probability integral transform: uniform on [0, 1) if tokens come from p; [R].

    A rank is the mass of likelier tokens plus a random share of the token's own. A wrong verifier
    moves mass between likely tokens and unlikely ones. A token without mass gets exactly 1.
    """
    index_R1 = torch.tensor(output)[:, None]
    own_R1 = p_RV.gather(1, index_R1)
    id_V = torch.arange(p_RV.shape[1])
    before_RV = (p_RV > own_R1) | ((p_RV == own_R1) & (id_V < index_R1))
    above_R = (p_RV * before_RV).sum(dim=1)
    share_R = torch.rand(len(p_RV), dtype=torch.float64, generator=generator)
    ranked_R = above_R + share_R * own_R1[:, 0]
    return torch.where(own_R1[:, 0] > 0, ranked_R.clamp(max=1 - 1e-12), 1.0)

"""An independent copy of the target, which shares only the checkpoint with the engine.

It has the checkpoint's module with eager attention, and edits and filters of its own.
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
_LIKELY = 32  # number of likeliest tokens of a row that `rounding` looks at
# Models with fewer parameters use one thread. On busy cores, for example next to the server under
# audit, two OpenMP threads spent 22 s of CPU time on work that one thread does in 1.5 s: with 15M
# parameters each thread has too little to do between two barriers.
_SMALL = 100_000_000
# Sampling parameters that the reference lacks, so that they would look like bugs of the subject.
_UNKNOWN = ("structured_outputs", "bad_words", "min_tokens")


class Text(NamedTuple):
    """A prompt, the tokens generated after it, and the engine's trace of these tokens."""

    prompt: list[int]
    output: list[int]
    trace: Sequence[Any] = ()


class Reference:
    """A checkpoint's own probabilities, computed in float32 on the CPU.

    Args:
        round_inputs: whether linear layers round their inputs to eight bits, which is part of the
            definition of a model with quantised weights.
        plain_head: whether the output layer's inputs are not rounded, even with `round_inputs`.

    Raises:
        CheckpointError, UnsupportedModelError: see `load_plain`.
    """

    def __init__(
        self,
        model: str,
        revision: str | None = None,
        *,
        round_inputs: bool = False,
        plain_head: bool = False,
    ) -> None:
        self.module: Any = load_plain(resolve_checkpoint(model, revision=revision))
        not_rounded = self.module.get_output_embeddings() if plain_head else None
        for layer in self.module.modules() if round_inputs else ():
            if isinstance(layer, torch.nn.Linear) and layer is not not_rounded:
                layer.register_forward_pre_hook(lambda _, inputs: (round_rows(inputs[0]),))
        eos = self.module.generation_config.eos_token_id
        self.stop_ids = [*eos] if isinstance(eos, list) else [eos]
        self.vocabulary: int = self.module.config.get_text_config().vocab_size
        self._threads = 1 if self.module.num_parameters() < _SMALL else torch.get_num_threads()

    def logits(self, texts: Sequence[Text]) -> list[Tensor]:
        """The raw logits from which each text's generated tokens are drawn, float32 [R, V]."""
        rows: list[Tensor] = []
        torch.set_num_threads(self._threads)  # an engine sets its own number for each step
        for start in range(0, len(texts), _BATCH):
            part = texts[start : start + _BATCH]
            ids = [[*text.prompt, *text.output][:-1] for text in part]
            longest = max(map(len, ids))
            padded = torch.tensor([[*line, *[0] * (longest - len(line))] for line in ids])
            with torch.inference_mode():  # attention is causal: padding after a text has no effect
                logits = self.module(padded, use_cache=False).logits
            for text, text_logits in zip(part, logits, strict=True):
                first = len(text.prompt) - 1
                rows.append(text_logits[first : first + len(text.output)].float())
        return rows

    def rounding(self, prompts: Sequence[list[int]]) -> float:
        """The standard deviation of the change of likely tokens' logits by bfloat16.

        Only weights and outputs of modules are rounded, and all arithmetic is in float32: the
        result is the same on each machine.
        """
        texts = [Text(ids, [0]) for ids in prompts]
        original, exact = self.module, self.logits(texts)
        self.module = copy.deepcopy(original)
        for parameter in self.module.parameters():
            parameter.data = _bfloat16(parameter.data)
        for module in self.module.modules():
            module.register_forward_hook(lambda module, inputs, output: _bfloat16(output))
        try:
            rounded = self.logits(texts)
        finally:
            self.module = original
        variances = []
        for exact_1V, rounded_1V in zip(exact, rounded, strict=True):
            likely = exact_1V[0].topk(min(_LIKELY, self.vocabulary)).indices
            variances.append((rounded_1V - exact_1V)[0, likely].var(correction=0))
        return float(torch.stack(variances).mean().sqrt())

    def probabilities(self, texts: Sequence[Text], params: SamplingParams) -> list[Tensor]:
        """The distributions of each text's tokens, edited and filtered: float64 [R, V]."""
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
    """Logits after bias, allowed tokens, and penalties for the tokens before each row."""
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
        for earlier, count in counts.items():
            row_V[earlier] -= presence + frequency * count
        counts[token] += 1
    return logits_RV


def filtered(logits_RV: Tensor, params: SamplingParams) -> Tensor:
    """The distributions after temperature, min-p, top-k and top-p; one-hot at T = 0.

    Tokens that tie with a filter's threshold are kept.
    """
    if params.temperature == 0:
        return torch.nn.functional.one_hot(logits_RV.argmax(dim=1), logits_RV.shape[1]).double()
    x_RV = logits_RV / params.temperature
    threshold_R = x_RV.amax(dim=1) + (math.log(params.min_p) if params.min_p > 0 else -math.inf)
    x_RV = x_RV.masked_fill(x_RV < threshold_R[:, None], -math.inf)
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
    """The tokens' ranks in their distributions, [R]: uniform on [0, 1) if tokens come from p.

    A rank is the mass of all likelier tokens plus a random share of the token's own mass (a
    randomised probability integral transform). A token without mass has the rank 1.
    """
    index_R1 = torch.tensor(output)[:, None]
    token_p_R1 = p_RV.gather(1, index_R1)
    id_V = torch.arange(p_RV.shape[1])
    is_before_RV = (p_RV > token_p_R1) | ((p_RV == token_p_R1) & (id_V < index_R1))
    mass_before_R = (p_RV * is_before_RV).sum(dim=1)
    share_R = torch.rand(len(p_RV), dtype=torch.float64, generator=generator)
    rank_R = mass_before_R + share_R * token_p_R1[:, 0]
    return torch.where(token_p_R1[:, 0] > 0, rank_R.clamp(max=1 - 1e-12), 1.0)

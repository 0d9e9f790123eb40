"""A language so simple that what a request must be given is known without an engine.

The logits of a position are a function of all tokens before it; a request's tokens are drawn from
them, one by one, by the fp64 oracle with the request's own noise. The rule `coupled` (or T=0) gives
the same tokens whatever was drafted, so this is the whole text, with and without speculation. How
many tokens are drafted, and how many of them are right, is a function of the tokens before, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from foretoken.engine.request import Request
from foretoken.ops import TARGET, Noise, Rows, Rule, SlotParams, get_backend
from foretoken.sampling.noise_key import to_int64

VOCABULARY = 5  # few, so that requests share outputs
MOST_DRAFTS = 5
WRONG = 4  # a draft that is never accepted: the target never says it


def naive_logits(tokens: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """float32 [VOCABULARY] after these tokens; another token anywhere gives other logits."""
    bits = hash(tokens)
    return np.array([*((bits >> 3 * v & 7) / 2 for v in range(WRONG)), -1e4], dtype=np.float32)


class NaiveTokenizer:
    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(97 + i) for i in ids)


class Truth:
    """The text of one sample, without an end; tokens are drawn when they are first asked for."""

    def __init__(self, prompt: tuple[int, ...], key: int, asked: tuple[Any, ...]) -> None:
        self.tokens = prompt
        self.num_prompt = len(prompt)
        temperature, self.bias, self.frequency, self.min_tokens, self.stop_ids = asked
        self.params = SlotParams(
            key_S=torch.tensor([to_int64(key)]), temperature_S=torch.tensor([temperature]),
            top_k_S=torch.zeros(1, dtype=torch.int64), top_p_S=torch.ones(1),
            min_p_S=torch.zeros(1), rule_S=torch.tensor([int(Rule.COUPLED)]),
        )  # fmt: skip

    def upto(self, length: int) -> tuple[int, ...]:
        while len(self.tokens) < length:
            self.tokens += (self._draw(),)
        return self.tokens[:length]

    def _draw(self) -> int:
        logits, output = naive_logits(self.tokens), self.tokens[self.num_prompt :]
        for token, bias in self.bias:
            logits[token] += bias
        for token in set(output):
            logits[token] -= self.frequency * output.count(token)
        if len(output) < self.min_tokens:
            logits[list(self.stop_ids)] = -np.inf
        first, position = torch.zeros(1, dtype=torch.int64), torch.tensor([len(self.tokens)])
        streams = TARGET
        row = torch.from_numpy(logits)[None]
        drawn = get_backend("reference").sample(
            Rows(row, self.params, first), Noise(position, first, streams)
        )
        return int(drawn)

    def drafts(self, known: int, most: int) -> list[int]:
        bits = hash(self.upto(known)) >> 20
        count, right = min(bits % (MOST_DRAFTS + 2), most), (bits >> 10) % (MOST_DRAFTS + 2)
        tokens = self.upto(known + right)
        return [tokens[known + i] if i < right else WRONG for i in range(count)]

    def decisions(self, max_drafts: int, limit: int) -> list[tuple[int, int]]:
        """(known tokens, drafts) of every decision up to the one that reaches `limit` tokens."""
        known, made = self.num_prompt, [(self.num_prompt, 0)]
        known += 1
        while known < limit:
            drafts = self.drafts(known, min(max_drafts, limit - known - 1))
            made.append((known, len(drafts)))
            known += 1 + (drafts.index(WRONG) if WRONG in drafts else len(drafts))
        return made


@lru_cache(4096)
def _truth(prompt: tuple[int, ...], key: int, asked: tuple[Any, ...]) -> Truth:
    return Truth(prompt, key, asked)


def truth_of(request: Request) -> Truth:
    params = request.params
    bias = tuple((params.logit_bias or {}).items())
    asked = (params.temperature, bias, params.frequency_penalty, params.min_tokens)
    stops = tuple(sorted(request.stop_ids))
    return _truth(tuple(request.group.prompt_ids), request.key, (*asked, stops))


def ending(request: Request) -> tuple[list[int], str, str, str | int | None]:
    """How a sample ends that is not aborted: (output ids, text, finish reason, stop reason)."""
    params, truth = request.params, truth_of(request)
    tokens = truth.upto(request.limit)[truth.num_prompt :]
    for count in range(max(params.min_tokens, 1), len(tokens) + 1):
        output, text = list(tokens[:count]), said(tokens[:count])
        if output[-1] in request.stop_ids:
            return output, text[:-1], "stop", output[-1]
        ends = [stop for stop in params.stop or () if text.endswith(stop)]
        if ends:  # the one that begins first
            longest = max(ends, key=len)
            return output, text.removesuffix(longest), "stop", longest
    return list(tokens), said(tokens), "length", None


def said(tokens: Sequence[int]) -> str:
    return NaiveTokenizer().decode(tokens)


def logprob_of(tokens: Sequence[int], at: int) -> float:
    logits = naive_logits(tuple(tokens[:at])).astype(np.float64)
    return float(logits[tokens[at]] - np.log(np.exp(logits).sum()))

"""What the requests of a batch are: prompts of an exact length, and parameters for each."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from foretoken.engine.engine import Engine
from foretoken.errors import ConfigError
from foretoken.lab.bench.options import BenchOptions
from foretoken.lab.workloads import heldout
from foretoken.sampling.params import SamplingParams

Prompts = list[list[int]]


class Workload:
    """Draws the batches of a benchmark, the same ones for the same options.

    Every run has prompts of its own, so that no run finds the keys and values of another in the
    cache; plain and speculative runs that are compared have the same.

    Raises:
        ConfigError: a request would not fit the model, or there is no such held-out text.
    """

    def __init__(self, options: BenchOptions, params: SamplingParams, engine: Engine) -> None:
        self._options = options
        self._params = params
        length, limit = options.input_len + options.output_len, engine.limits.max_model_len
        if length > limit:
            bound = f"at most {limit}, the longest prompt + output of this model"
            raise ConfigError("input_len + output_len", length, bound)
        special = set(getattr(engine.tokenizer, "all_special_ids", ()))
        self._ids = [i for i in range(engine.limits.vocab_size) if i not in special]
        self._text: list[int] = []
        if options.prompts == "heldout":
            self._text = _heldout_ids(engine, options.input_len)

    def prompts(self, batch: int, repeat: int) -> Prompts:
        """`batch` prompts of `input_len` token ids each; `repeat` counts the runs of a batch."""
        length = self._options.input_len
        chance = random.Random(f"{self._options.seed} {batch} {repeat}")
        if not self._text:
            return [chance.choices(self._ids, k=length) for _ in range(batch)]
        starts = [chance.randrange(len(self._text) - length + 1) for _ in range(batch)]
        return [self._text[start : start + length] for start in starts]

    def params(self, batch: int, repeat: int, num_drafts: int | None) -> Sequence[SamplingParams]:
        """Parameters of each request.

        With one seed for all, requests would share their noise, and accept and reject together.

        Args:
            num_drafts: K; None: the engine's.
        """
        first = self._options.seed + repeat * batch
        return [
            replace(
                self._params,
                max_tokens=self._options.output_len,
                ignore_eos=True,
                seed=first + i,
                num_speculative_tokens=num_drafts,
            )
            for i in range(batch)
        ]


def _heldout_ids(engine: Engine, length: int) -> list[int]:
    """All held-out texts, prompts and how they go on, as one run of token ids."""
    if engine.tokenizer is None:
        remedy = "Use `random`, or give a tokenizer."
        raise ConfigError("prompts", "heldout", "`random` for a model without tokenizer", remedy)
    texts = [item.prompt + item.reference for item in heldout()]
    ids = [i for text in texts for i in engine.tokenizer.encode(text)]
    if length > len(ids):
        raise ConfigError("input_len", length, f"at most {len(ids)}, the held-out tokens there are")
    return ids

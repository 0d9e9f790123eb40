"""An OpenAI-compatible server against the target at hand: nothing is asked of it but texts.

Under a small nucleus a few tokens have few outcomes, and the reference enumerates them all. Another
engine's arithmetic differs without any bug, so what is refuted is that its distribution lies within
`delta` of the reference's, and `delta` is measured: twice as far as the reference itself moves at
most in other arithmetics.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from foretoken.errors import ConfigError
from foretoken.lab.audit.engine import classify
from foretoken.lab.audit.evidence import Model
from foretoken.lab.audit.reference import Reference, Text, check_known, filtered
from foretoken.lab.audit.subjects import Checks, StoppedError, Subject
from foretoken.lab.bench.load import RequestFailedError, ServerGoneError
from foretoken.lab.bench.server import Server
from foretoken.lab.workloads import heldout
from foretoken.models.tokenizer import decode_after, encode_after
from foretoken.sampling.params import SamplingParams

LENGTH, PROMPT_TOKENS, CANDIDATES = 4, 16, 24
Path = tuple[int, ...]
Law = dict[str, Any]
"""Text -> its probability, and that under each of `IGNORED`, float64 [1 + bugs]."""
Chosen = tuple[list[int], SamplingParams, Law]
MOST = 15  # outcomes of a prompt; one more cell is for everything else
MARGIN = 0.01  # nuclei whose edge is nearer may differ between two arithmetics
IGNORED: dict[str, dict[str, Any]] = {
    "temperature_ignored": {"temperature": 1.0},
    "nucleus_leaks": {"top_p": 1.0},
}
ARITHMETICS = tuple(product((torch.bfloat16, torch.float16), (True, False)))
SPARE = 2.0  # other kernels of a dtype move it elsewhere, by about as much
# What servers may set by a model's generation_config, or by defaults of their own.
NEUTRAL = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
AT_ONCE, GIVE_UP = 32, 5
SILENCE = 60.0  # seconds without an answer after which a server is given up
DRAWS = 6_000
GREEDY_TOKENS, GREEDY_PROMPTS = 16, 8
TIE = 4 * 2**-8  # of two logits, relative: 4 units in the last place of bfloat16


class Client:
    """Completions as texts; failures are counted by what they were.

    Args:
        url: of a server; key: sent as a bearer token, if given.
    """

    def __init__(self, url: str, key: str | None) -> None:
        self.server = Server(url, SamplingParams(), api_key=key, timeout=SILENCE)
        asyncio.run(self.server.prepare())
        self.neutral = NEUTRAL if asyncio.run(self.server.takes(**NEUTRAL)) else {}
        self.failures, self._in_a_row, self._heard = Counter[str](), 0, time.monotonic()

    def texts(self, prompt: str, count: int, **asked: Any) -> list[str]:
        """`count` completions of a prompt, none if the request fails; `StoppedError`."""
        body = {"model": self.server.model, "prompt": prompt, "n": count, **self.neutral, **asked}
        try:
            texts = self._texts(asyncio.run(self.server.call("POST", "/v1/completions", body)))
        except ServerGoneError as error:
            raise StoppedError(f"the server stopped: {error}") from None
        except RequestFailedError as error:
            self.failures[str(error)] += 1
            self._in_a_row += 1
            if self._in_a_row == GIVE_UP or time.monotonic() - self._heard > SILENCE:
                why = f"the server gave no text {self._in_a_row} times in a row ({error})"
                raise StoppedError(why) from None
            return []
        self._in_a_row, self._heard = 0, time.monotonic()
        return texts

    def _texts(self, answered: tuple[int, bytes]) -> list[str]:
        status, answer = answered
        if status != 200:
            raise RequestFailedError(f"status {status}")
        try:
            return [str(choice["text"]) for choice in json.loads(answer)["choices"]]
        except ValueError:
            raise RequestFailedError("the answer is no JSON") from None
        except (KeyError, TypeError):
            raise RequestFailedError("the answer has no texts") from None


class Asked(NamedTuple):
    """A prompt, as text and as tokens, how it is completed, and the cell of each text."""

    prompt: str
    ids: list[int]
    params: SamplingParams
    cells: dict[str, int]
    model: Model


class ServerAudit:
    """What is asked of a server.

    Args:
        params: temperature; the nuclei are ours.
        reference: of the checkpoint that the server claims to serve; tokenizer: its own.
    """

    def __init__(
        self, client: Client, reference: Reference, tokenizer: Any, params: SamplingParams
    ) -> None:
        check_known(params)
        self.client, self.reference, self.tokenizer = client, reference, tokenizer
        self.asked = self._choose(params.temperature or 1.0)

    def _choose(self, heat: float) -> list[Asked]:
        """Prompts with few outcomes, the most evenly likely; one of three at half the heat."""
        known = self.prompts = self._readable()
        warm = SamplingParams(temperature=heat, top_p=0.6, max_tokens=LENGTH)
        cool = replace(warm, temperature=heat / 2, top_p=0.8)
        chosen = [*self._most_even(known, warm)[:2], *self._most_even(known, cool)[:1]]
        if not chosen:
            raise ConfigError("model", "this target", "one with prompts of few outcomes")
        asked = []
        moved = [self._moved(chosen, *how) for how in ARITHMETICS]
        for number, (ids, params, law) in enumerate(chosen, 1):
            delta = SPARE * max(how[number - 1] for how in moved)
            rows = np.array([*law.values(), np.zeros(1 + len(IGNORED))]).T
            rows[:, -1] = np.maximum(1 - rows.sum(axis=1), 0) * (np.arange(len(rows)) > 0)
            null, *bugs = rows / rows.sum(axis=1, keepdims=True)
            model = Model(f"prompt {number}", null, dict(zip(IGNORED, bugs, strict=True)))
            cells = {text: cell for cell, text in enumerate(law)}
            prompt = self.tokenizer.decode(ids)
            asked.append(Asked(prompt, ids, params, cells, model._replace(delta=delta)))
        return asked

    def _moved(self, chosen: Sequence[Chosen], *how: Any) -> list[float]:
        """TV of each law to that in another arithmetic."""
        with self.reference.rounded(*how):
            others = [self._laws([ids], params, 0.0)[0] or {} for ids, params, _ in chosen]
        return [
            sum(abs(law.get(text, [0])[0] - other.get(text, [0])[0]) for text in law | other) / 2
            for (_, _, law), other in zip(chosen, others, strict=True)
        ]

    def _readable(self) -> list[list[int]]:
        """Prompts of which the server will read the same tokens."""
        encode, decode = self.tokenizer.encode, self.tokenizer.decode
        prompts = (encode(item.prompt)[:PROMPT_TOKENS] for item in heldout(CANDIDATES))
        return [ids for ids in prompts if encode(decode(ids)) == ids]

    def _most_even(self, known: list[list[int]], params: SamplingParams) -> list[Chosen]:
        laws = zip(known, self._laws(known, params, MARGIN), strict=True)
        found = [(ids, params, law) for ids, law in laws if law is not None]
        return sorted(found, key=lambda item: max(chance[0] for chance in item[2].values()))

    def _laws(
        self, prompts: list[list[int]], params: SamplingParams, margin: float
    ) -> list[Law | None]:
        """Of the next tokens; None if they are too many, or a nucleus' edge too near."""
        others = [replace(params, **change) for change in IGNORED.values()]
        live: dict[int, dict[Path, Any]] = {
            i: {(): np.ones(1 + len(others))} for i in range(len(prompts))
        }
        for _ in range(LENGTH):
            at = [(i, path) for i, paths in live.items() for path in paths]
            rows = self.reference.logits([Text(prompts[i], [*path, 0]) for i, path in at])
            longer: dict[int, dict[Path, Any]] = {i: {} for i in live}
            for (i, path), logits in zip(at, rows, strict=True):
                row_1V = logits[-1:].double()
                if margin and near_edge(row_1V, params, margin):
                    longer.pop(i, None)
                if i in longer:
                    p = np.stack([filtered(row_1V, each)[0].numpy() for each in (params, *others)])
                    for token in p[0].nonzero()[0].tolist():
                        longer[i][(*path, token)] = live[i][path] * p[:, token]
            live = {i: paths for i, paths in longer.items() if 0 < len(paths) <= MOST}
        return [self._law(prompts[i], live.get(i, {})) for i in range(len(prompts))]

    def _law(self, ids: list[int], paths: dict[Path, Any]) -> Law | None:
        law: Law = {}
        for path, chance in paths.items():
            if set(self.reference.stop_ids) & set(path):
                return None
            text = decode_after(self.tokenizer, ids, path)
            law[text] = law.get(text, 0.0) + chance
        return law or None

    def subject(self, name: str) -> Subject:
        """Texts of each prompt."""
        models = [asked.model for asked in self.asked]
        return Subject(name, models, self._draw, self.checks, AT_ONCE, DRAWS, self.notes)

    def _draw(self, number: int, trials: int, wave: int) -> tuple[Any, ...]:
        asked = self.asked[number]
        given = {
            name: getattr(asked.params, name) for name in ("max_tokens", "temperature", "top_p")
        }
        texts = self.client.texts(asked.prompt, AT_ONCE, **given)
        known = asked.cells
        return (np.array([known.get(text, len(known)) for text in texts], dtype=np.int64),)

    def notes(self) -> list[str]:
        """What was allowed for, and what failed."""
        deltas = ", ".join(f"{asked.model.delta:.4f}" for asked in self.asked)
        lines = [f"Allowed: TV <= {deltas} per prompt, twice what other arithmetics move it."]
        if not self.client.neutral:
            lines.append(f"It refuses {', '.join(NEUTRAL)}: it may apply some of its own.")
        if self.client.failures:
            failed = ", ".join(f"{what} ({n})" for what, n in self.client.failures.items())
            lines.append(f"Requests that failed: {failed}.")
        return lines

    def checks(self) -> Checks:
        """Temperature 0, and texts by seed again without drafts."""
        broken, lines = [], ["Not testable against a server: u = 0, tails beyond 24 bits."]
        for check in (self._greedy, self._replay):
            bug, line = check()
            broken += [bug] if bug else []
            lines.append(line)
        return broken, lines

    def _greedy(self) -> tuple[str | None, str]:
        """Texts are read as their tokens; those that look wrong token by token, for the words of a
        text may be other tokens than those that were generated."""
        params, gaps = SamplingParams(temperature=0.0), list[float]()
        asked = {"max_tokens": GREEDY_TOKENS, "temperature": 0.0}
        for ids in self.prompts[:GREEDY_PROMPTS]:
            for text in self.client.texts(self.tokenizer.decode(ids), 1, **asked):
                tokens = encode_after(self.tokenizer, ids, text) or [*self.reference.stop_ids[:1]]
                said = Text(ids, tokens)
                wrong, _ = classify([said], self.reference.logits([said]), params, 2**-23)
                gaps.append(self._first_gap(ids, text) or 0.0 if wrong else 0.0)
        ties, bugs = sum(0 < gap <= TIE for gap in gaps), sum(gap > TIE for gap in gaps)
        equal = len(gaps) - ties - bugs
        line = (
            f"Temperature 0: {equal} of {len(gaps)} texts are the target's, {ties} part at a "
            f"numeric tie (4 ulp of bfloat16), {bugs} elsewhere: bugs."
        )
        return ("greedy_differs" if bugs else None), line

    def _first_gap(self, ids: list[int], text: str) -> float | None:
        """Gap of the two best logits, relative, where a text leaves the target's; None: nowhere."""
        output = list[int]()
        for _ in range(GREEDY_TOKENS):
            (logits,) = self.reference.logits([Text(ids, [*output, 0])])
            best, tokens = logits[-1].topk(2)
            output.append(int(tokens[0]))
            mine = decode_after(self.tokenizer, ids, output)
            if output[-1] in self.reference.stop_ids:
                return None
            if not mine.endswith("\ufffd") and not text.startswith(mine):
                return float((best[0] - best[1]) / best[0].abs().clamp(min=1e-9))
        return None

    def _replay(self) -> tuple[str | None, str]:
        """`coupled` emits one text for one seed, whatever is drafted: equality, not a test."""
        if not self.client.server.speculates:
            why = "the server takes no field `speculative`, or drafts nothing"
            return None, f"By seed again without drafts: not testable, {why}."
        asked = {"max_tokens": GREEDY_TOKENS, "temperature": 1.0}
        equal = 0
        for number, ids in enumerate(self.prompts[:GREEDY_PROMPTS]):
            drafted, plain = (
                self.client.texts(
                    self.tokenizer.decode(ids), 1, **asked, seed=number,
                    speculative={"rule": "coupled", "enabled": enabled},
                )
                for enabled in (True, False)
            )  # fmt: skip
            equal += bool(drafted) and drafted == plain
        num = len(self.prompts[:GREEDY_PROMPTS])
        line = f"`coupled` by seed, again without drafts: {equal} of {num} texts are equal."
        return ("replay_differs" if equal < num - 1 else None), line


def near_edge(row_1V: Tensor, params: SamplingParams, margin: float) -> bool:
    """Whether rounding could move a token into the nucleus or out of it."""
    plain = filtered(row_1V, replace(params, top_p=1.0))[0]
    mass = plain.sort(descending=True).values.cumsum(dim=0)
    return bool((mass - params.top_p).abs().min() < margin)

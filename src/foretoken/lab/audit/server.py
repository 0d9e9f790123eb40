"""An OpenAI-compatible server against the target at hand: nothing is asked of it but texts.

Under a small nucleus a few tokens have few outcomes, and the reference enumerates them all. Another
engine's arithmetic differs without any bug. What is allowed for is noise of each logit, independent
and normal, of standard deviation `SPARE` times what bfloat16 does to this target in
`Reference.rounding`. Noise cannot make an impossible text possible: prompts are chosen for which no
token is so near the edge of a nucleus that noise would take it out or bring it in. Texts outside of
the nuclei are allowed `OTHER` of all, and the distribution of those inside may be as far from the
reference's as noise moves it in 99 % of `NOISES` trials, `delta`.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from foretoken.errors import ConfigError
from foretoken.lab.audit.engine import classify
from foretoken.lab.audit.evidence import Model, Shown
from foretoken.lab.audit.reference import Reference, Text, check_known, filtered
from foretoken.lab.audit.subjects import Checks, StoppedError, Subject, checked
from foretoken.lab.bench.load import RequestFailedError, ServerGoneError
from foretoken.lab.bench.server import Server
from foretoken.lab.workloads import heldout
from foretoken.models.tokenizer import decode_after, encode_after
from foretoken.sampling.params import SamplingParams

LENGTH, PROMPT_TOKENS, CANDIDATES = 4, 16, 32  # candidates are looked at together
WARM, COOL = (1.0, (0.6, 0.65, 0.7, 0.75)), (0.5, (0.75, 0.8, 0.85, 0.9))
"""Parts of the temperature, and the nuclei that are tried at them."""
PER_HEAT = 2  # prompts
EVEN = 0.6  # probability of the likeliest text of a prompt, at most if there are enough prompts
Path = tuple[int, ...]
Law = dict[str, Any]
"""Text -> its probability, that under each of `IGNORED`, those under noise: [1 + bugs + NOISES]."""
Chosen = tuple[list[int], SamplingParams, Law]
MOST = 15  # outcomes of a prompt; one more cell is for everything else
IGNORED: dict[str, dict[str, Any]] = {
    "temperature_ignored": {"temperature": 1.0},
    "nucleus_ignored": {"top_p": 1.0},
}
LEAK = 0.05  # of texts, if drafts are tested without the nucleus: "nucleus_leaks"
# PyTorch's own bfloat16 moves logits of the embedded model 1.4 times as far as `rounding`, which
# leaves out what is rounded inside of modules; float16 an eighth of it.
SPARE = 2.0
NOISES = 1000
EDGE = 3.0  # standard deviations by which two logits, or a nucleus, may move towards each other
OTHER = 1e-3  # of a right server's texts may be anything
# What servers may set by a model's generation_config, or by defaults of their own.
NEUTRAL = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
AT_ONCE, GIVE_UP = 32, 5
SILENCE = 60.0  # seconds without an answer after which a server is given up
DRAWS = 6_000
GREEDY_TOKENS, GREEDY_PROMPTS = 16, 8


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


def _shown(prompt: str, params: SamplingParams, num: int) -> Shown:
    """What a plot says of the texts after a prompt."""
    about = (
        f"Texts of {LENGTH} tokens after …{prompt[-24:]!r} at temperature {params.temperature:g}, "
        f"top_p {params.top_p:g}. The target's share of each is computed from its checkpoint; the "
        "range allows for other arithmetic, too."
    )
    return Shown("number of the text", about, [*map(str, range(1, num + 1)), "others"])


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
        self.prompts = self._readable()
        self.noise = SPARE * reference.rounding(self.prompts[:CANDIDATES])
        self.reach = EDGE * math.sqrt(2) * self.noise  # of two logits against each other
        self._rows: dict[tuple[int, Path], Tensor] = {}
        self.asked = self._choose(params.temperature or 1.0)

    def _choose(self, heat: float) -> list[Asked]:
        """Prompts with few outcomes, the most evenly likely; some at half the heat."""
        chosen = [*self._most_even(heat, *WARM), *self._most_even(heat, *COOL)]
        self._rows.clear()
        if not chosen:
            raise ConfigError("model", "this target", "one with prompts of few outcomes")
        asked = []
        for number, (ids, params, law) in enumerate(chosen, 1):
            every = np.stack([*law.values()], axis=1)
            rows, noisy = every[: 1 + len(IGNORED)], every[1 + len(IGNORED) :]
            delta = float(np.quantile(np.abs(noisy - rows[0]).sum(axis=1) / 2, 0.99))
            others = np.maximum(1 - rows.sum(axis=1, keepdims=True), 0)
            others[0] = OTHER
            rows = np.hstack([rows, others])
            null, *bugs = rows / rows.sum(axis=1, keepdims=True)
            named = dict(zip(IGNORED, bugs, strict=True))
            named["nucleus_leaks"] = (1 - LEAK) * null + LEAK * np.eye(len(null))[-1]
            cells = {text: cell for cell, text in enumerate(law)}
            prompt = self.tokenizer.decode(ids)
            model = Model(
                f"prompt {number}", null, named, delta=delta, closed=True,
                shown=_shown(prompt, params, len(cells)),
            )  # fmt: skip
            asked.append(Asked(prompt, ids, params, cells, model))
        return asked

    def _readable(self) -> list[list[int]]:
        """Prompts of which the server will read the same tokens."""
        encode, decode = self.tokenizer.encode, self.tokenizer.decode
        prompts = (encode(item.prompt)[:PROMPT_TOKENS] for item in heldout())
        return [ids for ids in prompts if encode(decode(ids)) == ids]

    def _most_even(self, heat: float, part: float, nuclei: Sequence[float]) -> list[Chosen]:
        """Laws of several prompts: the first that are even enough, or the most even of all."""
        found: list[Chosen] = []
        for start in range(0, len(self.prompts), CANDIDATES):
            numbers = range(start, min(start + CANDIDATES, len(self.prompts)))
            for top_p in nuclei:
                params = SamplingParams(temperature=heat * part, top_p=top_p, max_tokens=LENGTH)
                laws = zip(numbers, self._laws(numbers, params), strict=True)
                found += [(self.prompts[i], params, law) for i, law in laws if law is not None]
            found.sort(key=lambda item: max(chance[0] for chance in item[2].values()))
            best = {tuple(ids): (ids, params, law) for ids, params, law in reversed(found)}
            found = [*reversed(best.values())]
            if sum(max(c[0] for c in law.values()) <= EVEN for *_, law in found) >= PER_HEAT:
                break
        return found[:PER_HEAT]

    def _laws(self, numbers: Sequence[int], params: SamplingParams) -> list[Law | None]:
        """Of the next tokens; None if they are too many, or the edge of a nucleus is too near."""
        others = [replace(params, **change) for change in IGNORED.values()]
        random = np.random.default_rng(0)
        live: dict[int, dict[Path, Any]] = {
            i: {(): np.ones(1 + len(others) + NOISES)} for i in numbers
        }
        for _ in range(LENGTH):
            at = [(i, path) for i, paths in live.items() for path in paths]
            longer: dict[int, dict[Path, Any]] = {i: {} for i in live}
            for (i, path), row_1V in zip(at, self._logits(at), strict=True):
                if near_edge(row_1V, params, self.reach):
                    longer.pop(i, None)
                if i in longer:
                    p = np.stack([filtered(row_1V, each)[0].numpy() for each in (params, *others)])
                    (tokens,) = p[0].nonzero()
                    noise = random.standard_normal((NOISES, len(tokens))) * self.noise
                    noisy = p[0, tokens] * np.exp(noise / params.temperature)
                    noisy /= noisy.sum(axis=1, keepdims=True)
                    chances = np.vstack([p[:, tokens], noisy]).T
                    for token, chance in zip(tokens.tolist(), chances, strict=True):
                        longer[i][(*path, token)] = live[i][path] * chance
            live = {i: paths for i, paths in longer.items() if 0 < len(paths) <= MOST}
        return [self._law(self.prompts[i], live.get(i, {})) for i in numbers]

    def _logits(self, at: Sequence[tuple[int, Path]]) -> list[Tensor]:
        """The row after each prompt and path, float64 [1, V]."""
        new = [key for key in at if key not in self._rows]
        texts = [Text(self.prompts[i], [*path, 0]) for i, path in new]
        for key, logits in zip(new, self.reference.logits(texts), strict=True):
            self._rows[key] = logits[-1:].clone()
        return [self._rows[key].double() for key in at]

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
        lines = [
            f"Allowed for other arithmetic: logits off by {self.noise:.3f} (standard deviation), "
            f"which is TV <= {deltas} per prompt, and {OTHER:.1%} of texts that cannot be."
        ]
        if not self.client.neutral:
            lines.append(f"It refuses {', '.join(NEUTRAL)}: it may apply some of its own.")
        if self.client.failures:
            failed = ", ".join(f"{what} ({n})" for what, n in self.client.failures.items())
            lines.append(f"Requests that failed: {failed}.")
        return lines

    def checks(self) -> Checks:
        """Temperature 0, and texts by seed again without drafts."""
        broken, lines = checked(self._greedy, self._replay)
        return broken, ["Not testable against a server: u = 0, tails beyond 24 bits.", *lines]

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
        bugs = sum(gap > self.reach for gap in gaps)
        ties = sum(gap > 0 for gap in gaps) - bugs
        equal = len(gaps) - ties - bugs
        line = (
            f"Temperature 0: {equal} of {len(gaps)} texts are the target's, {ties} part at a "
            f"numeric tie (logits within {self.reach:.2f}), {bugs} elsewhere: bugs."
        )
        return ("greedy_differs" if bugs else None), line

    def _first_gap(self, ids: list[int], text: str) -> float | None:
        """Gap of the two best logits where a text leaves the target's; None: nowhere."""
        output = list[int]()
        for _ in range(GREEDY_TOKENS):
            (logits,) = self.reference.logits([Text(ids, [*output, 0])])
            best, tokens = logits[-1].topk(2)
            output.append(int(tokens[0]))
            mine = decode_after(self.tokenizer, ids, output)
            if output[-1] in self.reference.stop_ids:
                return None
            if not mine.endswith("\ufffd") and not text.startswith(mine):
                return float(best[0] - best[1])
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


def near_edge(row_1V: Tensor, params: SamplingParams, reach: float) -> bool:
    """Whether a nucleus would be another one if two logits moved by `reach` against each other.

    It stays as it is if its last token stays likelier than the first one outside, if its mass stays
    at top_p or above, and its mass without the last one below. What `reach` in a logit can do to
    the mass m of a set is to add reach / temperature to log(m / (1 - m)).
    """
    p = filtered(row_1V, replace(params, top_p=1.0))[0].sort(descending=True).values
    mass, factor = p.cumsum(dim=0), math.exp(reach / params.temperature)
    last = int((mass - p < params.top_p).sum()) - 1
    without = float(mass[last] - p[last])
    beyond = float(p[last + 1 :].sum())
    most = params.top_p / (1 - params.top_p)
    return (
        bool((p[last] < p[last + 1 : last + 2] * factor).any())
        or without * factor >= most * (1 - without)
        or float(mass[last]) < most * beyond * factor
    )

"""An OpenAI-compatible server compared with the reference: the server is only asked for texts.

Under a small nucleus a few tokens have few outcomes, and the reference enumerates them all. Another
engine's arithmetic differs without any bug. The audit allows for independent normal noise of each
logit, with a standard deviation of `SPARE` times the effect of bfloat16 on this target
(`Reference.rounding`). Noise must not make an impossible text possible: prompts are chosen so that
no token is near enough to the edge of a nucleus for noise to take it out or bring it in. Texts
outside of the nuclei are allowed a share of `OTHER`. The distribution of texts inside may be as far
from the reference's as noise moves it in 99 % of `NOISES` trials; that distance is `delta`.
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
from foretoken.lab.audit.evidence import Model, PlotText
from foretoken.lab.audit.reference import Reference, Text, check_known, filtered
from foretoken.lab.audit.subjects import Checks, StoppedError, Subject, checked
from foretoken.lab.bench.load import RequestFailedError, ServerGoneError
from foretoken.lab.bench.server import Server
from foretoken.lab.workloads import heldout
from foretoken.models.tokenizer import decode_after, encode_after
from foretoken.sampling.params import SamplingParams

LENGTH, PROMPT_TOKENS, CANDIDATES = 4, 16, 32  # so many candidates are evaluated together
FULL, HALF = (1.0, (0.6, 0.65, 0.7, 0.75)), (0.5, (0.75, 0.8, 0.85, 0.9))
"""Factor of the temperature, and the nuclei that are tried with it."""
PROMPTS = 2  # for each factor
EVEN = 0.6  # the likeliest text of a prompt is no likelier, if there are enough such prompts
Path = tuple[int, ...]
Distribution = dict[str, Any]
"""text -> its probabilities [1 + bugs + NOISES]: true, under each of `IGNORED`, under noise."""
Candidate = tuple[list[int], SamplingParams, Distribution]
MOST = 15  # outcomes of a prompt; one more cell is for everything else
IGNORED: dict[str, dict[str, Any]] = {
    "temperature_ignored": {"temperature": 1.0},
    "nucleus_ignored": {"top_p": 1.0},
}
LEAK = 0.05  # share of other texts if drafts are tested without the nucleus: "nucleus_leaks"
# PyTorch's own bfloat16 moves logits of the embedded model 1.4 times as far as `rounding`, which
# leaves out rounding inside of modules; float16 moves them an eighth of that.
SPARE = 2.0
NOISES = 1000
EDGE = 3.0  # standard deviations by which two logits, or a nucleus, may move towards each other
OTHER = 1e-3  # share of a correct server's texts that may be anything
# Servers may set these by a model's generation_config, or by defaults of their own.
NEUTRAL = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
AT_ONCE, GIVE_UP = 32, 5  # texts per request; failures in a row that end the audit
SILENCE = 60.0  # seconds without an answer that end the audit
DRAWS = 6_000
GREEDY_TOKENS, GREEDY_PROMPTS = 16, 8


class Client:
    """Completions as texts; failures are counted by their reason.

    Args:
        url: of a server.
        key: sent as a bearer token, if given.
    """

    def __init__(self, url: str, key: str | None) -> None:
        self.server = Server(url, SamplingParams(), api_key=key, timeout=SILENCE)
        asyncio.run(self.server.prepare())
        self.neutral = NEUTRAL if asyncio.run(self.server.takes(**NEUTRAL)) else {}
        self.failures, self._in_a_row, self._heard = Counter[str](), 0, time.monotonic()

    def texts(self, prompt: str, count: int, **fields: Any) -> list[str]:
        """`count` completions of a prompt; empty if the request fails; raises `StoppedError`."""
        body = {"model": self.server.model, "prompt": prompt, "n": count, **self.neutral, **fields}
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


class ChosenPrompt(NamedTuple):
    """A prompt as text and as tokens, how it is completed, and the cell of each text."""

    prompt: str
    ids: list[int]
    params: SamplingParams
    cells: dict[str, int]
    model: Model


def _plot_text(prompt: str, params: SamplingParams, num: int) -> PlotText:
    about = (
        f"Texts of {LENGTH} tokens after …{prompt[-24:]!r} at temperature {params.temperature:g}, "
        f"top_p {params.top_p:g}. The target's share of each is computed from its checkpoint; the "
        "range allows for other arithmetic, too."
    )
    return PlotText("number of the text", about, [*map(str, range(1, num + 1)), "others"])


class ServerAudit:
    """The audit of a server.

    Args:
        params: temperature; the nuclei are chosen here.
        reference: of the checkpoint that the server claims to serve.
        tokenizer: of that checkpoint.
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
        self.chosen = self._choose(params.temperature or 1.0)

    def _choose(self, temperature: float) -> list[ChosenPrompt]:
        """Prompts with few, most evenly likely outcomes; some at half the temperature."""
        found = [*self._most_even(temperature, *FULL), *self._most_even(temperature, *HALF)]
        self._rows.clear()
        if not found:
            raise ConfigError("model", "this target", "one with prompts of few outcomes")
        chosen = []
        for number, (ids, params, distribution) in enumerate(found, 1):
            every = np.stack([*distribution.values()], axis=1)
            rows, noisy = every[: 1 + len(IGNORED)], every[1 + len(IGNORED) :]
            delta = float(np.quantile(np.abs(noisy - rows[0]).sum(axis=1) / 2, 0.99))
            others = np.maximum(1 - rows.sum(axis=1, keepdims=True), 0)
            others[0] = OTHER
            rows = np.hstack([rows, others])
            null, *bugs = rows / rows.sum(axis=1, keepdims=True)
            named = dict(zip(IGNORED, bugs, strict=True))
            named["nucleus_leaks"] = (1 - LEAK) * null + LEAK * np.eye(len(null))[-1]
            cells = {text: cell for cell, text in enumerate(distribution)}
            prompt = self.tokenizer.decode(ids)
            model = Model(
                f"prompt {number}", null, named, delta=delta, closed=True,
                shown=_plot_text(prompt, params, len(cells)),
            )  # fmt: skip
            chosen.append(ChosenPrompt(prompt, ids, params, cells, model))
        return chosen

    def _readable(self) -> list[list[int]]:
        """Prompts that the server will split into the same tokens."""
        encode, decode = self.tokenizer.encode, self.tokenizer.decode
        prompts = (encode(item.prompt)[:PROMPT_TOKENS] for item in heldout())
        return [ids for ids in prompts if encode(decode(ids)) == ids]

    def _most_even(
        self, temperature: float, factor: float, nuclei: Sequence[float]
    ) -> list[Candidate]:
        """The first candidates that are even enough, or the most even of all."""

        def likeliest(candidate: Candidate) -> float:
            return max(float(chance[0]) for chance in candidate[2].values())

        found: list[Candidate] = []
        for start in range(0, len(self.prompts), CANDIDATES):
            numbers = range(start, min(start + CANDIDATES, len(self.prompts)))
            for top_p in nuclei:
                heat = temperature * factor
                params = SamplingParams(temperature=heat, top_p=top_p, max_tokens=LENGTH)
                each = zip(numbers, self._distributions(numbers, params), strict=True)
                found += [(self.prompts[i], params, d) for i, d in each if d is not None]
            found.sort(key=likeliest)
            best = {tuple(candidate[0]): candidate for candidate in reversed(found)}
            found = [*reversed(best.values())]
            if sum(likeliest(candidate) <= EVEN for candidate in found) >= PROMPTS:
                break
        return found[:PROMPTS]

    def _distributions(
        self, numbers: Sequence[int], params: SamplingParams
    ) -> list[Distribution | None]:
        """Of the texts after prompts; None: too many texts, or a nucleus' edge is too near."""
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
        return [self._distribution(self.prompts[i], live.get(i, {})) for i in numbers]

    def _logits(self, at: Sequence[tuple[int, Path]]) -> list[Tensor]:
        """The row after each prompt and path, float64 [1, V]."""
        new = [key for key in at if key not in self._rows]
        texts = [Text(self.prompts[i], [*path, 0]) for i, path in new]
        for key, logits in zip(new, self.reference.logits(texts), strict=True):
            self._rows[key] = logits[-1:].clone()
        return [self._rows[key].double() for key in at]

    def _distribution(self, ids: list[int], paths: dict[Path, Any]) -> Distribution | None:
        found: Distribution = {}
        for path, chance in paths.items():
            if set(self.reference.stop_ids) & set(path):
                return None
            text = decode_after(self.tokenizer, ids, path)
            found[text] = found.get(text, 0.0) + chance
        return found or None

    def subject(self, name: str) -> Subject:
        models = [chosen.model for chosen in self.chosen]
        return Subject(name, models, self._draw, self.checks, AT_ONCE, DRAWS, self.notes)

    def _draw(self, number: int, trials: int, wave: int) -> tuple[Any, ...]:
        chosen = self.chosen[number]
        names = ("max_tokens", "temperature", "top_p")
        fields = {name: getattr(chosen.params, name) for name in names}
        texts, known = self.client.texts(chosen.prompt, AT_ONCE, **fields), chosen.cells
        return (np.array([known.get(text, len(known)) for text in texts], dtype=np.int64),)

    def notes(self) -> list[str]:
        """The allowance for other arithmetic, refused fields, failed requests."""
        deltas = ", ".join(f"{chosen.model.delta:.4f}" for chosen in self.chosen)
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
        broken, lines = checked(self._greedy, self._replay)
        return broken, ["Not testable against a server: u = 0, tails beyond 24 bits.", *lines]

    def _greedy(self) -> tuple[str | None, str]:
        """Encode each text and check its tokens; if they look wrong, compare it token by token with
        the reference's: a text may be encoded as other tokens than those generated."""
        params, gaps = SamplingParams(temperature=0.0), list[float]()
        fields = {"max_tokens": GREEDY_TOKENS, "temperature": 0.0}
        for ids in self.prompts[:GREEDY_PROMPTS]:
            for text in self.client.texts(self.tokenizer.decode(ids), 1, **fields):
                tokens = encode_after(self.tokenizer, ids, text) or [*self.reference.stop_ids[:1]]
                encoded = Text(ids, tokens)
                wrong, _ = classify([encoded], self.reference.logits([encoded]), params, 2**-23)
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
        """Gap of the two best logits where a text departs from the target's; None: it does not."""
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
        """`coupled` emits one text for one seed, whatever the drafts: texts must be equal."""
        if not self.client.server.speculates:
            why = "the server takes no field `speculative`, or drafts nothing"
            return None, f"By seed again without drafts: not testable, {why}."
        fields = {"max_tokens": GREEDY_TOKENS, "temperature": 1.0}
        equal = 0
        for number, ids in enumerate(self.prompts[:GREEDY_PROMPTS]):
            drafted, plain = (
                self.client.texts(
                    self.tokenizer.decode(ids), 1, **fields, seed=number,
                    speculative={"rule": "coupled", "enabled": enabled},
                )
                for enabled in (True, False)
            )  # fmt: skip
            equal += bool(drafted) and drafted == plain
        num = len(self.prompts[:GREEDY_PROMPTS])
        line = f"`coupled` by seed, again without drafts: {equal} of {num} texts are equal."
        return ("replay_differs" if equal < num - 1 else None), line


def near_edge(row_1V: Tensor, params: SamplingParams, reach: float) -> bool:
    """Whether a nucleus would change if two logits moved by `reach` against each other.

    It stays the same if its last token stays likelier than the first one outside, its mass stays at
    top_p or above, and its mass without the last token stays below. A change of `reach` in a logit
    adds at most reach / temperature to log(m / (1 - m)), where m is the mass of a set.
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

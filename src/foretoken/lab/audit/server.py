"""An OpenAI-compatible server compared with the reference, by nothing but the server's texts.

Under a small nucleus, few texts of a few tokens are possible, and the reference enumerates them
all. Another engine's arithmetic differs without any bug. So the audit allows for independent normal
noise on each logit; its standard deviation is `SPARE` times the effect of bfloat16 on this target
(`Reference.rounding`). The audit chooses prompts for which no token is so near the edge of a
nucleus that noise could move it across. Texts outside the nuclei may have a share of `OTHER`. The
distance `delta` that is allowed inside the nuclei covers 99 % of `NOISES` random noises.
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
from foretoken.lab.audit.evidence import PlotText, Source
from foretoken.lab.audit.reference import Reference, Text, check_known, filtered
from foretoken.lab.audit.subjects import Checks, StoppedError, Subject, run_checks
from foretoken.lab.bench.load import RequestFailedError, ServerGoneError
from foretoken.lab.bench.server import Server
from foretoken.lab.workloads import heldout
from foretoken.models.tokenizer import decode_after, encode_after
from foretoken.sampling.params import SamplingParams

LENGTH, PROMPT_TOKENS, CANDIDATES = 4, 16, 32  # candidates: prompts that are evaluated together
# (factor of the temperature, the values of top_p that are tried with it)
FULL, HALF = (1.0, (0.6, 0.65, 0.7, 0.75)), (0.5, (0.75, 0.8, 0.85, 0.9))
PROMPTS = 2  # for each factor
EVEN = 0.6  # largest probability of a prompt's likeliest text, if there are enough such prompts
Path = tuple[int, ...]
Distribution = dict[str, Any]
"""text -> its probabilities [1 + bugs + NOISES]: true, under each of `IGNORED`, with each noise."""
Candidate = tuple[list[int], SamplingParams, Distribution]
MAX_TEXTS = 15  # largest number of possible texts of a prompt; one more cell is for all other texts
IGNORED: dict[str, dict[str, Any]] = {
    "temperature_ignored": {"temperature": 1.0}, "nucleus_ignored": {"top_p": 1.0}
}  # fmt: skip
LEAK = 0.05  # share of other texts under the bug "nucleus_leaks"
# PyTorch's own bfloat16 moves logits of the embedded model 1.4 times as far as `rounding`, which
# leaves out rounding inside of modules; float16 moves them an eighth of that.
SPARE = 2.0
NOISES = 1000
EDGE = 3.0  # standard deviations of noise that do not change the nuclei of a chosen prompt
OTHER = 1e-3  # share of a correct server's texts that may be outside the nuclei
# Fields without effect, sent because a server's defaults or generation_config may differ.
NEUTRAL = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
TEXTS_PER_REQUEST = 32
MAX_FAILURES, MAX_SILENCE = 5, 60.0  # failures in a row, or seconds, that end the audit
DRAWS = 6_000
GREEDY_TOKENS, GREEDY_PROMPTS = 16, 8


class Client:
    """A client that asks a server for completions, and counts failures by their reason."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self.server = Server(url, SamplingParams(), api_key=api_key, timeout=MAX_SILENCE)
        asyncio.run(self.server.prepare())
        self.neutral = NEUTRAL if asyncio.run(self.server.takes(**NEUTRAL)) else {}
        self.failures, self._in_a_row, self._heard = Counter[str](), 0, time.monotonic()

    def texts(self, prompt: str, count: int, **fields: Any) -> list[str]:
        """`count` texts after a prompt; [] if the request fails.

        Raises:
            StoppedError: the server stopped, or failed `MAX_FAILURES` times or for `MAX_SILENCE`.
        """
        body = {"model": self.server.model, "prompt": prompt, "n": count, **self.neutral, **fields}
        try:
            texts = self._texts(asyncio.run(self.server.call("POST", "/v1/completions", body)))
        except ServerGoneError as error:
            raise StoppedError(f"the server stopped: {error}") from None
        except RequestFailedError as error:
            self.failures[str(error)] += 1
            self._in_a_row += 1
            if self._in_a_row == MAX_FAILURES or time.monotonic() - self._heard > MAX_SILENCE:
                why = f"the server gave no text {self._in_a_row} times in a row ({error})"
                raise StoppedError(why) from None
            return []
        self._in_a_row, self._heard = 0, time.monotonic()
        return texts

    def _texts(self, answer: tuple[int, bytes]) -> list[str]:
        """The texts in an answer (status, body)."""
        status, body = answer
        if status != 200:
            raise RequestFailedError(f"status {status}")
        try:
            return [str(choice["text"]) for choice in json.loads(body)["choices"]]
        except ValueError:
            raise RequestFailedError("the answer is no JSON") from None
        except (KeyError, TypeError):
            raise RequestFailedError("the answer has no texts") from None


class ChosenPrompt(NamedTuple):
    """A prompt as text and as tokens, with its parameters, the cell of each text, its source."""

    prompt: str
    ids: list[int]
    params: SamplingParams
    cells: dict[str, int]
    source: Source


def _plot_text(prompt: str, params: SamplingParams, num_texts: int) -> PlotText:
    about = (
        f"Texts of {LENGTH} tokens after …{prompt[-24:]!r} at temperature {params.temperature:g}, "
        f"top_p {params.top_p:g}. The target's share of each text is computed from its checkpoint; "
        "the range allows for other arithmetic, too."
    )
    return PlotText("number of the text", about, [*map(str, range(1, num_texts + 1)), "others"])


class ServerAudit:
    """The audit of a server.

    Args:
        params: the temperature; nuclei are chosen by the audit.
        reference: a reference of the checkpoint that the server claims to serve.
        tokenizer: the tokenizer of that checkpoint.
    """

    def __init__(
        self, client: Client, reference: Reference, tokenizer: Any, params: SamplingParams
    ) -> None:
        check_known(params)
        self.client, self.reference, self.tokenizer = client, reference, tokenizer
        self.prompts = self._stable_prompts()
        self.noise = SPARE * reference.rounding(self.prompts[:CANDIDATES])
        self.max_shift = EDGE * math.sqrt(2) * self.noise  # of the difference of two logits
        self._known_logits: dict[tuple[int, Path], Tensor] = {}
        self.chosen = self._choose(params.temperature or 1.0)

    def _choose(self, temperature: float) -> list[ChosenPrompt]:
        """Choose prompts with few, about equally likely texts; some at half the temperature."""
        candidates = [*self._most_even(temperature, *FULL), *self._most_even(temperature, *HALF)]
        self._known_logits.clear()
        if not candidates:
            bound = (
                f"a model for which some prompt has at most {MAX_TEXTS} texts of {LENGTH} tokens, "
                "without stop tokens and without tokens near the edge of top_p"
            )
            raise ConfigError("model", self.client.server.model, bound, "Audit an engine instead.")
        chosen = []
        for number, (ids, params, distribution) in enumerate(candidates, 1):
            all_rows = np.stack([*distribution.values()], axis=1)  # [1 + bugs + NOISES, texts]
            rows, noisy = all_rows[: 1 + len(IGNORED)], all_rows[1 + len(IGNORED) :]
            delta = float(np.quantile(np.abs(noisy - rows[0]).sum(axis=1) / 2, 0.99))
            others = np.maximum(1 - rows.sum(axis=1, keepdims=True), 0)
            others[0] = OTHER
            rows = np.hstack([rows, others])
            null, *bugs = rows / rows.sum(axis=1, keepdims=True)
            bug_rows = dict(zip(IGNORED, bugs, strict=True))
            bug_rows["nucleus_leaks"] = (1 - LEAK) * null + LEAK * np.eye(len(null))[-1]
            cells = {text: cell for cell, text in enumerate(distribution)}
            prompt = self.tokenizer.decode(ids)
            source = Source(
                f"prompt {number}", null, bug_rows, delta=delta, closed=True,
                plot=_plot_text(prompt, params, len(cells)),
            )  # fmt: skip
            chosen.append(ChosenPrompt(prompt, ids, params, cells, source))
        return chosen

    def _stable_prompts(self) -> list[list[int]]:
        """Held-out prompts that the server, which gets them as text, encodes as the same tokens."""
        encode, decode = self.tokenizer.encode, self.tokenizer.decode
        prompts = (encode(item.prompt)[:PROMPT_TOKENS] for item in heldout())
        return [ids for ids in prompts if encode(decode(ids)) == ids]

    def _most_even(
        self, temperature: float, factor: float, nuclei: Sequence[float]
    ) -> list[Candidate]:
        """The candidates of `PROMPTS` prompts with the least probability of the likeliest text.

        The search ends early if this probability is at most `EVEN` for enough prompts.
        """

        def likeliest(candidate: Candidate) -> float:
            return max(float(chance[0]) for chance in candidate[2].values())

        candidates: list[Candidate] = []
        for start in range(0, len(self.prompts), CANDIDATES):
            numbers = range(start, min(start + CANDIDATES, len(self.prompts)))
            for top_p in nuclei:
                params = SamplingParams(
                    temperature=temperature * factor, top_p=top_p, max_tokens=LENGTH
                )
                pairs = zip(numbers, self._distributions(numbers, params), strict=True)
                candidates += [(self.prompts[i], params, d) for i, d in pairs if d is not None]
            candidates.sort(key=likeliest)
            # The best candidate of each prompt: of equal keys, a dict keeps the last value.
            best = {tuple(candidate[0]): candidate for candidate in reversed(candidates)}
            candidates = [*reversed(best.values())]
            if sum(likeliest(candidate) <= EVEN for candidate in candidates) >= PROMPTS:
                break
        return candidates[:PROMPTS]

    def _distributions(
        self, numbers: Sequence[int], params: SamplingParams
    ) -> list[Distribution | None]:
        """Distributions of texts after prompts; None: too many texts, a stop token, a near edge."""
        ignoring = [replace(params, **change) for change in IGNORED.values()]
        random = np.random.default_rng(0)
        live: dict[int, dict[Path, Any]] = {
            i: {(): np.ones(1 + len(ignoring) + NOISES)} for i in numbers
        }
        for _ in range(LENGTH):
            keys = [(i, path) for i, paths in live.items() for path in paths]
            longer: dict[int, dict[Path, Any]] = {i: {} for i in live}
            for (i, path), row_1V in zip(keys, self._logits(keys), strict=True):
                if near_edge(row_1V, params, self.max_shift):
                    longer.pop(i, None)
                if i in longer:
                    p = np.stack([filtered(row_1V, x)[0].numpy() for x in (params, *ignoring)])
                    (tokens,) = p[0].nonzero()
                    noise = random.standard_normal((NOISES, len(tokens))) * self.noise
                    noisy = p[0, tokens] * np.exp(noise / params.temperature)
                    noisy /= noisy.sum(axis=1, keepdims=True)
                    chances = np.vstack([p[:, tokens], noisy]).T
                    for token, chance in zip(tokens.tolist(), chances, strict=True):
                        longer[i][(*path, token)] = live[i][path] * chance
            live = {i: paths for i, paths in longer.items() if 0 < len(paths) <= MAX_TEXTS}
        return [self._distribution(self.prompts[i], live.get(i, {})) for i in numbers]

    def _logits(self, keys: Sequence[tuple[int, Path]]) -> list[Tensor]:
        """The logits after each (index of a prompt, path of tokens), float64 [1, V]."""
        new = [key for key in keys if key not in self._known_logits]
        texts = [Text(self.prompts[i], [*path, 0]) for i, path in new]
        for key, logits in zip(new, self.reference.logits(texts), strict=True):
            self._known_logits[key] = logits[-1:].clone()
        return [self._known_logits[key].double() for key in keys]

    def _distribution(self, ids: list[int], paths: dict[Path, Any]) -> Distribution | None:
        """The distribution of texts, from that of paths; None: no path, or a stop token."""
        distribution: Distribution = {}
        for path, chance in paths.items():
            if set(self.reference.stop_ids) & set(path):
                return None
            text = decode_after(self.tokenizer, ids, path)
            distribution[text] = distribution.get(text, 0.0) + chance
        return distribution or None

    def subject(self, name: str) -> Subject:
        sources = [chosen.source for chosen in self.chosen]
        return Subject(name, sources, self._draw, self.checks, TEXTS_PER_REQUEST, DRAWS, self.notes)

    def _draw(self, number: int, trials: int, batch: int) -> tuple[Any, ...]:
        """The cells of new texts after a prompt; the last cell is for unexpected texts."""
        chosen = self.chosen[number]
        names = ("max_tokens", "temperature", "top_p")
        fields = {name: getattr(chosen.params, name) for name in names}
        texts, cells = self.client.texts(chosen.prompt, TEXTS_PER_REQUEST, **fields), chosen.cells
        return (np.array([cells.get(text, len(cells)) for text in texts], dtype=np.int64),)

    def notes(self) -> list[str]:
        deltas = ", ".join(f"{chosen.source.delta:.4f}" for chosen in self.chosen)
        lines = [
            f"Allowed for other arithmetic: logits off by {self.noise:.3f} (standard deviation), "
            f"which is TV <= {deltas} per prompt, and {OTHER:.1%} of impossible texts."
        ]
        if not self.client.neutral:
            lines.append(f"The server refuses {', '.join(NEUTRAL)}: other defaults may apply.")
        if self.client.failures:
            failed = ", ".join(f"{reason} ({n})" for reason, n in self.client.failures.items())
            lines.append(f"Requests that failed: {failed}.")
        return lines

    def checks(self) -> Checks:
        broken, lines = run_checks(self._greedy, self._replay)
        return broken, ["Not testable against a server: u = 0, tails beyond 24 bits.", *lines]

    def _greedy(self) -> tuple[str | None, str]:
        """Check that texts at temperature 0 are the target's.

        The tokens of an encoded text may differ from the generated tokens. So if the encoded tokens
        look wrong, the text is compared with the reference's text.
        """
        params, gaps = SamplingParams(temperature=0.0), list[float]()
        fields = {"max_tokens": GREEDY_TOKENS, "temperature": 0.0}
        for ids in self.prompts[:GREEDY_PROMPTS]:
            for text in self.client.texts(self.tokenizer.decode(ids), 1, **fields):
                tokens = encode_after(self.tokenizer, ids, text) or [*self.reference.stop_ids[:1]]
                encoded = Text(ids, tokens)
                wrong, _ = classify([encoded], self.reference.logits([encoded]), params, 2**-23)
                gaps.append(self._first_gap(ids, text) or 0.0 if wrong else 0.0)
        bugs = sum(gap > self.max_shift for gap in gaps)
        ties = sum(gap > 0 for gap in gaps) - bugs
        equal = len(gaps) - ties - bugs
        line = (
            f"Temperature 0: {equal} of {len(gaps)} texts are the target's, {ties} differ at a "
            f"numeric tie (logits within {self.max_shift:.2f}), {bugs} elsewhere: bugs."
        )
        return ("greedy_differs" if bugs else None), line

    def _first_gap(self, ids: list[int], text: str) -> float | None:
        """The gap of the two best logits where a text leaves the target's text; None: nowhere."""
        output = list[int]()
        for _ in range(GREEDY_TOKENS):
            (logits,) = self.reference.logits([Text(ids, [*output, 0])])
            best, tokens = logits[-1].topk(2)
            output.append(int(tokens[0]))
            own_text = decode_after(self.tokenizer, ids, output)
            if output[-1] in self.reference.stop_ids:
                return None
            if not own_text.endswith("\ufffd") and not text.startswith(own_text):
                return float(best[0] - best[1])
        return None

    def _replay(self) -> tuple[str | None, str]:
        """Check that `coupled` emits the same texts without drafts, by seed; one may differ."""
        if not self.client.server.speculates:
            why = "the server takes no field `speculative`, or drafts nothing"
            return None, f"`coupled` by seed, again without drafts: not testable, {why}."
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


def near_edge(row_1V: Tensor, params: SamplingParams, max_shift: float) -> bool:
    """Whether a nucleus could change if differences of logits changed by `max_shift`.

    The nucleus does not change if three conditions remain true: its last token is likelier than the
    first token outside, its mass is at least top_p, and its mass without the last token is below
    top_p. The shift adds at most max_shift / temperature to log(m / (1 - m)), where m is the mass
    of a set of tokens.
    """
    p = filtered(row_1V, replace(params, top_p=1.0))[0].sort(descending=True).values
    mass, factor = p.cumsum(dim=0), math.exp(max_shift / params.temperature)
    last = int((mass - p < params.top_p).sum()) - 1
    without_last = float(mass[last] - p[last])
    outside = float(p[last + 1 :].sum())
    odds = params.top_p / (1 - params.top_p)
    return (
        bool((p[last] < p[last + 1 : last + 2] * factor).any())
        or without_last * factor >= odds * (1 - without_last)
        or float(mass[last]) < odds * outside * factor
    )

"""Measure every case under every load, with prompts from a text or a dataset; cases take turns."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from foretoken.errors import ConfigError
from foretoken.lab.bench.figures import figures, latencies
from foretoken.lab.bench.load import BenchRequest, Client, Run, drive
from foretoken.lab.bench.options import DATASETS, BenchCase, BenchOptions, Load
from foretoken.lab.reporter import Report
from foretoken.lab.workloads import heldout

_ROLES = {"system": "system", "user": "user", "assistant": "assistant"}
_ROLES |= {"human": "user", "gpt": "assistant"}  # in ShareGPT's format
_CHARS_PER_TOKEN = 4  # assumed if a server does not report tokens


class Item(NamedTuple):
    """An entry of a dataset: a text or messages, and the length of its answer, if given."""

    prompt: str | list[dict[str, Any]]
    num_output: int | None = None


class PromptSource(NamedTuple):
    """The material from which requests are cut or chosen.

    ids: token ids; prompts are pieces of them
    text: a text to cut prompts from, if its tokens are not known
    shuffled: prompts are random ids out of `ids` instead of pieces
    items: entries of a dataset, each a request
    notes: lines about entries that cannot be sent
    """

    ids: Sequence[int] = ()
    text: str = ""
    shuffled: bool = False
    items: Sequence[Item] = ()
    notes: Sequence[str] = ()


class Workload:
    """Draws the requests of each run; equal options give equal requests.

    Every run has new prompts, so that no cache holds the keys and values of an earlier run. Cases
    that take turns have equal prompts, except for systems that would cache the prompts of one case
    for the next: there, pieces of a text begin one token later for each case, and each case has
    separate entries of a dataset.

    lengths: smallest and largest number of tokens of prompts, and of outputs; `ConfigError` if the
        text has fewer tokens than a prompt
    distinct_cases: number of cases that must not share prompts; 1: all have equal prompts
    """

    def __init__(
        self,
        source: PromptSource,
        lengths: tuple[tuple[int, int], tuple[int, int]],
        seed: int,
        distinct_cases: int = 1,
    ) -> None:
        self._source, self._lengths, self._seed = source, lengths, seed
        self._distinct_cases = distinct_cases
        self._items = [*source.items]
        random.Random(seed).shuffle(self._items)
        longest, size = lengths[0][1], len(source.ids) or len(source.text) // _CHARS_PER_TOKEN
        size -= distinct_cases - 1
        if not source.items and not source.shuffled and longest > size:
            raise ConfigError("input_len", longest, f"at most {size} for this text")

    def requests(
        self, load: Load, before: int, count: int, case: int = 0
    ) -> list[tuple[float, BenchRequest]]:
        """The requests of one run, each with the seconds since the previous request; deterministic.

        before: number of requests of all earlier runs of the case
        case: number of the case; ignored if all cases have equal prompts
        """
        random_, requests = random.Random(f"{self._seed} {load.name} {before}"), []
        case %= self._distinct_cases
        for i in range(count):
            gap = random_.expovariate(load.rate) if load.rate else 0.0
            seed = self._seed + before + i  # with equal seeds, drafts would be accepted together
            num_input, num_output = (random_.randint(*bounds) for bounds in self._lengths)
            if self._items:
                index = self._distinct_cases * before + case * count + i
                item = self._items[index % len(self._items)]
                request = BenchRequest(item.prompt, item.num_output or num_output, seed)
            else:
                request = BenchRequest(self._piece(random_, num_input, case), num_output, seed)
            requests.append((gap, request))
        return requests

    def _piece(self, random_: random.Random, size: int, shift: int) -> Any:
        """A random piece of the source, of `size` tokens, moved by `shift` tokens or characters."""
        source, max_shift = self._source, self._distinct_cases - 1
        if source.shuffled:
            return random_.choices(source.ids, k=size + max_shift)[shift : shift + size]
        text: Any = source.ids or source.text
        size = size if source.ids else size * _CHARS_PER_TOKEN
        start = random_.randrange(len(text) - size - max_shift + 1) + shift
        return text[start : start + size]


def read_text(prompts: str) -> str:
    """The text of a file; for `heldout` and `random`, all held-out prompts and references."""
    if prompts in ("heldout", "random"):
        return "".join(item.prompt + item.reference for item in heldout())
    return _read(prompts)


def read_dataset(path: str) -> PromptSource:
    """Read a dataset: objects with `prompt`, with `messages`, or with `conversations`.

    The file has one object per line, or one list of objects. `messages` are sent without the
    answers at their end, `conversations` (the format of ShareGPT) only up to their first answer.
    Entries that cannot be sent are counted in a note; `ConfigError` if no entry can be sent.
    """
    text, items, errors = _read(path), list[Item](), list[str]()
    is_list = text.lstrip().startswith("[")
    for i, part in enumerate([text] if is_list else text.split("\n"), start=1):
        if not part.strip():
            continue
        try:
            data = json.loads(part)
        except (ValueError, RecursionError) as error:
            errors.append(f"line {i}: {error}")
            continue
        for j, entry in enumerate(data if is_list else [data], start=1):
            try:
                items.append(_item(entry))
            except ValueError as error:
                errors.append(f"{f'entry {j}' if is_list else f'line {i}'}: {error}")
    if not items:
        remedy = f"The first error is in {errors[0]}." if errors else ""
        raise ConfigError("prompts", path, "a dataset with a request in it", remedy)
    total, examples = len(items) + len(errors), "; ".join(errors[:5])
    note = f"{Path(path).name}: {len(errors)} of {total} entries were left out: {examples}."
    return PromptSource(items=items, notes=[note] if errors else [])


def _item(entry: Any) -> Item:
    """Read an entry of a dataset; `ValueError` says what is wrong with the entry."""
    if not isinstance(entry, dict):
        raise ValueError("not an object")
    length = entry.get("max_tokens")
    is_integer = isinstance(length, int) and not isinstance(length, bool)
    if length is not None and (not is_integer or length < 1):
        raise ValueError("`max_tokens` is no integer >= 1")
    prompt = entry.get("prompt")
    if isinstance(prompt, str) and prompt:
        return Item(prompt, length)
    turns = entry.get("messages", entry.get("conversations"))
    if not isinstance(turns, list) or not turns:
        raise ValueError("no `prompt`, `messages` or `conversations`")
    messages: list[dict[str, Any]] = []
    for turn in turns:
        if not isinstance(turn, dict):
            raise ValueError("a turn that is no object")
        role = _ROLES.get(str(turn.get("role", turn.get("from"))))
        content = turn.get("content", turn.get("value"))
        if role is None or not isinstance(content, str):
            raise ValueError("a turn without a known role and a text")
        if role == "assistant" and "messages" not in entry:
            break
        messages.append({"role": role, "content": content})
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not any(message["role"] == "user" for message in messages):
        raise ValueError("nothing said by a user before the answer")
    return Item(messages, length)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        bound = "`heldout`, `random`, or a file of UTF-8 text"
        raise ConfigError("prompts", path, bound, f"{error}.") from None


@dataclass
class Measured:
    """The measurements of a case under a load.

    Attributes:
        repeats: figures of each run, in order. A run without an answer has an empty entry, so that
            entry i is of repeat i in all cases.
        samples: latencies of all requests, by name.
        partial: whether the figures are of a run that was cut short.
    """

    repeats: list[dict[str, float]] = field(default_factory=list)
    samples: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    partial: bool = False


class Bench:
    """Measures the system that a client connects to.

    Attributes:
        groups: for each engine, the list of cases that take turns.
        measured: figures of all runs up to now, by load and case.
        failed: number of failed requests by reason, including warm-up.
        notes: lines about the prompts.
    """

    def __init__(
        self, options: BenchOptions, client: Client, groups: Sequence[Sequence[BenchCase]]
    ) -> None:
        self.options, self.client, self.groups = options, client, groups
        self.measured: dict[tuple[Load, BenchCase], Measured] = {}
        self.failed: Counter[str] = Counter()
        self.notes: list[str] = []
        self._workload: Workload | None = None
        runs = options.warmup + options.repeats
        counts = [options.requests_of(load) for load in options.loads]
        self.num_requests = sum(counts) * runs * sum(map(len, groups))

    async def run(self, report: Report = lambda num_ended, run_name: None) -> None:
        """Measure all cases. `measured` holds all finished runs, even after an error.

        `ConfigError`: requests failed; the other requests were measured nevertheless.

        report: called with the number of ended requests, warm-up included, and the current run
        """
        num_ended = 0
        for cases in self.groups:
            report(num_ended, "loading")
            async with self.client.opened(cases):
                workload = await self._prepare()
                for load, repeat, case in self._turns(cases):
                    number = repeat - self.options.warmup + 1
                    phase = f"repeat {number}" if number > 0 else "warm-up"
                    run_name = f"{load.name}, {case.name}, {phase}"

                    def on_end(run_name: str = run_name) -> None:
                        nonlocal num_ended
                        num_ended += 1
                        report(num_ended, run_name)

                    report(num_ended, run_name)
                    count = self.options.requests_of(load)
                    before = self._requests_before(load, repeat)
                    requests = workload.requests(load, before, count, cases.index(case))
                    run, is_complete = Run(), False
                    try:
                        await drive(self.client, case, load, requests, run, on_end)
                        is_complete = not run.stopped
                    finally:
                        self._keep(load, case, run, number > 0, is_complete)
                    if run.stopped:
                        raise self._failure(run.stopped)
        if self.failed:
            [(why, _)] = self.failed.most_common(1)
            raise self._failure(f"{self.failed.total()} requests failed, most because: {why}")

    def _keep(
        self, load: Load, case: BenchCase, run: Run, is_measured: bool, is_complete: bool
    ) -> None:
        """Keep the figures of a measured run; of an incomplete run only without a complete run."""
        self.failed.update(run.failed)
        if not is_measured:  # a warm-up run
            return
        measured = self.measured.setdefault((load, case), Measured())
        if is_complete or (run.done and not any(measured.repeats)):
            bounds = self.options.bounds
            measured.repeats.append(figures(run, self.client.floor, bounds) if run.done else {})
            measured.partial = not is_complete
            for name, values in latencies(run.done).items():
                measured.samples[name] += values

    def _requests_before(self, load: Load, repeat: int) -> int:
        options, runs = self.options, self.options.warmup + self.options.repeats
        earlier = options.loads[: options.loads.index(load)]
        return runs * sum(map(options.requests_of, earlier)) + repeat * options.requests_of(load)

    def _failure(self, why: str) -> ConfigError:
        """The error for failed requests: about `url`, or `prompts` for engines in this process."""
        why = f"{why.rstrip('.')}."
        if self.options.url is None:
            return ConfigError("prompts", self.options.prompts, "requests that fit", why)
        return ConfigError("url", self.options.url, "a server that answers every request", why)

    async def _prepare(self) -> Workload:
        if self._workload is not None:  # made with the tokenizer of the server or the first engine
            return self._workload
        client, prompts = self.client, self.options.prompts
        if prompts is not None and prompts.endswith(DATASETS):
            source = read_dataset(prompts)
        else:
            text = read_text(prompts or "heldout")
            ids = await client.tokens(text)
            if prompts == "random" or (prompts is None and not ids and client.vocabulary()):
                source = PromptSource(client.vocabulary() or sorted(set(ids)), shuffled=True)
            else:
                source = PromptSource(ids, text)
            if not source.ids:
                if self.options.url is None or source.shuffled:
                    remedy = "An engine in this process can have `random`, too."
                    bound = "a dataset, since the tokens of a text are unknown"
                    raise ConfigError("prompts", prompts, bound, remedy)
                self.notes.append("The server does not tokenize: 4 characters count as one token.")
        self.notes += source.notes
        distinct_cases = max(map(len, self.groups)) if client.keeps_prefixes else 1
        self._workload = Workload(source, self.options.lengths, self.options.seed, distinct_cases)
        needed = self.num_requests // sum(map(len, self.groups)) * distinct_cases
        if len(source.items) < needed and source.items:
            repeated = f"{len(source.items)} entries for {needed} requests are sent repeatedly"
            cached = ", and a cache may hold them" if client.keeps_prefixes else ""
            self.notes.append(f"{Path(str(prompts)).name}: {repeated}{cached}.")
        return self._workload

    def _turns(self, cases: Sequence[BenchCase]) -> Iterator[tuple[Load, int, BenchCase]]:
        """The runs in order: warm-up first; the order of cases is reversed with each repeat."""
        for load in self.options.loads:
            for repeat in range(self.options.warmup + self.options.repeats):
                for case in cases[:: -1 if repeat % 2 else 1]:
                    yield load, repeat, case

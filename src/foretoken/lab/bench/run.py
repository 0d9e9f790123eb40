"""Measure every case under every load, in turns, with prompts cut from a text or a dataset."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from foretoken.errors import ConfigError
from foretoken.lab.bench.figures import figures, latencies
from foretoken.lab.bench.load import BenchRequest, Client, Run, drive
from foretoken.lab.bench.options import DATASETS, BenchCase, BenchOptions, Load
from foretoken.lab.workloads import heldout

_ROLES = {role: role for role in ("system", "user", "assistant")}
_ROLES |= {"human": "user", "gpt": "assistant"}
_CHARS_PER_TOKEN = 4  # assumed where a server does not report tokens


class Item(NamedTuple):
    """A line of a dataset: a text or messages, and the tokens of its answer, if given."""

    prompt: str | list[dict[str, Any]]
    num_output: int | None = None


class PromptSource(NamedTuple):
    """The material from which requests are cut or chosen.

    Attributes:
        ids: token ids; prompts are pieces of them.
        text: used instead where tokens are unknown.
        shuffled: prompts are random ids out of `ids` instead.
        items: lines of a dataset, each a request.
        notes: what was left out.
    """

    ids: Sequence[int] = ()
    text: str = ""
    shuffled: bool = False
    items: Sequence[Item] = ()
    notes: Sequence[str] = ()


class Workload:
    """Draws the requests of each run, the same ones for the same options.

    Every run has new prompts, so that no run finds the keys and values of another in a cache. Cases
    that take turns have the same prompts. If they could find each other's in a cache, pieces of a
    text begin one token later for each case, and lines of a dataset differ.

    Args:
        lengths: least and most tokens of prompts and of outputs; each request's are drawn between.
        apart: number of cases that must not find each other's prompts; 1: all have the same.

    Raises:
        ConfigError: the text has fewer tokens than a prompt.
    """

    def __init__(
        self,
        source: PromptSource,
        lengths: tuple[tuple[int, int], tuple[int, int]],
        seed: int,
        apart: int = 1,
    ) -> None:
        self._source, self._lengths, self._seed = source, lengths, seed
        self._apart = apart
        self._items = [*source.items]
        random.Random(seed).shuffle(self._items)
        longest, size = lengths[0][1], len(source.ids) or len(source.text) // _CHARS_PER_TOKEN
        size -= apart - 1
        if not source.items and not source.shuffled and longest > size:
            raise ConfigError("input_len", longest, f"at most {size}, the tokens of the text")

    def requests(
        self, load: Load, before: int, count: int, case: int = 0
    ) -> list[tuple[float, BenchRequest]]:
        """Requests of one run, each with the seconds since the one before; deterministic.

        Args:
            before: requests of all earlier runs of the case.
            case: its number; ignored if all cases have the same prompts.
        """
        chance, case = random.Random(f"{self._seed} {load.name} {before}"), case % self._apart
        made = []
        for i in range(count):
            # Requests with one seed would share their noise: drafts would be accepted together.
            gap, seed = chance.expovariate(load.rate) if load.rate else 0.0, self._seed + before + i
            num_input, num_output = (chance.randint(*bounds) for bounds in self._lengths)
            if self._items:
                line = self._apart * before + case * count + i
                item = self._items[line % len(self._items)]
                request = BenchRequest(item.prompt, item.num_output or num_output, seed)
            else:
                request = BenchRequest(self._piece(chance, num_input, case), num_output, seed)
            made.append((gap, request))
        return made

    def _piece(self, chance: random.Random, size: int, shift: int) -> Any:
        """A random piece of the source, moved by `shift` tokens."""
        source, more = self._source, self._apart - 1
        if source.shuffled:
            return chance.choices(source.ids, k=size + more)[shift : shift + size]
        text: Any = source.ids or source.text
        size = size if source.ids else size * _CHARS_PER_TOKEN
        start = chance.randrange(len(text) - size - more + 1) + shift
        return text[start : start + size]


def read_text(prompts: str) -> str:
    """The text of a file; for `heldout` and `random`, all held-out prompts and references."""
    if prompts in ("heldout", "random"):
        return "".join(item.prompt + item.reference for item in heldout())
    return _read(prompts)


def read_dataset(path: str) -> PromptSource:
    """A dataset's requests: `{"prompt": ...}`, `{"messages": ...}`, `{"conversations": ...}`.

    One object per line, or a list of them in one file. `messages` are sent without answers at their
    end, `conversations` (the shape of ShareGPT) up to their first answer. Other entries are counted
    and left out.

    Raises:
        ConfigError: there is no such file, or no entry can be sent.
    """
    text, items, wrong = _read(path), list[Item](), list[str]()
    whole = text.lstrip().startswith("[")
    for i, piece in enumerate([text] if whole else text.split("\n"), start=1):
        if not piece.strip():
            continue
        try:
            found = json.loads(piece)
        except (ValueError, RecursionError) as error:
            wrong.append(f"line {i}: {error}")
            continue
        for j, entry in enumerate(found if whole else [found], start=1):
            try:
                items.append(_item(entry))
            except ValueError as error:
                wrong.append(f"{f'entry {j}' if whole else f'line {i}'}: {error}")
    if not items:
        remedy = f"The first is wrong in {wrong[0]}." if wrong else ""
        raise ConfigError("prompts", path, "a dataset with a request in it", remedy)
    total, first = len(items) + len(wrong), "; ".join(wrong[:5])
    said = f"{Path(path).name}: {len(wrong)} of {total} requests were left out: {first}."
    return PromptSource(items=items, notes=[said] if wrong else [])


def _item(given: Any) -> Item:
    """Read one object of a dataset; `ValueError` says what is wrong with it."""
    if not isinstance(given, dict):
        raise ValueError("not an object")
    most = given.get("max_tokens")
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
        raise ValueError("`max_tokens` is no integer >= 1")
    prompt = given.get("prompt")
    if isinstance(prompt, str) and prompt:
        return Item(prompt, most)
    turns = given.get("messages", given.get("conversations"))
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
        if role == "assistant" and "messages" not in given:
            break
        messages.append({"role": role, "content": content})
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not any(message["role"] == "user" for message in messages):
        raise ValueError("nothing said by a user before the answer")
    return Item(messages, most)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        bound = "`heldout`, `random`, or a file of UTF-8 text"
        raise ConfigError("prompts", path, bound, f"{error}.") from None


Report = Callable[[int, str], None]
"""Gets the number of requests that have ended, warm-up included, and what runs."""


@dataclass
class Measured:
    """The measurements of a case under a load so far.

    Attributes:
        repeats: figures of its runs in order; an empty entry for a run without an answer keeps the
            turns of cases aligned.
        samples: latencies of all requests, by name.
        partial: the run was cut short.
    """

    repeats: list[dict[str, float]] = field(default_factory=list)
    samples: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    partial: bool = False


class Bench:
    """Measures a client's system.

    Attributes:
        groups: cases that take turns, a list for each engine.
        measured: figures of all runs so far, by load and case.
        failed: number of failed requests by reason, warm-up included.
        notes: about the prompts.
    """

    def __init__(
        self, options: BenchOptions, client: Client, groups: Sequence[Sequence[BenchCase]]
    ) -> None:
        self.options, self.client, self.groups = options, client, groups
        self.measured: dict[tuple[Load, BenchCase], Measured] = {}
        self.failed: Counter[str] = Counter()
        self.notes: list[str] = []
        self._workload: Workload | None = None
        turns = options.warmup + options.repeats
        counts = [options.requests_of(load) for load in options.loads]
        self.num_requests = sum(counts) * turns * sum(map(len, groups))

    async def run(self, report: Report = lambda done, what: None) -> None:
        """Measure everything; `measured` holds all finished runs, however it ends.

        Raises:
            ConfigError: requests failed; the others were measured all the same.
            ForetokenError: the engine failed.
        """
        done = 0
        for cases in self.groups:
            report(done, "loading")
            async with self.client.opened(cases):
                workload = await self._prepare()
                for load, repeat, case in self._turns(cases):
                    number = repeat - self.options.warmup + 1
                    what = f"repeat {number}" if number > 0 else "warm-up"
                    title = f"{load.name}, {case.name}, {what}"

                    def ended(title: str = title) -> None:
                        nonlocal done
                        done += 1
                        report(done, title)

                    report(done, title)
                    count, before = self.options.requests_of(load), self._before(load, repeat)
                    requests = workload.requests(load, before, count, cases.index(case))
                    run, whole = Run(), False
                    try:
                        await drive(self.client, case, load, requests, run, ended)
                        whole = not run.stopped
                    finally:
                        self._keep(load, case, run, number > 0, whole)
                    if run.stopped:
                        raise self._failure(run.stopped)
        if self.failed:
            raise self._failure(
                f"{self.failed.total()} requests failed; most so: "
                f"{self.failed.most_common(1)[0][0]}"
            )

    def _keep(self, load: Load, case: BenchCase, run: Run, counts: bool, whole: bool) -> None:
        """Keep a run's figures; those of a run that was cut short only if there is no whole run."""
        self.failed.update(run.failed)
        if not counts:
            return
        kept = self.measured.setdefault((load, case), Measured())
        if whole or (run.done and not any(kept.repeats)):
            bounds = self.options.bounds
            kept.repeats.append(figures(run, self.client.floor, bounds) if run.done else {})
            kept.partial = not whole
            for name, values in latencies(run.done).items():
                kept.samples[name] += values

    def _before(self, load: Load, repeat: int) -> int:
        """Number of requests of a case before this run."""
        options, turns = self.options, self.options.warmup + self.options.repeats
        others = options.loads[: options.loads.index(load)]
        return turns * sum(map(options.requests_of, others)) + repeat * options.requests_of(load)

    def _failure(self, why: str) -> ConfigError:
        name, bound = "url", "a server that answers every request"
        if self.options.url is None:
            name, bound = "prompts", "requests that fit"
        return ConfigError(name, getattr(self.options, name), bound, f"{why.rstrip('.')}.")

    async def _prepare(self) -> Workload:
        """The workload; it is made once, with the tokens of the client that is open then."""
        if self._workload is not None:
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
                    remedy = "Use `random`, or give a tokenizer."
                    bound = "a dataset where no tokenizer is known"
                    raise ConfigError("prompts", prompts, bound, remedy)
                self.notes.append("The server tells no tokens: prompts have 4 characters for each.")
        self.notes += source.notes
        lengths = self.options.input_lengths, self.options.output_lengths
        apart = max(map(len, self.groups)) if client.keeps_prefixes else 1
        self._workload = Workload(source, lengths, self.options.seed, apart)
        needed = self.num_requests // sum(map(len, self.groups)) * apart
        if len(source.items) < needed and source.items:
            said = f"{len(source.items)} lines for {needed} requests: they are sent again"
            known = ", and a cache may know them" if client.keeps_prefixes else ""
            self.notes.append(f"{Path(str(prompts)).name}: {said}{known}.")
        return self._workload

    def _turns(self, cases: Sequence[BenchCase]) -> Iterator[tuple[Load, int, BenchCase]]:
        """Load, repeat (warm-up first) and case; the order of cases is reversed each repeat."""
        for load in self.options.loads:
            for repeat in range(self.options.warmup + self.options.repeats):
                for case in cases[:: -1 if repeat % 2 else 1]:
                    yield load, repeat, case

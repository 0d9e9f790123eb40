"""Measures every case under every load, in turns."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from foretoken.errors import ConfigError
from foretoken.lab.bench.figures import figures, latencies
from foretoken.lab.bench.load import Client, Run, drive
from foretoken.lab.bench.options import DATASETS, BenchOptions, Case, Load
from foretoken.lab.bench.workload import Source, Workload, read_dataset, read_text

Report = Callable[[int, str], None]
"""Gets how many requests have ended, warm-up included, and what runs."""


@dataclass
class Measured:
    """What there is of a case under a load.

    Attributes:
        repeats: figures of its runs in order, empty of one without an answer: turns stay together.
        samples: latencies of all requests, by name.
        partial: it is of a run that was cut short.
    """

    repeats: list[dict[str, float]] = field(default_factory=list)
    samples: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    partial: bool = False


class Bench:
    """Measures what a client stands for.

    Attributes:
        groups: cases that take turns, a list for each engine.
        measured: figures of all runs so far, by load and case.
        failed: why requests failed, and how many of them so, warm-up included.
        notes: of the prompts.
    """

    def __init__(
        self, options: BenchOptions, client: Client, groups: Sequence[Sequence[Case]]
    ) -> None:
        self.options, self.client, self.groups = options, client, groups
        self.measured: dict[tuple[Load, Case], Measured] = {}
        self.failed: Counter[str] = Counter()
        self.notes: list[str] = []
        self._workload: Workload | None = None
        turns = options.warmup + options.repeats
        counts = [options.requests_of(load) for load in options.loads]
        self.num_requests = sum(counts) * turns * sum(map(len, groups))

    async def run(self, report: Report = lambda done, what: None) -> None:
        """Measure everything; `measured` holds what is done, however it ends.

        Raises:
            ConfigError: requests failed: all the same, the others were measured.
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

    def _keep(self, load: Load, case: Case, run: Run, counts: bool, whole: bool) -> None:
        """A run that was cut short is kept only where there is no whole one."""
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
        """Requests of a case before this run."""
        options, turns = self.options, self.options.warmup + self.options.repeats
        others = options.loads[: options.loads.index(load)]
        return turns * sum(map(options.requests_of, others)) + repeat * options.requests_of(load)

    def _failure(self, why: str) -> ConfigError:
        """What ends a command once its requests failed."""
        name, bound = "url", "a server that answers every request"
        if self.options.url is None:
            name, bound = "prompts", "requests that fit"
        return ConfigError(name, getattr(self.options, name), bound, f"{why.rstrip('.')}.")

    async def _prepare(self) -> Workload:
        """The workload, made with the first client's tokens."""
        if self._workload is not None:
            return self._workload
        client, prompts = self.client, self.options.prompts
        if prompts is not None and prompts.endswith(DATASETS):
            source = read_dataset(prompts)
        else:
            text = read_text(prompts or "heldout")
            ids = await client.tokens(text)
            if prompts == "random" or (prompts is None and not ids and client.vocabulary()):
                source = Source(client.vocabulary() or sorted(set(ids)), shuffled=True)
            else:
                source = Source(ids, text)
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
        asked = self.num_requests // sum(map(len, self.groups)) * apart
        if len(source.items) < asked and source.items:
            said = f"{len(source.items)} lines for {asked} requests: they are sent again"
            known = ", and a cache may know them" if client.keeps_prefixes else ""
            self.notes.append(f"{Path(str(prompts)).name}: {said}{known}.")
        return self._workload

    def _turns(self, cases: Sequence[Case]) -> Iterator[tuple[Load, int, Case]]:
        """Load, repeat (warm-up first) and case; who goes first changes with each repeat."""
        for load in self.options.loads:
            for repeat in range(self.options.warmup + self.options.repeats):
                for case in cases[:: -1 if repeat % 2 else 1]:
                    yield load, repeat, case

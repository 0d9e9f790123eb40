"""Rough use, on every CPU backend: threads, signals, a busy machine, forks; then every command that
the documents show. Exits with 1 if any of it goes wrong.

Each case runs in processes of its own (`tests/long/trial_child.py`), so that one which crashes or
hangs is a failure of its row and not of the run. What is timed is recorded, and judged only where
it means that something hangs or collapses: a signal that takes more than 5 s, or default threads
that make less than a third of the tokens of one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from benchmarks.common import DRAFT, ROOT, TARGET, parse, progress, record
from foretoken.lab.results import Row, Spread, Value
from tests.long import documented

BACKENDS = ("native", "torch")
# How the call is made and the signal that it gets.
WAYS = [
    ("raise", signal.SIGINT),
    ("stream", signal.SIGINT),
    ("return", signal.SIGINT),
    ("return", signal.SIGTERM),
]
PROMPT = 5.0  # seconds within which a signal ends what it should
COLLAPSE = 3.0
PATIENCE = 300.0  # seconds until a child that says nothing is ended

Failures = list[str]


class Child:
    """A case in a process of its own, which is killed when it is silent for too long."""

    def __init__(self, case: str, backend: str, *numbers: float, patience: float = PATIENCE):
        command = [sys.executable, "-m", "tests.long.trial_child", case, backend]
        self.patience = patience
        self.process = subprocess.Popen(
            [*command, *map(str, numbers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # A loop that is ended by Ctrl-C leaves a traceback, as any program does.
            stderr=subprocess.DEVNULL if case == "loop" else None,
            text=True,
            cwd=ROOT,
            env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.process.kill()
        self.process.communicate()

    def line(self) -> str:
        """The next line, or "" if the process ended or had to be."""
        timer = threading.Timer(self.patience, self.process.kill)
        timer.start()
        try:
            return self.process.stdout.readline().strip()  # type: ignore[union-attr]
        finally:
            timer.cancel()

    def report(self, failures: Failures) -> dict[str, Any]:
        """The next line's object; its failures, or that there is none, are added to those given."""
        line = self.line()
        if not line.startswith("{"):
            failures.append(f"the process said {line!r} and ended with {self.process.wait()}")
            return {}
        found: dict[str, Any] = json.loads(line)
        failures += found.pop("failures")
        return found

    def ask(self, text: str) -> None:
        """Write a line to it."""
        self.process.stdin.write(text + "\n")  # type: ignore[union-attr]
        self.process.stdin.flush()  # type: ignore[union-attr]


def threads(backend: str, seconds: float) -> tuple[Row, Failures]:
    """Two threads that share one LLM."""
    failures: Failures = []
    with Child("threads", backend, seconds, patience=PATIENCE + seconds) as child:
        values = child.report(failures)
    return _row("threads", backend, values, failures), failures


def signals(backend: str, count: int) -> tuple[Row, Failures]:
    """Signals at random moments of long calls, of which one process makes one after the other."""
    failures: Failures = []
    took, got = [], []
    with Child("signals", backend) as child:
        alive = child.line() == "ready"
        for i in progress(range(count), f"signals, {backend}"):
            if not alive:
                failures.append(f"the process ended before signal {i}: {child.process.wait()}")
                break
            way, number = WAYS[i % len(WAYS)]
            child.ask(way)
            alive = child.line() == "go"
            time.sleep(random.uniform(0.0, 0.2))
            start = time.perf_counter()
            child.process.send_signal(number)
            told: Failures = []
            report = child.report(told)
            took.append(time.perf_counter() - start)
            got.append(report.get("tokens", 0))
            if took[-1] > PROMPT:
                told.append(f"it took {took[-1]:.1f} s")
            failures += [f"signal {i}, {way}, {number.name}: {what}" for what in told]
            alive = alive and bool(report)
    values: dict[str, Value] = {"signals": len(took), "partial_tokens": sum(got)}
    if took:
        values["to_end"] = Spread.of([1000 * t for t in took], "ms")
    return _row("signals", backend, values, failures), failures


def loops(backend: str, count: int) -> tuple[Row, Failures]:
    """One signal to a loop of short calls; every other time Ctrl-C, else SIGTERM."""
    failures: Failures = []
    took = []
    for i in progress(range(count), f"loops, {backend}"):
        number = (signal.SIGINT, signal.SIGTERM)[i % 2]
        with Child("loop", backend) as child:
            said = child.line()
            time.sleep(random.uniform(0.0, 0.5))
            start = time.perf_counter()
            child.process.send_signal(number)
            try:
                code = child.process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                code = 0
            took.append(time.perf_counter() - start)
        if said != "go" or code != -number:
            failures.append(f"{number.name}: said {said!r}, exit status {code}, not {-number}")
        if took[-1] > PROMPT:
            failures.append(f"{number.name}: it took {took[-1]:.1f} s")
    values: dict[str, Value] = {
        "signals": count,
        "to_end": Spread.of([1000 * t for t in took], "ms"),
    }
    return _row("loop of calls", backend, values, failures), failures


def forks(backend: str, count: int) -> tuple[Row, Failures]:
    """Forks of a process whose LLM and AsyncEngine are busy in other threads."""
    failures: Failures = []
    with Child("fork", backend, count) as child:
        values = child.report(failures)
    return _row("fork", backend, values, failures), failures


def neighbour(backend: str, seconds: float, repeats: int) -> tuple[Row, Failures]:
    """Default threads and one thread, alone and beside a process that keeps one core busy."""
    failures: Failures = []
    values: dict[str, Value] = {}
    for place in ("alone", "beside a busy process"):
        with busy(place != "alone"), Child("speed", backend, seconds, repeats) as child:
            found = child.report(failures).get("tokens_per_s", {})
        for name, speeds in found.items():
            values[f"{name}, {place}"] = Spread.of(speeds, "tokens/s")
        if found and place != "alone":
            failures += collapse(found["default"], found["one"])
    return _row("busy neighbour", backend, values, failures), failures


def documents() -> tuple[Row, Failures]:
    """What README.md and docs/ tell users to type (`tests/long/documented.py`)."""
    start = time.perf_counter()
    count, failures = documented.run_all()
    values: dict[str, Value] = {"commands": count, "minutes": (time.perf_counter() - start) / 60}
    return _row("documents", "auto", values, failures), failures


def collapse(default: list[float], one: list[float]) -> Failures:
    """What is wrong with these tokens per second of default threads and of one."""
    ours, least = statistics.median(default), statistics.median(one) / COLLAPSE
    if ours >= least:
        return []
    return [f"default threads make {ours:.1f} tokens/s, a third of one thread's are {least:.1f}"]


@contextmanager
def busy(wanted: bool) -> Iterator[None]:
    """A process beside us that keeps one core busy, if wanted."""
    if not wanted:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _row(case: str, backend: str, values: dict[str, Any], failures: Failures) -> Row:
    return Row(f"{case}, {backend}", {"backend": backend}, values | {"failures": len(failures)})


def cases(backend: str, options: argparse.Namespace) -> list[Callable[[], tuple[Row, Failures]]]:
    """Those of one backend."""
    return [
        lambda: threads(backend, options.seconds),
        lambda: signals(backend, options.signals),
        lambda: loops(backend, options.loops),
        lambda: forks(backend, options.forks),
        lambda: neighbour(backend, options.neighbour_seconds, options.repeats),
    ]


def main() -> int:
    options = parse(
        __doc__, seconds=60, signals=60, loops=6, forks=10, neighbour_seconds=3, repeats=3
    )
    rows, failures = [], []
    for run in (*(case for name in BACKENDS for case in cases(name, options)), documents):
        row, told = run()
        rows.append(row)
        failures += [f"{row.case}: {what}" for what in told]
        shown = {k: round(getattr(v, "median", v), 1) for k, v in row.values.items()}
        print(f"{row.case:28}{'FAILED' if told else 'passed'}  {shown}", flush=True)
        for what in told[:10]:
            print(f"  {what}", flush=True)
    record(
        "trial",
        options,
        {
            "target": TARGET,
            "draft": DRAFT,
            "k": 4,
            "backends": list(BACKENDS),
            "seconds": options.seconds,
            "neighbour_seconds": options.neighbour_seconds,
            "repeats": options.repeats,
        },
        rows,
        [
            "threads: two of them share one LLM; every result is compared with that of one thread.",
            "signals: at random moments of long calls: Ctrl-C in generate and stream, both signals "
            "with on_interrupt=return; to_end: until the partial outputs are checked.",
            "loop of calls: one Ctrl-C or SIGTERM ends the process by that signal.",
            "fork: every call in the child raises UsageError, and the child ends by itself.",
            "documents: every command of README.md and docs/ that needs no GPU and is no long run.",
            f"busy neighbour: fails where default threads make less than 1/{COLLAPSE:g} of the "
            "tokens of one thread; other differences are recorded and not judged.",
            *(f"FAILED: {failure}" for failure in failures[:20]),
        ],
        "tests.long.trial",
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

"""Rough use, on every CPU backend: threads, signals, a busy machine, forks; then every command that
the documents show. Exits with 1 if any of it goes wrong.

Each case runs in a process of its own (`--child CASE BACKEND`), so that one which crashes or hangs
is a failure of its row and not of the run. A child writes lines on standard output: `go` when a
signal may come, and JSON objects with counts and with its `failures`, in words. What is timed is
recorded, and judged only where it means that something hangs or collapses: a signal that takes more
than 5 s, or default threads that make less than a third of the tokens of one thread.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

from benchmarks.common import DRAFT, ROOT, TARGET, parse, progress, record
from foretoken import LLM, AsyncEngine, SamplingParams
from foretoken.engine.trace import StepTrace
from foretoken.errors import UsageError
from foretoken.lab.results import Row, Spread, Value
from foretoken.lab.workloads import heldout
from foretoken.outputs import RequestOutput
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

SPECULATION = {"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 4}
PROMPTS = [item.prompt[-160:] for item in heldout(8)]
SHORT = [
    SamplingParams(temperature=0, max_tokens=24),
    SamplingParams(temperature=0.8, seed=1, n=2, max_tokens=16),
    SamplingParams(temperature=1.0, seed=2, top_p=0.9, max_tokens=24),
    SamplingParams(temperature=0, num_speculative_tokens=0, max_tokens=12),
]
# Prompts and tokens of a call that is still running when its signal comes.
LONG = {"native": (2, 600), "torch": (1, 240)}
HANG = 60  # seconds after which something is said to wait for ever

Failures = list[str]
Report = dict[str, Any]


class Child:
    """A case in a process of its own, which is killed when it is silent for too long."""

    program = ("-m", "tests.long.trial", "--child")

    def __init__(self, case: str, backend: str, *numbers: float, patience: float = PATIENCE):
        self.patience = patience
        self.process = subprocess.Popen(
            [sys.executable, *self.program, case, backend, *map(str, numbers)],
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
        timer = threading.Timer(self.patience, self.process.kill)
        timer.start()
        try:
            return self.process.stdout.readline().strip()  # type: ignore[union-attr]
        finally:
            timer.cancel()

    def report(self, failures: Failures) -> dict[str, Any]:
        line = self.line()
        if not line.startswith("{"):
            failures.append(f"the process said {line!r} and ended with {self.process.wait()}")
            return {}
        found: dict[str, Any] = json.loads(line)
        failures += found.pop("failures")
        return found

    def ask(self, text: str) -> None:
        self.process.stdin.write(text + "\n")  # type: ignore[union-attr]
        self.process.stdin.flush()  # type: ignore[union-attr]


def threads(backend: str, seconds: float) -> tuple[Row, Failures]:
    failures: Failures = []
    with Child("threads", backend, seconds, patience=PATIENCE + seconds) as child:
        values = child.report(failures)
    return _row("threads", backend, values, failures), failures


def signals(backend: str, count: int) -> tuple[Row, Failures]:
    """Signals at random moments of long calls, which one process makes one after the other."""
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
    """Forks of a process while its LLM and AsyncEngine are busy in other threads."""
    failures: Failures = []
    with Child("fork", backend, count) as child:
        values = child.report(failures)
    return _row("fork", backend, values, failures), failures


def neighbour(backend: str, seconds: float, repeats: int) -> tuple[Row, Failures]:
    """Default threads and one thread, on a quiet machine and next to a busy process."""
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
    """The commands of README.md and docs/ (`tests/long/documented.py`)."""
    start = time.perf_counter()
    count, failures = documented.run_all()
    values: dict[str, Value] = {"commands": count, "minutes": (time.perf_counter() - start) / 60}
    return _row("documents", "auto", values, failures), failures


def collapse(default: list[float], one: list[float]) -> Failures:
    """Failures in these tokens per second of default threads and of one."""
    ours, least = statistics.median(default), statistics.median(one) / COLLAPSE
    if ours >= least:
        return []
    return [f"default threads make {ours:.1f} tokens/s, a third of one thread's are {least:.1f}"]


@contextmanager
def busy(wanted: bool) -> Iterator[None]:
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
    return [
        lambda: threads(backend, options.seconds),
        lambda: signals(backend, options.signals),
        lambda: loops(backend, options.loops),
        lambda: forks(backend, options.forks),
        lambda: neighbour(backend, options.neighbour_seconds, options.repeats),
    ]


# What a child does


def tokens(output: RequestOutput) -> list[list[int]]:
    return [sample.token_ids for sample in output.outputs]


def load(backend: str, **options: Any) -> LLM:
    return LLM(TARGET, SPECULATION, backend=backend, max_num_seqs=8, **options)


def say(report: Report | str) -> None:
    print(report if isinstance(report, str) else json.dumps(report), flush=True)


def check(llm: LLM, failures: list[str]) -> None:
    try:
        llm.engine.check_integrity()
    except Exception as error:
        failures.append(f"integrity: {error}")
    if llm.engine.has_work:
        failures.append("requests were left behind")


def share_llm(
    llm: LLM, seconds: float, each: Sequence[SamplingParams] = SHORT, count: int = 2
) -> Report:
    pairs = [(prompt, params) for prompt in PROMPTS[:4] for params in each]
    expected = [tokens(llm.generate([prompt], params)[0]) for prompt, params in pairs]
    calls, failures = [0] * count, list[str]()
    num_steps = 0
    end = time.monotonic() + seconds

    def count_step(trace: StepTrace) -> None:
        nonlocal num_steps
        num_steps += 1

    def work(number: int) -> None:
        choose = random.Random(number)
        while not calls[number] or time.monotonic() < end:
            i = choose.randrange(len(pairs))
            prompt, params = pairs[i]
            try:
                if choose.random() < 0.3:
                    *_, output = llm.stream(prompt, params)
                else:
                    (output,) = llm.generate([prompt], params)
            except BaseException as error:
                failures.append(f"{type(error).__name__}: {error}")
                return
            if tokens(output) != expected[i]:
                failures.append(f"item {i} has other tokens than alone (error: {output.error})")
            calls[number] += 1

    llm.engine.on_step = count_step
    crew = [threading.Thread(target=work, args=[i], daemon=True) for i in range(count)]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join(max(end - time.monotonic(), 0) + HANG)
    failures += ["a thread waits for ever" for thread in crew if thread.is_alive()]
    if not failures:
        check(llm, failures)
        if [tokens(llm.generate([p], params)[0]) for p, params in pairs] != expected:
            failures.append("afterwards, one thread gets other tokens")
    if min(calls) * 3 < max(calls) and max(calls) > 30:
        failures.append(f"unfair: the threads made {calls} calls")
    return {
        "threads": count,
        "calls": sum(calls),
        "calls_of_the_busiest_thread": max(calls),
        "calls_of_the_other": min(calls),
        "steps": num_steps,
        "failures": failures,
    }


def take_signals(backend: str) -> None:
    """Make one long call for each line of standard input, in the way that the line names."""
    llm = load(backend)
    count, length = LONG[backend]
    prompts = PROMPTS[:count]
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=length, ignore_eos=True)
    whole = [tokens(output) for output in llm.generate(prompts, params)]
    say("ready")
    for line in sys.stdin:
        way, failures, outputs = line.strip(), list[str](), None
        announce(llm, lasts=True)
        try:
            if way == "stream":
                for output in llm.stream(prompts[0], params):
                    outputs = [output]
                failures.append("the call ended before the signal came")
            else:
                outputs = llm.generate(prompts, params, on_interrupt=way)  # type: ignore[arg-type]
        except KeyboardInterrupt as stop:
            # Between steps of a stream it is the caller's, who has the last output.
            outputs = getattr(stop, "outputs", outputs if way == "stream" else None)
        if outputs is None:
            failures.append("the partial outputs were lost")
        elif way != "stream" and not any(output.interrupted_by for output in outputs):
            failures.append("no output says that it was interrupted")
        for output, known in zip(outputs or (), whole, strict=False):
            cut = tokens(output)
            if any(some != all_[: len(some)] for some, all_ in zip(cut, known, strict=False)):
                failures.append("partial tokens are not the beginning of the whole ones")
        check(llm, failures)
        got = sum(len(some) for output in outputs or () for some in tokens(output))
        say({"tokens": got, "failures": failures})


def announce(llm: LLM, *, lasts: bool = False) -> None:
    """Say `go` in the first step that comes; lasts: a call of many steps takes a second or more."""
    steps = itertools.count()

    def told(trace: StepTrace) -> None:
        number = next(steps)
        if number == 0:
            llm.engine.on_step = told if lasts else None
            say("go")
        elif number > 60:  # a signal that a busy machine sends late still finds it
            time.sleep(0.005)

    llm.engine.on_step = told


def call_in_a_loop(backend: str) -> None:
    """Short calls, one after the other, until the process is ended."""
    llm = load(backend)
    llm.generate(PROMPTS, SHORT[0])
    announce(llm)
    for _ in range(10**6):
        llm.generate(PROMPTS[:2], SHORT[0])
    say("survived")


def fork_while_busy(backend: str, count: int) -> Report:
    """Forks while LLM and AsyncEngine are busy in other threads; neither may notice."""
    llm, engine = load(backend), AsyncEngine(TARGET, SPECULATION, backend=backend)
    expected = tokens(llm.generate(PROMPTS[0], SHORT[0])[0])
    failures, stop = list[str](), threading.Event()

    async def ask() -> list[list[int]]:
        outputs = [output async for output in engine.generate(PROMPTS[0], SHORT[0])]
        return tokens(outputs[-1])

    def busy(call: Callable[[], list[list[int]]]) -> None:
        while not stop.is_set():
            if call() != expected:
                failures.append("other tokens beside forks")

    crew = [
        threading.Thread(target=busy, args=[call], daemon=True)
        for call in (
            lambda: tokens(llm.generate(PROMPTS[0], SHORT[0])[0]),
            lambda: asyncio.run(ask()),
        )
    ]
    for thread in crew:
        thread.start()
    for _ in range(count):
        time.sleep(random.uniform(0.0, 0.05))
        child = os.fork()
        if not child:
            signal.alarm(HANG)
            told = in_fork(llm, engine)
            print(*told, sep="\n", end="", file=sys.stderr, flush=True)
            atexit._run_exitfuncs()  # finalizers
            os._exit(len(told))  # `exit` would crash in a thread pool of PyTorch's own
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code:
            failures.append(f"a fork ended with {code}")
    stop.set()
    for thread in crew:
        thread.join(HANG)
    failures += ["a thread waits for ever" for thread in crew if thread.is_alive()]
    return {"forks": count, "failures": failures}


def in_fork(llm: LLM, engine: AsyncEngine) -> list[str]:
    async def one(outputs: AsyncIterator[RequestOutput]) -> None:
        async for _ in outputs:
            break

    told = []
    conversation = [{"role": "user", "content": "a"}]
    calls: dict[str, Callable[[], Any]] = {
        "generate": lambda: llm.generate("a"),
        "stream": lambda: next(llm.stream("a")),
        "chat": lambda: llm.chat(conversation),
        "metrics": lambda: llm.metrics,
        "tokenizer": lambda: llm.tokenizer,
        "AsyncEngine.generate": lambda: asyncio.run(one(engine.generate("a"))),
        "AsyncEngine.chat": lambda: asyncio.run(
            one(engine.chat(conversation, chat_template="{{ messages[0].content }}"))
        ),
        "AsyncEngine.abort": lambda: asyncio.run(engine.abort("1")),
        "AsyncEngine.metrics": lambda: engine.metrics,
    }
    for name, call in calls.items():
        try:
            call()
            told.append(f"{name} returned")
        except UsageError:
            pass
        except Exception as error:
            told.append(f"{name}: {type(error).__name__}: {error}")
    llm.close()
    asyncio.run(engine.close())
    return told


def measure_speed(backend: str, seconds: float, repeats: int) -> Report:
    found: dict[str, list[float]] = {"default": [], "one": []}
    for _ in range(repeats):
        for name, count in (("default", None), ("one", 1)):
            with load(backend, threads=count, enable_prefix_caching=False) as llm:
                llm.generate(PROMPTS[0], SHORT[0])
                start, made = time.perf_counter(), 0
                while not made or time.perf_counter() - start < seconds:
                    (output,) = llm.generate(PROMPTS[0], SHORT[0])
                    made += len(output.outputs[0].token_ids)
                found[name].append(made / (time.perf_counter() - start))
    return {"tokens_per_s": found, "failures": []}


def be_child(case: str, backend: str, *numbers: str) -> None:
    # A process that a script starts in its background ignores Ctrl-C by default.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if case == "threads":
        say(share_llm(load(backend), float(numbers[0])))
    elif case == "signals":
        take_signals(backend)
    elif case == "loop":
        call_in_a_loop(backend)
    elif case == "fork":
        say(fork_while_busy(backend, int(numbers[0])))
    elif case == "speed":
        say(measure_speed(backend, float(numbers[0]), int(numbers[1])))
    else:
        raise SystemExit(f"unknown case {case}")


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        be_child(*sys.argv[2:])
        return 0
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

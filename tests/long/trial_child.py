"""What `tests.long.trial` runs in processes of their own: python -m tests.long.trial_child CASE ...

Every case writes lines on standard output: `go` when a signal may come, and JSON objects with what
was counted, `failures` among it: what went wrong, in words.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from benchmarks.common import DRAFT, TARGET
from foretoken import LLM, AsyncEngine, SamplingParams
from foretoken.engine.trace import StepTrace
from foretoken.errors import UsageError
from foretoken.lab.workloads import heldout
from foretoken.outputs import RequestOutput

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
Report = dict[str, Any]


def tokens(output: RequestOutput) -> list[list[int]]:
    return [sample.token_ids for sample in output.outputs]


def load(backend: str, **options: Any) -> LLM:
    return LLM(TARGET, SPECULATION, backend=backend, max_num_seqs=8, **options)


def say(report: Report | str) -> None:
    print(report if isinstance(report, str) else json.dumps(report), flush=True)


def check(llm: LLM, failures: list[str]) -> None:
    """Nothing is left behind in the engine."""
    try:
        llm.engine.check_integrity()
    except Exception as error:
        failures.append(f"integrity: {error}")
    if llm.engine.has_work:
        failures.append("requests were left behind")


def threads(
    llm: LLM, seconds: float, each: Sequence[SamplingParams] = SHORT, count: int = 2
) -> Report:
    """Threads that share one LLM for a while; every result against that of one thread."""
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


def signals(backend: str) -> None:
    """One long call per line read, in the way that the line says, until there are no more lines."""
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


def loop(backend: str) -> None:
    """Short calls, one after the other, until the process is ended."""
    llm = load(backend)
    llm.generate(PROMPTS, SHORT[0])
    announce(llm)
    for _ in range(10**6):
        llm.generate(PROMPTS[:2], SHORT[0])
    say("survived")


def fork(backend: str, count: int) -> Report:
    """Forks while LLM and AsyncEngine are busy in other threads; all must go on as if alone."""
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
    """Which calls do not say at once that this process cannot serve them."""

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


def speed(backend: str, seconds: float, repeats: int) -> Report:
    """Tokens per second with the default threads and with one, in turn."""
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


def main() -> None:
    # What a script starts in its background ignores Ctrl-C unless it says otherwise.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    case, backend, *numbers = sys.argv[1:]
    if case == "threads":
        say(threads(load(backend), float(numbers[0])))
    elif case == "signals":
        signals(backend)
    elif case == "loop":
        loop(backend)
    elif case == "fork":
        say(fork(backend, int(numbers[0])))
    elif case == "speed":
        say(speed(backend, float(numbers[0]), int(numbers[1])))
    else:
        raise SystemExit(f"unknown case {case}")


if __name__ == "__main__":
    main()

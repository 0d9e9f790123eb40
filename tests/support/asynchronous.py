"""Driving an `AsyncEngine` from tests: one call per event loop, steps on demand."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

from foretoken import AsyncEngine, SamplingParams
from foretoken.ops.passes import pass_begins

PARAMS = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
PROMPTS = ["abc", "def f(x):", "import os", "x", "for i in", "class A:"]
OPTIONS = {"max_num_seqs": 4, "block_size": 4}
PATIENCE = 300.0  # seconds after which something hangs; a busy machine may take 60 times as long


def until(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.001)


def run(coroutine: Coroutine[Any, Any, Any], loop: Any = None) -> Any:
    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(asyncio.wait_for(coroutine, PATIENCE))


async def last(engine: AsyncEngine, prompt: Any, params: Any = PARAMS, **options: Any) -> Any:
    return [output async for output in engine.generate(prompt, params, **options)][-1]


# What follows looks inside; tests do not.


def thread_of(engine: AsyncEngine) -> threading.Thread:
    return engine._worker._thread


def num_requests(engine: AsyncEngine) -> int:
    """Requests that have not ended, and commands that the thread has not seen."""
    return len(engine._worker._groups) + len(engine._worker._commands)


async def idle(engine: AsyncEngine) -> None:
    """Wait until the thread has nothing to do; then nothing may be left. The thread itself looks,
    between two steps: what it is doing just now is not visible."""
    while await asyncio.wrap_future(engine._worker.call(lambda engine: engine.has_work)):
        await asyncio.sleep(0.001)
    await asyncio.wrap_future(engine._worker.call(lambda engine: engine.check_integrity()))
    assert not num_requests(engine)
    assert not engine._worker._open


async def entered(engine: AsyncEngine, count: int) -> None:
    """Wait until so many requests are open; the thread may not have looked at them yet."""
    while engine.status.num_open < count:
        await asyncio.sleep(0.001)


async def first(engine: AsyncEngine, gate: Gate, stream: Any) -> Any:
    """What a stream yields first; two steps are let through for it, and not before it is open.
    The first of them may have begun without it. No other request may open or end meanwhile.
    """
    num_open = engine.status.num_open
    reading = asyncio.ensure_future(anext(stream))
    await entered(engine, num_open + 1)
    gate.open(2)
    return await reading


class Gate:
    """Lets the engine make a step only when it is told to.
    asked: steps that the engine has come to make; the last one may wait here
    count: those that were let through
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine.engine
        self.step = self.engine.step
        self.engine.step = self  # type: ignore[method-assign, assignment]
        self.allowed = threading.Semaphore(0)
        self.asked = self.count = 0

    def __call__(self) -> Any:
        self.asked += 1
        pass_begins()  # readers learn of the step before, as they do when one takes long
        assert self.allowed.acquire(timeout=PATIENCE)
        self.count += 1
        return self.step()

    def open(self, steps: int = 10_000) -> None:
        self.allowed.release(steps)

    def close(self) -> None:
        """No gate from here on: the engine is as it was."""
        self.engine.step = self.step  # type: ignore[method-assign]
        self.open()

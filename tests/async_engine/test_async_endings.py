"""Leaving, aborting, closing, failing: whatever ends, ends cleanly and alone."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from foretoken import AsyncEngine
from foretoken.errors import CapacityError, ProcessingError, RequestError, StepError, UsageError
from tests.engine.doubles import ON_HOST, Double, double, engine_of, failing
from tests.support.asynchronous import (
    LONG,
    OPTIONS,
    PARAMS,
    PATIENCE,
    PROMPTS,
    Gate,
    entered,
    first,
    idle,
    last,
    num_requests,
    run,
    thread_of,
)
from tests.support.checkpoints import ids_of


async def test_leaving_an_iterator_ends_its_request_alone(
    engine: AsyncEngine, expected: dict[str, list[int]]
) -> None:
    gate = Gate(engine)

    async def read_on(stream: Any) -> None:
        async for _ in stream:
            pass

    kept = asyncio.create_task(last(engine, "def f(x):", LONG))
    await entered(engine, 1)
    async with aclosing(engine.generate("abc", LONG, request_id="closed")) as stream:
        await first(engine, gate, stream)
    broken_off = engine.generate("abc", LONG, request_id="broken off")
    await first(engine, gate, broken_off)
    cancelled = engine.generate("abc", LONG, request_id="cancelled")
    await first(engine, gate, cancelled)
    reading = asyncio.create_task(read_on(cancelled))
    await asyncio.sleep(0)  # now it waits for more than the gate lets through
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert engine.status.num_open == 2
    del broken_off
    gate.open()
    tokens = (await kept).outputs[0].token_ids
    assert (len(tokens), tokens[:30]) == (200, expected["def f(x):"])
    gc.collect()
    while engine.status.num_open:  # the loop closes what was collected
        await asyncio.sleep(0.001)
    await idle(engine)
    reused = await last(engine, "abc", PARAMS, request_id="closed")
    assert reused.outputs[0].token_ids == expected["abc"]


async def test_a_request_is_left_before_its_first_step(engine: AsyncEngine) -> None:
    gate = Gate(engine)
    task = asyncio.create_task(last(engine, "abc", LONG))
    await entered(engine, 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    gate.open()
    await idle(engine)


async def test_abort_by_name(engine: AsyncEngine, expected: dict[str, list[int]]) -> None:
    gate = Gate(engine)
    ended = asyncio.create_task(last(engine, "abc", LONG, request_id="a"))
    other = asyncio.create_task(last(engine, "x", request_id="b"))
    gate.open(1)
    while gate.engine.scheduler.running == []:
        await asyncio.sleep(0.001)
    assert await engine.abort("a")
    assert not await engine.abort("nobody")
    gate.open()
    output = await ended
    assert output.outputs[0].finish_reason == "abort"
    assert len(output.outputs[0].token_ids) < 200
    assert (await other).outputs[0].token_ids == expected["x"]
    assert not await engine.abort("a")
    await idle(engine)


async def test_many_requests_with_aborts_at_random(
    engine: AsyncEngine, expected: dict[str, list[int]]
) -> None:
    async def one(number: int) -> None:
        prompt = PROMPTS[number % len(PROMPTS)]
        stop_after = None if number % 3 else number % 7
        tokens: list[int] = []
        async with aclosing(engine.generate(prompt, PARAMS)) as stream:
            count = 0
            async for output in stream:
                tokens = output.outputs[0].token_ids
                count += 1
                if count == stop_after:
                    break
        assert tokens == expected[prompt][: len(tokens)]
        assert stop_after is not None or tokens == expected[prompt]

    await asyncio.gather(*(one(number) for number in range(30)))
    await idle(engine)


async def test_bad_requests_raise_at_the_first_step_and_queue_nothing(engine: AsyncEngine) -> None:
    for prompt, params, error in [
        ("", {}, RequestError),
        (None, {}, RequestError),
        ([999], {}, RequestError),
        ("abc", {"max_tokens": 10_000}, CapacityError),
        ("abc", {"temperature": -1}, RequestError),
        ("abc", {"temprature": 1}, RequestError),
        ("abc", 3, RequestError),
    ]:
        stream = engine.generate(prompt, params)  # type: ignore[arg-type]
        with pytest.raises(error):
            await anext(stream)
    async with aclosing(engine.generate("abc", LONG, request_id="one")) as stream:
        await anext(stream)
        for name in ("one", 7):
            with pytest.raises(RequestError, match="request_id"):
                await anext(engine.generate("abc", request_id=name))  # type: ignore[arg-type]
    await idle(engine)
    engine.generate("abc", LONG)  # never begun: nothing was queued
    await idle(engine)


async def test_numbers_avoid_names_that_are_taken(engine: AsyncEngine) -> None:
    async with aclosing(engine.generate("abc", LONG, request_id="1")) as named:
        await anext(named)
        assert (await last(engine, "x")).request_id == "2"


async def test_close_while_requests_run(folder: Path) -> None:
    async with AsyncEngine(str(folder), **OPTIONS) as engine:  # type: ignore[arg-type]
        gate = Gate(engine)
        tasks = [asyncio.create_task(last(engine, "abc", LONG)) for _ in range(6)]
        await entered(engine, 6)
        gate.open(5)
        while gate.count < 5:
            await asyncio.sleep(0.001)
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0)  # the thread has been asked to stop after the present step
        gate.open(1)
    await closing
    assert not thread_of(engine).is_alive()
    outputs = await asyncio.gather(*tasks)
    assert {o.outputs[0].finish_reason for o in outputs} == {"abort"}
    assert [bool(o.outputs[0].token_ids) for o in outputs] == [True] * 4 + [False] * 2
    with pytest.raises(UsageError, match="closed"):
        await last(engine, "abc")
    assert not await engine.abort("1")
    await engine.close()


async def test_a_fault_in_the_thread_reaches_every_reader(engine: AsyncEngine) -> None:
    gate = Gate(engine)
    tasks = [asyncio.create_task(last(engine, "abc", LONG)) for _ in range(2)]
    await entered(engine, 2)

    def broken() -> None:
        raise ZeroDivisionError("injected")

    gate.step = broken  # type: ignore[assignment]
    late = engine.generate("abc")
    tasks.append(asyncio.ensure_future(anext(late)))  # type: ignore[arg-type]
    await entered(engine, 3)
    gate.open()
    for error in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(error, StepError)
        assert isinstance(error.__cause__, ZeroDivisionError)
    with pytest.raises(StepError, match="ZeroDivisionError: injected") as caught:
        await last(engine, "abc")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    await engine.close()


async def test_what_was_finished_before_a_fault_can_still_be_read(
    engine: AsyncEngine, expected: dict[str, list[int]]
) -> None:
    gate = Gate(engine)
    slow = engine.generate("abc", PARAMS)
    gate.allowed.release()
    assert not (await anext(slow)).finished
    gate.allowed.release(100)
    while engine.engine.has_work:
        await asyncio.sleep(0.001)

    def broken() -> None:
        raise ZeroDivisionError("injected")

    engine.engine.step = broken  # type: ignore[method-assign, assignment]
    with pytest.raises(StepError):
        await last(engine, "x")
    assert (await anext(slow)).outputs[0].token_ids == expected["abc"]
    await slow.aclose()


async def test_faults_that_end_requests_are_in_their_last_output(
    engine: AsyncEngine, expected: dict[str, list[int]]
) -> None:
    error, begins = ZeroDivisionError("injected"), [*ids_of("x"), expected["x"][0]]
    tokenizer: Any = engine.engine.tokenizer
    encode = failing(error, lambda text, **options: text == "unreadable")
    decode = failing(error, lambda ids, **options: ids[:2] == begins)
    tokenizer.encode = partial(encode, tokenizer.encode)
    tokenizer.decode = partial(decode, tokenizer.decode)
    good, bad = await asyncio.gather(last(engine, "abc"), last(engine, "x"))
    assert good.outputs[0].token_ids == expected["abc"]
    assert isinstance(bad.error, ProcessingError)
    assert bad.outputs[0].finish_reason == "error"
    with pytest.raises(ProcessingError, match="prompt was encoded"):
        await last(engine, "unreadable")
    with double(engine.engine.runner, "model", forward=failing(error)):
        both = await asyncio.gather(last(engine, "abc"), last(engine, "x"))
    assert [type(o.error) for o in both] == [StepError] * 2
    assert (await last(engine, "abc")).outputs[0].token_ids == expected["abc"]
    await idle(engine)


async def test_a_loop_that_was_closed_is_forgotten(
    engine: AsyncEngine, expected: dict[str, list[int]]
) -> None:
    gate, stream = Gate(engine), engine.generate("abc", LONG)

    def begin() -> Any:
        loop = asyncio.new_event_loop()
        waiting = loop.create_task(anext(stream))  # type: ignore[arg-type]
        loop.run_until_complete(entered(engine, 1))
        loop.close()  # an unclean end: nothing was cancelled
        return waiting

    waiting = await asyncio.to_thread(begin)
    gate.open()
    assert (await last(engine, "abc")).outputs[0].token_ids == expected["abc"]
    while num_requests(engine):
        await asyncio.sleep(0.001)
    waiting._log_destroy_pending = False


def test_two_loops_share_one_engine(engine: AsyncEngine, expected: dict[str, list[int]]) -> None:
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda p=p: found.append(run(last(engine, p))))  # type: ignore[misc]
        for p in PROMPTS[:2]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert {o.prompt: o.outputs[0].token_ids for o in found} == {
        p: expected[p] for p in PROMPTS[:2]
    }


class Observed(Double):
    """An engine that counts how often it is asked for work."""

    looks = 0

    @property
    def has_work(self) -> bool:
        self.looks += 1
        return bool(self.real.has_work)


def test_an_idle_thread_sleeps(folder: Path) -> None:
    """It looks for work when it wakes up, and it does not."""
    observed: Any = Observed(engine_of(ON_HOST, folder, **OPTIONS))
    engine = AsyncEngine.from_engine(observed)
    run(last(engine, "abc", {"max_tokens": 2}))
    threading.Event().wait(0.2)
    assert 0 < observed.looks < 20
    run(engine.close())


@pytest.mark.usefixtures("forked")
def test_a_forgotten_engine_ends_its_thread_and_the_program(folder: Path) -> None:
    engine = AsyncEngine(str(folder), **OPTIONS)  # type: ignore[arg-type]
    thread = thread_of(engine)
    del engine
    gc.collect()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    code = (
        "import asyncio, sys\nfrom foretoken import AsyncEngine\n"
        "engine = AsyncEngine(sys.argv[1])\n"
        "async def main():\n"
        "    async for o in engine.generate('abc', {'max_tokens': 200, 'ignore_eos': True}):\n"
        "        return o\n"
        "asyncio.run(main())\nprint('end')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.returncode, done.stdout) == (0, "end\n")
    assert "Error" not in done.stderr

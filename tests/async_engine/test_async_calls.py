"""`AsyncEngine`: tokens and texts between steps, how busy it is, and what is said when it ended."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import aclosing
from typing import Any

import pytest

from foretoken import AsyncEngine, RequestError, StepError, UsageError
from foretoken.engine.trace import StepTrace
from tests.support.asynchronous import LONG, PARAMS, PATIENCE, Gate, entered, idle, last


async def test_tokens_and_texts_are_those_of_generate(engine: AsyncEngine) -> None:
    ids = await engine.encode("def f(x):")
    assert ids == (await last(engine, "def f(x):")).prompt_token_ids
    assert await engine.decode(ids) == "def f(x):"
    assert await engine.encode({"prompt_token_ids": [3, 1]}) == [3, 1]
    for wrong in ([-1], [10**9], [True]):
        with pytest.raises(RequestError, match="`tokens` is"):
            await engine.decode(wrong)
    with pytest.raises(RequestError):
        await engine.encode(3)  # type: ignore[arg-type]
    await last(engine, "x")  # what one call raises reaches no other call


async def test_requests_that_decode_do_not_wait_while_a_long_prompt_is_encoded(
    engine: AsyncEngine, expected: dict[str, list[int]]
) -> None:
    tokenizer: Any = engine.engine.tokenizer
    encode, go = tokenizer.encode, threading.Event()

    def slow(text: str, **options: Any) -> Any:
        if len(text) < 5000:
            return encode(text, **options)
        assert go.wait(PATIENCE)
        return [5, 6]

    tokenizer.encode = slow
    long, more = "a" * 5000, "b" * 5000
    asked = [asyncio.ensure_future(last(engine, long, request_id=n)) for n in "xyz"]
    tokens = asyncio.ensure_future(engine.encode(more))
    await entered(engine, 3)
    assert (await last(engine, "abc")).outputs[0].token_ids == expected["abc"]
    assert await engine.abort("x")
    asked[1].cancel()
    await asyncio.sleep(0)
    go.set()
    assert (await asked[0]).outputs[0].finish_reason == "abort"
    assert len((await asked[2]).outputs[0].token_ids) == PARAMS.max_tokens
    assert await tokens == [5, 6]
    await idle(engine)


def watch(engine: AsyncEngine, seconds: float) -> list[int]:
    """How many steps were made before each text that begins with "slow", which takes so long."""
    tokenizer: Any = engine.engine.tokenizer
    encode, steps, seen = tokenizer.encode, list[StepTrace](), list[int]()

    def slow(text: str, **options: Any) -> Any:
        if text.startswith("slow"):
            seen.append(len(steps))
            time.sleep(seconds)
        return encode(text, **options)

    engine.engine.on_step = steps.append
    tokenizer.encode = slow
    return seen


async def test_steps_come_between_prompts_that_take_long_together(engine: AsyncEngine) -> None:
    seen = watch(engine, 0.03)
    async with aclosing(engine.generate("abc", LONG)) as stream:
        await anext(stream)
        few = {"max_tokens": 1}
        await asyncio.gather(*(last(engine, f"slow {i}", few) for i in range(5)))
    assert len(set(seen)) == 5


async def test_a_burst_of_short_prompts_does_not_keep_the_first_one_waiting(
    engine: AsyncEngine,
) -> None:
    """Nothing runs when they come: the first one runs before the last one is encoded."""
    seen = watch(engine, 0.01)
    few = {"max_tokens": 2}
    await asyncio.gather(*(last(engine, f"slow {i}", few) for i in range(20)))
    assert seen[-1] > 2


def test_the_collector_may_end_an_engine_in_the_thread_that_encodes(engine: AsyncEngine) -> None:
    worker = engine._worker
    worker.call(lambda of: worker.stop(), ["x" * 5000]).result(timeout=60)
    worker.stop()


async def test_how_busy_it_is(engine: AsyncEngine) -> None:
    gate = Gate(engine)
    status = engine.status
    assert (status.num_open, status.num_running, status.num_waiting) == (0, 0, 0)
    async with aclosing(engine.generate("abc", {"n": 6, "max_tokens": 50})) as stream:
        gate.open(1)
        await anext(stream)
        status = engine.status
        assert (status.num_open, status.num_running, status.num_waiting) == (1, 4, 2)
        assert 0 < status.kv_cache_usage < 1
        gate.open()
    await idle(engine)
    assert engine.status.kv_cache_usage == 0
    assert engine.status.failure is None


async def test_calls_that_wait_when_the_thread_fails_are_told(engine: AsyncEngine) -> None:
    gate = Gate(engine)

    def fail() -> Any:
        raise RuntimeError("broken")

    gate.step = fail
    async with aclosing(engine.generate("abc", LONG)) as stream:
        reading = asyncio.ensure_future(anext(stream))
        while engine.status.num_waiting == 0:
            await asyncio.sleep(0.001)
        calling = asyncio.ensure_future(engine.encode("abc"))
        left = asyncio.ensure_future(engine.encode("abc"))
        await asyncio.sleep(0)
        left.cancel()
        gate.open()
        for waiting in (reading, calling):
            with pytest.raises(StepError, match="broken"):
                await waiting
    assert isinstance(engine.status.failure, StepError)
    with pytest.raises(StepError):
        await engine.decode([1])


async def test_a_closed_engine_says_so(engine: AsyncEngine) -> None:
    await engine.close()
    assert isinstance(engine.status.failure, UsageError)
    with pytest.raises(UsageError):
        await engine.encode("abc")


def test_defaults_are_a_copy(engine: AsyncEngine) -> None:
    engine.get_default_sampling_params().top_k = 5
    assert engine.get_default_sampling_params().top_k == 0

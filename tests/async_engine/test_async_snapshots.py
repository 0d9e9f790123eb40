"""The same tokens as `LLM`, in one batch, in order, whatever the reader does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from foretoken import AsyncEngine
from foretoken.errors import RequestError
from foretoken.ops import ForwardOutput
from tests.async_engine.loops import watched_loop
from tests.engine.doubles import double
from tests.support.asynchronous import LONG, PARAMS, PROMPTS, Gate, idle, last, num_requests


async def test_tokens_are_those_of_llm_and_requests_share_steps(
    engine: AsyncEngine, expected: dict[str, list[int]]
) -> None:
    gate = Gate(engine)
    tasks = [asyncio.create_task(last(engine, prompt)) for prompt in PROMPTS[:4]]
    while num_requests(engine) < 4:
        await asyncio.sleep(0.001)
    gate.open()
    outputs = await asyncio.gather(*tasks)
    assert {o.prompt: o.outputs[0].token_ids for o in outputs} == {
        prompt: expected[prompt] for prompt in PROMPTS[:4]
    }
    assert gate.count <= 33, "four requests of 30 tokens, one after the other, need more"
    assert engine.metrics.num_steps > gate.count
    await idle(engine)


async def test_snapshots_come_in_order_and_the_last_is_finished(engine: AsyncEngine) -> None:
    seen = [o async for o in engine.generate("abc", PARAMS, request_id="mine")]
    assert [o.finished for o in seen] == [False] * (len(seen) - 1) + [True]
    assert {o.request_id for o in seen} == {"mine"}
    for before, after in pairwise(seen):
        a, b = before.outputs[0], after.outputs[0]
        assert len(a.token_ids) < len(b.token_ids)
        assert b.token_ids[: len(a.token_ids)] == a.token_ids
        assert b.text.startswith(a.text)


async def test_a_slow_reader_gets_the_newest_output_and_stalls_no_other(
    engine: AsyncEngine, expected: dict[str, list[int]]
) -> None:
    gate = Gate(engine)
    gate.open(1)
    slow = engine.generate("abc", PARAMS)
    first = await anext(slow)
    gate.open()
    quick = await last(engine, "x", LONG)
    assert len(quick.outputs[0].token_ids) == 200
    second = await anext(slow)  # 30 tokens were done long ago
    assert not first.finished
    assert second.outputs[0].token_ids == expected["abc"]
    with pytest.raises(StopAsyncIteration):
        await anext(slow)
    await idle(engine)


async def test_a_loop_that_is_busy_is_called_once(engine: AsyncEngine) -> None:
    gate, calls = Gate(engine), list[Any]()
    stream = engine.generate("abc", PARAMS)
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    watched_loop().on_call = calls.append
    gate.open()
    while num_requests(engine) or not gate.count:  # its last output too has been shown
        threading.Event().wait(0.01)  # the loop does not get round to anything
    assert len(calls) == 1
    assert (await waiting).finished
    await stream.aclose()


async def test_readers_are_woken_as_the_next_pass_begins(engine: AsyncEngine) -> None:
    """Not at the end of a step, where they would wait for the interpreter; of the last they are."""
    in_pass, woken = False, list[bool]()

    def noted(forward: Callable[..., ForwardOutput], *given: Any) -> ForwardOutput:
        nonlocal in_pass
        in_pass = True
        try:
            return forward(*given)
        finally:
            in_pass = False

    watched_loop().on_call = lambda call: woken.append(in_pass)
    with double(engine.engine.runner, "model", forward=noted):
        assert [d async for d in engine.generate("abc", LONG, deltas=True)][-1].finished
    assert len(woken) > 1
    assert all(woken[:-1])


async def test_calls_as_vllms_users_write_them(
    engine: AsyncEngine, expected: dict[str, list[int]]
) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    talk = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
    by_place = [o async for o in engine.generate("abc", PARAMS, "mine", lora_request=None)][-1]
    assert by_place.request_id == "mine"
    chat = engine.chat(talk, PARAMS, "talk", chat_template=template)
    for output in (by_place, await last(engine, {"prompt": "abc"}), [o async for o in chat][-1]):
        assert (output.prompt, output.outputs[0].token_ids) == ("abc", expected["abc"])
    for wrong in ({"chat_template": "no marks"}, {"chat_templat": template}):
        with pytest.raises(RequestError):
            engine.chat(talk, PARAMS, **wrong)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="left out, or 0"):
        engine.generate("abc", PARAMS, priority=3)
    with pytest.raises(RequestError, match="at least one message"):
        await anext(engine.chat([], PARAMS, chat_template=template))
    await idle(engine)

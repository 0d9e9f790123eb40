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
from foretoken.outputs import RequestOutput
from tests.support.asynchronous import (
    LONG,
    PARAMS,
    PROMPTS,
    Gate,
    idle,
    last,
    num_requests,
    run,
)


def test_tokens_are_those_of_llm_and_requests_share_steps(
    engine: AsyncEngine, expected: dict[str, list[int]]
) -> None:
    async def main() -> None:
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

    run(main())


def test_snapshots_come_in_order_and_the_last_is_finished(engine: AsyncEngine) -> None:
    async def main() -> list[RequestOutput]:
        return [o async for o in engine.generate("abc", PARAMS, request_id="mine")]

    seen = run(main())
    assert [o.finished for o in seen] == [False] * (len(seen) - 1) + [True]
    assert {o.request_id for o in seen} == {"mine"}
    for before, after in pairwise(seen):
        a, b = before.outputs[0], after.outputs[0]
        assert len(a.token_ids) < len(b.token_ids)
        assert b.token_ids[: len(a.token_ids)] == a.token_ids
        assert b.text.startswith(a.text)


def test_a_slow_reader_gets_the_newest_and_stalls_nobody(
    engine: AsyncEngine, expected: dict[str, list[int]]
) -> None:
    async def main() -> None:
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

    run(main())


def test_a_loop_that_is_busy_is_called_once(engine: AsyncEngine) -> None:
    async def main() -> None:
        gate = Gate(engine)
        loop = asyncio.get_running_loop()
        calls = []
        real = loop.call_soon_threadsafe

        def counted(function: Callable[..., object], *args: Any, **options: Any) -> Any:
            calls.append(function)
            return real(function, *args, **options)

        loop.call_soon_threadsafe = counted  # type: ignore[assignment, method-assign]
        stream = engine.generate("abc", PARAMS)
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        gate.open()
        while num_requests(engine) or not gate.count:  # its last output too has been shown
            threading.Event().wait(0.01)  # the loop does not get round to anything
        loop.call_soon_threadsafe = real  # type: ignore[method-assign]
        assert len(calls) == 1
        assert (await waiting).finished
        await stream.aclose()

    run(main())


def test_readers_are_woken_as_the_next_pass_begins(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at the end of a step, where they would wait for the interpreter; of the last they are."""
    step, stepping, woken = engine.engine.step, False, []

    def noted() -> Any:
        nonlocal stepping
        stepping = True
        try:
            return step()
        finally:
            stepping = False

    async def main() -> None:
        loop = asyncio.get_running_loop()
        real = loop.call_soon_threadsafe

        def counted(*call: Any, **options: Any) -> Any:
            woken.append(stepping)
            return real(*call, **options)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        assert [d async for d in engine.generate("abc", LONG, deltas=True)][-1].finished

    monkeypatch.setattr(engine.engine, "step", noted)
    run(main())
    assert len(woken) > 1
    assert all(woken[:-1])


def test_calls_as_vllms_users_write_them(
    engine: AsyncEngine, expected: dict[str, list[int]]
) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    talk = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]

    async def main() -> None:
        by_place = [o async for o in engine.generate("abc", PARAMS, "mine", lora_request=None)][-1]
        assert by_place.request_id == "mine"
        chat = engine.chat(talk, PARAMS, "talk", chat_template=template)
        for output in (
            by_place,
            await last(engine, {"prompt": "abc"}),
            [o async for o in chat][-1],
        ):
            assert (output.prompt, output.outputs[0].token_ids) == ("abc", expected["abc"])
        for wrong in ({"chat_template": "no marks"}, {"chat_templat": template}):
            with pytest.raises(RequestError):
                engine.chat(talk, PARAMS, **wrong)  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="left out, or 0"):
            engine.generate("abc", PARAMS, priority=3)
        with pytest.raises(RequestError, match="at least one message"):
            await anext(engine.chat([], PARAMS, chat_template=template))
        await idle(engine)

    run(main())

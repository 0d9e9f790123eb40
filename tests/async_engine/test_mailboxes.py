"""The mailbox between the worker's thread and a reader: no news is lost, and a step wakes once."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from foretoken import AsyncEngine, RequestDelta
from foretoken.engine import worker
from foretoken.engine.worker import Mailbox
from tests.support.asynchronous import PARAMS, Gate, idle, run


@pytest.mark.parametrize("deltas", [True, False])
def test_no_news_is_lost_between_a_look_and_the_wait(
    deltas: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader looks without the lock: while one piece of news replaces another, it must see
    either. A thread that is interrupted at every instruction shows; a reader that sleeps fails."""
    for name in ("build_output", "take_delta"):
        monkeypatch.setattr(worker, name, lambda engine, news: news)
    monkeypatch.setattr(RequestDelta, "merge", staticmethod(lambda several: several[-1]))
    last = 400

    async def read_all() -> int:
        mailbox: Any = Mailbox(asyncio.get_running_loop(), deltas=deltas)
        thread = threading.Thread(
            target=lambda: [
                mailbox.put(None, i) and worker.wake_readers([mailbox]) for i in range(1, last + 1)
            ]
        )
        thread.start()
        while (read := await mailbox.read()) < last:
            pass
        thread.join()
        return int(read)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        assert all(run(read_all()) == last for _ in range(300))
    finally:
        sys.setswitchinterval(interval)


def test_readers_of_a_step_are_woken_by_one_call_of_their_loop(engine: AsyncEngine) -> None:
    async def main() -> None:
        gate, loop = Gate(engine), asyncio.get_running_loop()
        streams = [engine.generate(prompt, PARAMS, deltas=True) for prompt in ("abc", "de", "f")]

        def ask() -> list[asyncio.Future[RequestDelta]]:
            return [asyncio.ensure_future(anext(stream)) for stream in streams]

        firsts, num_steps = ask(), 0
        while not all(first.done() for first in firsts):
            num_steps += 1
            gate.open(1)
            while gate.asked <= num_steps:  # it has told of a step when it comes for the next
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.01)
        calls: list[Sequence[Mailbox]] = []
        call = loop.call_soon_threadsafe
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                loop, "call_soon_threadsafe", lambda wake, its: (calls.append(its), call(wake, its))
            )
            seconds = ask()
            await asyncio.sleep(0)  # they wait
            gate.open(1)
            await asyncio.wait_for(asyncio.gather(*seconds), 20)
        assert [len(mailboxes) for mailboxes in calls] == [3]
        gate.close()
        for stream in streams:
            await stream.aclose()
        await idle(engine)

    run(main())

"""The mailbox between the worker's thread and a reader: no news is lost, and a step wakes once."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any

import pytest

from foretoken import AsyncEngine, RequestDelta
from foretoken.engine.worker import Mailbox, wake_readers
from tests.async_engine.loops import watched_loop
from tests.support.asynchronous import PARAMS, Gate, idle, run

NEWS = [RequestDelta(str(i), [], finished=False) for i in range(1, 401)]


@pytest.mark.parametrize("deltas", [True, False])
def test_no_news_is_lost_between_a_look_and_the_wait(deltas: bool) -> None:
    """The reader looks without the lock: while one piece of news replaces another, it must see
    either. A thread that is interrupted at every instruction shows; a reader that sleeps fails."""
    last = len(NEWS)

    async def read_all() -> int:
        mailbox, num_read = Mailbox(asyncio.get_running_loop(), deltas=deltas), 0

        def put_all() -> None:
            for news in NEWS:
                if mailbox.put(news):
                    wake_readers([mailbox])

        thread = threading.Thread(target=put_all)
        thread.start()
        while num_read < last:
            num_read = int((await mailbox.read()).request_id)
        thread.join()
        return num_read

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        assert all(run(read_all()) == last for _ in range(300))
    finally:
        sys.setswitchinterval(interval)


async def test_readers_of_a_step_are_woken_by_one_call_of_their_loop(engine: AsyncEngine) -> None:
    gate = Gate(engine)
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
    calls: list[Any] = []
    seconds = ask()
    await asyncio.sleep(0)  # they wait
    watched_loop().on_call = calls.append
    gate.open(1)
    await asyncio.wait_for(asyncio.gather(*seconds), 20)
    assert [len(mailboxes) for _, mailboxes in calls] == [3]
    gate.close()
    for stream in streams:
        await stream.aclose()
    await idle(engine)

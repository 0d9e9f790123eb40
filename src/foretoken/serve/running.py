"""The engine's deltas of everything that a request asked for.

Charter: how many requests of the engine one of HTTP makes, and that none of them outlives it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, NamedTuple

from foretoken.async_engine import AsyncEngine
from foretoken.engine.prompts import Prompt
from foretoken.outputs import RequestDelta
from foretoken.serve.errors import written_as
from foretoken.serve.lifetime import Flight
from foretoken.serve.requests import Asked


class News(NamedTuple):
    """A delta, and the number of its prompt."""

    prompt: int
    delta: RequestDelta


async def run(engine: AsyncEngine, asked: Asked, flight: Flight) -> AsyncGenerator[News, None]:
    """What is new, in order for each prompt; closing it ends all of them, as `flight` may.

    Raises:
        ForetokenError: as `AsyncEngine.generate` does, what ended a request by a fault, and what
            `Flight` raises.
    """
    with written_as(asked.written), flight:
        if asked.messages is not None:
            template, name = asked.template, flight.new_name()
            streams = [engine.chat(asked.messages, asked.params, name, deltas=True, **template)]
        else:
            shown = (_shown(engine, prompt, asked) for prompt in asked.prompts)
            prompts = await asyncio.gather(*shown)
            streams = [
                engine.generate(prompt, asked.params, flight.new_name(), deltas=True)
                for prompt in prompts
            ]
        is_one = len(streams) == 1
        merged: AsyncGenerator[Any, None] = streams[0] if is_one else _merge(streams)
        async with aclosing(merged):
            async for item in merged:
                number, delta = (0, item) if is_one else item
                if delta.error is not None:
                    raise delta.error
                yield News(number, flight.read(delta))


async def _shown(engine: AsyncEngine, prompt: Prompt, asked: Asked) -> Prompt:
    """A prompt whose output names its text, if the answer begins with it."""
    if not asked.echo or isinstance(prompt, str):
        return prompt
    ids: list[int] = prompt  # type: ignore[assignment]  # a body has no other
    return {"prompt_token_ids": ids, "prompt": await engine.decode(ids)}


async def _merge(streams: list[AsyncGenerator[RequestDelta, None]]) -> AsyncGenerator[News, None]:
    """One task for each prompt, none for a delta."""
    queue: asyncio.Queue[News | Exception] = asyncio.Queue()

    async def pump(number: int, stream: AsyncGenerator[RequestDelta, None]) -> None:
        try:
            async with aclosing(stream):
                async for delta in stream:
                    queue.put_nowait(News(number, delta))
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(i, stream)) for i, stream in enumerate(streams)]
    try:
        num_left = len(tasks)
        while num_left:
            news = await queue.get()
            if isinstance(news, Exception):
                raise news
            yield news
            num_left -= news.delta.finished
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

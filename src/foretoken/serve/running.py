"""The engine's deltas of everything that a request asked for.

Charter: how many requests of the engine one of HTTP makes, that none of them outlives it, and how
many log-probabilities they may have together.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, NamedTuple

from foretoken.async_engine import AsyncEngine
from foretoken.engine.admission import last_tokens
from foretoken.errors import RequestError
from foretoken.outputs import RequestDelta
from foretoken.sampling.params import SamplingParams
from foretoken.serve.errors import written_as
from foretoken.serve.lifetime import Flight
from foretoken.serve.requests import Asked


class News(NamedTuple):
    """A delta, and the number of its prompt."""

    prompt: int
    delta: RequestDelta


async def run(
    engine: AsyncEngine, asked: Asked, flight: Flight, most_logprobs: int
) -> AsyncGenerator[News, None]:
    """What is new, in order for each prompt; closing it ends all of them, as `flight` may.

    Raises:
        RequestError: the answer would have more than `most_logprobs` log-probabilities.
        ForetokenError: as `AsyncEngine.generate` does, what ended a request by a fault, and what
            `Flight` raises.
    """
    with written_as(asked.written), flight:
        params, template = asked.params, asked.template
        likely = (asked.num_top, params.prompt_logprobs)
        is_counted = params.trace or any(value is not None for value in likely)
        if asked.messages is not None:
            if is_counted:
                ids = await engine.encode_chat(asked.messages, **template)
                size = len(last_tokens(ids, params, engine.engine.limits))
                (params,) = _bounded(engine, asked, [size], most_logprobs)
            name = flight.new_name()
            streams = [engine.chat(asked.messages, params, name, deltas=True, **template)]
        else:
            shown = (_shown(engine, prompt, asked, is_counted) for prompt in asked.prompts)
            prompts = await asyncio.gather(*shown)
            each = [params] * len(prompts)
            if is_counted:
                sizes = [len(prompt["prompt_token_ids"]) for prompt in prompts]
                each = _bounded(engine, asked, sizes, most_logprobs)
            streams = [
                engine.generate(prompt, its_params, flight.new_name(), deltas=True)
                for prompt, its_params in zip(prompts, each, strict=True)
            ]
        is_one = len(streams) == 1
        merged: AsyncGenerator[Any, None] = streams[0] if is_one else _merge(streams)
        async with aclosing(merged):
            async for item in merged:
                number, delta = (0, item) if is_one else item
                if delta.error is not None:
                    raise delta.error
                yield News(number, flight.read(delta))


async def _shown(engine: AsyncEngine, prompt: Any, asked: Asked, is_counted: bool) -> Any:
    """A prompt whose output names its text, if the answer begins with it; or one with its ids."""
    params, is_text = asked.params, isinstance(prompt, str)
    is_cut, adds_special = params.truncate_prompt_tokens is not None, asked.add_special_tokens
    if is_text and not (is_counted or is_cut or adds_special is False):
        return prompt
    ids, text = prompt, None
    if is_text:
        ids = await engine.encode(prompt, add_special_tokens=adds_special is not False)
        text = prompt
    kept = last_tokens(ids, params, engine.engine.limits)
    if asked.echo and (not is_text or len(kept) < len(ids)):
        text = await engine.decode(kept)
    return {"prompt_token_ids": kept, "prompt": text}


def _bounded(
    engine: AsyncEngine, asked: Asked, sizes: Sequence[int], most: int
) -> list[SamplingParams]:
    """The parameters for prompts of these lengths; a `max_tokens` left out is what `most` lets.

    Raises:
        RequestError: what is asked for is more.
    """
    params, limits = asked.params, engine.engine.limits
    of_prompt = 0 if params.prompt_logprobs is None else params.prompt_logprobs + 1
    of_prompt *= params.n if asked.echo else 1
    of_token = 0 if asked.num_top is None else asked.num_top + 1
    of_token += asked.num_drafts + 1 if params.trace else 0
    rooms = [min(limits.max_model_len, limits.cache_tokens) - size for size in sizes]
    count, longest = of_prompt * sum(sizes), params.max_tokens
    if longest is None:
        each = of_token * params.n * len(sizes)
        longest = max(1, (most - count) // each if each else max(rooms))
    count += of_token * params.n * sum(min(longest, max(room, 0)) for room in rooms)
    if count > most:
        name = "logprobs" if asked.num_top is not None else "prompt_logprobs"
        name = "trace" if params.trace and of_prompt == 0 and asked.num_top is None else name
        bound = f"at most {most} in one answer (--max-answer-logprobs)"
        remedy = "Ask for fewer tokens, samples or likeliest tokens."
        raise RequestError(name, f"{count} log-probabilities", bound, remedy)
    cut = replace(params, max_tokens=longest)
    return [cut if longest < room else params for room in rooms]


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

    tasks: list[asyncio.Task[None]] = []
    try:
        for i, stream in enumerate(streams):
            tasks.append(asyncio.create_task(pump(i, stream)))
            await asyncio.sleep(0)  # each checks its parameters, which may be long lists
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

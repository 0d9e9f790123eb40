"""The engine's deltas for one request over HTTP, and how long they may take.

Charter: one request over HTTP becomes one or several requests to the engine. None of them outlives
it, and their log-probabilities are bounded together. A `Flight` is a request over HTTP while the
engine works for it; timers end it if neither its client nor the model does. `Lifetime` holds all
flights. Routes ask it whether to take a request, signals tell it to drain, `server.py` polls it.
The front of a fleet has a `Lifetime`, too, with flights of its own (`fleet/front.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, Self

from foretoken.async_engine import AsyncEngine
from foretoken.engine.admission import last_tokens
from foretoken.errors import ForetokenError, RequestError
from foretoken.outputs import RequestDelta
from foretoken.sampling.params import SamplingParams
from foretoken.serve.errors import UnavailableError, written_as
from foretoken.serve.options import ServeOptions
from foretoken.serve.requests import GenerationRequest

_GRACE = 5.0
"""Seconds for a client to receive and read an answer that was cut off."""
NO_MORE = "The server ends and takes no more requests."
CUT_MESSAGES = {
    "queue": "No token was made within `queue_timeout`: the server is too busy.",
    "timeout": "No token was made within `request_timeout`: the server is too busy.",
    "shutdown": "The server ends, and its engine did not let go of this request.",
}
"""Messages for requests that are refused after they were accepted, by the reason given to `cut`."""


class UnderWay(Protocol):
    """A request that is being answered."""

    def cut(self, why: str, *, refuses: bool = True) -> None:
        """End it where it is, as `Flight.cut` does."""


class Lifetime:
    """The requests under way, and whether more are accepted.

    Args:
        failed: returns the error that made serving impossible, or None.

    Attributes:
        num_cut: requests that the server's end cut off.
    """

    def __init__(self, options: ServeOptions, failed: Callable[[], ForetokenError | None]) -> None:
        self.options, self.failed = options, failed
        self.flights: set[UnderWay] = set()
        self._end: float | None = None
        self.num_cut = 0

    @property
    def is_draining(self) -> bool:
        """Whether the server only finishes the requests that it has."""
        return self._end is not None

    def drain(self) -> None:
        """Take no more requests; those under way get `drain_timeout`. Safe in a signal handler."""
        self._end = self._end or time.monotonic() + self.options.drain_timeout

    def seconds_left(self) -> float:
        """Seconds that a client may still take to read the end of its answer."""
        left = _GRACE if self._end is None else self._end + _GRACE - time.monotonic()
        return min(max(left, 1.0), _GRACE)

    def is_over(self) -> bool:
        """Whether the drain is over; cuts off what is late. Call it repeatedly."""
        if self._end is None:
            return False
        late = time.monotonic() - self._end
        if late >= 0:
            self.num_cut = max(self.num_cut, len(self.flights))
            for flight in [*self.flights]:
                flight.cut("shutdown", refuses=late >= _GRACE)
        return not self.flights or late >= _GRACE


class Flight:
    """One request over HTTP, from the engine's queue to its last delta; a context manager.

    `cut` aborts it in the engine, and its last delta brings the tokens so far. A timeout before the
    first token refuses it at once, whatever the engine is doing: the task that entered is cancelled
    and leaves with `UnavailableError`. At the server's end an accepted request is not refused: if
    the engine had not begun with it, its answer is empty and says why.

    Args:
        name: prefix of its names in the engine; a number follows.

    Raises, when it is entered:
        UnavailableError: the server takes no more requests.
    """

    def __init__(self, lifetime: Lifetime, engine: AsyncEngine, name: str) -> None:
        self._lifetime, self._engine, self._name = lifetime, engine, name
        self._why, self._has_begun, self._is_refused, self._num_names = "", False, False, 0
        self._task: asyncio.Task[Any] | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._aborts: set[asyncio.Task[bool]] = set()

    def __enter__(self) -> Self:
        if self._lifetime.is_draining:
            raise UnavailableError(NO_MORE)
        self._task = asyncio.current_task()
        options, loop = self._lifetime.options, asyncio.get_running_loop()
        self._timers = [
            loop.call_later(options.queue_timeout, self.cut, "queue"),
            loop.call_later(options.request_timeout, self.cut, "timeout"),
        ]
        self._lifetime.flights.add(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        for timer in self._timers:
            timer.cancel()
        self._lifetime.flights.discard(self)
        if self._is_refused and self._task and kind is asyncio.CancelledError:
            self._task.uncancel()
            raise UnavailableError(CUT_MESSAGES[self._why])

    def new_name(self) -> str:
        self._num_names += 1
        return f"{self._name}-{self._num_names}"

    def cut(self, why: str, *, refuses: bool = True) -> None:
        """Abort it, because of `queue`, `timeout` or `shutdown`; if that `refuses` and there is no
        token yet, also cancel its task at once."""
        if refuses and not (self._has_begun or self._is_refused) and self._task:
            self._is_refused = self._task.cancel()
        self._why = self._why or why
        for number in range(self._num_names):
            task = asyncio.ensure_future(self._engine.abort(f"{self._name}-{number + 1}"))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    def read(self, delta: RequestDelta) -> RequestDelta:
        """A delta for the client: a sample that was cut off ends by `length`, not `abort`."""
        if not self._has_begun and any(sample.token_ids for sample in delta.outputs):
            self._has_begun = True
            self._timers[0].cancel()
        if not self._why:
            return delta
        if not delta.finished:
            self.cut(self._why, refuses=False)  # the first abort came before it was queued
        outputs = [
            replace(sample, finish_reason="length", stop_reason=self._why)
            if sample.finish_reason == "abort"
            else sample
            for sample in delta.outputs
        ]
        return replace(delta, outputs=outputs)


class PromptDelta(NamedTuple):
    """A delta, and the index of its prompt in the request."""

    prompt: int
    delta: RequestDelta


async def run(
    engine: AsyncEngine, generation: GenerationRequest, flight: Flight, most_logprobs: int
) -> AsyncGenerator[PromptDelta, None]:
    """Deltas of all prompts, in order for each; closing it ends their requests, as `flight` may.

    Raises:
        RequestError: the answer would have more than `most_logprobs` log-probabilities.
        ForetokenError: as `AsyncEngine.generate` and `Flight` raise, and the fault that ended a
            request.
    """
    with written_as(generation.written), flight:
        params, template = generation.params, generation.template
        likely = (generation.num_top, params.prompt_logprobs)
        is_counted = params.trace or any(value is not None for value in likely)
        if generation.messages is not None:
            if is_counted:
                ids = await engine.encode_chat(generation.messages, **template)
                size = len(last_tokens(ids, params, engine.engine.limits))
                (params,) = _bounded(engine, generation, [size], most_logprobs)
            name = flight.new_name()
            streams = [engine.chat(generation.messages, params, name, deltas=True, **template)]
        else:
            prompts = await asyncio.gather(
                *(_prepare(engine, each, generation, is_counted) for each in generation.prompts)
            )
            each = [params] * len(prompts)
            if is_counted:
                sizes = [len(prompt["prompt_token_ids"]) for prompt in prompts]
                each = _bounded(engine, generation, sizes, most_logprobs)
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
                yield PromptDelta(number, flight.read(delta))


async def _prepare(
    engine: AsyncEngine, prompt: Any, generation: GenerationRequest, is_counted: bool
) -> Any:
    """A prompt for the engine: as it came, or its ids, with the text that an answer may echo."""
    params, is_text = generation.params, isinstance(prompt, str)
    is_cut, adds_special = params.truncate_prompt_tokens is not None, generation.add_special_tokens
    if is_text and not (is_counted or is_cut or adds_special is False):
        return prompt
    ids, text = prompt, None
    if is_text:
        ids = await engine.encode(prompt, add_special_tokens=adds_special is not False)
        text = prompt
    kept = last_tokens(ids, params, engine.engine.limits)
    if generation.echo and (not is_text or len(kept) < len(ids)):
        text = await engine.decode(kept)
    return {"prompt_token_ids": kept, "prompt": text}


def _bounded(
    engine: AsyncEngine, generation: GenerationRequest, sizes: Sequence[int], most: int
) -> list[SamplingParams]:
    """Parameters for prompts of these lengths, with at most `most` log-probabilities in all.

    Where `max_tokens` is left out, it becomes what `most` leaves room for.

    Raises:
        RequestError: the request asks for more.
    """
    params, limits = generation.params, engine.engine.limits
    of_prompt = 0 if params.prompt_logprobs is None else params.prompt_logprobs + 1
    of_prompt *= params.n if generation.echo else 1
    of_token = 0 if generation.num_top is None else generation.num_top + 1
    of_token += generation.num_drafts + 1 if params.trace else 0
    rooms = [min(limits.max_model_len, limits.cache_tokens) - size for size in sizes]
    count, longest = of_prompt * sum(sizes), params.max_tokens
    if longest is None:
        each = of_token * params.n * len(sizes)
        longest = max(1, (most - count) // each if each else max(rooms))
    count += of_token * params.n * sum(min(longest, max(room, 0)) for room in rooms)
    if count > most:
        name = "logprobs" if generation.num_top is not None else "prompt_logprobs"
        name = "trace" if params.trace and of_prompt == 0 and generation.num_top is None else name
        bound = f"at most {most} in one answer (--max-answer-logprobs)"
        remedy = "Ask for fewer tokens, samples or likeliest tokens."
        raise RequestError(name, f"{count} log-probabilities", bound, remedy)
    cut = replace(params, max_tokens=longest)
    return [cut if longest < room else params for room in rooms]


async def _merge(
    streams: list[AsyncGenerator[RequestDelta, None]],
) -> AsyncGenerator[PromptDelta, None]:
    """Deltas of several streams as they come, with one task per stream."""
    queue: asyncio.Queue[PromptDelta | Exception] = asyncio.Queue()

    async def pump(number: int, stream: AsyncGenerator[RequestDelta, None]) -> None:
        try:
            async with aclosing(stream):
                async for delta in stream:
                    queue.put_nowait(PromptDelta(number, delta))
        except Exception as error:
            queue.put_nowait(error)

    tasks: list[asyncio.Task[None]] = []
    try:
        for i, stream in enumerate(streams):
            tasks.append(asyncio.create_task(pump(i, stream)))
            await asyncio.sleep(0)  # each stream first checks its parameters, maybe long lists
        num_left = len(tasks)
        while num_left:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            yield item
            num_left -= item.delta.finished
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

"""The engine's deltas of everything that a request asked for, and how long that may take.

Charter: how many requests of the engine one of HTTP makes, that none of them outlives it, how many
log-probabilities they may have together, and who ends a request that neither its client nor the
model ends. A `Flight` is one request over HTTP while the engine works for it; `Lifetime` knows all
of them. Routes ask it, signals tell it; how a process notices is `server.py`'s. In front of
replicas there is a `Lifetime`, too, of other flights: see `fleet/front.py`.
"""

from __future__ import annotations

import asyncio
import time
from asyncio import TimerHandle
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
from foretoken.serve.requests import Asked

_GRACE = 5.0
NO_MORE = "The server ends and takes no more requests."
TOLD = {
    "queue": "No token was made within `queue_timeout`: the server is too busy.",
    "timeout": "No token was made within `request_timeout`: the server is too busy.",
    "shutdown": "The server ends, and its engine did not let go of this request.",
}
"""What a client is told whose request is refused after it was taken, by what `cut` was given."""


class UnderWay(Protocol):
    """A request that is being answered."""

    def cut(self, why: str, *, refuses: bool = True) -> None:
        """End it where it is, as `Flight.cut` does."""


class Lifetime:
    """What is under way, and whether more is taken.

    Args:
        failed: what made it impossible to serve, if anything did.
        grace: seconds that a client has to receive and read an answer that was cut off.

    Attributes:
        num_cut: requests that the end came before.
    """

    def __init__(
        self,
        options: ServeOptions,
        failed: Callable[[], ForetokenError | None],
        grace: float = _GRACE,
    ) -> None:
        self.options, self.failed, self._grace = options, failed, grace
        self.flights: set[UnderWay] = set()
        self._end: float | None = None
        self.num_cut = 0

    @property
    def is_draining(self) -> bool:
        """Whether only what has begun is still answered."""
        return self._end is not None

    def drain(self) -> None:
        """Take no more, and let what is under way end in time. Safe in a signal handler."""
        self._end = self._end or time.monotonic() + self.options.drain_timeout

    def seconds_left(self) -> float:
        """How long a client may still take to read the end of its answer."""
        grace = self._grace
        left = grace if self._end is None else self._end + grace - time.monotonic()
        return min(max(left, 1.0), grace)

    def is_over(self) -> bool:
        """Whether all has been answered, or has had its time; to be asked again and again."""
        if self._end is None:
            return False
        late = time.monotonic() - self._end
        if late >= 0:
            self.num_cut = max(self.num_cut, len(self.flights))
            for flight in [*self.flights]:
                flight.cut("shutdown", refuses=late >= self._grace)
        return not self.flights or late >= self._grace

    def call_later(self, seconds: float, call: Callable[..., Any], *args: Any) -> TimerHandle:
        """As an event loop does it."""
        return asyncio.get_running_loop().call_later(seconds, call, *args)


class Flight:
    """One request over HTTP, from the engine's queue to its last delta; a context.

    What is cut off is aborted, and its last delta brings what there is. Before its first token it
    is refused, whatever the engine is doing: the task that entered is cancelled, and learns of it
    as `UnavailableError`. The end of the server refuses nothing that it has accepted: if the engine
    had not begun with it, its answer is empty, and says why.

    Args:
        name: of its requests to the engine, a number added.

    Raises, when it is entered:
        UnavailableError: the server takes no more.
    """

    def __init__(self, lifetime: Lifetime, engine: AsyncEngine, name: str) -> None:
        self._lifetime, self._engine, self._name = lifetime, engine, name
        self._why, self._has_begun, self._is_refused, self._num_names = "", False, False, 0
        self._task: asyncio.Task[Any] | None = None
        self._timers: list[TimerHandle] = []
        self._aborts: set[asyncio.Task[bool]] = set()

    def __enter__(self) -> Self:
        if self._lifetime.is_draining:
            raise UnavailableError(NO_MORE)
        self._task = asyncio.current_task()
        options, call_later = self._lifetime.options, self._lifetime.call_later
        self._timers = [
            call_later(options.queue_timeout, self.cut, "queue"),
            call_later(options.request_timeout, self.cut, "timeout"),
        ]
        self._lifetime.flights.add(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        for timer in self._timers:
            timer.cancel()
        self._lifetime.flights.discard(self)
        if self._is_refused and self._task and kind is asyncio.CancelledError:
            self._task.uncancel()
            raise UnavailableError(TOLD[self._why])

    def new_name(self) -> str:
        """The name of a further request to the engine."""
        self._num_names += 1
        return f"{self._name}-{self._num_names}"

    def cut(self, why: str, *, refuses: bool = True) -> None:
        """End it where it is: `queue`, `timeout` or `shutdown`; if that `refuses`, at once."""
        if refuses and not (self._has_begun or self._is_refused) and self._task:
            self._is_refused = self._task.cancel()
        self._why = self._why or why
        for number in range(self._num_names):
            task = asyncio.ensure_future(self._engine.abort(f"{self._name}-{number + 1}"))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    def read(self, delta: RequestDelta) -> RequestDelta:
        """A delta as clients understand it: one that was cut off ends by `length`."""
        if not self._has_begun and any(sample.token_ids for sample in delta.outputs):
            self._has_begun = True
            self._timers[0].cancel()
        if not self._why:
            return delta
        if not delta.finished:
            self.cut(self._why, refuses=False)  # it was not queued yet when its time was up
        outputs = [
            replace(sample, finish_reason="length", stop_reason=self._why)
            if sample.finish_reason == "abort"
            else sample
            for sample in delta.outputs
        ]
        return replace(delta, outputs=outputs)


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

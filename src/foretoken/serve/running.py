"""The engine's deltas for one request over HTTP, deadlines of requests, and the server's end.

One request over HTTP becomes one or several requests to the engine; these end with the answer. A
`GeneratingRequest` ends at a deadline if neither the client nor the model ends it. The `Lifetime`
of a server has all open requests; the front of a fleet has one, too, with requests that the front
forwards (`fleet/front.py`).
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from asyncio import TimerHandle
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, NamedTuple, Self

from foretoken.async_engine import AsyncEngine
from foretoken.engine.admission import last_tokens
from foretoken.errors import ForetokenError, RequestError
from foretoken.outputs import RequestDelta
from foretoken.sampling.params import SamplingParams
from foretoken.serve.errors import UnavailableError, client_field_names
from foretoken.serve.options import ServeOptions
from foretoken.serve.requests import GenerationRequest

_GRACE_SECONDS = 5.0
ENDING_MESSAGE = "The server ends and takes no more requests."
CUT_MESSAGES = {
    "queue": "No token was generated within `queue_timeout`: the server is too busy.",
    "timeout": "No token was generated within `request_timeout`: the server is too busy.",
    "shutdown": "The server ends, and the engine did not end this request in time.",
}
"""For requests that are refused after they were accepted, by the `reason` of `cut`."""


class OpenRequest(ABC):
    """A context manager that registers a request with a lifetime while it is answered.

    Raises, when the context is entered:
        UnavailableError: the server takes no more requests.
    """

    def __init__(self, lifetime: Lifetime) -> None:
        self._lifetime = lifetime
        self._task: asyncio.Task[Any] | None = None

    def __enter__(self) -> Self:
        if self._lifetime.is_draining:
            raise UnavailableError(ENDING_MESSAGE)
        self._task = asyncio.current_task()
        self._lifetime.open_requests.add(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        self._lifetime.open_requests.discard(self)

    @abstractmethod
    def cut(self, reason: str, *, refuses: bool = True) -> None:
        """End the request early, with the tokens that were generated.

        Args:
            reason: `queue`, `timeout` or `shutdown`.
            refuses: whether to cancel the request's task if there is no token yet.
        """


class Lifetime:
    """The open requests, and whether the server accepts more.

    Args:
        failed: returns the error that made serving impossible, or None.
        grace: seconds for a client to receive and read an answer that was cut off.
    """

    def __init__(
        self, options: ServeOptions, failed: Callable[[], ForetokenError | None],
        grace: float = _GRACE_SECONDS,
    ) -> None:  # fmt: skip
        self.options, self.failed, self._grace = options, failed, grace
        self.open_requests: set[OpenRequest] = set()
        self._end: float | None = None  # the time when open requests are cut off
        self.num_cut = 0  # requests that the server's end cut off

    @property
    def is_draining(self) -> bool:
        """Whether the server takes no more requests, and only finishes open ones."""
        return self._end is not None

    def drain(self) -> None:
        """Take no more requests; open ones get `drain_timeout`. Safe in a signal handler."""
        self._end = self._end or time.monotonic() + self.options.drain_timeout

    def seconds_left(self) -> float:
        """Seconds that a client gets to read the end of an answer."""
        grace = self._grace
        seconds = grace if self._end is None else self._end + grace - time.monotonic()
        return min(max(seconds, 1.0), grace)

    def is_over(self) -> bool:
        """Whether the drain is over. Call it repeatedly: each call ends late requests."""
        if self._end is None:
            return False
        seconds_late = time.monotonic() - self._end
        if seconds_late >= 0:
            self.cut_open_requests(refuses=seconds_late >= self._grace)
        return not self.open_requests or seconds_late >= self._grace

    def cut_open_requests(self, *, refuses: bool = True) -> None:
        """Cut all open requests off, since the server ends; see `OpenRequest.cut`."""
        self.num_cut = max(self.num_cut, len(self.open_requests))
        for request in [*self.open_requests]:
            request.cut("shutdown", refuses=refuses)

    def call_later(self, seconds: float, call: Callable[..., Any], *args: Any) -> TimerHandle:
        """Have the running event loop call a function; tests replace this method."""
        return asyncio.get_running_loop().call_later(seconds, call, *args)


class GeneratingRequest(OpenRequest):
    """A request whose answer the engine generates, with timers for its deadlines.

    `cut` aborts the request in the engine; the last delta then has the tokens that were generated.
    A timeout before the first token refuses the request, even while the engine is busy with a step:
    the task that entered the context is cancelled, and leaves it with `UnavailableError`. When the
    server ends, an accepted request without a token gets an empty answer with the reason, and is
    refused only if the engine does not end it in time.

    Args:
        name: prefix of the names of the engine's requests; a number follows.
    """

    def __init__(self, lifetime: Lifetime, engine: AsyncEngine, name: str) -> None:
        super().__init__(lifetime)
        self._engine, self._name = engine, name
        self._reason, self._has_begun, self._is_refused, self._num_requests = "", False, False, 0
        self._timers: list[TimerHandle] = []
        self._aborts: set[asyncio.Task[bool]] = set()

    def __enter__(self) -> Self:
        super().__enter__()
        options, call_later = self._lifetime.options, self._lifetime.call_later
        self._timers = [
            call_later(options.queue_timeout, self.cut, "queue"),
            call_later(options.request_timeout, self.cut, "timeout"),
        ]
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        for timer in self._timers:
            timer.cancel()
        super().__exit__(kind, *details)
        if self._is_refused and self._task and kind is asyncio.CancelledError:
            self._task.uncancel()
            raise UnavailableError(CUT_MESSAGES[self._reason])

    def new_name(self) -> str:
        self._num_requests += 1
        return f"{self._name}-{self._num_requests}"

    def cut(self, reason: str, *, refuses: bool = True) -> None:
        if refuses and not (self._has_begun or self._is_refused) and self._task:
            self._is_refused = self._task.cancel()
        self._reason = self._reason or reason
        for number in range(self._num_requests):
            task = asyncio.ensure_future(self._engine.abort(f"{self._name}-{number + 1}"))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    def read(self, delta: RequestDelta) -> RequestDelta:
        """The delta for the client: a sample that `cut` ended has the reason `length`."""
        if not self._has_begun and any(sample.token_ids for sample in delta.outputs):
            self._has_begun = True
            self._timers[0].cancel()
        if not self._reason:
            return delta
        if not delta.finished:
            # The first abort came before the request was queued.
            self.cut(self._reason, refuses=False)
        outputs = [*delta.outputs]
        for i, sample in enumerate(outputs):
            if sample.finish_reason == "abort":
                outputs[i] = replace(sample, finish_reason="length", stop_reason=self._reason)
        return replace(delta, outputs=outputs)


class PromptDelta(NamedTuple):
    """A delta of the engine, and the index of its prompt in the request over HTTP."""

    prompt: int
    delta: RequestDelta


async def run(
    engine: AsyncEngine,
    generation: GenerationRequest,
    request: GeneratingRequest,
    max_logprobs: int,
) -> AsyncGenerator[PromptDelta, None]:
    """Have the engine generate; yields the deltas of all prompts, those of one prompt in order.

    Closing the generator ends the engine's requests, if `request` has not ended them earlier.

    Raises:
        RequestError: the answer would have more than `max_logprobs` log-probabilities.
        ForetokenError: the errors of `AsyncEngine.generate` and `GeneratingRequest`, and the error
            that ended one of the engine's requests.
    """
    with client_field_names(generation.client_names), request:
        params, template = generation.params, generation.template
        logprob_counts = (generation.num_top, params.prompt_logprobs)
        is_counted = params.trace or any(value is not None for value in logprob_counts)
        if generation.messages is not None:
            if is_counted:
                ids = await engine.encode_chat(generation.messages, **template)
                length = len(last_tokens(ids, params, engine.engine.limits))
                (params,) = _bound_logprobs(engine, generation, [length], max_logprobs)
            name = request.new_name()
            streams = [engine.chat(generation.messages, params, name, deltas=True, **template)]
        else:
            prompts = await asyncio.gather(
                *(_prepare_prompt(engine, p, generation, is_counted) for p in generation.prompts)
            )
            prompt_params = [params] * len(prompts)
            if is_counted:
                lengths = [len(prompt["prompt_token_ids"]) for prompt in prompts]
                prompt_params = _bound_logprobs(engine, generation, lengths, max_logprobs)
            streams = [
                engine.generate(prompt, bounded_params, request.new_name(), deltas=True)
                for prompt, bounded_params in zip(prompts, prompt_params, strict=True)
            ]
        is_single = len(streams) == 1
        merged: AsyncGenerator[Any, None] = streams[0] if is_single else _merge(streams)
        async with aclosing(merged):
            async for item in merged:
                index, delta = (0, item) if is_single else item
                if delta.error is not None:
                    raise delta.error
                yield PromptDelta(index, request.read(delta))


async def _prepare_prompt(
    engine: AsyncEngine, prompt: Any, generation: GenerationRequest, is_counted: bool
) -> Any:
    """A prompt for the engine: unchanged, or as token ids with the text for `echo`.

    Token ids are needed to count log-probabilities (`is_counted`), to truncate the prompt, or to
    encode it without special tokens.
    """
    params, is_text = generation.params, isinstance(prompt, str)
    trims, adds_special = params.truncate_prompt_tokens is not None, generation.add_special_tokens
    if is_text and not (is_counted or trims or adds_special is False):
        return prompt
    ids, text = prompt, None
    if is_text:
        ids = await engine.encode(prompt, add_special_tokens=adds_special is not False)
        text = prompt
    kept_ids = last_tokens(ids, params, engine.engine.limits)
    if generation.echo and (not is_text or len(kept_ids) < len(ids)):
        text = await engine.decode(kept_ids)
    return {"prompt_token_ids": kept_ids, "prompt": text}


def _bound_logprobs(
    engine: AsyncEngine, generation: GenerationRequest, lengths: Sequence[int], limit: int
) -> list[SamplingParams]:
    """The parameters of each prompt; `RequestError` for more than `limit` log-probabilities.

    If the request has no `max_tokens`, answers may become as long as `limit` allows. `lengths` are
    the numbers of tokens of the prompts.
    """
    params, limits = generation.params, engine.engine.limits
    per_prompt_token = 0 if params.prompt_logprobs is None else params.prompt_logprobs + 1
    per_prompt_token *= params.n if generation.echo else 1
    per_token = 0 if generation.num_top is None else generation.num_top + 1
    per_token += generation.num_drafts + 1 if params.trace else 0
    rooms = [min(limits.max_model_len, limits.cache_tokens) - length for length in lengths]
    count, max_tokens = per_prompt_token * sum(lengths), params.max_tokens
    if max_tokens is None:
        per_position = per_token * params.n * len(lengths)
        max_tokens = max(1, (limit - count) // per_position if per_position else max(rooms))
    count += per_token * params.n * sum(min(max_tokens, max(room, 0)) for room in rooms)
    if count > limit:
        name = "logprobs" if generation.num_top is not None else "prompt_logprobs"
        if params.trace and per_prompt_token == 0 and generation.num_top is None:
            name = "trace"
        bound = f"at most {limit} in one answer (--max-answer-logprobs)"
        remedy = "Ask for fewer tokens, samples or likeliest tokens."
        raise RequestError(name, f"{count} log-probabilities", bound, remedy)
    bounded = replace(params, max_tokens=max_tokens)
    return [bounded if max_tokens < room else params for room in rooms]


async def _merge(
    streams: list[AsyncGenerator[RequestDelta, None]],
) -> AsyncGenerator[PromptDelta, None]:
    """The deltas of several streams in order of arrival, with the index of the stream."""
    queue: asyncio.Queue[PromptDelta | Exception] = asyncio.Queue()

    async def pump(index: int, stream: AsyncGenerator[RequestDelta, None]) -> None:
        try:
            async with aclosing(stream):
                async for delta in stream:
                    queue.put_nowait(PromptDelta(index, delta))
        except Exception as error:
            queue.put_nowait(error)

    tasks: list[asyncio.Task[None]] = []
    try:
        for i, stream in enumerate(streams):
            tasks.append(asyncio.create_task(pump(i, stream)))
            await asyncio.sleep(0)  # a stream begins with a check of parameters, which can be long
        num_unfinished = len(tasks)
        while num_unfinished:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            yield item
            num_unfinished -= item.delta.finished
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

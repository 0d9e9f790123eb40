"""`AsyncEngine`: an async iterator per request. `engine/worker.py` has the engine's thread."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, overload

from foretoken.config import EngineConfig, SpeculativeConfig
from foretoken.engine.admission import check_token_ids
from foretoken.engine.boundary import Params, ParamsReader, Prompt, check_options, decode, encode
from foretoken.engine.build import build_engine
from foretoken.engine.engine import Engine
from foretoken.engine.worker import EngineStatus, Mailbox, Worker
from foretoken.foreign import absent_attribute
from foretoken.models.chat import CHAT_OPTIONS, ChatOptions, ChatPrompt, ChatTemplate
from foretoken.outputs import RequestDelta, RequestOutput, SpeculationMetrics
from foretoken.sampling.params import SamplingParams


class AsyncEngine:
    """A loaded model and its engine, for asyncio. Arguments and errors are those of `LLM`.

    Requests of all tasks run in one batch. Several event loops may send requests; each iterator is
    read on the loop on which it was started. `AsyncEngine(...)` loads the model, which blocks: call
    it before the event loop serves anything, or by `asyncio.to_thread`. The program handles
    signals: `asyncio.run` turns Ctrl-C into a cancellation, which aborts requests (see `generate`).
    """

    def __init__(
        self,
        model: str | PathLike[str] = "tiny-python",
        speculative_config: SpeculativeConfig | Mapping[str, Any] | str | None = None,
        **options: Any,
    ) -> None:
        config = EngineConfig.parse(model=model, speculative_config=speculative_config, **options)
        self._serve(config, build_engine(config))

    @classmethod
    def from_engine(cls, engine: Engine) -> Self:
        """As `LLM.from_engine`."""
        async_engine = cls.__new__(cls)
        async_engine._serve(engine.config, engine)
        return async_engine

    def _serve(self, config: EngineConfig, engine: Engine) -> None:
        self.config = config
        self._params, self._tokenizer = ParamsReader(engine.default_params), engine.tokenizer
        self._grammars = engine.grammars
        self._worker = Worker(engine)
        weakref.finalize(self, self._worker.stop)  # also when the program exits

    @property
    def engine(self) -> Engine:
        """The engine; while it has work, only its own thread may use it. `UsageError` if closed."""
        return self._worker.engine

    @property
    def metrics(self) -> SpeculationMetrics:
        """Counts summed over all requests so far (a copy)."""
        self._worker.owner_process.check()
        return self._worker.metrics

    @overload
    def generate(
        self, prompt: Prompt, sampling_params: Params | None = None, request_id: str | None = None,
        *, deltas: Literal[False] = False, **others: Any,
    ) -> AsyncGenerator[RequestOutput, None]: ...  # fmt: skip

    @overload
    def generate(
        self, prompt: Prompt, sampling_params: Params | None = None, request_id: str | None = None,
        *, deltas: Literal[True], **others: Any,
    ) -> AsyncGenerator[RequestDelta, None]: ...  # fmt: skip

    def generate(
        self, prompt: Prompt, sampling_params: Params | None = None, request_id: str | None = None,
        *, deltas: bool = False, **others: Any,
    ) -> AsyncGenerator[RequestOutput, None] | AsyncGenerator[RequestDelta, None]:  # fmt: skip
        """Complete one prompt; yields outputs in order, the last one finished.

        Every output contains all earlier ones, so a slow reader gets only the newest. A
        `RequestDelta` holds only what is new: a slow reader gets several deltas merged into one,
        and each token, piece of text and log-probability exactly once. Leaving the iterator early
        (`break`, `aclose`, cancellation) aborts the request; with `contextlib.aclosing` it is
        aborted immediately rather than at garbage collection.

        Args:
            prompt, sampling_params, others: as in `LLM.generate`, for one prompt.
            request_id: a name for `abort` that no other open request has; None: a number.
            deltas: yield `RequestDelta`s. Their cost does not grow with the output.

        Raises, when called:
            RequestError: an unknown option.

        Raises, at the first `anext`, which queues the request:
            RequestError, CapacityError, OverloadedError: the request cannot be served.
            ProcessingError: the tokenizer raised when it encoded the prompt.
            UsageError: after `close()`, or in a forked child, which lacks the engine's thread.

        Raises, at any `anext`:
            StepError: the engine's thread failed, which is a bug in Foretoken. A fault that ends
                this request is not raised: the last output has the `error` and the tokens so far.
        """
        check_options(others, known=("prompt", "sampling_params", "request_id", "deltas"))
        return self._complete(prompt, sampling_params, request_id, deltas)

    @overload
    def chat(
        self, messages: Sequence[Mapping[str, Any]], sampling_params: Params | None = None,
        request_id: str | None = None, *, deltas: Literal[False] = False,
        **template: Unpack[ChatOptions],
    ) -> AsyncGenerator[RequestOutput, None]: ...  # fmt: skip

    @overload
    def chat(
        self, messages: Sequence[Mapping[str, Any]], sampling_params: Params | None = None,
        request_id: str | None = None, *, deltas: Literal[True],
        **template: Unpack[ChatOptions],
    ) -> AsyncGenerator[RequestDelta, None]: ...  # fmt: skip

    def chat(
        self, messages: Sequence[Mapping[str, Any]], sampling_params: Params | None = None,
        request_id: str | None = None, *, deltas: bool = False, **template: Unpack[ChatOptions],
    ) -> AsyncGenerator[RequestOutput, None] | AsyncGenerator[RequestDelta, None]:  # fmt: skip
        """Complete one conversation, as `generate` completes a prompt.

        Args:
            messages, template: as in `LLM.chat`, for one conversation.

        Raises, when called:
            RequestError: a bad chat template, or one that does not use the given `tools`.
        """
        prompt = self._chat_prompt(messages, template)
        return self._complete(prompt, sampling_params, request_id, deltas)

    def _chat_prompt(self, messages: Any, template: ChatOptions) -> ChatPrompt:
        options = check_options(template, known=CHAT_OPTIONS)
        return ChatPrompt(ChatTemplate(self._tokenizer, **options), messages)

    async def _complete(
        self, prompt: Prompt | ChatPrompt, sampling_params: Params | None, request_id: str | None,
        deltas: bool,
    ) -> AsyncGenerator[Any, None]:  # fmt: skip
        """Wait until the grammar is compiled, queue the request, and yield its outputs."""
        params = self._params.read(sampling_params)
        # Compiled grammars are held weakly: `compiling` keeps this one until the request ends.
        compiling = self._grammars.begin(params.structured_outputs)
        while compiling and (left := self._grammars.seconds_left(compiling)) > 0:
            await asyncio.wait([asyncio.wrap_future(compiling.future)], timeout=left)
        worker, mailbox = self._worker, Mailbox(asyncio.get_running_loop(), deltas=deltas)
        name = worker.open_request(request_id, mailbox, prompt, params)
        output = None
        try:
            while output is None or not output.finished:
                output = await mailbox.read()
                yield output
        finally:
            worker.close_request(name, mailbox)

    @property
    def status(self) -> EngineStatus:
        return self._worker.status()

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of requests without `sampling_params` (a copy)."""
        return replace(self._params.defaults)

    async def encode(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt, as `generate` encodes it; `RequestError` for an invalid prompt,
        and for a text if there is no tokenizer."""
        encoded = partial(encode, self._tokenizer, prompt, add_special_tokens=add_special_tokens)
        return await asyncio.wrap_future(self._worker.call(lambda engine: encoded()[1], prompt))

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], **template: Unpack[ChatOptions]
    ) -> list[int]:
        """Token ids of a conversation, as `chat` encodes it; errors as in `chat`."""
        prompt = self._chat_prompt(messages, template)
        return await asyncio.wrap_future(self._worker.call(lambda _: prompt.encode()[1], prompt))

    async def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, without special tokens; `RequestError` for an id that the model does
        not have, or if there is no tokenizer."""

        def checked_decode(engine: Engine) -> str:
            check_token_ids("tokens", token_ids, engine.limits.vocab_size)
            return decode(engine.tokenizer, token_ids)

        return await asyncio.wrap_future(self._worker.call(checked_decode, token_ids))

    async def abort(self, request_id: str) -> bool:
        """End a request; its iterator ends with the output so far and the finish_reason `abort`.
        Returns whether a request of this name was open."""
        return self._worker.abort(request_id)

    async def reset_prefix_cache(self, **others: Any) -> bool:
        """As `LLM.reset_prefix_cache`, between two steps."""
        check_options(others, known=())
        await asyncio.wrap_future(self._worker.call(Engine.reset_prefix_cache))
        return True

    if not TYPE_CHECKING:
        __getattr__ = absent_attribute

    async def close(self) -> None:
        """End all requests, release models and caches, and wait until the thread has ended.

        Open iterators end with the output so far and the finish_reason `abort`; later calls raise
        `UsageError`. Does nothing in a forked child.
        """
        self._worker.ask_to_stop()
        await asyncio.to_thread(self._worker.stop)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

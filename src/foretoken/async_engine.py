"""`AsyncEngine`: one async iterator per request, all of them batched by one engine in a thread.

Charter: the border between event loops and the engine's thread. Commands cross to the thread by a
queue under one condition, on which the thread sleeps when there is nothing to do; snapshots cross
back by `call_soon_threadsafe`. Only the thread touches the engine, and its tokenizer, whose fast
kind does not bear two callers at once; so long prompts do not hold up an event loop either.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from os import PathLike
from types import TracebackType
from typing import Any, Self, Unpack

from foretoken.config import EngineConfig, SpeculativeConfig
from foretoken.engine.boundary import build_output, prepare, submit
from foretoken.engine.build import build_engine
from foretoken.engine.engine import Engine
from foretoken.engine.prompts import Params, ParamsReader, Prompt, check_options
from foretoken.engine.request import RequestGroup
from foretoken.engine.turns import HomeProcess
from foretoken.errors import ForetokenError, RequestError, StepError, UsageError
from foretoken.models.chat import CHAT_OPTIONS, ChatOptions, ChatPrompt, ChatTemplate
from foretoken.outputs import RequestOutput, SpeculationMetrics
from foretoken.sampling.params import SamplingParams


class AsyncEngine:
    """An engine with a model in it, for asyncio.

    Requests of any number of tasks run in one batch. Building it loads the model and blocks: do it
    before the event loop serves anything, or by `asyncio.to_thread`. Requests may come from several
    event loops; each iterator belongs to the loop that began it. Signals are the program's:
    `asyncio.run` turns Ctrl-C into a cancellation, which ends requests as below.

    Args:
        model: `tiny-python`, a checkpoint folder, or a hub id, downloaded if it is missing.
        speculative_config: a dict, its JSON text, a `SpeculativeConfig`, or None.
        options: any other field of `EngineConfig`.

    Raises:
        ConfigError, CheckpointError, UnsupportedModelError, EngineMemoryError.
    """

    def __init__(
        self,
        model: str | PathLike[str] = "tiny-python",
        speculative_config: SpeculativeConfig | Mapping[str, Any] | str | None = None,
        **options: Any,
    ) -> None:
        self.config = EngineConfig.parse(model, speculative_config, **options)
        engine = build_engine(self.config)
        self._params, self._tokenizer = ParamsReader(engine.default_params), engine.tokenizer
        self._worker = _Worker(engine)
        # A forgotten engine ends its thread when it is collected or when the program exits.
        weakref.finalize(self, self._worker.stop)

    @property
    def engine(self) -> Engine:
        """The engine; while it has work, its own thread alone may touch it.

        Raises:
            UsageError: after `close()`.
        """
        return self._worker.engine

    @property
    def metrics(self) -> SpeculationMetrics:
        """Counts summed over all requests so far (a copy)."""
        self._worker.home.check()
        return self._worker.metrics

    def generate(
        self,
        prompt: Prompt,
        sampling_params: Params | None = None,
        request_id: str | None = None,
        **others: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt; yields what there is, in order, the last output finished.

        Every output holds all that came before it, so an iterator that is read slowly gets the
        newest one and skips others. Leaving it early (`break`, `aclose`, cancellation) aborts the
        request; to have that happen at once rather than at garbage collection, use
        `contextlib.aclosing`. Nothing is queued before the first step of the iterator.

        Args:
            prompt: a text, token ids, or a dict with `prompt` or `prompt_token_ids`.
            sampling_params: a `SamplingParams`, a dict of its fields, or None for the checkpoint's
                defaults over ours.
            request_id: a name for `abort`, of no other open request; None: a number.
            others: names that vLLM takes and that change nothing here (lora_request=None, ...).

        Raises, at once:
            RequestError: an option that is unknown.

        Raises, at the first step of the iterator:
            RequestError, CapacityError, OverloadedError: the request cannot be served.
            ProcessingError: the tokenizer raised when it encoded the prompt.
            UsageError: after `close()`, or in a forked child, which has no thread to serve it.

        Raises, at any step:
            StepError: the engine's thread failed, which is a bug in Foretoken. Faults that end
                requests and not the engine are in the last output's `error` instead, beside the
                tokens that were made.
        """
        check_options(others, known=("prompt", "sampling_params", "request_id"))
        return self._complete(prompt, sampling_params, request_id)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: Params | None = None,
        request_id: str | None = None,
        **template: Unpack[ChatOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one conversation, as `generate` does a prompt.

        Args:
            messages, template: as in `LLM.chat`, one conversation.
            sampling_params, request_id: as in `generate`.

        Raises, at once:
            RequestError: a template that is not one or does not use what it is given. All else is
                raised as in `generate`.
        """
        options = check_options(template, known=CHAT_OPTIONS)
        prompt = ChatPrompt(ChatTemplate(self._tokenizer, **options), messages)
        return self._complete(prompt, sampling_params, request_id)

    async def _complete(
        self, prompt: Prompt | ChatPrompt, sampling_params: Params | None, request_id: str | None
    ) -> AsyncGenerator[RequestOutput, None]:
        params = self._params.read(sampling_params)
        worker, mailbox = self._worker, _Mailbox(asyncio.get_running_loop())
        name = worker.enter(request_id, mailbox, prompt, params)
        output = None
        try:
            while output is None or not output.finished:
                output = await mailbox.newest()
                yield output
        finally:
            worker.leave(name, mailbox)

    async def abort(self, request_id: str) -> bool:
        """End a request where it is; its iterator ends with what there is, marked `abort`.

        Returns:
            Whether a request of this name is open; one that just ends may still end by itself.
        """
        return self._worker.abort(request_id)

    async def close(self) -> None:
        """End what runs and release models and caches; the thread has ended when it returns.

        Open iterators end with what there is, marked `abort`; later calls raise `UsageError`. Does
        nothing in a forked child.
        """
        self._worker.ask_to_stop()
        await asyncio.to_thread(self._worker.stop)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


class _Mailbox:
    """Holds the newest output of one request, for one reader on one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._arrived = asyncio.Event()
        self._content: RequestOutput | ForetokenError | None = None

    def put(self, content: RequestOutput | ForetokenError) -> bool:
        """From the engine's thread: replace what is there; False if the loop is gone.

        The loop is called once per reading, not once per output, so that a loop that does not get
        round to reading piles up nothing. What is finished stays.
        """
        with self._lock:
            if isinstance(self._content, RequestOutput) and self._content.finished:
                return True
            is_signalled = self._content is not None
            self._content = content
        return is_signalled or _call_in(self._loop, self._arrived.set)

    async def newest(self) -> RequestOutput:
        """On the loop: wait for an output that was not read before; raises an error put there."""
        await self._arrived.wait()
        with self._lock:
            self._arrived.clear()
            content, self._content = self._content, None
        if isinstance(content, RequestOutput):
            return content
        raise content or StepError("an empty mailbox was signalled")


class _Worker:
    """The thread that owns the engine. Public methods are for any thread, others for its own.

    In a forked child there is no such thread, and the condition may be held for ever by one that is
    not there: there `enter` and `abort` raise `UsageError`, what ends something does nothing.
    """

    def __init__(self, engine: Engine) -> None:
        self.home = HomeProcess("AsyncEngine")
        self.metrics = SpeculationMetrics()
        self._engine = engine
        self._wake = threading.Condition()  # guards the five fields below
        self._commands: deque[Callable[[], None]] = deque()
        self._open: dict[str, _Mailbox] = {}
        self._num_requests = 0
        self._is_closing = False
        self._failure: BaseException | None = None
        self._groups: dict[_Mailbox, RequestGroup] = {}
        self._thread = threading.Thread(target=self._run, name="foretoken-engine", daemon=True)
        self._thread.start()

    @property
    def engine(self) -> Engine:
        """The engine, while there is one."""
        try:
            return self._engine
        except AttributeError:
            raise _closed() from None

    def enter(
        self,
        request_id: str | None,
        mailbox: _Mailbox,
        prompt: Prompt | ChatPrompt,
        params: SamplingParams,
    ) -> str:
        """Have a request added; returns its name, the next free number if it is given none."""
        self.home.check()
        with self._wake:
            if self._failure is not None:
                raise _dead(self._failure)
            if self._is_closing:
                raise _closed()
            name = request_id
            while name is None or (request_id is None and name in self._open):
                self._num_requests += 1
                name = str(self._num_requests)
            if not isinstance(name, str) or name in self._open:
                raise RequestError("request_id", name, "a text that names no other open request")
            self._open[name] = mailbox
            self._post(lambda: self._add(mailbox, name, prompt, params))
        return name

    def leave(self, name: str, mailbox: _Mailbox) -> None:
        """Nobody reads this mailbox any more: its name is free, its request ends."""
        if self.home.is_left:
            return
        with self._wake:
            del self._open[name]
            self._post(lambda: self._abandon(mailbox))

    def abort(self, name: str) -> bool:
        """Have a request end where it is; False if there is none of that name."""
        self.home.check()
        with self._wake:
            mailbox = self._open.get(name)
            if mailbox is not None:
                self._post(lambda: self._abort(mailbox))
        return mailbox is not None

    def ask_to_stop(self) -> None:
        """Let the thread end after the present step; nothing is added from here on."""
        if self.home.is_left:
            return
        with self._wake:
            self._is_closing = True
            self._wake.notify()

    def stop(self) -> None:
        """Wait until the thread has ended what runs, and itself."""
        self.ask_to_stop()
        # The collector runs in any thread; a fork's bookkeeping of threads is not relied upon.
        if threading.current_thread() is not self._thread and not self.home.is_left:
            self._thread.join()

    def _post(self, command: Callable[[], None]) -> None:
        """Queue a command; the caller holds the condition."""
        self._commands.append(command)
        self._wake.notify()

    def _run(self) -> None:
        try:
            while self._obey():
                if self._engine.has_work:
                    self._step()
            for mailbox in [*self._groups]:
                self._abort(mailbox)
        except BaseException as error:  # nothing may end this thread without being told
            with self._wake:
                self._failure = error
                readers = [*self._open.values()]
            for mailbox in readers:
                mailbox.put(_dead(error))
        finally:
            del self._engine

    def _obey(self) -> bool:
        """Sleep until there is something to do; carry out the commands; False when it is over."""
        with self._wake:
            while not (self._commands or self._is_closing or self._engine.has_work):
                self._wake.wait()
            commands, self._commands = self._commands, deque()
            is_over = self._is_closing
        for command in commands:
            command()
        return not is_over

    def _step(self) -> None:
        changed = {*self._engine.step()}
        self.metrics = self._engine.metrics.copy()
        for mailbox, group in [*self._groups.items()]:
            if group in changed:
                self._show(mailbox, group)

    def _add(
        self, mailbox: _Mailbox, name: str, prompt: Prompt | ChatPrompt, params: SamplingParams
    ) -> None:
        engine = self._engine
        try:
            self._groups[mailbox] = submit(engine, prepare(engine, name, prompt, params))
        except ForetokenError as error:
            mailbox.put(error)

    def _abort(self, mailbox: _Mailbox) -> None:
        """End a request, unless it has ended, and show what it has."""
        group = self._groups.get(mailbox)
        if group is not None:
            self._engine.abort(group)
            self._show(mailbox, group)

    def _abandon(self, mailbox: _Mailbox) -> None:
        group = self._groups.pop(mailbox, None)
        if group is not None:
            self._engine.abort(group)

    def _show(self, mailbox: _Mailbox, group: RequestGroup) -> None:
        is_readable = mailbox.put(build_output(self._engine, group))
        if group.finished:
            del self._groups[mailbox]
        elif not is_readable:
            self._abandon(mailbox)


def _closed() -> UsageError:
    return UsageError("this AsyncEngine was closed: make a new one")


def _dead(cause: BaseException) -> StepError:
    error = StepError(
        f"the engine's thread ended by {type(cause).__name__}: {cause}. This is a bug in Foretoken."
    )
    error.__cause__ = cause
    return error


def _call_in(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> bool:
    """Have an event loop call something; False if it is closed."""
    try:
        loop.call_soon_threadsafe(function)
    except RuntimeError:
        return False
    return True

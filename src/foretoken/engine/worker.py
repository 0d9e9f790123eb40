"""Access to an engine: from its own process only, by one thread at a time.

Charter: an engine is not safe for two threads, and its native decoder keeps scratch memory between
calls. Threads that share an `LLM` take turns, first come, first served: each turn is one step, and
every step serves the requests of all threads. (A plain lock would go to the thread that just
released it.)

The engine of an `AsyncEngine` belongs to a thread of its own. Event loops send it commands through
a queue under one condition; without work the thread sleeps on that condition. Outputs go into
mailboxes, and their readers are woken by `call_soon_threadsafe`, on a host when the next pass
begins (see `ops/passes.py`). Prompts that take long to encode are encoded in another thread, so
that neither an event loop nor a step waits for them; short prompts are encoded between two steps.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

from foretoken.engine.boundary import Prompt, Submission, build_output, prepare, take_delta
from foretoken.engine.engine import Engine
from foretoken.engine.request import RequestGroup
from foretoken.errors import ForetokenError, RequestError, StepError, UsageError
from foretoken.models.chat import ChatPrompt
from foretoken.ops.passes import before_passes
from foretoken.outputs import RequestDelta, SpeculationMetrics
from foretoken.sampling.params import SamplingParams

_Answer = TypeVar("_Answer")
_LONG = 2**12
"""Characters or ids. Longer prompts go to the encoder's thread: they take 4 ms and more to encode;
the other thread costs 0.1 ms."""
_ENCODER = "foretoken-encoder"
_COMMANDS_S = 0.02
"""After so many seconds of commands, a step is computed before further commands."""


class HomeProcess:
    """The process that made an engine. A forked child has the engine's memory, not its threads."""

    def __init__(self, owner: str) -> None:
        self._owner, self._pid = owner, os.getpid()

    @property
    def is_forked(self) -> bool:
        """Whether the present process is a forked child."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """Raise `UsageError` in a forked child: there a computation would wait for ever."""
        if self.is_forked:
            raise UsageError(
                f"this {self._owner} belongs to process {self._pid}, and this is a fork of it "
                f"(process {os.getpid()}): make the {self._owner} after the fork, or start "
                "processes by `spawn`"
            )


class Turns:
    """A lock that threads get in the order in which they ask: `with turns:`.

    An exception in a waiting thread (Ctrl-C) takes the thread out of the line and has no other
    effect.

    Raises, on entering:
        UsageError: in a forked child, or in a thread that has or awaits its turn already. The call
            then came from a signal handler or a finalizer that runs during another call.
    """

    def __init__(self, owner: str) -> None:
        self.home = HomeProcess(owner)
        # One lock per thread, in line; the first thread has the turn. A waiting thread blocks on
        # its own lock, which the thread before it releases when it leaves.
        self._line: deque[threading.Lock] = deque()
        self._threads: set[int] = set()
        self._work: deque[Callable[[], None]] = deque()

    @property
    def inside(self) -> bool:
        """Whether the calling thread has or awaits its turn."""
        return threading.get_ident() in self._threads

    def __enter__(self) -> None:
        """Wait for the thread's turn."""
        self.home.check()
        if self.inside:
            raise UsageError(
                "this call came from within another one of the same thread, from a signal handler "
                "or a finalizer: let the handler set a flag and make the call when the other ended"
            )
        place = threading.Lock()
        place.acquire()
        try:
            self._threads.add(threading.get_ident())
            self._line.append(place)
            if self._line[0] is not place:
                place.acquire()
        except BaseException:
            self._leave(place)
            raise

    def __exit__(self, *raised: object) -> None:
        """Do the work of `later`, and end the turn."""
        try:
            while self._work:
                self._work.popleft()()
        finally:
            self._leave(self._line[0])

    def later(self, work: Callable[[], None]) -> None:
        """Do `work` at the end of this thread's present turn; without one, take a turn for it.

        This serves finalizers, which may run during another call. It also serves work that must not
        be lost: if waiting for the turn is interrupted, the next turn of any thread does the work.
        Does nothing in a forked child.
        """
        if self.home.is_forked:
            return
        self._work.append(work)
        if not self.inside:
            with self:
                pass

    def _leave(self, place: threading.Lock) -> None:
        """Give up a place in the line and wake the first thread, even if Ctrl-C comes between."""
        try:
            self._give_up(place)
        except BaseException:
            self._give_up(place)
            raise

    def _give_up(self, place: threading.Lock) -> None:
        """Leave the line, in steps that may be repeated.

        Waking a thread that is awake does no harm, so no step here needs a lock. The thread counts
        as inside until the last step: otherwise a finalizer that runs in between would take a turn
        and wait for its own thread.
        """
        with suppress(ValueError):  # interrupted before it was in the line
            self._line.remove(place)
        with suppress(IndexError, RuntimeError):  # no thread waits, or it is awake already
            self._line[0].release()
        self._threads.discard(threading.get_ident())


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """How busy an engine is. Its thread keeps working, so the numbers may be one step apart.

    Attributes:
        num_open: requests with an iterator that has not ended.
        num_running: samples that have a slot.
        num_waiting: samples that wait for a slot.
        kv_cache_usage: share of the cache's blocks that running samples hold, 0..1.
        failure: why nothing is served any more, or None.
    """

    num_open: int = 0
    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    failure: ForetokenError | None = None


class Mailbox:
    """Unread outputs of one request, for its reader on one event loop.

    Args:
        deltas: True: keep all unread deltas, and merge them when they are read. False: keep only
            the newest output, which contains all earlier ones.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, deltas: bool) -> None:
        self.loop = loop
        self._deltas = deltas
        self._lock = threading.Lock()  # guards the two fields below
        self._unread: list[Any] = []
        self._error: ForetokenError | None = None
        self._reader: asyncio.Future[None] | None = None  # used only on the loop

    def put(self, engine: Engine, group: RequestGroup) -> bool:
        """From the engine's thread: add what is new in a request; returns whether the reader must
        be woken."""
        news = take_delta(engine, group) if self._deltas else build_output(engine, group)
        if news is None:
            return False
        with self._lock:
            was_empty = not self._unread
            if self._deltas:
                self._unread.append(news)
            else:  # never empty in between: the reader looks without the lock
                self._unread = [news]
        return was_empty

    def fail(self, error: ForetokenError) -> None:
        """From the engine's thread: let the reader raise this error after all unread outputs."""
        with self._lock:
            self._error = self._error or error
        wake_readers([self])

    async def read(self) -> Any:
        """On the loop: wait for a `RequestOutput` or `RequestDelta`; raises the error of `fail`."""
        while not (self._unread or self._error):
            self._reader = self.loop.create_future()
            await self._reader
        with self._lock:
            unread, self._unread = self._unread, []
        if unread:
            return unread[0] if len(unread) == 1 else RequestDelta.merge(unread)
        raise self._error or StepError("an empty mailbox was read")

    def wake(self) -> None:
        """On the loop: wake the reader, if it waits."""
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def wake_readers(mailboxes: Iterable[Mailbox]) -> list[Mailbox]:
    """Wake the readers; returns the mailboxes of closed event loops.

    Each loop gets one call for all of its readers. The call writes to a socket: a call for each of
    512 readers took 8 ms a step.
    """
    by_loop: dict[asyncio.AbstractEventLoop, list[Mailbox]] = {}
    for mailbox in mailboxes:
        by_loop.setdefault(mailbox.loop, []).append(mailbox)
    closed = []
    for loop, its_mailboxes in by_loop.items():
        try:
            loop.call_soon_threadsafe(_wake_all, its_mailboxes)
        except RuntimeError:
            closed += its_mailboxes
    return closed


def _wake_all(mailboxes: Sequence[Mailbox]) -> None:
    for mailbox in mailboxes:
        mailbox.wake()


class Worker:
    """The thread that owns the engine. Any thread may call public methods; private methods run in
    the worker's own thread unless they say otherwise.

    A forked child has no such thread, and its copy of the condition may stay locked for ever. So in
    a forked child `enter` and `abort` raise `UsageError`, and `leave`, `ask_to_stop` and `stop` do
    nothing.
    """

    def __init__(self, engine: Engine) -> None:
        self.home = HomeProcess("AsyncEngine")
        self.metrics = SpeculationMetrics()
        self._engine = engine
        self._wake = threading.Condition()  # guards the six fields below
        self._commands: deque[Callable[[], None]] = deque()
        self._calls: set[Future[Any]] = set()
        self._open: dict[str, Mailbox] = {}
        self._num_requests = 0
        self._is_closing = False
        self._failure: BaseException | None = None
        self._groups: dict[Mailbox, RequestGroup] = {}
        self._with_news: list[Mailbox] = []  # mailboxes with readers to wake
        self._aborted: set[Mailbox] = set()  # of requests that were aborted before they were queued
        self._encoder = ThreadPoolExecutor(1, _ENCODER)
        if engine.tokenizer is not None:
            # The first call resets a fast tokenizer's truncation. After it threads may share the
            # tokenizer.
            with suppress(Exception):
                engine.tokenizer.encode("a")
        self._thread = threading.Thread(target=self._run, name="foretoken-engine", daemon=True)
        self._thread.start()

    @property
    def engine(self) -> Engine:
        """The engine; `UsageError` once its thread has ended."""
        try:
            return self._engine
        except AttributeError:
            raise _closed_error() from None

    def enter(
        self,
        request_id: str | None,
        mailbox: Mailbox,
        prompt: Prompt | ChatPrompt,
        params: SamplingParams,
    ) -> str:
        """Add a request; returns its name: `request_id`, or the next free number if that is None.

        Raises:
            RequestError: another open request has this name.
            UsageError, StepError: the thread serves no request any more.
        """
        with self._wake_to_serve():
            name = request_id
            while name is None or (request_id is None and name in self._open):
                self._num_requests += 1
                name = str(self._num_requests)
            if not isinstance(name, str) or name in self._open:
                raise RequestError("request_id", name, "a text that names no other open request")
            self._open[name] = mailbox
            add = partial(self._add, mailbox, name, prompt, params)
            if any(map(takes_long, (prompt, params.prediction, params.bad_words))):
                self._encoder.submit(add)
            else:
                self._post(add)
        return name

    def call(self, work: Callable[[Engine], _Answer], text: Any = None) -> Future[_Answer]:
        """Do `work` between two steps; the future gets the answer or the exception.

        Args:
            text: the input of `work`, if `work` uses nothing but the tokenizer. If the input is
                long, the encoder's thread does the work.
        """
        future: Future[_Answer] = Future()
        with self._wake_to_serve():
            self._calls.add(future)
            post = self._encoder.submit if takes_long(text) else self._post
            post(partial(self._answer, future, work))
        return future

    def status(self) -> EngineStatus:
        """How busy the engine is, from any thread."""
        with self._wake:
            num_open, failure = len(self._open), self._failure
        try:
            engine = self._engine
            engine.check_works()
        except AttributeError:
            error: ForetokenError = _died_error(failure) if failure else _closed_error()
            return EngineStatus(num_open, failure=error)
        except ForetokenError as broken:
            return EngineStatus(num_open, failure=broken)
        scheduler, pool = engine.scheduler, engine.scheduler.pool
        usage = 1 - pool.num_free / pool.num_blocks
        return EngineStatus(num_open, len(scheduler.running), len(scheduler.waiting), usage)

    def leave(self, name: str, mailbox: Mailbox) -> None:
        """Free the name of a request and end it, because the reader of its mailbox has left."""
        if self.home.is_forked:
            return
        with self._wake:
            del self._open[name]
            self._post(lambda: self._abandon(mailbox))

    def abort(self, name: str) -> bool:
        """End a request now; False if no open request has that name."""
        self.home.check()
        with self._wake:
            mailbox = self._open.get(name)
            if mailbox is not None:
                self._post(lambda: self._abort(mailbox))
        return mailbox is not None

    def ask_to_stop(self) -> None:
        """Let the thread end after the present step; `enter` takes no more requests."""
        if self.home.is_forked:
            return
        with self._wake:
            self._is_closing = True
            self._wake.notify()

    def stop(self) -> None:
        """End all requests and the thread, and wait until the thread has ended."""
        self.ask_to_stop()
        # A finalizer may call this in any thread. The worker's own threads must not wait.
        caller = threading.current_thread()
        is_own = caller is self._thread or caller.name.startswith(_ENCODER)
        if not is_own and not self.home.is_forked:
            self._thread.join()

    @contextmanager
    def _wake_to_serve(self) -> Iterator[None]:
        """Inside, any thread holds the condition; raises if no further command will be served."""
        self.home.check()
        with self._wake:
            if self._failure is not None:
                raise _died_error(self._failure)
            if self._is_closing:
                raise _closed_error()
            yield

    def _post(self, command: Callable[[], None]) -> None:
        """From any thread that holds the condition: queue a command."""
        self._commands.append(command)
        self._wake.notify()

    def _run(self) -> None:
        """Run commands and steps until the thread is asked to stop; then end all requests."""
        before_passes(self._wake_readers)
        try:
            while self._run_commands():
                if self._engine.has_work:
                    self._step()
            self._encoder.shutdown()  # waits: prompts that are being encoded post their commands
            while self._commands:
                self._run_commands()
            for mailbox in [*self._groups]:
                self._abort(mailbox)
            self._wake_readers()
        except BaseException as error:  # readers and callers must not wait for ever
            with self._wake:
                self._failure = error
                readers, callers = [*self._open.values()], [*self._calls]
            for mailbox in readers:
                mailbox.fail(_died_error(error))
            for future in callers:
                with suppress(InvalidStateError):  # its caller has left
                    future.set_exception(_died_error(error))
        finally:
            self._encoder.shutdown(wait=False)
            del self._engine

    def _run_commands(self) -> bool:
        """Sleep until there is something to do, and run commands; False: the thread shall end."""
        with self._wake:
            while not (self._commands or self._is_closing or self._engine.has_work):
                self._wake.wait()
            has_commands, is_over = bool(self._commands), self._is_closing
        if has_commands:
            self._wake_readers()  # before commands, because a prompt may take long to encode
        end = perf_counter() + _COMMANDS_S
        while self._commands and (perf_counter() < end or not self._engine.has_work):
            self._commands.popleft()()
        return not is_over

    def _step(self) -> None:
        """Run one step, and deliver what is new in its requests."""
        changed = {*self._engine.step()}
        self._wake_readers()  # if the step had no pass
        self.metrics = self._engine.metrics.copy()
        for mailbox, group in [*self._groups.items()]:
            if group in changed or group.finished:  # a failed step may end waiting requests
                self._deliver(mailbox, group)
        if not (self._engine.has_work and self._engine.runner.on_host):
            self._wake_readers()  # no pass follows, or a device computes it

    def _add(
        self, mailbox: Mailbox, name: str, prompt: Prompt | ChatPrompt, params: SamplingParams
    ) -> None:
        """In this thread or the encoder's: encode a prompt and queue it, unless its reader left."""
        if self._open.get(name) is not mailbox:
            return
        try:
            engine = self.engine
            engine.check_room()  # before encoding, which may take as long as a step
            submission = prepare(engine, name, prompt, params)
        except ForetokenError as error:
            mailbox.fail(error)
            return
        except Exception as error:  # a bug: the engine's thread tells all readers
            command = partial(_raise, error)
        else:
            command = partial(self._submit, mailbox, submission)
        if threading.current_thread() is self._thread:
            command()
        else:
            with self._wake:
                self._post(command)

    def _submit(self, mailbox: Mailbox, submission: Submission) -> None:
        """Queue an encoded prompt in the engine, unless its reader has left."""
        if self._open.get(submission.request_id) is not mailbox:
            return
        try:
            self._groups[mailbox] = self._engine.add(*submission)
        except ForetokenError as error:
            mailbox.fail(error)
            return
        if mailbox in self._aborted:
            self._abort(mailbox)

    def _answer(self, future: Future[_Answer], work: Callable[[Engine], _Answer]) -> None:
        """In this thread or the encoder's: do `work` and set the future.

        The future may be cancelled already, or have the error of a thread that died.
        """
        with suppress(InvalidStateError):
            if not future.done() and future.set_running_or_notify_cancel():
                try:
                    future.set_result(work(self.engine))
                except InvalidStateError:
                    raise
                except Exception as error:
                    future.set_exception(error)
        with self._wake:
            self._calls.discard(future)

    def _abort(self, mailbox: Mailbox) -> None:
        """End a request and deliver its output so far.

        A request that is not queued yet ends when `_submit` has queued it.
        """
        group = self._groups.get(mailbox)
        if group is None:
            self._aborted.add(mailbox)
        else:
            self._engine.abort(group)
            self._deliver(mailbox, group)
            self._wake_readers()

    def _abandon(self, mailbox: Mailbox) -> None:
        """End a request that has no reader any more."""
        self._aborted.discard(mailbox)
        group = self._groups.pop(mailbox, None)
        if group is not None:
            self._engine.abort(group)

    def _deliver(self, mailbox: Mailbox, group: RequestGroup) -> None:
        """Put what is new in a request into its mailbox; forget the request if it has ended."""
        if mailbox.put(self._engine, group):
            self._with_news.append(mailbox)
        if group.finished:
            del self._groups[mailbox]

    def _wake_readers(self) -> None:
        """Wake the readers of new outputs. Requests of closed loops end before the next step."""
        mailboxes, self._with_news = self._with_news, []
        if closed := wake_readers(mailboxes):
            with self._wake:
                for mailbox in closed:
                    self._post(partial(self._abandon, mailbox))


def takes_long(prompt: Any) -> bool:
    """Whether encoding or checking this input may take as long as a step."""
    if isinstance(prompt, Mapping):
        return any(map(takes_long, prompt.values()))
    if isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], str):
        return sum(map(len, prompt)) > _LONG
    return isinstance(prompt, ChatPrompt) or (isinstance(prompt, Sized) and len(prompt) > _LONG)


def _raise(error: Exception) -> None:
    raise error


def _closed_error() -> UsageError:
    return UsageError("this AsyncEngine was closed: make a new one")


def _died_error(cause: BaseException) -> StepError:
    """The error of readers and callers when the engine's thread has died of `cause`."""
    error = StepError(
        f"the engine's thread ended by {type(cause).__name__}: {cause}. This is a bug in Foretoken."
    )
    error.__cause__ = cause
    return error

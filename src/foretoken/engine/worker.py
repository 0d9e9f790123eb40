"""Access to an engine: from its own process only, by one thread at a time.

Charter: an engine is not safe for two threads, and its native decoder keeps scratch memory between
calls. The threads that share an `LLM` take turns of a step each, first come, first served, so that
every step serves the requests of all of them. (A plain lock would go to the thread that just
released it.)

The engine of an `AsyncEngine` belongs to a thread of its own. Event loops send it commands through
a queue under one condition; without work the thread sleeps on that condition. Outputs go back to
mailboxes by `call_soon_threadsafe`, on a host when the next pass begins (see `ops/passes.py`).
Prompts that take long to encode are encoded in another thread, so that neither an event loop nor a
step waits for them; others are encoded between two steps.
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
"""Longer prompts, in characters or ids, go to the encoder's thread: 4 ms; a thread costs 0.1 ms."""
_ENCODER = "foretoken-encoder"
_COMMANDS_S = 0.02
"""Seconds of commands after which a step comes first."""


class HomeProcess:
    """The process that made an engine. A fork of it has the engine's memory but not its threads."""

    def __init__(self, owner: str) -> None:
        self._owner, self._pid = owner, os.getpid()

    @property
    def is_forked(self) -> bool:
        """Whether the present process is a forked child."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """Raise `UsageError` in a forked child, where computing would wait for ever."""
        if self.is_forked:
            raise UsageError(
                f"this {self._owner} belongs to process {self._pid}, and this is a fork of it "
                f"(process {os.getpid()}): make the {self._owner} after the fork, or start "
                "processes by `spawn`"
            )


class Turns:
    """A lock that threads get in the order in which they ask: `with turns:`.

    An exception in a waiting thread (Ctrl-C) takes it out of the line and has no other effect.

    Raises, on entering:
        UsageError: in a forked child, or in a thread that has or awaits its turn already: in a
            signal handler or a finalizer that runs during a call.
    """

    def __init__(self, owner: str) -> None:
        self.home = HomeProcess(owner)
        # One locked lock per thread; the first thread has the turn, the others wait for theirs.
        self._line: deque[threading.Lock] = deque()
        self._threads: set[int] = set()
        self._work: deque[Callable[[], None]] = deque()

    @property
    def inside(self) -> bool:
        """Whether this thread has or awaits its turn."""
        return threading.get_ident() in self._threads

    def __enter__(self) -> None:
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
        try:
            while self._work:
                self._work.popleft()()
        finally:
            self._leave(self._line[0])

    def later(self, work: Callable[[], None]) -> None:
        """Do `work` at the end of this thread's present turn, or of a turn taken for it.

        For calls that may come during another call, from finalizers, and for work that must not be
        lost if waiting is interrupted: then the next turn of any thread does it. Does nothing in a
        forked child.
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
        """`_leave`, in steps that may be done twice.

        Waking a thread that is awake does no harm, so no step here needs a lock. The thread counts
        as inside to the last: a finalizer that ran before would wait for itself.
        """
        with suppress(ValueError):  # interrupted before it was in the line
            self._line.remove(place)
        with suppress(IndexError, RuntimeError):  # no thread waits, or it is awake already
            self._line[0].release()
        self._threads.discard(threading.get_ident())


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """How busy an engine is. Its thread works on meanwhile: numbers may be one step apart.

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
        deltas: keep all unread deltas, and merge them when they are read; else keep the newest
            output alone, which holds all that came before it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, deltas: bool) -> None:
        self.loop = loop
        self._deltas = deltas
        self._lock = threading.Lock()  # guards the two fields below
        self._unread: list[Any] = []
        self._error: ForetokenError | None = None
        self._reader: asyncio.Future[None] | None = None  # the loop's own

    def put(self, engine: Engine, group: RequestGroup) -> bool:
        """From the engine's thread: add a request's news; True: the reader must be woken."""
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
        """From the engine's thread: let the reader raise this error after all unread news."""
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

    Each loop gets one call, which writes to a socket: one for each of 512 readers took 8 ms a step.
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
    """The thread that owns the engine. Any thread may call public methods, only itself the others.

    A forked child has no such thread, and its copy of the condition may stay locked for ever:
    there `enter` and `abort` raise `UsageError`, and `leave`, `ask_to_stop` and `stop` do nothing.
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
        self._with_news: list[Mailbox] = []  # readers to wake
        self._aborted: set[Mailbox] = set()  # before they had a group
        self._encoder = ThreadPoolExecutor(1, _ENCODER)
        if engine.tokenizer is not None:
            # The first call resets a fast tokenizer's truncation; then threads may share it.
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
        """Add a request; returns its name: if none is given, the next free number."""
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

    def call(self, work: Callable[[Engine], _Answer], given: Any = None) -> Future[_Answer]:
        """Do `work` between two steps; the future has its answer or its exception.

        Args:
            given: the input of `work`, if it needs the tokenizer alone: if that is long, the
                encoder's thread does the work.
        """
        future: Future[_Answer] = Future()
        with self._wake_to_serve():
            self._calls.add(future)
            post = self._encoder.submit if takes_long(given) else self._post
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
        """The reader of this mailbox has left: free its name and end its request."""
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
        """Let the thread end after the present step; no request is taken any more."""
        if self.home.is_forked:
            return
        with self._wake:
            self._is_closing = True
            self._wake.notify()

    def stop(self) -> None:
        """End the requests and the thread, and wait for its end."""
        self.ask_to_stop()
        # A finalizer may call this in any thread, even in those that it would wait for.
        here = threading.current_thread()
        is_ours = here is self._thread or here.name.startswith(_ENCODER)
        if not is_ours and not self.home.is_forked:
            self._thread.join()

    @contextmanager
    def _wake_to_serve(self) -> Iterator[None]:
        """Hold the condition; raises if the thread will serve no further command."""
        self.home.check()
        with self._wake:
            if self._failure is not None:
                raise _died_error(self._failure)
            if self._is_closing:
                raise _closed_error()
            yield

    def _post(self, command: Callable[[], None]) -> None:
        """Queue a command; the caller holds the condition."""
        self._commands.append(command)
        self._wake.notify()

    def _run(self) -> None:
        before_passes(self._wake_readers)
        try:
            while self._run_commands():
                if self._engine.has_work:
                    self._step()
            self._encoder.shutdown()  # prompts in it are queued first, then end with all others
            while self._commands:
                self._run_commands()
            for mailbox in [*self._groups]:
                self._abort(mailbox)
            self._wake_readers()
        except BaseException as error:  # readers must learn of it
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
        """Sleep until there is something to do, and run commands; False if the thread is to end."""
        with self._wake:
            while not (self._commands or self._is_closing or self._engine.has_work):
                self._wake.wait()
            has_commands, is_over = bool(self._commands), self._is_closing
        if has_commands:
            self._wake_readers()  # now: a prompt may take long to encode
        until = perf_counter() + _COMMANDS_S
        while self._commands and (perf_counter() < until or not self._engine.has_work):
            self._commands.popleft()()
        return not is_over

    def _step(self) -> None:
        changed = {*self._engine.step()}
        self._wake_readers()  # if the step had no pass
        self.metrics = self._engine.metrics.copy()
        for mailbox, group in [*self._groups.items()]:
            if group in changed or group.finished:  # a failed step may end requests that wait
                self._deliver(mailbox, group)
        if not (self._engine.has_work and self._engine.runner.on_host):
            self._wake_readers()  # no pass follows, or another device computes it

    def _add(
        self, mailbox: Mailbox, name: str, prompt: Prompt | ChatPrompt, params: SamplingParams
    ) -> None:
        """In either thread: encode a prompt and queue it, unless its reader has left."""
        if self._open.get(name) is not mailbox:
            return
        try:
            engine = self.engine
            engine.check_room()  # before it is encoded, which takes as long as a step
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
        """In either thread; the caller may have left, or have been told that the thread died."""
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
        """End a request, unless it has ended, and deliver what it has."""
        group = self._groups.get(mailbox)
        if group is None:
            self._aborted.add(mailbox)
        else:
            self._engine.abort(group)
            self._deliver(mailbox, group)
            self._wake_readers()

    def _abandon(self, mailbox: Mailbox) -> None:
        self._aborted.discard(mailbox)
        group = self._groups.pop(mailbox, None)
        if group is not None:
            self._engine.abort(group)

    def _deliver(self, mailbox: Mailbox, group: RequestGroup) -> None:
        if mailbox.put(self._engine, group):
            self._with_news.append(mailbox)
        if group.finished:
            del self._groups[mailbox]

    def _wake_readers(self) -> None:
        """Wake readers with news; a request on a closed loop ends before the next step."""
        mailboxes, self._with_news = self._with_news, []
        if closed := wake_readers(mailboxes):
            with self._wake:
                for mailbox in closed:
                    self._post(partial(self._abandon, mailbox))


def takes_long(prompt: Any) -> bool:
    """Whether an input may take as long to encode, or to read, as a step takes."""
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
    error = StepError(
        f"the engine's thread ended by {type(cause).__name__}: {cause}. This is a bug in Foretoken."
    )
    error.__cause__ = cause
    return error

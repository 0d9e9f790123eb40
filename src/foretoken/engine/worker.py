"""Who may touch an engine: its own process, one thread at a time.

Charter: an engine is not safe for two threads, and its native decoder keeps scratch memory between
calls. The threads that share an `LLM` take turns of a step each, first come, first served, so that
every step serves the requests of all of them. (A plain lock goes to whoever asks while it is free,
which is the thread that just released it.)

The engine of an `AsyncEngine` belongs to a thread of its own. Commands of event loops cross to it
by a queue under one condition, on which the thread sleeps when there is nothing to do; news cross
back to mailboxes by `call_soon_threadsafe`, on a host when the next pass begins (see
`ops/passes.py`). Prompts that take long to encode are encoded in another thread, so that neither an
event loop nor a step waits for them; others between two steps.
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
from foretoken.outputs import RequestDelta, RequestOutput, SpeculationMetrics
from foretoken.sampling.params import SamplingParams

_Answer = TypeVar("_Answer")
_LONG = 2**12
"""Characters or ids, from which on a prompt is encoded aside: 4 ms; a thread costs 0.1 ms."""
_ENCODER = "foretoken-encoder"
_COMMANDS = 0.02
"""Seconds after which a step comes before further commands."""


class HomeProcess:
    """The process that made an engine. A fork of it has the engine's memory but not its threads."""

    def __init__(self, owner: str) -> None:
        self._owner, self._pid = owner, os.getpid()

    @property
    def is_left(self) -> bool:
        """Whether this is another process: a forked child."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """Raise `UsageError` in a forked child, where computing would wait for ever."""
        if self.is_left:
            raise UsageError(
                f"this {self._owner} belongs to process {self._pid}, and this is a fork of it "
                f"(process {os.getpid()}): make the {self._owner} after the fork, or start "
                "processes by `spawn`"
            )


class Turns:
    """A lock that threads get in the order in which they ask: `with turns:`.

    What raises while a thread waits (Ctrl-C) costs it its place in the line and nothing else.

    Raises, on entering:
        UsageError: in a forked child, or in a thread that has or awaits its turn: a signal handler
            or a finalizer that runs in the midst of a call.
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
        """Have `work` done at the end of a turn: this thread's present one, or one taken for it.

        It is for whatever may run in the midst of a call, like finalizers, and for what must not be
        lost if waiting is interrupted: the next turn of any thread does it then. Does nothing in a
        forked child.
        """
        if self.home.is_left:
            return
        self._work.append(work)
        if not self.inside:
            with self:
                pass

    def _leave(self, place: threading.Lock) -> None:
        """Give up a place in the line and wake whoever is first, also when Ctrl-C comes between."""
        try:
            self._give_up(place)
        except BaseException:
            self._give_up(place)
            raise

    def _give_up(self, place: threading.Lock) -> None:
        """`_leave`, in steps that may be done twice.

        To wake a thread that is awake does no harm, so that no step here needs a lock. The thread
        counts as inside to the last: a finalizer that ran before would wait for itself.
        """
        with suppress(ValueError):  # interrupted before it stood in the line
            self._line.remove(place)
        with suppress(IndexError, RuntimeError):  # no thread waits; or it is awake already
            self._line[0].release()
        self._threads.discard(threading.get_ident())


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """How busy an engine is. Its thread goes on meanwhile: numbers may be one step apart.

    Attributes:
        num_open: requests with an iterator that has not ended.
        num_running: samples that have a slot.
        num_waiting: samples that wait for one.
        kv_cache_usage: share of the cache's blocks that running samples hold, 0..1.
        failure: why nothing is served any more, or None.
    """

    num_open: int = 0
    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    failure: ForetokenError | None = None


class Mailbox:
    """What one request's reader, on one event loop, has not read yet.

    Args:
        deltas: all of it, as deltas, which are merged when they are read; else the newest output,
            which holds what came before it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, deltas: bool) -> None:
        self.loop = loop
        self.deltas = deltas
        self._lock = threading.Lock()  # guards the two fields below
        self._unread: list[Any] = []
        self._error: ForetokenError | None = None
        self._reader: asyncio.Future[None] | None = None  # the loop's own

    def put(self, news: RequestOutput | RequestDelta) -> bool:
        """From the engine's thread: put in what a request has; True: the reader must be told."""
        with self._lock:
            is_told = bool(self._unread)
            if self.deltas:
                self._unread.append(news)
            else:  # never empty in between: the reader looks without the lock
                self._unread = [news]
        return not is_told

    def fail(self, error: ForetokenError) -> None:
        """From the engine's thread: there will be no more news; what is unread is read first."""
        with self._lock:
            self._error = self._error or error
        tell([self])

    async def read(self) -> Any:
        """On the loop: wait for news, a `RequestOutput` or a `RequestDelta`; raises an error."""
        while not (self._unread or self._error):
            self._reader = self.loop.create_future()
            await self._reader
        with self._lock:
            unread, self._unread = self._unread, []
        if unread:
            return unread[0] if len(unread) == 1 else RequestDelta.merge(unread)
        raise self._error or StepError("an empty mailbox was read")

    def wake(self) -> None:
        """On the loop: what is unread may have been read meanwhile, without waiting."""
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def tell(mailboxes: Iterable[Mailbox]) -> list[Mailbox]:
    """Wake their readers; returns the mailboxes with a loop that is gone.

    One call for each loop: it writes to a socket, which for each of 512 readers took 8 ms a step.
    """
    of_loops: dict[asyncio.AbstractEventLoop, list[Mailbox]] = {}
    for mailbox in mailboxes:
        of_loops.setdefault(mailbox.loop, []).append(mailbox)
    gone = []
    for loop, its in of_loops.items():
        try:
            loop.call_soon_threadsafe(_wake_all, its)
        except RuntimeError:
            gone += its
    return gone


def _wake_all(mailboxes: Sequence[Mailbox]) -> None:
    for mailbox in mailboxes:
        mailbox.wake()


class Worker:
    """The thread that owns the engine. Public methods are for any thread, others for its own.

    A forked child has no such thread, and its copy of the condition may stay locked for ever:
    there `enter` and `abort` raise `UsageError`, and what ends something does nothing.
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
        self._untold: list[Mailbox] = []
        self._aborted: set[Mailbox] = set()  # before they had a group
        self._encoder = ThreadPoolExecutor(1, _ENCODER)
        if engine.tokenizer is not None:
            # A fast tokenizer takes several callers, once it has no truncation to be rid of.
            with suppress(Exception):
                engine.tokenizer.encode("a")
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
        mailbox: Mailbox,
        prompt: Prompt | ChatPrompt,
        params: SamplingParams,
    ) -> str:
        """Have a request added; returns its name, the next free number if it is given none."""
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
        """Have something done between two steps; what it raises is raised to who waits for it.

        Args:
            given: what `work` gives to the tokenizer, if it needs nothing else: if that is long,
                the work is done in the thread that encodes.
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
            return EngineStatus(num_open, failure=_dead(failure) if failure else _closed())
        except ForetokenError as error:
            return EngineStatus(num_open, failure=error)
        scheduler, pool = engine.scheduler, engine.scheduler.pool
        usage = 1 - pool.num_free / pool.num_blocks
        return EngineStatus(num_open, len(scheduler.running), len(scheduler.waiting), usage)

    def leave(self, name: str, mailbox: Mailbox) -> None:
        """The reader of this mailbox left: its name is free, its request ends."""
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
        here = threading.current_thread()
        is_ours = here is self._thread or here.name.startswith(_ENCODER)
        if not is_ours and not self.home.is_left:
            self._thread.join()

    @contextmanager
    def _wake_to_serve(self) -> Iterator[None]:
        """Hold the condition of a thread that will serve what is posted; raises if it will not."""
        self.home.check()
        with self._wake:
            if self._failure is not None:
                raise _dead(self._failure)
            if self._is_closing:
                raise _closed()
            yield

    def _post(self, command: Callable[[], None]) -> None:
        """Queue a command; the caller holds the condition."""
        self._commands.append(command)
        self._wake.notify()

    def _run(self) -> None:
        before_passes(self._tell)
        try:
            while self._obey():
                if self._engine.has_work:
                    self._step()
            self._encoder.shutdown()  # what it has begun ends as what waits for a slot does
            while self._commands:
                self._obey()
            for mailbox in [*self._groups]:
                self._abort(mailbox)
            self._tell()
        except BaseException as error:  # whatever ends this thread, readers must learn of it
            with self._wake:
                self._failure = error
                readers, callers = [*self._open.values()], [*self._calls]
            for mailbox in readers:
                mailbox.fail(_dead(error))
            for future in callers:
                with suppress(InvalidStateError):  # its caller has left
                    future.set_exception(_dead(error))
        finally:
            self._encoder.shutdown(wait=False)
            del self._engine

    def _obey(self) -> bool:
        """Sleep until there is something to do; carry out commands; False when it is over."""
        with self._wake:
            while not (self._commands or self._is_closing or self._engine.has_work):
                self._wake.wait()
            has_commands, is_over = bool(self._commands), self._is_closing
        if has_commands:
            self._tell()  # a prompt may take long to encode
        until = perf_counter() + _COMMANDS
        while self._commands and (perf_counter() < until or not self._engine.has_work):
            self._commands.popleft()()
        return not is_over

    def _step(self) -> None:
        changed = {*self._engine.step()}
        self._tell()  # where there was nothing to compute
        self.metrics = self._engine.metrics.copy()
        for mailbox, group in [*self._groups.items()]:
            if group in changed or group.finished:  # in a step that failed, before it ever ran
                self._show(mailbox, group)
        if not (self._engine.has_work and self._engine.runner.on_host):
            self._tell()  # no pass comes, or one that another device computes

    def _add(
        self, mailbox: Mailbox, name: str, prompt: Prompt | ChatPrompt, params: SamplingParams
    ) -> None:
        """In either thread: encode a prompt, unless its reader has left; then queue it."""
        if self._open.get(name) is not mailbox:
            return
        try:
            engine = self.engine
            engine.check_room()  # before it is encoded, which takes as long as a step
            submission = prepare(engine, name, prompt, params)
        except ForetokenError as error:
            mailbox.fail(error)
            return
        except Exception as error:  # a bug: the engine's thread says so to all who wait
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
        """In either thread; its caller may have left, or been told that the engine's ended."""
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
        """End a request, unless it has ended, and show what it has."""
        group = self._groups.get(mailbox)
        if group is None:
            self._aborted.add(mailbox)
        else:
            self._engine.abort(group)
            self._show(mailbox, group)
            self._tell()

    def _abandon(self, mailbox: Mailbox) -> None:
        self._aborted.discard(mailbox)
        group = self._groups.pop(mailbox, None)
        if group is not None:
            self._engine.abort(group)

    def _show(self, mailbox: Mailbox, group: RequestGroup) -> None:
        news: RequestDelta | RequestOutput | None = (
            take_delta(self._engine, group) if mailbox.deltas else build_output(self._engine, group)
        )
        if news is not None and mailbox.put(news):
            self._untold.append(mailbox)
        if group.finished:
            del self._groups[mailbox]

    def _tell(self) -> None:
        """Wake readers with news; where the loop is gone, the request ends, as no step runs."""
        untold, self._untold = self._untold, []
        if gone := tell(untold):
            with self._wake:
                for mailbox in gone:
                    self._post(partial(self._abandon, mailbox))


def takes_long(prompt: Any) -> bool:
    """Whether what is given takes as long to encode, or to read, as a step may."""
    if isinstance(prompt, Mapping):
        return any(map(takes_long, prompt.values()))
    if isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], str):
        return sum(map(len, prompt)) > _LONG
    return isinstance(prompt, ChatPrompt) or (isinstance(prompt, Sized) and len(prompt) > _LONG)


def _raise(error: Exception) -> None:
    raise error


def _closed() -> UsageError:
    return UsageError("this AsyncEngine was closed: make a new one")


def _dead(cause: BaseException) -> StepError:
    error = StepError(
        f"the engine's thread ended by {type(cause).__name__}: {cause}. This is a bug in Foretoken."
    )
    error.__cause__ = cause
    return error

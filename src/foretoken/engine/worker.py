"""Access to an engine, which one thread at a time may use, in the process that made it.

Threads that share an `LLM` take turns (`Turns`), first come, first served: each turn is one step,
which serves the requests of all threads. (A plain lock would go to the thread that just released
it.)

The engine of an `AsyncEngine` belongs to a thread of its own (`Worker`). Event loops queue commands
for this thread, which sleeps without work. Outputs go into mailboxes. Readers are woken by
`call_soon_threadsafe`: on a host when the next pass of the target begins (`ops/passes.py`). Short
prompts are encoded between two steps, long prompts in another thread, so that neither an event loop
nor a step waits for them.
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
# Characters or ids. Longer prompts take 4 ms and more to encode, and go to the encoder's thread,
# which costs 0.1 ms.
_LONG_PROMPT = 2**12
_ENCODER_THREAD = "foretoken-encoder"
_MAX_COMMAND_SECONDS = (
    0.02  # after so many seconds of commands, a step runs before the next command
)


class OwnerProcess:
    """The process that made an engine. A forked child has the engine's memory, not its threads.

    Args:
        owner: name of the class that uses the engine, `LLM` or `AsyncEngine`.
    """

    def __init__(self, owner: str) -> None:
        self._owner, self._pid = owner, os.getpid()

    @property
    def is_forked(self) -> bool:
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

    An exception in a waiting thread (Ctrl-C) takes the thread out of the queue and has no other
    effect.

    Raises, on entering:
        UsageError: in a forked child, or in a thread that has or awaits its turn already. The call
            then came from a signal handler or a finalizer that runs during another call.
    """

    def __init__(self, owner: str) -> None:
        self.owner_process = OwnerProcess(owner)
        # One lock per thread, in order; the first thread has the turn. A waiting thread blocks on
        # its lock, which the thread before it releases at the end of its turn.
        self._queue: deque[threading.Lock] = deque()
        self._threads: set[int] = set()  # ids of threads that have or await their turn
        self._deferred: deque[Callable[[], None]] = deque()

    @property
    def inside(self) -> bool:
        """Whether the calling thread has or awaits its turn."""
        return threading.get_ident() in self._threads

    def __enter__(self) -> None:
        self.owner_process.check()
        if self.inside:
            raise UsageError(
                "a signal handler or a finalizer made this call while another call of the same "
                "thread was running: only set a flag there, and make the call later"
            )
        lock = threading.Lock()
        lock.acquire()
        try:
            self._threads.add(threading.get_ident())
            self._queue.append(lock)
            if self._queue[0] is not lock:
                lock.acquire()
        except BaseException:
            self._leave(lock)
            raise

    def __exit__(self, *raised: object) -> None:
        try:
            while self._deferred:
                self._deferred.popleft()()
        finally:
            self._leave(self._queue[0])

    def later(self, work: Callable[[], None]) -> None:
        """Do `work` at the end of this thread's present turn; without one, take a turn for it.

        This is for finalizers, which may run during another call, and for work that must not be
        lost: if waiting for the turn is interrupted, the next turn of any thread does the work.
        Does nothing in a forked child.
        """
        if self.owner_process.is_forked:
            return
        self._deferred.append(work)
        if not self.inside:
            with self:
                pass

    def _leave(self, lock: threading.Lock) -> None:
        """Remove a lock from the queue and wake the first thread, even if Ctrl-C comes between."""
        try:
            self._remove_and_wake(lock)
        except BaseException:
            self._remove_and_wake(lock)
            raise

    def _remove_and_wake(self, lock: threading.Lock) -> None:
        """As `_leave`, in steps that may be repeated.

        Waking a thread that is awake does no harm, so no step here needs a lock. The thread counts
        as inside until the last step: otherwise a finalizer that runs in between would take a turn
        and wait for its own thread.
        """
        with suppress(ValueError):  # interrupted before the lock was in the queue
            self._queue.remove(lock)
        with suppress(IndexError, RuntimeError):  # no thread waits, or it is awake already
            self._queue[0].release()
        self._threads.discard(threading.get_ident())


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """How busy an engine is. Its thread keeps working, so the numbers may be one step apart.

    Attributes:
        num_open: requests with an iterator that has not ended.
        num_running, num_waiting: samples that have a slot, and that wait for one.
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
        self.loop, self.deltas = loop, deltas
        self._lock = threading.Lock()  # guards `_unread` and `_error`
        self._unread: list[Any] = []
        self._error: ForetokenError | None = None
        self._reader: asyncio.Future[None] | None = None  # used only on the loop

    def put(self, output: RequestOutput | RequestDelta) -> bool:
        """From the engine's thread: add an output; returns whether the reader must be woken."""
        with self._lock:
            was_empty = not self._unread
            if self.deltas:
                self._unread.append(output)
            else:  # never empty in between: the reader looks without the lock
                self._unread = [output]
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
    unreachable = []
    for loop, loop_mailboxes in by_loop.items():
        try:
            loop.call_soon_threadsafe(_wake_all, loop_mailboxes)
        except RuntimeError:
            unreachable += loop_mailboxes
    return unreachable


def _wake_all(mailboxes: Sequence[Mailbox]) -> None:
    for mailbox in mailboxes:
        mailbox.wake()


class Worker:
    """The thread that owns the engine. Any thread may call public methods; private methods run in
    the worker's own thread unless they say otherwise.

    A forked child has no such thread, and its copy of the condition may stay locked for ever. So in
    a forked child `open_request`, `call` and `abort` raise `UsageError`, and `close_request`,
    `ask_to_stop` and `stop` do nothing.
    """

    def __init__(self, engine: Engine) -> None:
        self.owner_process = OwnerProcess("AsyncEngine")
        self.metrics = SpeculationMetrics()
        self._engine = engine
        self._condition = threading.Condition()  # guards the six fields below
        self._commands: deque[Callable[[], None]] = deque()
        self._calls: set[Future[Any]] = set()
        self._open: dict[str, Mailbox] = {}  # by name of the request
        self._num_requests = 0
        self._is_closing = False
        self._failure: BaseException | None = None
        self._groups: dict[Mailbox, RequestGroup] = {}  # of requests that the engine has
        self._to_wake: list[Mailbox] = []  # mailboxes with new outputs
        self._aborted: set[Mailbox] = set()  # of requests that were aborted before they were queued
        self._encoder = ThreadPoolExecutor(1, _ENCODER_THREAD)
        if engine.tokenizer is not None:
            # The first call resets a fast tokenizer's truncation; after that, threads may share it.
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

    def open_request(
        self, request_id: str | None, mailbox: Mailbox, prompt: Prompt | ChatPrompt,
        params: SamplingParams,
    ) -> str:  # fmt: skip
        """Add a request; returns its name: `request_id`, or the next free number if that is None.

        Raises:
            RequestError: `request_id` is no text, or another open request has this name.
            UsageError, StepError: the thread serves no request any more, or this is a fork.
        """
        with self._condition_if_serving():
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
        """Do `work` between two steps; the future gets the answer or the exception. With a long
        `text`, the encoder's thread does the work, which may then use only the tokenizer."""
        future: Future[_Answer] = Future()
        with self._condition_if_serving():
            self._calls.add(future)
            post = self._encoder.submit if takes_long(text) else self._post
            post(partial(self._run_call, future, work))
        return future

    def status(self) -> EngineStatus:
        with self._condition:
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

    def close_request(self, name: str, mailbox: Mailbox) -> None:
        """Free a request's name and end the request: its mailbox has no reader any more."""
        if self.owner_process.is_forked:
            return
        with self._condition:
            del self._open[name]
            self._post(lambda: self._abandon(mailbox))

    def abort(self, name: str) -> bool:
        """End a request now; False if no open request has that name."""
        self.owner_process.check()
        with self._condition:
            mailbox = self._open.get(name)
            if mailbox is not None:
                self._post(lambda: self._abort(mailbox))
        return mailbox is not None

    def ask_to_stop(self) -> None:
        """Let the thread end after the present step; `open_request` takes no more requests."""
        if self.owner_process.is_forked:
            return
        with self._condition:
            self._is_closing = True
            self._condition.notify()

    def stop(self) -> None:
        """End all requests and the thread, and wait until the thread has ended."""
        self.ask_to_stop()
        # A finalizer may call this in any thread. The worker's own threads must not wait.
        caller = threading.current_thread()
        is_own = caller is self._thread or caller.name.startswith(_ENCODER_THREAD)
        if not is_own and not self.owner_process.is_forked:
            self._thread.join()

    @contextmanager
    def _condition_if_serving(self) -> Iterator[None]:
        """In any thread: hold the condition; errors as in `open_request`, but no `RequestError`."""
        self.owner_process.check()
        with self._condition:
            if self._failure is not None:
                raise _died_error(self._failure)
            if self._is_closing:
                raise _closed_error()
            yield

    def _post(self, command: Callable[[], None]) -> None:
        """In any thread that holds the condition: queue a command."""
        self._commands.append(command)
        self._condition.notify()

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
            with self._condition:
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
        """Sleep until there is something to do, and run commands; False: the thread must end."""
        with self._condition:
            while not (self._commands or self._is_closing or self._engine.has_work):
                self._condition.wait()
            has_commands, must_end = bool(self._commands), self._is_closing
        if has_commands:
            self._wake_readers()  # before commands, because a prompt may take long to encode
        end = perf_counter() + _MAX_COMMAND_SECONDS
        while self._commands and (perf_counter() < end or not self._engine.has_work):
            self._commands.popleft()()
        return not must_end

    def _step(self) -> None:
        """Run one step, and deliver the new outputs of its requests."""
        changed = {*self._engine.step()}
        self._wake_readers()  # for earlier outputs, unless a pass has woken the readers already
        self.metrics = self._engine.metrics.copy()
        for mailbox, group in [*self._groups.items()]:
            if group in changed or group.finished:  # a failed step may end waiting requests
                self._deliver(mailbox, group)
        if not (self._engine.has_work and self._engine.runner.on_host):
            self._wake_readers()  # no pass follows, or a device computes the pass

    def _add(
        self, mailbox: Mailbox, name: str, prompt: Prompt | ChatPrompt, params: SamplingParams
    ) -> None:
        """In this thread or the encoder's: encode a prompt that has a reader, and queue it."""
        if self._open.get(name) is not mailbox:
            return
        try:
            engine = self.engine
            engine.check_room()  # before encoding, which may take as long as a step
            submission = prepare(engine, name, prompt, params)
        except ForetokenError as error:
            mailbox.fail(error)
            return
        except Exception as error:  # a bug: raised in the engine's thread, which tells all readers
            command = partial(_raise, error)
        else:
            command = partial(self._submit, mailbox, submission)
        if threading.current_thread() is self._thread:
            command()
        else:
            with self._condition:
                self._post(command)

    def _submit(self, mailbox: Mailbox, submission: Submission) -> None:
        """Queue an encoded prompt in the engine, if the prompt still has a reader."""
        if self._open.get(submission.request_id) is not mailbox:
            return
        try:
            self._groups[mailbox] = self._engine.add(*submission)
        except ForetokenError as error:
            mailbox.fail(error)
            return
        if mailbox in self._aborted:
            self._abort(mailbox)

    def _run_call(self, future: Future[_Answer], work: Callable[[Engine], _Answer]) -> None:
        """In this thread or the encoder's: do `work` and set the future."""
        # The future may be cancelled already, or have the error of a thread that died.
        with suppress(InvalidStateError):
            if not future.done() and future.set_running_or_notify_cancel():
                try:
                    future.set_result(work(self.engine))
                except InvalidStateError:
                    raise
                except Exception as error:
                    future.set_exception(error)
        with self._condition:
            self._calls.discard(future)

    def _abort(self, mailbox: Mailbox) -> None:
        """End a request and deliver its output so far."""
        group = self._groups.get(mailbox)
        if group is None:  # not queued yet: `_submit` queues it and then ends it
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
        """Put a request's new output into its mailbox; forget the request if it has ended."""
        make_output: Callable[..., RequestDelta | RequestOutput | None]
        make_output = take_delta if mailbox.deltas else build_output
        output = make_output(self._engine, group)
        if output is not None and mailbox.put(output):
            self._to_wake.append(mailbox)
        if group.finished:
            del self._groups[mailbox]

    def _wake_readers(self) -> None:
        """Wake the readers of new outputs. Before the next step, end the requests whose readers'
        event loops are closed."""
        mailboxes, self._to_wake = self._to_wake, []
        if unreachable := wake_readers(mailboxes):
            with self._condition:
                for mailbox in unreachable:
                    self._post(partial(self._abandon, mailbox))


def takes_long(prompt: Any) -> bool:
    """Whether encoding or checking this input may take as long as a step."""
    if isinstance(prompt, Mapping):
        return any(map(takes_long, prompt.values()))
    if isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], str):
        return sum(map(len, prompt)) > _LONG_PROMPT
    is_long = isinstance(prompt, Sized) and len(prompt) > _LONG_PROMPT
    return is_long or isinstance(prompt, ChatPrompt)


def _raise(error: Exception) -> None:
    raise error


def _closed_error() -> UsageError:
    return UsageError("this AsyncEngine was closed: make a new one")


def _died_error(cause: BaseException) -> StepError:
    name = type(cause).__name__
    text = f"the engine's thread ended by {name}: {cause}. This is a bug in Foretoken."
    return StepError(text).caused_by(cause)

"""Send requests at a fixed concurrency or at a Poisson rate, and time each piece of the answers.

Charter: when requests are sent, and the records of them. A `Client` does the sending: `offline.py`
to an engine in this process, `server.py` to any server with OpenAI's API.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import Any, NamedTuple

from foretoken.engine.trace import StepTrace
from foretoken.errors import UsageError
from foretoken.lab.bench.floor import Floor
from foretoken.lab.bench.options import BenchCase, Load
from foretoken.outputs import SpeculationMetrics

MOST_FAILURES = 10
"""So many failed requests in a row end a run."""


class RequestFailedError(Exception):
    """One request got no answer or a wrong one; says why. The run counts it and goes on."""


class ServerGoneError(Exception):
    """The server refuses connections; says why. The run ends with the records so far."""


class BenchRequest(NamedTuple):
    """One request.

    Attributes:
        prompt: token ids, a text, or the messages of a chat.
        num_output: tokens to generate; fewer may come if the server cannot ignore an end of text.
    """

    prompt: str | list[int] | list[dict[str, Any]]
    num_output: int
    seed: int


@dataclass(slots=True)
class Record:
    """The record of one request; times are seconds of `time.perf_counter`.

    Latencies begin when a request was due: a client that sends late must not hide waiting time.

    Attributes:
        due: when it had to be sent: under a rate as drawn beforehand, else once there was room.
        arrivals: when each piece of the answer that held tokens came.
        ended: when the answer was complete; None: it is not, or failed.
        num_input: tokens of the prompt, 0 if unknown.
        num_output: tokens of the answer.
        origins: of each token, where the client sees them: `CompletionOutput.origins`.
        error: why it failed, or None.
        sent: under a rate, when the client began to connect.
        num_first: tokens of the first piece.
    """

    due: float
    arrivals: list[float] = field(default_factory=list)
    ended: float | None = None
    num_input: int = 0
    num_output: int = 0
    origins: list[str] = field(default_factory=list)
    error: str | None = None
    sent: float | None = None
    num_first: int = 1


class Step(NamedTuple):
    """One step of the engine; `seconds` count from the end of the previous step."""

    seconds: float
    trace: StepTrace


@dataclass(slots=True)
class Run:
    """The records of one case under one load.

    Attributes:
        seconds: from the first request to the last answer, or to the early end.
        steps: the engine's steps meanwhile, if it is in this process.
        speculation: counts of these requests, if the client has them.
        stopped: why the run ended early; empty if it did not.
        concurrency: requests that were under way at any time; 0 under a rate.
        failed_in_a_row: failed requests since the last answered one.
    """

    records: list[Record] = field(default_factory=list)
    seconds: float = 0.0
    steps: list[Step] = field(default_factory=list)
    speculation: SpeculationMetrics | None = None
    stopped: str = ""
    concurrency: int = 0
    failed_in_a_row: int = 0

    @property
    def done(self) -> list[Record]:
        """Requests with a complete answer."""
        return [record for record in self.records if record.ended is not None]

    @property
    def failed(self) -> list[str]:
        """For each failed request, why it failed."""
        return [record.error for record in self.records if record.error is not None]


class Client(ABC):
    """The system under test: engines that are made here one after another, or a server.

    The defaults of this class suit a system that shows nothing but its answers.

    Attributes:
        floor: of the engine that was made last, or None.
        notes: for readers of the results.
        keeps_prefixes: whether a prompt that was sent before may cost less.
    """

    floor: Floor | None = None
    notes: list[str]
    keeps_prefixes: bool = True

    def opened(self, cases: Sequence[BenchCase]) -> AbstractAsyncContextManager[None]:
        """Inside, requests of these cases can be sent."""
        return nullcontext()

    def together(self) -> AbstractContextManager[None]:
        """Requests sent inside reach the system all at once, if that is possible."""
        return nullcontext()

    @abstractmethod
    async def send(self, request: BenchRequest, case: BenchCase, record: Record) -> None:
        """Send a request and keep its answer in `record`, piece by piece.

        Raises:
            RequestFailedError: the answer is wrong, broken off or late.
            ServerGoneError: no connection.
            ForetokenError: the engine failed.
        """

    @abstractmethod
    async def counts(self) -> SpeculationMetrics | None:
        """Speculation of all requests so far; None if unknown."""

    def watch(self, steps: list[Step] | None) -> None:  # noqa: B027
        """From now on add every step of the engine to this list; None: stop."""

    @abstractmethod
    async def tokens(self, text: str) -> list[int]:
        """The token ids of a text; empty if unknown."""

    def vocabulary(self) -> list[int]:
        """Ids to make random prompts of; empty if unknown."""
        return []

    @abstractmethod
    def shapes(self) -> dict[str, Any]:
        """The settings that all rows of a results file share."""


async def drive(
    client: Client,
    case: BenchCase,
    load: Load,
    requests: Sequence[tuple[float, BenchRequest]],
    run: Run,
    on_end: Callable[[], None] = lambda: None,
) -> None:
    """Send all requests and wait for their answers; `run` always holds the records so far.

    Args:
        requests: each with the seconds since the one before, which count only under a rate.
        on_end: called when one has ended.
    """
    before, run.concurrency = await client.counts(), load.concurrency
    client.watch(run.steps)
    start = time.perf_counter()
    tasks: list[asyncio.Task[None]] = []

    async def one(request: BenchRequest, due: float | None = None) -> None:
        now = time.perf_counter()
        record = Record(now) if due is None else Record(due, sent=now)
        await _send(client, request, case, run, record)
        on_end()

    async def worker() -> None:
        for _, request in waiting:
            await one(request)
            if run.stopped:
                return

    waiting, due = iter(requests), start
    try:
        if load.rate is None:
            with client.together():
                tasks += [asyncio.create_task(worker()) for _ in range(load.concurrency)]
                await asyncio.sleep(0)  # all of them begin
        else:
            for gap, request in waiting:
                due += gap
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                if run.stopped:
                    break
                tasks.append(asyncio.create_task(one(request, due)))
        await asyncio.gather(*tasks)
    finally:
        run.seconds = time.perf_counter() - start
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with suppress(UsageError):  # a failed engine is closed; its own error is already reported
            client.watch(None)
    after = await client.counts()
    if before is not None and after is not None:
        run.speculation = difference(before, after)


async def _send(
    client: Client, request: BenchRequest, case: BenchCase, run: Run, record: Record
) -> None:
    """Send one request; a failure may stop the run."""
    run.records.append(record)
    try:
        await client.send(request, case, record)
        record.ended, run.failed_in_a_row = time.perf_counter(), 0
    except RequestFailedError as error:
        record.error = str(error)
        run.failed_in_a_row += 1
        if run.failed_in_a_row >= MOST_FAILURES:
            run.stopped = f"{MOST_FAILURES} requests in a row failed, the last one so: {error}"
    except ServerGoneError as error:
        record.error = run.stopped = str(error)


def difference(before: SpeculationMetrics, after: SpeculationMetrics) -> SpeculationMetrics:
    """What was counted between two readings of the same counters."""
    made = SpeculationMetrics()
    for count in fields(SpeculationMetrics):
        old, new = getattr(before, count.name), getattr(after, count.name)
        if isinstance(new, list):
            setattr(made, count.name, [b - a for a, b in zip_longest(old, new, fillvalue=0)])
        elif isinstance(new, int):
            setattr(made, count.name, new - old)
    return made

"""Send requests at a fixed concurrency or at a Poisson rate, and time each piece of the answers.

A `Client` sends the requests: `offline.py` to an engine in this process, `server.py` to any server
with OpenAI's API.
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

MOST_FAILURES = 10  # so many failed requests in a row end a run


class RequestFailedError(Exception):
    """A request got no answer or a wrong one, for the reason in the message. The run continues."""


class ServerGoneError(Exception):
    """The server refuses connections, for the reason in the message. The run ends."""


class BenchRequest(NamedTuple):
    """A request of a benchmark.

    prompt: token ids, a text, or the messages of a chat
    num_output: tokens to generate; fewer if the server cannot ignore an end of text
    """

    prompt: str | list[int] | list[dict[str, Any]]
    num_output: int
    seed: int

    @property
    def is_chat(self) -> bool:
        return isinstance(self.prompt, list) and isinstance(self.prompt[0], dict)


@dataclass(slots=True)
class Record:
    """The record of one request; times are seconds of `time.perf_counter`.

    Latencies begin when a request is due: a client that sends late does not hide waiting time.

    Attributes:
        due: the time at which the request had to be sent: drawn beforehand under a rate, else the
            time at which the previous request had ended.
        arrivals: the arrival time of each piece of the answer that contained tokens.
        ended: the time at which the answer was complete; None: it is not complete.
        num_input: tokens of the prompt, 0 if unknown.
        origins: the origin of each token (`CompletionOutput.origins`), if the client knows it.
        error: the reason why the request failed, or None.
        sent: under a rate, the time at which the client began to connect.
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
        seconds: time from the first request to the last answer, or to an early end.
        steps: the engine's steps during the run, if the engine is in this process.
        speculation: counts of drafts in these requests, if the client knows them.
        stopped: the reason why the run ended early; empty if it did not.
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
    def done(self) -> list[Record]:  # records with a complete answer
        return [record for record in self.records if record.ended is not None]

    @property
    def failed(self) -> list[str]:  # reasons of failed requests
        return [record.error for record in self.records if record.error is not None]


class Client(ABC):
    """The connection to the system under test: engines in this process, or a server.

    Attributes:
        floor: the floor of the last engine, or None.
        notes: lines for readers of the results.
        keeps_prefixes: whether a prompt may cost less if it was sent before.
    """

    floor: Floor | None = None
    notes: list[str]
    keeps_prefixes: bool = True

    def opened(self, cases: Sequence[BenchCase]) -> AbstractAsyncContextManager[None]:
        """A context in which requests of these cases can be sent."""
        return nullcontext()

    def together(self) -> AbstractContextManager[None]:
        """A context that holds requests back, so that they reach the system all at once."""
        return nullcontext()

    @abstractmethod
    async def send(self, request: BenchRequest, case: BenchCase, record: Record) -> None:
        """Send a request, and add its answer to `record`, piece by piece.

        `RequestFailedError`: a wrong, incomplete or late answer; `ServerGoneError`: no connection;
        another `ForetokenError`: the engine failed.
        """

    @abstractmethod
    async def counts(self) -> SpeculationMetrics | None:
        """Counts of drafts in all requests up to now; None if unknown."""

    def watch(self, steps: list[Step] | None) -> None:  # noqa: B027
        """Begin to add every step of the engine to this list, until called with None."""

    @abstractmethod
    async def tokens(self, text: str) -> list[int]:
        """The token ids of a text; empty if unknown."""

    def vocabulary(self) -> list[int]:
        """Token ids for random prompts; empty if unknown."""
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
    """Send all requests and wait for their answers; `run` always holds the records up to now.

    requests: each with the seconds since the previous request, which count only under a rate
    """
    counts_before, run.concurrency = await client.counts(), load.concurrency
    client.watch(run.steps)
    start = time.perf_counter()
    tasks: list[asyncio.Task[None]] = []

    async def send_one(request: BenchRequest, due: float | None = None) -> None:
        now = time.perf_counter()
        record = Record(now) if due is None else Record(due, sent=now)
        await _send(client, request, case, run, record)
        on_end()

    async def worker() -> None:
        for _, request in waiting:
            await send_one(request)
            if run.stopped:
                return

    waiting, due = iter(requests), start
    try:
        if load.rate is None:
            with client.together():
                tasks += [asyncio.create_task(worker()) for _ in range(load.concurrency)]
                await asyncio.sleep(0)  # so that all workers begin
        else:
            for gap, request in waiting:
                due += gap
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                if run.stopped:
                    break
                tasks.append(asyncio.create_task(send_one(request, due)))
        await asyncio.gather(*tasks)
    finally:
        run.seconds = time.perf_counter() - start
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with suppress(UsageError):  # a failed engine is closed; its own error is already reported
            client.watch(None)
    counts_after = await client.counts()
    if counts_before is not None and counts_after is not None:
        run.speculation = difference(counts_before, counts_after)


async def _send(
    client: Client, request: BenchRequest, case: BenchCase, run: Run, record: Record
) -> None:
    run.records.append(record)
    try:
        await client.send(request, case, record)
        record.ended, run.failed_in_a_row = time.perf_counter(), 0
    except RequestFailedError as error:
        record.error = str(error)
        run.failed_in_a_row += 1
        if run.failed_in_a_row >= MOST_FAILURES:
            run.stopped = f"{MOST_FAILURES} requests in a row failed, the last because: {error}"
    except ServerGoneError as error:
        record.error = run.stopped = str(error)


def difference(before: SpeculationMetrics, after: SpeculationMetrics) -> SpeculationMetrics:
    """How much the counters grew between two readings, in total; without those of each drafter."""
    result = SpeculationMetrics()
    for count in fields(SpeculationMetrics):
        old, new = getattr(before, count.name), getattr(after, count.name)
        if isinstance(new, list):
            setattr(result, count.name, [b - a for a, b in zip_longest(old, new, fillvalue=0)])
        elif isinstance(new, int):
            setattr(result, count.name, new - old)
    return result

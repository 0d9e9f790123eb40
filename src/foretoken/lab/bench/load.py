"""Requests sent at a fixed concurrency or at a Poisson rate, and when each piece of an answer came.

Charter: when requests are sent, and what is kept of them. How one is sent is a `Client`'s affair:
`offline.py` has an engine in this process, `server.py` any server of OpenAI's API.
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
from foretoken.lab.bench.options import Case, Load
from foretoken.outputs import SpeculationMetrics

MOST_FAILURES = 10
"""So many failed requests in a row end a run: there is nothing left to measure."""


class RequestFailedError(Exception):
    """One request got no answer, or a wrong one; says why. Counted, and the run goes on."""


class ServerGoneError(Exception):
    """Nobody listens any more; says why. The run ends with what it has."""


class Asked(NamedTuple):
    """One request.

    Attributes:
        prompt: token ids, a text, or the messages of a chat.
        num_output: tokens that it generates, exactly where the server can be told so.
    """

    prompt: str | list[int] | list[dict[str, Any]]
    num_output: int
    seed: int


@dataclass(slots=True)
class Record:
    """What came of a request; times are seconds of `time.perf_counter`.

    Latencies begin when it was due: a sender that is late must not hide what its users wait for.

    Attributes:
        due: when it had to be sent: under a rate as drawn beforehand, else once there was room.
        arrivals: when each piece of the answer that held tokens came.
        ended: when the answer was complete; None: it is not, or failed.
        num_input, num_output: tokens of the prompt, 0 if nobody told, and of the answer.
        origins: of each token, where the client sees them: `CompletionOutput.origins`.
        error: why it failed, or None.
        sent: under a rate, when the client began with it, which is to connect.
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
    """One step of the engine; `seconds` count from the end of the one before it."""

    seconds: float
    trace: StepTrace


@dataclass(slots=True)
class Run:
    """One case under one load.

    Attributes:
        seconds: from the first request to the last answer, or to the early end.
        steps: what the engine did meanwhile, where it is in this process.
        speculation: counts of these requests, where the client has them.
        stopped: why the run ended early; empty if it did not.
        concurrency: requests that were under way at any time; 0 under a rate.
        failed_in_a_row: requests since the last that was answered.
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
        """Requests whose answers are complete."""
        return [record for record in self.records if record.ended is not None]

    @property
    def failed(self) -> list[str]:
        """Why requests failed, one text for each."""
        return [record.error for record in self.records if record.error is not None]


class Client(ABC):
    """Who answers: engines that are made here one after another, or a server.

    What it does by itself is right for one of which nothing but its answers is seen.

    Attributes:
        floor: of the engine that was made last, if one was.
        notes: what a reader of the results must know of it.
        keeps_prefixes: whether a prompt that was sent before may cost less.
    """

    floor: Floor | None = None
    notes: list[str]
    keeps_prefixes: bool = True

    def opened(self, cases: Sequence[Case]) -> AbstractAsyncContextManager[None]:
        """Inside, requests of these cases can be sent."""
        return nullcontext()

    def together(self) -> AbstractContextManager[None]:
        """What is sent inside, the system sees at once, where that can be had."""
        return nullcontext()

    @abstractmethod
    async def send(self, asked: Asked, case: Case, record: Record) -> None:
        """Send a request and keep its answer in `record`, piece by piece.

        Raises:
            RequestFailedError: the answer is wrong, broken off or late.
            ServerGoneError: no connection.
            ForetokenError: the engine failed.
        """

    @abstractmethod
    async def counts(self) -> SpeculationMetrics | None:
        """Speculation of all requests so far; None if nobody tells."""

    def watch(self, steps: list[Step] | None) -> None:  # noqa: B027
        """Have every step of the engine added to this list; None: no longer."""

    @abstractmethod
    async def tokens(self, text: str) -> list[int]:
        """The token ids of a text; empty if nobody tells."""

    def vocabulary(self) -> list[int]:
        """Ids to make random prompts of; empty if they are not known."""
        return []

    @abstractmethod
    def shapes(self) -> dict[str, Any]:
        """What stays equal over the rows of a results file."""


async def drive(
    client: Client,
    case: Case,
    load: Load,
    requests: Sequence[tuple[float, Asked]],
    run: Run,
    on_end: Callable[[], None] = lambda: None,
) -> None:
    """Send all requests and wait for their answers; `run` holds what there is at any time.

    Args:
        requests: seconds from the one before, which count under a rate alone, and the request.
        on_end: called when one has ended.
    """
    before, run.concurrency = await client.counts(), load.concurrency
    client.watch(run.steps)
    start = time.perf_counter()
    tasks: list[asyncio.Task[None]] = []

    async def one(asked: Asked, due: float | None = None) -> None:
        now = time.perf_counter()
        await _send(client, asked, case, run, Record(now) if due is None else Record(due, sent=now))
        on_end()

    async def worker() -> None:
        for _, asked in waiting:
            await one(asked)
            if run.stopped:
                return

    waiting, due = iter(requests), start
    try:
        if load.rate is None:
            with client.together():
                tasks += [asyncio.create_task(worker()) for _ in range(load.concurrency)]
                await asyncio.sleep(0)  # all of them begin
        else:
            for gap, asked in waiting:
                due += gap
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                if run.stopped:
                    break
                tasks.append(asyncio.create_task(one(asked, due)))
        await asyncio.gather(*tasks)
    finally:
        run.seconds = time.perf_counter() - start
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with suppress(UsageError):  # an engine that failed is closed, and its own error is told
            client.watch(None)
    after = await client.counts()
    if before is not None and after is not None:
        run.speculation = difference(before, after)


async def _send(client: Client, asked: Asked, case: Case, run: Run, record: Record) -> None:
    """One request; whether the run goes on behind it."""
    run.records.append(record)
    try:
        await client.send(asked, case, record)
        record.ended, run.failed_in_a_row = time.perf_counter(), 0
    except RequestFailedError as error:
        record.error = str(error)
        run.failed_in_a_row += 1
        if run.failed_in_a_row >= MOST_FAILURES:
            run.stopped = f"{MOST_FAILURES} requests in a row failed, the last one so: {error}"
    except ServerGoneError as error:
        record.error = run.stopped = str(error)


def difference(before: SpeculationMetrics, after: SpeculationMetrics) -> SpeculationMetrics:
    """What was counted between two looks at the same counts."""
    made = SpeculationMetrics()
    for count in fields(SpeculationMetrics):
        old, new = getattr(before, count.name), getattr(after, count.name)
        if isinstance(new, list):
            setattr(made, count.name, [b - a for a, b in zip_longest(old, new, fillvalue=0)])
        elif isinstance(new, int):
            setattr(made, count.name, new - old)
    return made

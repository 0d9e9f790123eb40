"""A replica: one engine and the application over it, asked by messages instead of a socket.

Charter: from a `Call` to what the application sends, and what Ray Serve asks of a replica. Nothing
here knows of other replicas.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple, cast

from prometheus_client.core import Metric
from starlette.types import Message, Send

from foretoken import __version__
from foretoken.async_engine import AsyncEngine
from foretoken.config import EngineConfig
from foretoken.engine.devices import choose_device
from foretoken.errors import ConfigError, ForetokenError
from foretoken.serve.app import build_app
from foretoken.serve.context import Context
from foretoken.serve.errors import request_id
from foretoken.serve.fleet.call import MESSAGE_BYTES, Call, Done, Head, Taken
from foretoken.serve.logs import noted, set_up
from foretoken.serve.metrics import EngineCollector, process_metrics
from foretoken.serve.options import MAX_STEP_SECONDS, ServeOptions
from foretoken.serve.server import collect_when_idle, leave

_POLL_S = 0.1
_TOLD_S = 2.0
"""In which clients are told that their replica's engine has failed; then its process ends."""
_PACE_S, _PACE_EACH_S, _MOST_PACE_S = 0.002, 0.001, 0.02
"""Seconds between two messages of an answer: at least, for each stream that is open, and at most.
A message takes 0.12 ms of a core (benchmarks/results/replicas.json), part of which the engine's
thread waits for. What comes sooner goes with the next one.
"""


class State(NamedTuple):
    """How a replica is.

    Attributes:
        pid: of its process.
        failure: why it serves nobody any more; empty: it serves.
        load: requests over HTTP that it answers.
    """

    replica: str
    pid: int
    failure: str
    load: int


class Replica:
    """One engine. Ray Serve makes as many as are asked for, each in a process of its own.

    Args:
        config: of the engine; `seed` is that of the fleet.
        options: of the server.
        version: of the package that deploys it.
        name: its own; None: the one that Ray Serve gave it.

    Raises:
        ConfigError: the package here is another one, or an option does not fit this machine.
    """

    def __init__(
        self, config: EngineConfig, options: ServeOptions, version: str, name: str | None = None
    ) -> None:
        self._name, self._is_alone = name or _own_name(), name is None
        self._num_streams = 0
        self._ending: asyncio.Task[None] | None = None
        with told_briefly():
            check_version(version)
            set_up(options.log_level)
            self._engine = _engine(replace(config, seed=own_seed(config.seed, self._name)))
        self._app = build_app(self._engine, options, guarded=False)
        context: Context = self._app.state.context
        self._life = context.lifetime
        self._metrics = EngineCollector(self._engine, context.counts, context.served.names[0])
        self._draining: asyncio.Task[None] | None = None
        collect_when_idle()

    async def answer(self, call: Call) -> AsyncGenerator[Taken | Head | bytes | Done, None]:
        """Answer a request: first `Taken`, then a `Head`, the body in pieces, and `Done`.

        Leaving it early is a client that leaves: the engine ends the request.
        """
        yield Taken(self._name)
        scope = {**call.scope, "asgi": {"version": "3.0"}, "state": {}, "client": None}
        waiting, news = list[Head | bytes](), asyncio.Event()

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                waiting.append(Head(message["status"], list(message["headers"])))
            else:
                waiting.append(message.get("body", b""))
            news.set()

        task = asyncio.create_task(self._run(scope, call, send))
        task.add_done_callback(lambda _: news.set())
        self._num_streams += 1
        try:
            while waiting or not task.done():
                await news.wait()
                found, waiting[:] = [*waiting], []
                news.clear()
                for piece in _joined(found):
                    yield piece
                if found and not task.done():
                    pace = max(_PACE_S, _PACE_EACH_S * self._num_streams)
                    await asyncio.sleep(min(pace, _MOST_PACE_S))
            await task
            yield Done(noted(scope["state"]))
        finally:
            self._num_streams -= 1
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _run(self, scope: dict[str, Any], call: Call, send: Send) -> None:
        """The application over one call."""
        body: list[Message] = [{"type": "http.request", "body": call.body, "more_body": False}]

        async def receive() -> Message:
            if body:
                return body.pop()
            await asyncio.Event().wait()  # who leaves cancels this task
            raise RuntimeError("a call goes on after its end")

        request_id.set(call.name)  # of this task
        await self._app(scope, receive, send)

    async def state(self) -> State:
        """How it is."""
        failure = self._engine.status.failure
        return State(self._name, os.getpid(), str(failure or ""), len(self._life.flights))

    async def metrics(self) -> tuple[str, list[Metric]]:
        """Its name, and its metrics with those of its process."""
        return self._name, [*self._metrics.collect(), *process_metrics()]

    async def drain(self) -> None:
        """Take no more, and end what is under way in time, as a server does that gets SIGTERM."""
        self._life.drain()
        self._draining = self._draining or asyncio.create_task(self._end())

    async def _end(self) -> None:
        while not self._life.is_over():
            await asyncio.sleep(_POLL_S)

    async def check_health(self) -> None:
        """Raise what the engine failed by, and end this process: Ray Serve starts another one.

        A failed engine refuses at once, so that it would be the least busy of all and get most
        requests, until Ray Serve has asked it three times.
        """
        if (failure := self._engine.status.failure) is not None:
            if self._is_alone and self._ending is None:
                self._ending = asyncio.create_task(self._leave())
            raise failure

    async def _leave(self) -> None:
        end = asyncio.get_running_loop().time() + _TOLD_S
        while self._num_streams and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(_POLL_S)
        leave(1)


@contextmanager
def told_briefly() -> Iterator[None]:
    """Errors of ours without those that caused them: Ray Serve shows all of it where it tells why
    a deployment failed, and the reason is below."""
    try:
        yield
    except ForetokenError as error:
        error.__cause__, error.__suppress_context__ = None, True
        raise


def _engine(config: EngineConfig) -> AsyncEngine:
    if choose_device(config.device).type == "cpu" and config.max_step_seconds is None:
        config = replace(config, max_step_seconds=MAX_STEP_SECONDS)
    return AsyncEngine(**{name: getattr(config, name) for name in config.__slots__})


def check_version(deployed: str) -> None:
    """Raise `ConfigError` where a machine of the cluster has another version of the package."""
    if deployed != __version__:
        remedy = "Install one version on all machines of the cluster."
        bound = f"{deployed}, the version that deploys it"
        raise ConfigError("foretoken", __version__, bound, remedy)


def own_seed(seed: int, replica: str) -> int:
    """The engine's seed in one replica.

    Requests without a seed get noise by the engine's seed and their number (decision 005): with one
    seed for all, requests of equal numbers in two replicas would get the same noise. Requests with
    a seed do not depend on it. Names of replicas are new at each start, and so are these seeds.
    """
    digest = hashlib.blake2b(f"{seed}/{replica}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _own_name() -> str:
    from ray import serve

    name: str = serve.get_replica_context().replica_id.unique_id
    return name


def _joined(pieces: Iterable[Head | bytes]) -> Iterator[Head | bytes]:
    """The same with pieces of a body as one, or in parts of the longest message."""
    for is_head, group in groupby(pieces, key=lambda piece: isinstance(piece, Head)):
        if is_head:
            yield from group
            continue
        body = b"".join(cast("Iterable[bytes]", group))
        yield from (body[i : i + MESSAGE_BYTES] for i in range(0, len(body), MESSAGE_BYTES))

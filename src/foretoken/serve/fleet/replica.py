"""A replica: one engine and the application over it, called by messages instead of a socket.

Charter: from a `Call` to the application's answer, and the methods that Ray Serve calls. Nothing
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
from foretoken.serve.errors import request_id
from foretoken.serve.fleet.call import MESSAGE_BYTES, Call, Done, Head, Taken
from foretoken.serve.logs import log_fields, set_up
from foretoken.serve.metrics import EngineCollector, process_metrics
from foretoken.serve.options import MAX_STEP_SECONDS, ServeOptions
from foretoken.serve.routes import Context
from foretoken.serve.server import collect_when_idle, leave

_POLL_S = 0.1
_TOLD_S = 2.0
"""Seconds for clients to learn that the engine has failed; then the process ends."""
_PACE_S, _PACE_EACH_S, _MOST_PACE_S = 0.002, 0.001, 0.02
"""Seconds between two messages of an answer: the minimum, for each open stream, and the maximum.
A message takes 0.12 ms of a core (benchmarks/results/replicas.json); for a part of that the
engine's thread waits. Text that comes sooner goes with the next message.
"""


class State(NamedTuple):
    """The state of a replica.

    Attributes:
        replica: its name.
        pid: of its process.
        failure: why it no longer serves; empty: it serves.
        load: requests over HTTP that it is answering.
    """

    replica: str
    pid: int
    failure: str
    load: int


class Replica:
    """One engine. Ray Serve makes each replica in a process of its own.

    Args:
        config: of the engine; `seed` is the fleet's.
        options: of the server.
        version: of the package that deploys it.
        name: the replica's name; None: the one that Ray Serve gave it.

    Raises:
        ConfigError: this machine has another version, or an option does not fit this machine.
    """

    def __init__(
        self, config: EngineConfig, options: ServeOptions, version: str, name: str | None = None
    ) -> None:
        self._name, self._is_alone = name or _own_name(), name is None
        self._num_streams = 0
        self._ending: asyncio.Task[None] | None = None
        with without_causes():
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

        If the generator is closed early, the engine ends the request.
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
            yield Done(log_fields(scope["state"]))
        finally:
            self._num_streams -= 1
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _run(self, scope: dict[str, Any], call: Call, send: Send) -> None:
        """Run the application for one call."""
        body: list[Message] = [{"type": "http.request", "body": call.body, "more_body": False}]

        async def receive() -> Message:
            if body:
                return body.pop()
            await asyncio.Event().wait()  # a client that leaves cancels this task
            raise RuntimeError("a call goes on after its end")

        request_id.set(call.name)  # of this task
        await self._app(scope, receive, send)

    async def state(self) -> State:
        failure = self._engine.status.failure
        return State(self._name, os.getpid(), str(failure or ""), len(self._life.flights))

    async def metrics(self) -> tuple[str, list[Metric]]:
        """Its name, and the metrics of its engine and its process."""
        return self._name, [*self._metrics.collect(), *process_metrics()]

    async def drain(self) -> None:
        """Take no more requests, and end those under way in time, as a server at SIGTERM."""
        self._life.drain()
        self._draining = self._draining or asyncio.create_task(self._end())

    async def _end(self) -> None:
        while not self._life.is_over():
            await asyncio.sleep(_POLL_S)

    async def check_health(self) -> None:
        """Raise the engine's failure and end this process, so that Ray Serve starts another one.

        Ray Serve would wait for three failed checks. Meanwhile a failed engine, which refuses at
        once, would be the least busy replica and get most requests.
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
def without_causes() -> Iterator[None]:
    """Raise our errors without their causes: Ray Serve shows the whole chain as the reason why a
    deployment failed, with the real reason at the bottom."""
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
    """Raise `ConfigError` if this machine has another version of the package than `deployed`."""
    if deployed != __version__:
        remedy = "Install one version on all machines of the cluster."
        bound = f"{deployed}, the version that deploys it"
        raise ConfigError("foretoken", __version__, bound, remedy)


def own_seed(seed: int, replica: str) -> int:
    """The engine's seed in one replica.

    Requests without a seed get noise by the engine's seed and their number (decision 005). With one
    seed for all replicas, requests of equal numbers would get the same noise. Requests with a seed
    do not depend on it. Replicas get new names at each start, and so new seeds.
    """
    digest = hashlib.blake2b(f"{seed}/{replica}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _own_name() -> str:
    from ray import serve

    name: str = serve.get_replica_context().replica_id.unique_id
    return name


def _joined(pieces: Iterable[Head | bytes]) -> Iterator[Head | bytes]:
    """The pieces, those of a body joined, and split again at `MESSAGE_BYTES`."""
    for is_head, group in groupby(pieces, key=lambda piece: isinstance(piece, Head)):
        if is_head:
            yield from group
            continue
        body = b"".join(cast("Iterable[bytes]", group))
        yield from (body[i : i + MESSAGE_BYTES] for i in range(0, len(body), MESSAGE_BYTES))

"""A replica: one engine and its application, which Ray Serve calls by messages, not by a socket."""

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
from foretoken.serve.fleet.call import MESSAGE_BYTES, Call, Done, Head, Started
from foretoken.serve.logs import configure_logging, log_fields
from foretoken.serve.metrics import EngineCollector, process_metrics
from foretoken.serve.options import MAX_STEP_SECONDS, ServeOptions
from foretoken.serve.routes import Context
from foretoken.serve.server import collect_when_idle, exit_now

_POLL_S = 0.1
_FAILURE_NOTICE_S = 2.0  # for clients to read that the engine has failed; then the process ends
_MIN_PAUSE_S, _PAUSE_PER_STREAM_S, _MAX_PAUSE_S = 0.002, 0.001, 0.02
"""Seconds between two messages of an answer: the minimum, the seconds for each open stream, and the
maximum. A message takes 0.12 ms of a core (benchmarks/results/replicas.json), and for a part of
this time the engine's thread waits. So text that is ready earlier waits for the next message."""


class State(NamedTuple):
    """The state of a replica.

    Attributes:
        failure: why the replica no longer serves; empty: it serves.
        load: the number of requests over HTTP that it is answering.
    """

    replica: str
    pid: int
    failure: str
    load: int


class Replica:
    """One engine and its application. Ray Serve makes each replica in another process.

    Args:
        config: the engine's options, with the seed of the fleet.
        version: the version of the package that deploys the replica.
        name: the replica's name; None: the one that Ray Serve gave it.

    Raises:
        ConfigError: this machine has another version, or an option does not fit this machine.
    """

    def __init__(
        self, config: EngineConfig, options: ServeOptions, version: str, name: str | None = None
    ) -> None:
        self._owns_process = name is None
        if name is None:
            from ray import serve

            name = serve.get_replica_context().replica_id.unique_id
        self._name: str = name
        self._num_streams = 0
        self._ending: asyncio.Task[None] | None = None
        with without_causes():
            check_version(version)
            configure_logging(options.log_level)
            config = replace(config, seed=replica_seed(config.seed, name))
            if choose_device(config.device).type == "cpu" and config.max_step_seconds is None:
                config = replace(config, max_step_seconds=MAX_STEP_SECONDS)
            engine_options = {field: getattr(config, field) for field in config.__slots__}
            self._engine = AsyncEngine(**engine_options)
        self._app = build_app(self._engine, options, guarded=False)
        context: Context = self._app.state.context
        self._life = context.lifetime
        self._metrics = EngineCollector(self._engine, context.counts, context.served.names[0])
        self._draining: asyncio.Task[None] | None = None
        collect_when_idle()

    async def answer(self, call: Call) -> AsyncGenerator[Started | Head | bytes | Done, None]:
        """Answer a request: yields `Started`, then a `Head`, the body in pieces, and `Done`.

        If the generator is closed early, the engine ends the request.
        """
        yield Started(self._name)
        scope = {**call.scope, "asgi": {"version": "3.0"}, "state": {}, "client": None}
        unsent, has_news = list[Head | bytes](), asyncio.Event()

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                unsent.append(Head(message["status"], list(message["headers"])))
            else:
                unsent.append(message.get("body", b""))
            has_news.set()

        task = asyncio.create_task(self._run_app(scope, call, send))
        task.add_done_callback(lambda _: has_news.set())
        self._num_streams += 1
        try:
            while unsent or not task.done():
                await has_news.wait()
                ready, unsent[:] = [*unsent], []
                has_news.clear()
                for piece in _join_pieces(ready):
                    yield piece
                if ready and not task.done():
                    pause = max(_MIN_PAUSE_S, _PAUSE_PER_STREAM_S * self._num_streams)
                    await asyncio.sleep(min(pause, _MAX_PAUSE_S))
            await task
            yield Done(log_fields(scope["state"]))
        finally:
            self._num_streams -= 1
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _run_app(self, scope: dict[str, Any], call: Call, send: Send) -> None:
        body: list[Message] = [{"type": "http.request", "body": call.body, "more_body": False}]

        async def receive() -> Message:
            if body:
                return body.pop()
            await asyncio.Event().wait()  # if the client disconnects, this task is cancelled
            raise RuntimeError("an event that is never set was set")

        request_id.set(call.name)  # only for this task
        await self._app(scope, receive, send)

    async def state(self) -> State:
        failure = self._engine.status.failure
        return State(self._name, os.getpid(), str(failure or ""), len(self._life.open_requests))

    async def metrics(self) -> tuple[str, list[Metric]]:
        """The replica's name, and the metrics of the engine and of the process."""
        return self._name, [*self._metrics.collect(), *process_metrics()]

    async def drain(self) -> None:
        """Take no more requests, and end the open ones in time, as a server does at SIGTERM."""
        self._life.drain()
        self._draining = self._draining or asyncio.create_task(self._wait_for_drain())

    async def _wait_for_drain(self) -> None:
        while not self._life.is_over():
            await asyncio.sleep(_POLL_S)

    async def check_health(self) -> None:
        """If the engine has failed, raise its error and end this process.

        Ray Serve alone would replace the replica only after three failed checks. Until then the
        failed replica, which refuses at once, would be the least busy and get most requests.
        """
        if (failure := self._engine.status.failure) is not None:
            if self._owns_process and self._ending is None:
                self._ending = asyncio.create_task(self._end_process())
            raise failure

    async def _end_process(self) -> None:
        """End this process when all streams have ended, or after `_FAILURE_NOTICE_S`."""
        end = asyncio.get_running_loop().time() + _FAILURE_NOTICE_S
        while self._num_streams and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(_POLL_S)
        exit_now(1)


@contextmanager
def without_causes() -> Iterator[None]:
    """Remove the causes of our errors: Ray Serve would show all causes before the error itself."""
    try:
        yield
    except ForetokenError as error:
        error.__cause__, error.__suppress_context__ = None, True
        raise


def check_version(deployed: str) -> None:
    """Raise `ConfigError` if this machine has another version of the package than `deployed`."""
    if deployed != __version__:
        remedy = "Install one version on all machines of the cluster."
        bound = f"{deployed}, the version that deploys the replica"
        raise ConfigError("foretoken", __version__, bound, remedy)


def replica_seed(fleet_seed: int, replica: str) -> int:
    """The engine's seed in the replica of this name; a replica has a new name at each start.

    The noise of a request without a seed depends on the engine's seed and the request's number
    (decision 005). With one seed for all replicas, requests of equal numbers would have equal
    noise.
    """
    digest = hashlib.blake2b(f"{fleet_seed}/{replica}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _join_pieces(pieces: Iterable[Head | bytes]) -> Iterator[Head | bytes]:
    """The pieces of an answer, with parts of the body joined up to `MESSAGE_BYTES`."""
    for is_head, group in groupby(pieces, key=lambda piece: isinstance(piece, Head)):
        if is_head:
            yield from group
            continue
        joined = b"".join(cast("Iterable[bytes]", group))
        yield from (joined[i : i + MESSAGE_BYTES] for i in range(0, len(joined), MESSAGE_BYTES))

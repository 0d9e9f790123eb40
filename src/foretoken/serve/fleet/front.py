"""The front of a fleet: an application that forwards each request to a replica.

The front checks access and the limits of bodies, as a single server does; replicas check fields.
Health, load, models and metrics are joined from all replicas.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any, Protocol

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from foretoken.serve.answers.named import error_event, named_event
from foretoken.serve.app import access_middleware
from foretoken.serve.errors import (
    Refusal,
    UnavailableError,
    UnknownModelError,
    path_without_root,
    refusal,
    request_id,
)
from foretoken.serve.fleet.call import Call, Done, Head, Routing, Started, read_routing
from foretoken.serve.fleet.config import Fleet
from foretoken.serve.limits import METHODS_WITHOUT_BODY, BodyLimits
from foretoken.serve.running import CUT_MESSAGES, Lifetime, OpenRequest
from foretoken.serve.sse import DONE, dumps, in_thread_if_long, while_connected

START_SECONDS = 8.0
_GRACE_SECONDS = 10.0
"""From `request_timeout`, when a replica ends its answer, until the front gives up."""
_MAX_CONTEXT = 2**19
"""The context for `BodyLimits`, in tokens: a front does not know the contexts of its models."""
_POLL_S = 0.1
_STATE_SECONDS = 3.0  # for a replica to report; then the replica counts as down
Piece = Started | Head | bytes | Done


class ReplicaDiedError(UnavailableError):
    """The replica that answered a request is gone."""


class Replicas(Protocol):
    """All replicas of one model; `names` are the names of the model."""

    names: Sequence[str]

    def answer(self, call: Call) -> AsyncGenerator[Piece, None]:
        """Have one replica answer; closing the generator ends the request in the replica.

        Raises, at any step:
            ReplicaDiedError: the replica is gone; no second replica gets the request.
            UnavailableError: the replica failed, or no replica can take the request.
        """

    async def call_all(self, method: str, seconds: float) -> list[Any]:
        """Call a method of all replicas; returns the results that arrive within `seconds`."""


class Front:
    """Several models with several replicas each, as one application.

    Args:
        start_seconds: time for a replica to begin with a request; then the client gets 503.

    Attributes:
        num_died: the number of answers that ended because their replica died.
    """

    def __init__(
        self, fleet: Fleet, models: Sequence[Replicas], life: Lifetime,
        start_seconds: float = START_SECONDS,
    ) -> None:  # fmt: skip
        self._start_seconds = start_seconds
        self.models, self.life, self.num_died = models, life, 0
        self._by_name = {name: replicas for replicas in models for name in replicas.names}
        routes = [*state_routes(self), Route("/{path:path}", _Endpoint(self._forward))]
        app = Starlette(routes=routes, lifespan=self._lifespan)
        app.add_middleware(BodyLimits, options=fleet.server, max_model_len=_MAX_CONTEXT)
        for kind, arguments in access_middleware(fleet.server):
            app.add_middleware(kind, **arguments)
        self.app: ASGIApp = app

    def replicas_of(self, name: str | None) -> Replicas:
        """The replicas of the model with this name; None: of the first model.

        A single model gets every request, since its replicas refuse unknown names. If there are
        several models, an unknown name raises `UnknownModelError`.
        """
        replicas = self._by_name.get(name or "")
        if replicas is None and name is not None and len(self.models) > 1:
            raise UnknownModelError("model", name, f"one of {', '.join(self._by_name)}")
        return replicas or self.models[0]

    async def call_all(self, method: str, seconds: float = _STATE_SECONDS) -> list[list[Any]]:
        """The results of `Replicas.call_all` for each model."""
        calls = (replicas.call_all(method, seconds) for replicas in self.models)
        return await asyncio.gather(*calls)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(self._drain_replicas())
        yield
        task.cancel()

    async def _drain_replicas(self) -> None:
        """Wait until this front drains, and then have all replicas drain."""
        while not self.life.is_draining:  # set by a signal handler, which cannot call replicas
            await asyncio.sleep(_POLL_S)
        await self.call_all("drain", self._start_seconds)

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        body = b"" if scope["method"] in METHODS_WITHOUT_BODY else await request.body()
        routing = Routing(None, "")
        if body:
            routing = await in_thread_if_long(len(body), read_routing, body)
        replicas = self.replicas_of(routing.model or _model_in_path(path_without_root(scope)))
        call = Call.from_scope(scope, body, routing.prompt, request_id.get())
        with suppress(ClientDisconnect), ForwardedRequest(self.life) as forwarded:
            relay = Relay(scope, send, self._start_seconds)
            try:
                async with asyncio.timeout(self.life.options.request_timeout + _GRACE_SECONDS):
                    await while_connected(receive, relay.run(replicas.answer(call), forwarded))
            except TimeoutError:
                message = "The replica neither answers nor fails: its machine may be gone."
                await relay.fail(refusal(ReplicaDiedError(message)))
            except ClientDisconnect:
                raise
            except Exception as error:
                self.num_died += isinstance(error, ReplicaDiedError)
                await relay.fail(refusal(error))


class _Endpoint:
    """An ASGI application as an object: Starlette would call a function with a `Request`."""

    def __init__(self, call: ASGIApp) -> None:
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._call(scope, receive, send)


class ForwardedRequest(OpenRequest):
    """A forwarded request: the replica ends it at deadlines, and `cut` cancels it if `refuses`."""

    is_cut = False  # whether `cut` has cancelled the request's task

    def cut(self, reason: str, *, refuses: bool = True) -> None:
        if refuses and not self.is_cut and self._task:
            self.is_cut = self._task.cancel()


class Relay:
    """Passes a replica's answer on to the client.

    A stream is passed on in complete events, since an error event could not follow half an event.
    Other answers are kept until they are complete, so that a failure can still set the status.
    """

    def __init__(self, scope: Scope, send: Send, start_seconds: float) -> None:
        self._scope, self._send, self._start_seconds = scope, send, start_seconds
        self._head: Head | None = None
        self._replica = ""
        self._unsent, self._num_events = list[bytes](), 0
        self._has_sent_head = False

    async def run(self, pieces: AsyncGenerator[Piece, None], forwarded: ForwardedRequest) -> None:
        """Send the replica's answer; `UnavailableError` if there is none, or `forwarded` is cut."""
        try:
            async with aclosing(pieces):
                await self._await_replica(pieces)
                async for piece in pieces:
                    if isinstance(piece, Head):
                        await self._receive_head(piece)
                    elif isinstance(piece, bytes):
                        await self._receive_body(piece)
                    elif isinstance(piece, Done):
                        self._add_log_fields(piece.fields)
                await self._send_rest()
        except asyncio.CancelledError:
            if not forwarded.is_cut or (task := asyncio.current_task()) is None:
                raise
            task.uncancel()
            raise UnavailableError(CUT_MESSAGES["shutdown"]) from None

    async def fail(self, refused: Refusal) -> None:
        """Send a refusal, as the whole answer or as the last event of a stream that has begun."""
        if not self._has_sent_head:
            await refused.response(self._scope)(self._scope, _receive_nothing, self._send)
            return
        self._add_log_fields({"complete": False})
        path = path_without_root(self._scope)
        if path.startswith("/v1/messages"):
            last = b"".join(named_event("error", refused.anthropic))
        elif path.startswith("/v1/responses"):
            last = b"".join(error_event(refused, self._num_events))
        else:
            last = b"data: " + dumps(refused.openai) + b"\n\n" + DONE
        await self._send_body(last, more=False)

    async def _await_replica(self, pieces: AsyncGenerator[Piece, None]) -> None:
        """Wait until a replica begins with the request; `UnavailableError` if it takes too long."""
        try:
            async with asyncio.timeout(self._start_seconds):
                started = await anext(pieces, None)
        except TimeoutError:
            within = f"within {self._start_seconds:g} s"
            message = f"No replica took the request {within}: none is up, or all are too busy."
            raise UnavailableError(message) from None
        if isinstance(started, Started):
            self._replica = started.replica
            self._add_log_fields({"replica": started.replica})

    async def _receive_head(self, head: Head) -> None:
        """Keep the head of an answer; send it now if the answer is a stream."""
        self._head = head
        content_types = [value for name, value in head.headers if name.lower() == b"content-type"]
        if any(each.startswith(b"text/event-stream") for each in content_types):
            await self._send_head(head)

    async def _receive_body(self, part: bytes) -> None:
        """Keep a part of a body; send all complete events of a stream."""
        self._unsent.append(part)
        if not self._has_sent_head:
            return
        events, end, rest = b"".join(self._unsent).rpartition(b"\n\n")
        self._unsent = [rest]
        if not end:
            return
        self._num_events += events.count(b"\n\n") + 1
        await self._send_body(events + end, more=True)

    async def _send_rest(self) -> None:
        if self._head is None:
            raise UnavailableError("The replica ended without an answer.")
        if not self._has_sent_head:
            await self._send_head(self._head)
        await self._send_body(b"".join(self._unsent), more=False)

    async def _send_head(self, head: Head) -> None:
        self._has_sent_head = True
        headers = [*head.headers, (b"x-replica", self._replica.encode())]
        await self._send({"type": "http.response.start", "status": head.status, "headers": headers})

    async def _send_body(self, body: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    def _add_log_fields(self, fields: dict[str, Any]) -> None:
        self._scope.setdefault("state", {}).setdefault("log_fields", {}).update(fields)


def _model_in_path(path: str) -> str | None:
    """NAME of the path `/v1/models/NAME`; None for any other path."""
    name = path.removeprefix("/v1/models/")
    return name if name != path and name else None


async def _receive_nothing() -> Any:
    await asyncio.Event().wait()


def state_routes(front: Front) -> list[Route]:
    """Endpoints that a front answers itself, for all replicas."""

    async def health(request: Request) -> Response:
        for replicas, states in zip(front.models, await front.call_all("state"), strict=True):
            if all(state.failure for state in states):
                message = f"No replica of {replicas.names[0]} is up."
                message += "".join(f" {state.replica}: {state.failure}" for state in states)
                return refusal(UnavailableError(message)).response()
        return JSONResponse({})

    async def ready(request: Request) -> Response:
        if front.life.is_draining:
            return refusal(UnavailableError("The server ends.")).response()
        return await health(request)

    async def load(request: Request) -> Response:
        loads = {s.replica: s.load for states in await front.call_all("state") for s in states}
        return JSONResponse({"server_load": sum(loads.values()), "replicas": loads})

    async def models(request: Request) -> Response:
        per_model = await asyncio.gather(*(_model_cards(each, request) for each in front.models))
        cards = [card for model_cards in per_model for card in model_cards]
        return JSONResponse({"object": "list", "data": cards})

    async def metrics(request: Request) -> Response:
        names = (replicas.names[0] for replicas in front.models)
        per_model = [*zip(names, await front.call_all("metrics"), strict=True)]
        registry = CollectorRegistry()
        registry.register(FleetCollector(per_model, front.num_died))
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    endpoints: dict[str, Any] = {
        "/health": health, "/health/ready": ready, "/ping": health, "/load": load,
        "/v1/models": models, "/metrics": metrics,
    }  # fmt: skip
    return [
        Route(path, endpoint, methods=["GET", "POST"] if path == "/ping" else ["GET"])
        for path, endpoint in endpoints.items()
    ]


ModelMetrics = list[tuple[str, list[tuple[str, list[Metric]]]]]
"""A pair for each model: its name, and the names and metrics of its replicas."""


class FleetCollector(Collector):
    """The metric families of all replicas, joined by name, and the counts of the front."""

    def __init__(self, per_model: ModelMetrics, num_died: int) -> None:
        self._per_model, self._num_died = per_model, num_died

    def collect(self) -> Iterator[Metric]:
        by_name = dict[str, Metric]()
        for replica, families in (each for _, replicas in self._per_model for each in replicas):
            for family in families:
                joined = Metric(family.name, family.documentation, family.type, family.unit)
                by_name.setdefault(family.name, joined).samples += [
                    sample._replace(labels={**sample.labels, "replica": replica})
                    for sample in family.samples
                ]
        yield from by_name.values()
        up = GaugeMetricFamily("foretoken:replicas", "Replicas that are up.", labels=["model_name"])
        for name, replicas in self._per_model:
            up.add_metric([name], len(replicas))
        yield up
        died_text = "Answers that ended because their replica died, as this front saw it."
        yield CounterMetricFamily("foretoken:replica_failures", died_text, value=self._num_died)


async def _model_cards(replicas: Replicas, request: Request) -> list[dict[str, Any]]:
    """What `/v1/models` lists for one model, from any of its replicas; [] if no replica answers."""
    call = Call.from_scope(request.scope, b"", "", request_id.get())
    parts, status = list[bytes](), 0
    try:
        async with asyncio.timeout(_STATE_SECONDS), aclosing(replicas.answer(call)) as pieces:
            async for piece in pieces:
                if isinstance(piece, Head):
                    status = piece.status
                elif isinstance(piece, bytes):
                    parts.append(piece)
    except (TimeoutError, UnavailableError):
        return []
    cards: list[dict[str, Any]] = json.loads(b"".join(parts))["data"] if status == 200 else []
    return cards

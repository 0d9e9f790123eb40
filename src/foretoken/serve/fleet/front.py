"""In front of replicas: an application that chooses one, forwards requests, and returns answers.

Charter: the way of a request, from its body to its last byte, and the message to its client if the
replica dies. Also health, load, models and metrics, for which a front asks all replicas at once.
The front checks access and the body's length, as a single server does (`guards`, `BodyLimits`); the
replica checks fields. No Ray: `Replicas` is the interface to it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any, Protocol, Self

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from foretoken.serve.answers.named import error_event, named_event
from foretoken.serve.app import guards
from foretoken.serve.errors import (
    Refusal,
    UnavailableError,
    UnknownModelError,
    own_path,
    refusal,
    request_id,
)
from foretoken.serve.fleet.call import Call, Done, Head, Taken, Wanted, read_wanted
from foretoken.serve.fleet.config import Fleet
from foretoken.serve.limits import BODILESS, BodyLimits
from foretoken.serve.running import CUT_MESSAGES, NO_MORE, Lifetime
from foretoken.serve.sse import DONE, aside, dumps, while_connected

TAKEN_SECONDS = 8.0
"""Seconds for a replica to begin with a request; after that the client gets 503."""
_LATE_SECONDS = 10.0
"""Seconds from `request_timeout`, when a replica should end its answer, until the front ends it."""
_MAX_CONTEXT = 2**19
"""Tokens of the longest context, for a front's bound on bodies. A replica knows its context, and
applies the exact bound."""
_POLL_S = 0.1
_STATE_SECONDS = 3.0
"""Seconds for a replica to report its state; then it counts as down."""
Piece = Taken | Head | bytes | Done


class ReplicaDiedError(UnavailableError):
    """The replica that answered a request is gone."""


class Replicas(Protocol):
    """All replicas of one model."""

    names: Sequence[str]

    def answer(self, call: Call) -> AsyncGenerator[Piece, None]:
        """Have one replica answer; closing the generator ends the request in the replica.

        Raises, at any step:
            ReplicaDiedError: the replica is gone; no other replica was tried.
            UnavailableError: the replica failed.
        """

    async def ask(self, method: str, seconds: float) -> list[Any]:
        """Call a method of all replicas by its name; returns the results that come in time."""


class Front:
    """Several models with several replicas each, as one application.

    Attributes:
        num_died: answers that ended because their replica died.
    """

    def __init__(self, fleet: Fleet, models: Sequence[Replicas], life: Lifetime) -> None:
        self.models, self.life, self.num_died = models, life, 0
        self._by_name = {name: replicas for replicas in models for name in replicas.names}
        routes = [*state_routes(self), Route("/{path:path}", _Endpoint(self._forward))]
        app = Starlette(routes=routes, lifespan=self._lifespan)
        app.add_middleware(BodyLimits, options=fleet.server, max_model_len=_MAX_CONTEXT)
        for kind, arguments in guards(fleet.server):
            app.add_middleware(kind, **arguments)
        self.app: ASGIApp = app

    def replicas_of(self, name: str | None) -> Replicas:
        """The replicas of the model with this name; None: of the first model.

        If there is only one model, its replicas get every request, and reject unknown names.

        Raises:
            UnknownModelError: there are several models, and none has this name.
        """
        replicas = self._by_name.get(name or "")
        if replicas is None and name is not None and len(self.models) > 1:
            raise UnknownModelError("model", name, f"one of {', '.join(self._by_name)}")
        return replicas or self.models[0]

    async def ask(self, method: str) -> list[list[Any]]:
        """The results of `Replicas.ask` for each model."""
        return await asyncio.gather(
            *(replicas.ask(method, _STATE_SECONDS) for replicas in self.models)
        )

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        watching = asyncio.create_task(self._watch())
        yield
        watching.cancel()

    async def _watch(self) -> None:
        """Wait until this front drains, then have all replicas drain.

        The signal handler only sets a flag, since it cannot call replicas.
        """
        while not self.life.is_draining:
            await asyncio.sleep(_POLL_S)
        await asyncio.gather(*(replicas.ask("drain", TAKEN_SECONDS) for replicas in self.models))

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Have a replica answer a request, and pass its answer on to the client."""
        request = Request(scope, receive)
        body = b"" if scope["method"] in BODILESS else await request.body()
        wanted = await aside(len(body), read_wanted, body) if body else Wanted(None, "")
        replicas = self.replicas_of(wanted.model or _model_in_path(own_path(scope)))
        call = Call.from_scope(scope, body, wanted.prompt, request_id.get())
        with suppress(ClientDisconnect), ForwardedRequest(self.life) as under_way:
            relay = Relay(scope, send)
            try:
                async with asyncio.timeout(self.life.options.request_timeout + _LATE_SECONDS):
                    await while_connected(receive, relay.run(replicas.answer(call), under_way))
            except TimeoutError:
                message = "The replica neither answers nor fails: its machine may be gone."
                await relay.fail(refusal(ReplicaDiedError(message)))
            except ClientDisconnect:
                raise
            except Exception as error:
                self.num_died += isinstance(error, ReplicaDiedError)
                await relay.fail(refusal(error))


class _Endpoint:
    """An ASGI function as an object: Starlette would call a plain function with a request."""

    def __init__(self, call: ASGIApp) -> None:
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._call(scope, receive, send)


class ForwardedRequest:
    """A request that a replica answers, as the `Lifetime` of this process holds it.

    A context manager, for the time of the answer.

    Attributes:
        is_cut: whether `cut` has cancelled the request's task.

    Raises, when the context is entered:
        UnavailableError: this front takes no more requests.
    """

    def __init__(self, life: Lifetime) -> None:
        self._life, self.is_cut = life, False
        self._task: asyncio.Task[Any] | None = None

    def __enter__(self) -> Self:
        if self._life.is_draining:
            raise UnavailableError(NO_MORE)
        self._task = asyncio.current_task()
        self._life.flights.add(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        self._life.flights.discard(self)

    def cut(self, reason: str, *, refuses: bool = True) -> None:
        """Cancel the request's task, if `refuses`: its replica did not end the answer in time."""
        if refuses and not self.is_cut and self._task:
            self.is_cut = self._task.cancel()


class Relay:
    """Passes a replica's answer on to the client.

    A stream is passed on event by event, so that an error can follow any of them. Any other answer
    is kept until it is complete, so that a failure can still set the status.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope, self._send = scope, send
        self._head: Head | None = None
        self._replica = ""
        self._unsent, self._num_events = list[bytes](), 0
        self._has_begun = False  # whether the head was sent

    async def run(self, pieces: AsyncGenerator[Piece, None], under_way: ForwardedRequest) -> None:
        """Send the replica's answer, from `Taken` to `Done`."""
        try:
            async with aclosing(pieces):
                await self._await_replica(pieces)
                async for piece in pieces:
                    if isinstance(piece, Head):
                        await self._receive_head(piece)
                    elif isinstance(piece, bytes):
                        await self._send_events(piece)
                    elif isinstance(piece, Done):
                        self._add_log_fields(piece.fields)
                await self._end()
        except asyncio.CancelledError:
            if not under_way.is_cut or (task := asyncio.current_task()) is None:
                raise
            task.uncancel()
            raise UnavailableError(CUT_MESSAGES["shutdown"]) from None

    async def fail(self, refused: Refusal) -> None:
        """Send a refusal, as the whole answer or as the last event of a stream that has begun."""
        if not self._has_begun:
            await refused.response(self._scope)(self._scope, _receive_nothing, self._send)
            return
        self._add_log_fields({"complete": False})
        path = own_path(self._scope)
        if path.startswith("/v1/messages"):
            last = b"".join(named_event("error", refused.anthropic))
        elif path.startswith("/v1/responses"):
            last = b"".join(error_event(refused, self._num_events))
        else:
            last = b"data: " + dumps(refused.body) + b"\n\n" + DONE
        await self._send_body(last, more=False)

    async def _await_replica(self, pieces: AsyncGenerator[Piece, None]) -> None:
        """Wait until a replica has taken the request; `UnavailableError` if none does in time."""
        try:
            async with asyncio.timeout(TAKEN_SECONDS):
                taken = await anext(pieces, None)
        except TimeoutError:
            message = f"No replica took the request within {TAKEN_SECONDS:g} s: none is up, or all"
            raise UnavailableError(f"{message} are too busy.") from None
        if isinstance(taken, Taken):
            self._replica = taken.replica
            self._add_log_fields({"replica": taken.replica})

    async def _receive_head(self, head: Head) -> None:
        """Keep the head of an answer; send it at once if the answer is a stream."""
        self._head = head
        kinds = [value for name, value in head.headers if name.lower() == b"content-type"]
        if any(kind.startswith(b"text/event-stream") for kind in kinds):
            self._has_begun = True
            await self._send_head(head)

    async def _send_events(self, part: bytes) -> None:
        """Keep a part of a body; of a stream send all complete events.

        An incomplete event is kept, since an error event could not follow half of an event.
        """
        self._unsent.append(part)
        if not self._has_begun:
            return
        whole, mark, rest = b"".join(self._unsent).rpartition(b"\n\n")
        self._unsent = [rest]
        if not mark:
            return
        self._num_events += whole.count(b"\n\n") + 1
        await self._send_body(whole + mark, more=True)

    async def _end(self) -> None:
        """Send what is still kept of the answer, which is complete."""
        if self._head is None:
            raise UnavailableError("The replica ended without an answer.")
        if not self._has_begun:
            self._has_begun = True
            await self._send_head(self._head)
        await self._send_body(b"".join(self._unsent), more=False)

    async def _send_head(self, head: Head) -> None:
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
        """200 while every model has a replica that serves."""
        for replicas, states in zip(front.models, await front.ask("state"), strict=True):
            if not any(not state.failure for state in states):
                message = f"No replica of {replicas.names[0]} is up."
                message += "".join(f" {state.replica}: {state.failure}" for state in states)
                return refusal(UnavailableError(message)).response()
        return JSONResponse({})

    async def ready(request: Request) -> Response:
        """As `health`, and 503 once this front takes no more requests."""
        if front.life.is_draining:
            return refusal(UnavailableError("The server ends.")).response()
        return await health(request)

    async def load(request: Request) -> Response:
        loads = {s.replica: s.load for states in await front.ask("state") for s in states}
        return JSONResponse({"server_load": sum(loads.values()), "replicas": loads})

    async def models(request: Request) -> Response:
        per_model = await asyncio.gather(*(_model_cards(each, request) for each in front.models))
        cards = [card for model_cards in per_model for card in model_cards]
        return JSONResponse({"object": "list", "data": cards})

    async def metrics(request: Request) -> Response:
        names = (replicas.names[0] for replicas in front.models)
        gathered = zip(names, await front.ask("metrics"), strict=True)
        registry = CollectorRegistry()
        registry.register(FleetCollector([*gathered], front.num_died))
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    endpoints: dict[str, Any] = {
        "/health": health, "/health/ready": ready, "/ping": health, "/load": load,
        "/v1/models": models, "/metrics": metrics,
    }  # fmt: skip
    methods = {"/ping": ["GET", "POST"]}
    return [
        Route(path, endpoint, methods=methods.get(path, ["GET"]))
        for path, endpoint in endpoints.items()
    ]


ModelMetrics = list[tuple[str, list[tuple[str, list[Metric]]]]]
"""A pair for each model: its name, and the names and metrics of its replicas."""


class FleetCollector(Collector):
    """The metric families of all replicas, joined by name, and counts of the front."""

    def __init__(self, gathered: ModelMetrics, num_died: int) -> None:
        self._gathered, self._num_died = gathered, num_died

    def collect(self) -> Iterator[Metric]:
        """The replicas' families, the number of replicas per model, and the failures."""
        yield from with_replica_label(each for _, replicas in self._gathered for each in replicas)
        up = GaugeMetricFamily("foretoken:replicas", "Replicas that are up.", labels=["model_name"])
        for name, replicas in self._gathered:
            up.add_metric([name], len(replicas))
        yield up
        died_text = "Answers that ended because their replica died, as this front saw it."
        yield CounterMetricFamily("foretoken:replica_failures", died_text, value=self._num_died)


def with_replica_label(replicas: Iterable[tuple[str, Sequence[Metric]]]) -> Iterator[Metric]:
    """The metric families of several replicas; families of the same name become one.

    Each sample gets its replica's name as the label `replica`.
    """
    by_name = dict[str, Metric]()
    for replica, families in replicas:
        for family in families:
            joined = Metric(family.name, family.documentation, family.type, family.unit)
            by_name.setdefault(family.name, joined).samples += [
                sample._replace(labels={**sample.labels, "replica": replica})
                for sample in family.samples
            ]
    yield from by_name.values()


async def _model_cards(replicas: Replicas, request: Request) -> list[dict[str, Any]]:
    """What `/v1/models` lists for one model, from any of its replicas; [] if none is up."""
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

"""In front of replicas: an application that chooses one, forwards requests, and returns answers.

Charter: a request on its way, from its body to its last byte, and what its client is told when its
replica dies. Who calls and how long a body may be is checked as before one engine (`guards`,
`BodyLimits`); what a request may ask for, the replica checks. What is asked of all replicas at once
is `state.py`'s. No Ray: `Replicas` is how this asks it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any, Protocol, Self

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
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
from foretoken.serve.fleet.state import state_routes
from foretoken.serve.limits import BODILESS, BodyLimits
from foretoken.serve.running import NO_MORE, TOLD, Lifetime
from foretoken.serve.sse import DONE, aside, dumps, while_connected

TAKEN_SECONDS = 8.0
_LATE_SECONDS = 10.0
"""Over `request_timeout`, in which a replica ends what it answers: then the front does."""
_MOST_CONTEXT = 2**19
"""Tokens: the front does not know the models' contexts. Replicas apply the exact bound."""
_POLL_S = 0.1
Piece = Taken | Head | bytes | Done


class ReplicaDiedError(UnavailableError):
    """The replica that answered a request is gone."""


class Replicas(Protocol):
    """All replicas of one model."""

    names: Sequence[str]

    def answer(self, call: Call) -> AsyncGenerator[Piece, None]:
        """Have one of them answer; closing it ends the request there.

        Raises, at any step:
            ReplicaDiedError: it is gone; nobody else was asked.
            UnavailableError: it failed by an error.
        """

    async def ask(self, what: str, seconds: float) -> list[Any]:
        """Results of a method of each that gives one in time."""


class Front:
    """Several models with several replicas each, as one application.

    Args:
        taken_seconds: for a replica to begin with a request; after that the client gets 503.

    Attributes:
        num_died: answers that ended because their replica died.
    """

    def __init__(
        self,
        fleet: Fleet,
        models: Sequence[Replicas],
        life: Lifetime,
        taken_seconds: float = TAKEN_SECONDS,
    ) -> None:
        self._taken_seconds = taken_seconds
        self.models, self.life, self.num_died = models, life, 0
        self._by_name = {name: each for each in models for name in each.names}
        routes = [*state_routes(self), Route("/{path:path}", _Endpoint(self._forward))]
        app = Starlette(routes=routes, lifespan=self._lifespan)
        app.add_middleware(BodyLimits, options=fleet.server, max_model_len=_MOST_CONTEXT)
        for kind, given in guards(fleet.server):
            app.add_middleware(kind, **given)
        self.app: ASGIApp = app

    def of(self, name: str | None) -> Replicas:
        """The replicas of a model; None: of the first. With one model they report unknown names.

        Raises:
            UnknownModelError: there is no such model.
        """
        found = self._by_name.get(name or "")
        if found is None and name is not None and len(self.models) > 1:
            raise UnknownModelError("model", name, f"one of {', '.join(self._by_name)}")
        return found or self.models[0]

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        watching = asyncio.create_task(self._watch())
        yield
        watching.cancel()

    async def _watch(self) -> None:
        """Tell all replicas once that this front drains: a signal's handler cannot."""
        while not self.life.is_draining:
            await asyncio.sleep(_POLL_S)
        await asyncio.gather(*(each.ask("drain", self._taken_seconds) for each in self.models))

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        body = b"" if scope["method"] in BODILESS else await request.body()
        wanted = await aside(len(body), read_wanted, body) if body else Wanted(None, "")
        replicas = self.of(wanted.model or _named_in(own_path(scope)))
        call = Call.of(scope, body, wanted.prompt, request_id.get())
        with suppress(ClientDisconnect), Forwarded(self.life) as under_way:
            relay = Relay(scope, send, self._taken_seconds)
            try:
                async with asyncio.timeout(self.life.options.request_timeout + _LATE_SECONDS):
                    await while_connected(receive, relay.run(replicas.answer(call), under_way))
            except TimeoutError:
                told = "The replica neither answers nor fails: its machine may be gone."
                await relay.fail(refusal(ReplicaDiedError(told)))
            except ClientDisconnect:
                raise
            except Exception as error:
                self.num_died += isinstance(error, ReplicaDiedError)
                await relay.fail(refusal(error))


class _Endpoint:
    """A function of ASGI as Starlette tells it from one that takes a request."""

    def __init__(self, call: ASGIApp) -> None:
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._call(scope, receive, send)


class Forwarded:
    """A request that a replica answers, for the `Lifetime` of this process; a context.

    Raises, when it is entered:
        UnavailableError: this front takes no more.
    """

    def __init__(self, life: Lifetime) -> None:
        self._life, self._is_cut = life, False
        self._task: asyncio.Task[Any] | None = None

    def __enter__(self) -> Self:
        if self._life.is_draining:
            raise UnavailableError(NO_MORE)
        self._task = asyncio.current_task()
        self._life.flights.add(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        self._life.flights.discard(self)

    def cut(self, why: str, *, refuses: bool = True) -> None:
        """Replicas end what they answer in time; this ends what they did not let go of."""
        if refuses and not self._is_cut and self._task:
            self._is_cut = self._task.cancel()

    @property
    def is_cut(self) -> bool:
        """Whether a cancellation is `cut`'s."""
        return self._is_cut


class Relay:
    """What a replica says, as its client reads it.

    A stream is passed on event by event, so that an error can follow any of them. Any other answer
    is kept until it is complete, so that what fails has its status.
    """

    def __init__(self, scope: Scope, send: Send, taken_seconds: float) -> None:
        self._scope, self._send, self._taken_seconds = scope, send, taken_seconds
        self._head: Head | None = None
        self._replica = ""
        self._parts, self._num_events, self._has_begun = list[bytes](), 0, False

    async def run(self, pieces: AsyncGenerator[Piece, None], under_way: Forwarded) -> None:
        """Send it, from `Taken` to `Done`."""
        try:
            async with aclosing(pieces):
                await self._await_taken(pieces)
                async for piece in pieces:
                    if isinstance(piece, Head):
                        await self._begin(piece)
                    elif isinstance(piece, bytes):
                        await self._pass_on(piece)
                    elif isinstance(piece, Done):
                        self._note(piece.fields)
                await self._end()
        except asyncio.CancelledError:
            if not under_way.is_cut or (task := asyncio.current_task()) is None:
                raise
            task.uncancel()
            raise UnavailableError(TOLD["shutdown"]) from None

    async def fail(self, refused: Refusal) -> None:
        """Tell the client why there is no answer, or no more of it."""
        if not self._has_begun:
            await refused.response(self._scope)(self._scope, _never, self._send)
            return
        self._note({"complete": False})
        path = own_path(self._scope)
        if path.startswith("/v1/messages"):
            last = b"".join(named_event("error", refused.anthropic))
        elif path.startswith("/v1/responses"):
            last = b"".join(error_event(refused, self._num_events))
        else:
            last = b"data: " + dumps(refused.body) + b"\n\n" + DONE
        await self._send_body(last, more=False)

    async def _await_taken(self, pieces: AsyncGenerator[Piece, None]) -> None:
        try:
            async with asyncio.timeout(self._taken_seconds):
                taken = await anext(pieces, None)
        except TimeoutError:
            within = f"within {self._taken_seconds:g} s"
            told = f"No replica took the request {within}: none is up, or all are too busy."
            raise UnavailableError(told) from None
        if isinstance(taken, Taken):
            self._replica = taken.replica
            self._note({"replica": taken.replica})

    async def _begin(self, head: Head) -> None:
        self._head = head
        if _is_stream(head):
            self._has_begun = True
            await self._start(head)

    async def _pass_on(self, part: bytes) -> None:
        """Of a stream whole events: half of one could not be followed by an error."""
        self._parts.append(part)
        if not self._has_begun:
            return
        whole, mark, rest = b"".join(self._parts).rpartition(b"\n\n")
        self._parts = [rest]
        if not mark:
            return
        self._num_events += whole.count(b"\n\n") + 1
        await self._send_body(whole + mark, more=True)

    async def _end(self) -> None:
        if self._head is None:
            raise UnavailableError("The replica ended without an answer.")
        if not self._has_begun:
            self._has_begun = True
            await self._start(self._head)
        await self._send_body(b"".join(self._parts), more=False)

    async def _start(self, head: Head) -> None:
        headers = [*head.headers, (b"x-replica", self._replica.encode())]
        await self._send({"type": "http.response.start", "status": head.status, "headers": headers})

    async def _send_body(self, body: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    def _note(self, fields: dict[str, Any]) -> None:
        """For the line in the log."""
        self._scope.setdefault("state", {}).setdefault("log_fields", {}).update(fields)


def _is_stream(head: Head) -> bool:
    kinds = [value for name, value in head.headers if name.lower() == b"content-type"]
    return any(kind.startswith(b"text/event-stream") for kind in kinds)


def _named_in(path: str) -> str | None:
    """The model that `/v1/models/NAME` names."""
    name = path.removeprefix("/v1/models/")
    return name if name != path and name else None


async def _never() -> Any:
    await asyncio.Event().wait()

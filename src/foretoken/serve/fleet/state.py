"""What is asked of all replicas at once: health, load, models, metrics.

Charter: one answer made of many. Each replica has a little time; what does not answer then counts
as down.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from foretoken.serve.errors import UnavailableError, refusal, request_id
from foretoken.serve.fleet.call import Call, Head

if TYPE_CHECKING:
    from foretoken.serve.fleet.front import Front, Replicas

_SECONDS = 3.0
"""Seconds that a replica has to report its state."""


def state_routes(front: Front) -> list[Route]:
    """Endpoints that a front answers itself; a replica has them, too, for itself alone."""

    async def health(request: Request) -> Response:
        """200 while every model has a replica that serves."""
        asked = await asyncio.gather(*(each.ask("state", _SECONDS) for each in front.models))
        for replicas, states in zip(front.models, asked, strict=True):
            if not any(not state.failure for state in states):
                told = f"No replica of {replicas.names[0]} is up."
                told += "".join(f" {state.replica}: {state.failure}" for state in states)
                return refusal(UnavailableError(told)).response()
        return JSONResponse({})

    async def ready(request: Request) -> Response:
        """The same, and 503 once this front takes no more requests."""
        if front.life.is_draining:
            return refusal(UnavailableError("The server ends.")).response()
        return await health(request)

    async def load(request: Request) -> Response:
        """How many requests are being answered, by all replicas, and by each."""
        asked = (replicas.ask("state", _SECONDS) for replicas in front.models)
        loads = {s.replica: s.load for states in await asyncio.gather(*asked) for s in states}
        return JSONResponse({"server_load": sum(loads.values()), "replicas": loads})

    async def models(request: Request) -> Response:
        """All models, under all their names."""
        found = await asyncio.gather(*(_listed(each, request) for each in front.models))
        return JSONResponse({"object": "list", "data": [card for cards in found for card in cards]})

    async def metrics(request: Request) -> Response:
        """Metrics of all replicas, each with its name as a label."""
        registry = CollectorRegistry()
        registry.register(FleetCollector(await _gathered(front), front.num_died))
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    named: dict[str, Callable[[Request], Awaitable[Response]]] = {
        "/health": health, "/health/ready": ready, "/ping": health, "/load": load,
        "/v1/models": models, "/metrics": metrics,
    }  # fmt: skip
    methods = {"/ping": ["GET", "POST"]}
    return [Route(path, call, methods=methods.get(path, ["GET"])) for path, call in named.items()]


Gathered = list[tuple[str, list[tuple[str, list[Metric]]]]]
"""By name of the model, of its replicas their names and metrics."""


async def _gathered(front: Front) -> Gathered:
    asked = await asyncio.gather(*(each.ask("metrics", _SECONDS) for each in front.models))
    return [(each.names[0], found) for each, found in zip(front.models, asked, strict=True)]


class FleetCollector(Collector):
    """Families of many replicas as one of each name, and what a front knows."""

    def __init__(self, found: Gathered, num_died: int) -> None:
        self._found, self._num_died = found, num_died

    def collect(self) -> Iterator[Metric]:
        """All of them."""
        yield from labelled(each for _, replicas in self._found for each in replicas)
        up = GaugeMetricFamily("foretoken:replicas", "Replicas that are up.", labels=["model_name"])
        for name, replicas in self._found:
            up.add_metric([name], len(replicas))
        yield up
        died = "Answers that ended because their replica died, as this front saw it."
        yield CounterMetricFamily("foretoken:replica_failures", died, value=self._num_died)


def labelled(found: Iterable[tuple[str, Sequence[Metric]]]) -> Iterator[Metric]:
    """Families of several replicas, joined by name, each sample with `replica` as a label."""
    joined = dict[str, Metric]()
    for replica, families in found:
        for family in families:
            into = joined.setdefault(
                family.name, Metric(family.name, family.documentation, family.type, family.unit)
            )
            into.samples += [
                sample._replace(labels={**sample.labels, "replica": replica})
                for sample in family.samples
            ]
    yield from joined.values()


async def _listed(replicas: Replicas, request: Request) -> list[dict[str, Any]]:
    """The cards of one model's names, from any of its replicas; [] if none is up."""
    call, parts, status = Call.of(request.scope, b"", "", request_id.get()), list[bytes](), 0
    try:
        async with asyncio.timeout(_SECONDS), aclosing(replicas.answer(call)) as pieces:
            async for piece in pieces:
                if isinstance(piece, Head):
                    status = piece.status
                elif isinstance(piece, bytes):
                    parts.append(piece)
    except (TimeoutError, UnavailableError):
        return []
    cards: list[dict[str, Any]] = json.loads(b"".join(parts))["data"] if status == 200 else []
    return cards

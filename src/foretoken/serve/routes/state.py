"""How the server is: health, metrics, version."""

from __future__ import annotations

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from foretoken import __version__
from foretoken.serve.context import Context
from foretoken.serve.errors import UnavailableError, refusal
from foretoken.serve.metrics import EngineCollector, exposition


def router(context: Context) -> APIRouter:
    """`/health`, `/health/ready`, `/metrics`, `/version`."""
    routes = APIRouter(tags=["state"])
    collector = EngineCollector(context.engine, context.counts, context.served.names[0])

    # The engine is built before the socket listens: while it lives, it is ready.
    @routes.get("/health", response_model=None)
    async def health() -> Response:
        """200 while the engine serves, 503 once it has failed."""
        failure = context.engine.status.failure
        return JSONResponse({}) if failure is None else refusal(failure).response()

    @routes.get("/health/ready", response_model=None)
    async def ready() -> Response:
        """The same, and 503 once the server takes no more requests."""
        if context.lifetime.is_draining:
            return refusal(UnavailableError("The server ends.")).response()
        return await health()

    @routes.get("/metrics", response_model=None)
    async def metrics() -> Response:
        """Counts, gauges and histograms for Prometheus."""
        return Response(exposition(collector), media_type=CONTENT_TYPE_LATEST)

    @routes.get("/version", response_model=None)
    async def version() -> JSONResponse:
        """Foretoken's version."""
        return JSONResponse({"version": __version__})

    return routes

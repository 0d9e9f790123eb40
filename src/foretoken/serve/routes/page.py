"""The page at `/`: what speculation does to a prompt, shown token by token.

Its files are static and ask this server alone; what the page needs to know of it is `/page/state`.
"""

from __future__ import annotations

import hashlib
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from foretoken.config import LOSSLESS_METHODS
from foretoken.serve.access import PAGE
from foretoken.serve.context import Context
from foretoken.serve.errors import told_of

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'"
)
HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # kept, and asked for again by its ETag
}


def router(context: Context) -> APIRouter:
    """`/`, its files, and `/page/state`."""
    routes = APIRouter(tags=["page"])
    served = _served(context)

    @routes.get("/page/state", response_model=None)
    async def state() -> JSONResponse:
        """What a request may ask for here, and how busy the server is."""
        return JSONResponse({**served, "now": _now(context)})

    for path, name in PAGE.items():
        routes.add_api_route(path, _file(name), response_model=None, include_in_schema=False)
    return routes


def _file(name: str) -> Any:
    """The endpoint of one file, which is read once."""
    content = files("foretoken.serve").joinpath("page", name).read_bytes()
    headers = HEADERS | {"ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}
    kind = _TYPES[name.rpartition(".")[2]]

    async def send(request: Request) -> Response:
        known = request.headers.get("if-none-match", "").replace("W/", "").split(",")
        if headers["ETag"] in map(str.strip, known):
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=kind)

    return send


def _served(context: Context) -> dict[str, Any]:
    """What does not change while the server runs."""
    served, engine = context.served, context.engine
    speculation, limits = engine.config.speculative_config, engine.engine.limits
    rule = speculation.rejection_sample_method if speculation else "standard"
    synthetic = ("synthetic",) if limits.allows_synthetic else ()
    return {
        "model": served.names[0],
        "has_chat": served.format.has_template,
        "num_drafts": served.num_drafts,
        "adapts": limits.adapts,
        "drafter": limits.drafter,
        "drafters": [name for name in limits.names if name],
        "predictors": served.predictors,
        "rule": rule,
        "rules": (*LOSSLESS_METHODS, *synthetic),
    }


def _now(context: Context) -> dict[str, Any]:
    status, metrics = context.engine.status, context.engine.metrics
    return {
        "running": status.num_running,
        "waiting": status.num_waiting,
        "kv_cache_usage": status.kv_cache_usage,
        "num_draft_tokens": metrics.num_draft_tokens,
        "num_accepted_tokens": metrics.num_accepted_tokens,
        "failure": None if status.failure is None else told_of(status.failure),
    }

"""The page `/`, which shows what speculation does, and `/docs`; they load no foreign files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from html import escape
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from foretoken.config import LOSSLESS_METHODS
from foretoken.serve.access import PAGE_FILES
from foretoken.serve.errors import public_message
from foretoken.serve.routes import Context

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'"
)
_HEAD = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark"><title>Foretoken: the API</title>
<link rel="icon" href="page/icon.svg"><link rel="stylesheet" href="page/page.css">
<header><h1>Foretoken: the API</h1><p>For programs: <a href="openapi.json">openapi.json</a></p>
<p>A field of type null is not implemented; a field of type anything has no effect.</p>
</header><main class="docs">"""
HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # files are cached, but checked by ETag each time
}


def router(context: Context) -> APIRouter:
    """Endpoints for the page `/` and its files, for `/page/state`, and for `/docs`."""
    routes = APIRouter(tags=["page"])
    options = _request_options(context)

    @routes.get("/page/state", response_model=None)
    async def state() -> JSONResponse:
        """The server's options for requests, and how busy it is."""
        status, metrics = context.engine.status, context.engine.metrics
        now = {
            "running": status.num_running,
            "waiting": status.num_waiting,
            "kv_cache_usage": status.kv_cache_usage,
            "num_draft_tokens": metrics.num_draft_tokens,
            "num_accepted_tokens": metrics.num_accepted_tokens,
            "failure": None if status.failure is None else public_message(status.failure),
        }
        return JSONResponse({**options, "now": now})

    @routes.get("/docs", response_model=None, include_in_schema=False)
    async def docs(request: Request) -> HTMLResponse:
        # FastAPI's own page would load scripts from another server.
        text = _HEAD + "".join(_sections(request.app.openapi()))
        return HTMLResponse(text, headers=HEADERS)

    for path, name in PAGE_FILES.items():
        routes.add_api_route(path, _sender(name), response_model=None, include_in_schema=False)
    return routes


def _sender(name: str) -> Any:
    content = files("foretoken.serve").joinpath("page", name).read_bytes()
    headers = HEADERS | {"ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}
    media_type = _TYPES[name.rpartition(".")[2]]

    async def send(request: Request) -> Response:
        etags = request.headers.get("if-none-match", "").replace("W/", "").split(",")
        if headers["ETag"] in map(str.strip, etags):
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=media_type)

    return send


def _request_options(context: Context) -> dict[str, Any]:
    """The part of `/page/state` that does not change: the model and the options for requests."""
    served, engine = context.served, context.engine
    speculation, limits = engine.config.speculative_config, engine.engine.limits
    rule = speculation.rejection_sample_method if speculation else "standard"
    synthetic_rules = ("synthetic",) if limits.allows_synthetic else ()
    return {
        "model": served.names[0],
        "has_chat": served.format.has_template,
        "num_drafts": served.num_drafts,
        "adapts": limits.adapts,
        "drafter": limits.drafter,
        "drafters": [name for name in limits.names if name],
        "predictors": served.predictors,
        "rule": rule,
        "rules": (*LOSSLESS_METHODS, *synthetic_rules),
    }


def _sections(document: Mapping[str, Any]) -> Iterator[str]:
    """HTML sections for the paths of an OpenAPI document, and then for the objects in bodies."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            description = escape(operation.get("description", ""))
            yield f"<section><h2><code>{method.upper()} {escape(path)}</code></h2>"
            yield f"<p>{description}</p>"
            for media_type, content in operation.get("requestBody", {}).get("content", {}).items():
                yield f"<p>Body, {media_type}: {_type(content['schema'])}</p>"
            yield "</section>"
    for name, schema in document["components"]["schemas"].items():
        yield f'<section id="{name}"><h2>{name}</h2><p>{escape(schema.get("description", ""))}</p>'
        yield "<table><thead><tr><th>Field<th>Type<th></thead>"
        for field, value in schema.get("properties", {}).items():
            requirement = "required" if field in schema.get("required", ()) else ""
            yield f"<tr><th><code>{escape(field)}</code><td>{_type(value)}<td>{requirement}"
        yield "</table></section>"


def _type(schema: Mapping[str, Any]) -> str:
    """The type of a JSON schema in words, as HTML with links to named types."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(map(_type, schema["anyOf"]))
    if values := schema.get("enum") or ([schema["const"]] if "const" in schema else []):
        return ", ".join(f"<code>{escape(repr(value))}</code>" for value in values)
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if schema.get("type") == "object" and isinstance(schema.get("additionalProperties"), Mapping):
        return f"object of {_type(schema['additionalProperties'])}"
    return escape(schema.get("type", "anything"))

"""`/docs`: the API's document as a page, which loads nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse

from foretoken.serve.routes.page import HEADERS

_HEAD = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark"><title>Foretoken: the API</title>
<link rel="icon" href="page/icon.svg"><link rel="stylesheet" href="page/page.css">
<header><h1>Foretoken: the API</h1><p>For programs: <a href="openapi.json">openapi.json</a></p>
<p>What is null alone is not implemented; what may be anything changes nothing.</p>
</header><main class="docs">"""


def router() -> APIRouter:
    """The page; FastAPI's own brings its scripts from another server."""
    routes = APIRouter()

    @routes.get("/docs", response_model=None, include_in_schema=False)
    async def docs(request: Request) -> HTMLResponse:
        text = _HEAD + "".join(_sections(request.app.openapi()))
        return HTMLResponse(text, headers=HEADERS)

    return routes


def _sections(document: Mapping[str, Any]) -> Iterator[str]:
    """What each path takes, then the objects that bodies are made of."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            said = escape(operation.get("description", ""))
            yield f"<section><h2><code>{method.upper()} {escape(path)}</code></h2><p>{said}</p>"
            for kind, content in operation.get("requestBody", {}).get("content", {}).items():
                yield f"<p>Body, {kind}: {_type(content['schema'])}</p>"
            yield "</section>"
    for name, schema in document["components"]["schemas"].items():
        yield f'<section id="{name}"><h2>{name}</h2><p>{escape(schema.get("description", ""))}</p>'
        yield "<table><thead><tr><th>Field<th>Type<th></thead>"
        for field, value in schema.get("properties", {}).items():
            need = "required" if field in schema.get("required", ()) else ""
            yield f"<tr><th><code>{escape(field)}</code><td>{_type(value)}<td>{need}"
        yield "</table></section>"


def _type(schema: Mapping[str, Any]) -> str:
    """A type in words, with links to those that have names."""
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

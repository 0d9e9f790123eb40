"""`/v1/models`: what is served, under all its names."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse

from foretoken.serve.context import Context


def router(context: Context) -> APIRouter:
    """The list, and one of it."""
    routes = APIRouter(prefix="/v1/models", tags=["models"])

    @routes.get("", response_model=None)
    async def models() -> JSONResponse:
        """All names of the model."""
        listed = [_card(context, name) for name in context.served.names]
        return JSONResponse({"object": "list", "data": listed})

    @routes.get("/{name:path}", response_model=None)
    async def model(name: str) -> JSONResponse:
        """One of them."""
        context.served.check_name(name)
        return JSONResponse(_card(context, name))

    return routes


def _card(context: Context, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": context.started,
        "owned_by": "foretoken",
        "root": context.served.root,
        "parent": None,
        "max_model_len": context.served.max_model_len,
    }

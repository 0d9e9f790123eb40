"""The ASGI application over an engine, and the middleware that a fleet's front has, too."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from foretoken import __version__
from foretoken.async_engine import AsyncEngine
from foretoken.serve import errors
from foretoken.serve.access import HostCheck, KeyCheck, RootPath
from foretoken.serve.limits import BodyLimits
from foretoken.serve.logs import RequestLog
from foretoken.serve.metrics import Counts
from foretoken.serve.options import ServeOptions
from foretoken.serve.requests import ServedModel
from foretoken.serve.routes import Context, generate, page, state
from foretoken.serve.running import Lifetime


def build_app(
    engine: AsyncEngine, options: ServeOptions, *,
    guarded: bool = True, life: Lifetime | None = None,
) -> FastAPI:  # fmt: skip
    """The HTTP APIs over an engine; `ConfigError` if the options do not fit the engine.

    When the application ends, it closes the engine.

    Args:
        guarded: whether the application checks access and logs requests. In a fleet, the front does
            both, and the replicas do not.
        life: the open requests, and whether more are taken; None: a new `Lifetime`.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await engine.close()

    life = life or Lifetime(options, lambda: engine.status.failure)
    served = ServedModel.from_engine(engine, options)
    context = Context(engine, served, Counts(), int(time.time()), life)
    app = FastAPI(
        title="Foretoken", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan,
        responses=errors.error_responses(errors.Refusal(400, "", "").openai),
    )  # fmt: skip
    app.state.context = context
    errors.install(app)
    for part in (generate, state, page):
        app.include_router(part.router(context))
    # The last middleware added sees a request first, so no body is read before access is checked.
    longest = served.max_model_len
    app.add_middleware(BodyLimits, options=options, max_model_len=longest)
    for kind, arguments in access_middleware(options) if guarded else ():
        app.add_middleware(kind, **arguments)
    return app


def access_middleware(options: ServeOptions) -> list[tuple[Any, dict[str, Any]]]:
    """Classes of middleware and their arguments. The last middleware sees a request first."""
    middleware: list[tuple[Any, dict[str, Any]]] = []
    if options.keys:
        middleware.append((KeyCheck, {"keys": options.keys}))
    if options.allowed_origins:
        any_request = {"allow_methods": ["*"], "allow_headers": ["*"]}
        any_answer = {"allow_origins": options.allowed_origins, "expose_headers": ["X-Request-Id"]}
        middleware.append((CORSMiddleware, {**any_request, **any_answer}))
    if options.checks_host:
        middleware.append((HostCheck, {"options": options}))
    middleware.append((RequestLog, {}))
    if options.root_path:
        middleware.append((RootPath, {"root": options.root_path}))
    return middleware

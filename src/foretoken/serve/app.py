"""The application: an engine and its options as ASGI, and what stands before every application."""

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
from foretoken.serve.context import Context
from foretoken.serve.limits import BodyLimits
from foretoken.serve.logs import RequestLog
from foretoken.serve.metrics import Counts
from foretoken.serve.options import ServeOptions
from foretoken.serve.requests import Served
from foretoken.serve.routes import generate, page, state
from foretoken.serve.running import Lifetime


def build_app(
    engine: AsyncEngine,
    options: ServeOptions,
    *,
    guarded: bool = True,
    life: Lifetime | None = None,
) -> FastAPI:
    """OpenAI's API over an engine, which it closes when it ends.

    Args:
        guarded: whether it checks who calls, and logs that; False in a replica: the front has.
        life: knows its requests; None: one of its own.

    Raises:
        ConfigError: the engine's rule is `synthetic`, and the options do not allow that.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await engine.close()

    life = life or Lifetime(options, lambda: engine.status.failure)
    context = Context(engine, Served.of(engine, options), Counts(), int(time.time()), life)
    app = FastAPI(
        title="Foretoken", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan,
        responses=errors.documented(errors.Refusal(400, "", "").body),
    )  # fmt: skip
    app.state.context = context
    errors.install(app)
    for part in (generate, state, page):
        app.include_router(part.router(context))
    # The last one added is the first that sees a request: bodies of strangers are not read.
    most = context.served.max_model_len
    app.add_middleware(BodyLimits, options=options, max_model_len=most)
    for kind, given in guards(options) if guarded else ():
        app.add_middleware(kind, **given)
    return app


def guards(options: ServeOptions) -> list[tuple[Any, dict[str, Any]]]:
    """Classes of ASGI that see a request before the application does, the last one first, and
    what each is given."""
    found: list[tuple[Any, dict[str, Any]]] = []
    if options.keys:
        found.append((KeyCheck, {"keys": options.keys}))
    if options.allowed_origins:
        every = {"allow_methods": ["*"], "allow_headers": ["*"]}
        shown = {"allow_origins": options.allowed_origins, "expose_headers": ["X-Request-Id"]}
        found.append((CORSMiddleware, {**every, **shown}))
    if options.checks_host:
        found.append((HostCheck, {"options": options}))
    found.append((RequestLog, {}))
    if options.root_path:
        found.append((RootPath, {"root": options.root_path}))
    return found

"""The application: an engine and its options as ASGI."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

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


def build_app(engine: AsyncEngine, options: ServeOptions) -> FastAPI:
    """OpenAI's API over an engine, which it closes when it ends.

    Raises:
        ConfigError: the engine's rule is `synthetic`, and the options do not allow that.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await engine.close()

    life = Lifetime(engine, options)
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
    if options.keys:
        app.add_middleware(KeyCheck, keys=options.keys)
    if options.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id"],
        )
    if options.checks_host:
        app.add_middleware(HostCheck, options=options)
    app.add_middleware(RequestLog)
    if options.root_path:
        app.add_middleware(RootPath, root=options.root_path)
    return app

"""Endpoints: each group has a module with a `router`; all of them read the record `Context`."""

from __future__ import annotations

from dataclasses import dataclass

from foretoken.async_engine import AsyncEngine
from foretoken.serve.metrics import Counts
from foretoken.serve.requests import Served
from foretoken.serve.running import Lifetime


@dataclass(frozen=True, slots=True)
class Context:
    """The objects that endpoints share.

    Attributes:
        engine: the engine.
        served: the model's names, and the options of the server.
        counts: sums for the metrics.
        started: the time of the server's start, in seconds since 1970.
        lifetime: the requests under way.
    """

    engine: AsyncEngine
    served: Served
    counts: Counts
    started: int
    lifetime: Lifetime

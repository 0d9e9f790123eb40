"""Endpoints: one module for each group, with a `router`; and the record that all of them read."""

from __future__ import annotations

from dataclasses import dataclass

from foretoken.async_engine import AsyncEngine
from foretoken.serve.metrics import Counts
from foretoken.serve.requests import Served
from foretoken.serve.running import Lifetime


@dataclass(frozen=True, slots=True)
class Context:
    """The engine, how it is served, the counts, the time of the start, and the requests."""

    engine: AsyncEngine
    served: Served
    counts: Counts
    started: int
    lifetime: Lifetime

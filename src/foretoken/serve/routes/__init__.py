"""Endpoints: each group has a module with a `router`."""

from __future__ import annotations

from dataclasses import dataclass

from foretoken.async_engine import AsyncEngine
from foretoken.serve.metrics import Counts
from foretoken.serve.requests import ServedModel
from foretoken.serve.running import Lifetime


@dataclass(frozen=True, slots=True)
class Context:
    """The objects that endpoints share; `started` is in seconds since 1970."""

    engine: AsyncEngine
    served: ServedModel
    counts: Counts
    started: int
    lifetime: Lifetime

"""What every route reads: one record, made with the application."""

from __future__ import annotations

from dataclasses import dataclass

from foretoken.async_engine import AsyncEngine
from foretoken.serve.metrics import Counts
from foretoken.serve.requests import Served
from foretoken.serve.running import Lifetime


@dataclass(frozen=True, slots=True)
class Context:
    """The engine, what is served of it, what has been counted, and what is under way."""

    engine: AsyncEngine
    served: Served
    counts: Counts
    started: int
    lifetime: Lifetime

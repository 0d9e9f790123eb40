"""Hostile requests get no answer, or one with a status below 500; nothing of them stays."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from foretoken import AsyncEngine
from foretoken.serve.options import ServeOptions
from tests.long.hostile import Attack, attack, attacks, generated, status_of, table
from tests.serve.running import Running, post, running
from tests.support.asynchronous import idle

HALF = {"half a head", "half a body"}
SILENT = {"nothing", "a half-closed half of a body"}
HALF_CLOSED = {"a half-closed socket"}  # a whole request: its two tokens may come before the end
HARMLESS = {"two requests at once", "an upgrade"}


@contextmanager
def served(target: Path, **patience: float) -> Iterator[Running]:
    engine = AsyncEngine(str(target), {"method": "ngram"}, max_num_waiting=8)
    with running(engine, ServeOptions(max_body_bytes=2**20, **patience)) as server:
        yield server
        asyncio.run(idle(engine))  # nothing runs, every block is free
        with httpx.Client(base_url=server.url) as http:
            assert post(http, "/v1/completions", prompt="a", max_tokens=2)["choices"]


@pytest.fixture(scope="module")
def attacked(target: Path) -> Iterator[Running]:
    with served(target) as server:
        yield server


@pytest.fixture(scope="module")
def hasty(target: Path) -> Iterator[Running]:
    """A server that soon gives up on silent clients; on a busy core others might time out."""
    with served(target, io_timeout=0.5) as server:
        yield server


@pytest.mark.parametrize("what", attacks(), ids=lambda what: what.name)
def test_attacks_are_answered_or_hung_up_on(
    attacked: Running, hasty: Running, what: Attack
) -> None:
    waits = what.name in SILENT | HALF | HALF_CLOSED or what.pause
    answer = attack(httpx.URL((hasty if waits else attacked).url).port or 0, what)
    status = status_of(answer)
    if what.name in HALF:
        assert status == 408
    elif what.name in HALF_CLOSED:
        assert status in (0, 200)
    elif waits:
        assert status in (0, 408)
    elif what.name in HARMLESS:
        assert status == 200
    else:
        assert 400 <= status < 500
        assert b'"error"' in answer


def test_odd_values_in_every_field(attacked: Running) -> None:
    found = table(httpx.URL(attacked.url).port or 0, 400, random.Random(1))
    assert max(found) < 500
    assert found[400] > 200
    assert found[413] > 5
    assert found[200] > 5


def test_requests_made_from_the_schema(attacked: Running) -> None:
    found = generated(attacked.url, 10)
    assert max(found) < 500
    assert found.total() > 70
    assert found[400] > 35

"""What no honest client sends gets an answer that is none of 5xx, or none; nothing is left."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.hostile import Attack, attack, attacks, generated, status_of, table
from foretoken import AsyncEngine
from foretoken.serve.options import ServeOptions
from tests.serve.running import Running, post, running
from tests.support.asynchronous import idle

SILENT = {"nothing", "a half-closed socket", "a half-closed half of a body"}
HARMLESS = {"two requests at once", "an upgrade"}


@pytest.fixture(scope="module")
def attacked(target: Path) -> Iterator[Running]:
    engine = AsyncEngine(str(target), {"method": "ngram"}, max_num_waiting=8)
    options = ServeOptions(io_timeout=0.5, max_body_bytes=2**20)
    with running(engine, options) as server:
        yield server
        asyncio.run(idle(engine))  # nothing runs, every block is free
        with httpx.Client(base_url=server.url) as http:
            assert post(http, "/v1/completions", prompt="a", max_tokens=2)["choices"]


@pytest.mark.parametrize("what", attacks(), ids=lambda what: what.name)
def test_attacks_are_answered_or_hung_up_on(attacked: Running, what: Attack) -> None:
    answer = attack(httpx.URL(attacked.url).port or 0, what)
    status = status_of(answer)
    if what.name in SILENT or what.pause:
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

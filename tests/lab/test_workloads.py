"""The held-out prompts are enough, distinct, and taken in order."""

from __future__ import annotations

import pytest

from foretoken.errors import ConfigError
from foretoken.lab.workloads import heldout


def test_prompts_are_enough_and_distinct() -> None:
    items = heldout()
    assert len(items) >= 50
    assert len({item.id for item in items}) == len({item.prompt for item in items}) == len(items)
    assert all(item.licence and item.prompt.strip() and item.reference for item in items)


def test_limit() -> None:
    assert heldout(3) == heldout()[:3]
    with pytest.raises(ConfigError, match="limit"):
        heldout(0)
    with pytest.raises(ConfigError, match="limit"):
        heldout(100_000)

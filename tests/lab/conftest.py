"""The embedded pair, loaded once for all tests of the laboratory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from foretoken import LLM


@pytest.fixture(scope="session")
def pair() -> Iterator[LLM]:
    with LLM("tiny-python", {"method": "draft_model"}, max_num_seqs=64) as llm:
        yield llm


@pytest.fixture(scope="module")
def known_memory() -> Iterator[None]:
    """Every results file measures how fast memory is, for a second and a half."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("foretoken.lab.results.read_bandwidth", lambda: 40.0)
        yield

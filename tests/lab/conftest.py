"""The embedded pair, loaded once for all tests of the laboratory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from foretoken import LLM


@pytest.fixture(scope="session")
def pair() -> Iterator[LLM]:
    with LLM("tiny-python", {"method": "draft_model"}, max_num_seqs=64) as llm:
        yield llm

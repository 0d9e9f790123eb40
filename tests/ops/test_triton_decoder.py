"""The GPU's decoder computes what Transformers does, in Triton's interpreter.

What is compared is in `tests/models/interpreted_decoder.py`, all in one process.
"""

from __future__ import annotations

import importlib.util
import json

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from tests.models import interpreted_decoder
from tests.models.interpreted_decoder import CASES
from tests.support.interpreter import chosen, few_each_time, interpret

FEW = ("qwen3", "padding")


@pytest.fixture(scope="module")
def failures(request: pytest.FixtureRequest) -> dict[str, str | None]:
    found: dict[str, str | None] = json.loads(
        interpret(interpreted_decoder.__name__, *chosen(request))
    )
    return found


@pytest.mark.parametrize("name", few_each_time(CASES, FEW))
def test_interpreted_decoder(failures: dict[str, str | None], name: str) -> None:
    assert failures[name] is None, failures[name]

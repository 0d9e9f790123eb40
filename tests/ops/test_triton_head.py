"""The GPU's EAGLE-3 head computes what its operators do, in Triton's interpreter.

What is compared is in `tests/models/interpreted_head.py`, all in one process; so are whole rounds
of the drafter, with the published equations.
"""

from __future__ import annotations

import importlib.util
import json

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from tests.models import interpreted_head
from tests.models.interpreted_head import CASES
from tests.support.interpreter import chosen, few_each_time, interpret, interpret_tests

FEW = ("some of it", "lacks")


@pytest.fixture(scope="module")
def failures(request: pytest.FixtureRequest) -> dict[str, str | None]:
    found: dict[str, str | None] = json.loads(
        interpret(interpreted_head.__name__, *chosen(request))
    )
    return found


@pytest.mark.parametrize("name", few_each_time(CASES, FEW))
def test_interpreted_head(failures: dict[str, str | None], name: str) -> None:
    assert failures[name] is None, failures[name]


@pytest.mark.trial
def test_interpreted_rounds() -> None:
    """Each head and each method once; a GPU runs them all."""
    few = "some and probabilistic or whole and greedy"
    interpret_tests("tests/drafting/test_eagle3.py", f"triton and ({few})")

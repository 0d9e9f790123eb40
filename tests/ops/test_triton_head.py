"""The GPU's EAGLE-3 head computes what its operators do, in Triton's interpreter.

What is compared is in `tests/models/interpreted_head.py`, all in one process; so are whole rounds
of the drafter, with the published equations.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from tests.models import interpreted_head
from tests.models.interpreted_head import CASES

ROOT = Path(__file__).parents[2]


def interpreted(*command: str) -> str:
    """What a process prints in which kernels are interpreted."""
    run = subprocess.run(
        [sys.executable, "-m", *command],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    return run.stdout


@pytest.fixture(scope="module")
def failures() -> dict[str, str | None]:
    found: dict[str, str | None] = json.loads(
        interpreted(interpreted_head.__name__).split("\n")[-2]
    )
    return found


@pytest.mark.parametrize("name", CASES)
def test_interpreted_head(failures: dict[str, str | None], name: str) -> None:
    assert failures[name] is None, failures[name]


def test_interpreted_rounds() -> None:
    file = "tests/drafting/test_eagle3.py"
    quiet = ("-W", "ignore::RuntimeWarning")  # logarithms of 0, as numpy sees them
    printed = interpreted("pytest", "-q", "-p", "no:cacheprovider", file, "-k", "triton", *quiet)
    assert "passed" in printed

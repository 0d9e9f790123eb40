"""The GPU's decoder computes what Transformers does, in Triton's interpreter.

What is compared is in `tests/models/interpreted_decoder.py`, all in one process.
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

from tests.models import interpreted_decoder
from tests.models.interpreted_decoder import CASES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def failures() -> dict[str, str | None]:
    run = subprocess.run(
        [sys.executable, "-m", interpreted_decoder.__name__],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert run.returncode == 0, run.stderr
    found: dict[str, str | None] = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", CASES)
def test_interpreted_decoder(failures: dict[str, str | None], name: str) -> None:
    assert failures[name] is None, failures[name]

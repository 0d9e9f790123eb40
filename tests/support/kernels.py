"""Tests of the native kernels run wherever these can be compiled; elsewhere they are skipped."""

from __future__ import annotations

import shutil

import pytest

from foretoken.ops import unavailable

COMMAND = "python -m foretoken.ops.backends.native.build"

needs_kernels = pytest.mark.usefixtures("kernels")
"""For tests that have nothing to run without kernels; the fixture is in `tests/conftest.py`."""


def require_kernels() -> None:
    """Skip without kernels; fail if only their compilation is missing, or is of older sources."""
    if (reason := unavailable("native")) is not None:
        skip_or_fail(reason, bool(shutil.which("g++") or shutil.which("clang++")))


def skip_or_fail(reason: str, has_compiler: bool) -> None:
    """Fail if a compiler could make the kernels that are missing, else skip."""
    if COMMAND in reason and has_compiler:
        pytest.fail(f"no native kernels of the present sources: {reason}", pytrace=False)
    pytest.skip(reason)

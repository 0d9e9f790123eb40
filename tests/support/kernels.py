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
    reason = unavailable("native")
    if reason is None:
        return
    if COMMAND in reason and (shutil.which("g++") or shutil.which("clang++")):
        pytest.fail(f"no native kernels of the present sources: {reason}", pytrace=False)
    pytest.skip(reason)

"""Triton's compiler accepts every kernel: its first stage needs no GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

KERNELS = """
    advance copy_match count decide decode edit filter guess join likeliest measure merge pack pick
    plan prefill residual scan search settle sweep wide write_drafts write write_new
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton here")
@pytest.mark.parametrize("how", ["few", pytest.param("all", marks=pytest.mark.trial)])
def test_every_kernel_has_types(how: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore", "-m", "tests.ops.typed_kernels", how]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == [f"{name}_kernel" for name in KERNELS.split()]

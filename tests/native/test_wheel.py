"""The wheel that `pip` builds from this folder, with a compiler and without.

Needs the network, because `pip` fetches the build backend; skipped without it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from foretoken.ops.backends.native import build
from foretoken.serve.access import PAGE_FILES
from tests.project.source import ROOT

pytestmark = pytest.mark.soak


def build_wheel(folder: Path, path: str) -> ZipFile:
    """The wheel of a copy of this folder, built with these commands on PATH."""
    source = folder / "source"
    hidden = shutil.ignore_patterns(".*", "__pycache__", "lib", "tests", "benchmarks", "docs")
    shutil.copytree(ROOT, source, ignore=hidden)
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "-w", str(folder)]
    done = subprocess.run(
        command, cwd=source, env={**os.environ, "PATH": path}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    said = done.stdout + done.stderr
    if done.returncode and "No matching distribution found" in said:
        pytest.skip("pip could not fetch the build backend")
    assert done.returncode == 0, said
    (wheel,) = folder.glob("*.whl")
    return ZipFile(wheel)


def tag_and_libraries(wheel: ZipFile) -> tuple[str, list[str]]:
    (info,) = [name for name in wheel.namelist() if name.endswith(".dist-info/WHEEL")]
    lines = wheel.read(info).decode().splitlines()
    (tag,) = [line.removeprefix("Tag: ") for line in lines if line.startswith("Tag: ")]
    return tag, sorted(name for name in wheel.namelist() if name.endswith(".so"))


def test_with_a_compiler_it_brings_the_kernels(tmp_path: Path) -> None:
    if not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("no C++ compiler here")
    wheel = build_wheel(tmp_path, os.environ["PATH"])
    tag, libraries = tag_and_libraries(wheel)
    assert tag.startswith("py3-none-linux_")
    variants = build.VARIANTS[build.platform.machine()]
    names = sorted(build.library_path(variant).name for variant in variants)
    assert libraries == [f"foretoken/ops/backends/native/lib/{name}" for name in names]
    page = {f"foretoken/serve/page/{name}" for name in PAGE_FILES.values()}
    assert page <= {*wheel.namelist()}


def test_without_a_compiler_it_is_pure_python(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path, str(tmp_path))
    assert tag_and_libraries(wheel) == ("py3-none-any", [])
    # The kernels can be built where the wheel is installed.
    assert "foretoken/ops/backends/native/csrc/stack.cpp" in wheel.namelist()

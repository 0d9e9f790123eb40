"""Compiling the kernels: what is built, kept and deleted, and the messages when it fails."""

from __future__ import annotations

import os
import platform
import re
import stat
import time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from foretoken.ops.backends.native import build as installed

# A compiler that logs its arguments, or fails.
FAKE = """#!/bin/sh
echo "$@" >> {log}
for word in "$@"; do last=$word; done
{then}
"""
WORKS = 'echo library > "$last"'
VARIANTS = ("x86-64-v4-vnni", "x86-64-v4", "x86-64-v3-vnni", "x86-64-v3")
FAILS = """for i in 1 2 3 4 5 6 7 8 9; do echo "kernel.cpp:$i: warning: no error here" >&2; done
echo "kernel.cpp:9: error: no such luck" >&2; echo "   9 | int x" >&2
for i in 1 2 3 4 5 6 7 8 9; do echo "kernel.cpp:$i: error: and so on" >&2; done; exit 1"""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with `build.py`, one source file and no libraries; no compiler is on PATH."""
    for name in ("csrc", "bin"):
        (tmp_path / name).mkdir()
    (tmp_path / "csrc" / "kernel.cpp").write_text("int one() { return 1; }")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


@pytest.fixture
def build(tree: Path) -> Any:
    """`build.py` of that folder, for x86-64 whatever this machine is."""
    return loaded(tree)


def loaded(tree: Path, old: str = "", new: str = "") -> Any:
    text = Path(installed.__file__).read_text(encoding="utf-8")
    (tree / "build.py").write_text(text.replace(old, new), encoding="utf-8")
    spec = spec_from_file_location("build", tree / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = module_from_spec(spec)
    spec.loader.exec_module(module)
    module.VARIANTS[platform.machine()] = module.VARIANTS["x86_64"]
    return module


def compiler(tree: Path, name: str, then: str = WORKS) -> None:
    path = tree / "bin" / name
    path.write_text(FAKE.format(log=tree / f"{name}.log", then=then))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def commands(tree: Path, name: str) -> list[str]:
    log = tree / f"{name}.log"
    return log.read_text().splitlines() if log.exists() else []


def test_one_library_per_instruction_set_each_compiled_once(tree: Path, build: Any) -> None:
    compiler(tree, "g++")
    built = build.build()
    assert built == [build.library_path(v) for v in VARIANTS]
    assert sorted((tree / "lib").iterdir()) == sorted(built)  # no unfinished file
    compiled = [line for line in commands(tree, "g++") if "-c " in line]
    for march, command in zip(("x86-64-v3", "x86-64-v4"), sorted(compiled), strict=True):
        assert f"-march={march} " in command
        assert "vnni" not in command
        assert str(tree / "csrc" / "kernel.cpp") in command
        assert "-ffast-math" not in command
    assert len(commands(tree, "g++")) == 6, "two files, four libraries"
    assert build.build() == built
    assert len(commands(tree, "g++")) == 6
    built[1].unlink()
    assert build.build() == built
    assert len(commands(tree, "g++")) == 8


def test_only_quantised_products_are_compiled_for_each_variant(tree: Path, build: Any) -> None:
    compiler(tree, "g++")
    (tree / "csrc" / "quantised.cpp").touch()
    build.build()
    compiled = [line for line in commands(tree, "g++") if "-c " in line]
    flags = [set(line.split()) for line in compiled if f"{tree}/csrc/quantised.cpp" in line]
    for wanted in build.VARIANTS["x86_64"].values():
        found = [f for f in flags if {w for w in f if "march" in w or "vnni" in w} == {*wanted}]
        assert len(found) == 1
    assert len(flags) == 4
    assert len(compiled) == 6
    linked = [line.split() for line in commands(tree, "g++") if "-shared" in line]
    assert [len([word for word in line if word.endswith(".o")]) for line in linked] == [2] * 4
    objects = [{word for word in line if word.endswith(".o")} for line in linked]
    assert len(set.union(*objects)) == 6
    assert not set.intersection(*objects)


def test_progress_is_shown_from_the_start(
    tree: Path, build: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler(tree, "g++")
    for name in ("a", "b"):
        (tree / "csrc" / f"{name}.cpp").touch()
    assert build.main() == 0
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first == "Compiling C++ kernels: 0 of 6 files, 0 s"
    assert last.startswith("Compiling C++ kernels: 6 of 6 files, ")
    assert build.main() == 0
    assert capsys.readouterr().err == "", "nothing is left to do"


def test_clang_is_used_without_gcc(tree: Path, build: Any) -> None:
    compiler(tree, "clang++")
    assert all(path.exists() for path in build.build())
    assert len(commands(tree, "clang++")) == 6


def test_changed_sources_give_another_library_and_outdated_ones_are_deleted(
    tree: Path, build: Any
) -> None:
    compiler(tree, "g++")
    (tree / "lib").mkdir()
    unrelated = tree / "lib" / "note.txt"
    unrelated.touch()
    old = build.build()
    (tree / "csrc" / "kernel.h").touch()
    new = build.build()
    assert set(new).isdisjoint(old)
    assert not any(path.exists() for path in old)
    assert all(path.exists() for path in (*new, unrelated))


def test_old_unfinished_files_are_deleted_and_recent_ones_kept(tree: Path, build: Any) -> None:
    compiler(tree, "g++", f'echo "$last" >> {tree}/parts; {WORKS}')
    build.build()
    used = Path((tree / "parts").read_text().splitlines()[0]).parent
    assert used.parent == tree / "lib"
    old, new = used, used.with_name(f"{used.name}x")
    for folder in (old, new):
        folder.mkdir()
        (folder / "kernel.o").touch()
    partial = tree / "lib" / "foretoken-0.1.partial"
    partial.touch()
    for path in (old, partial):
        os.utime(path, (0, time.time() - 4000))
    built = build.build()
    assert {*(tree / "lib").iterdir()} == {*built, new}


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="Linux has it")
def test_as_many_files_at_a_time_as_there_are_cores_for_this_process(
    tree: Path, build: Any
) -> None:
    for name in ("a", "b", "c"):
        (tree / "csrc" / f"{name}.cpp").touch()
    compiler(
        tree, "g++", f"echo start >> {tree}/order; sleep 0.05; echo end >> {tree}/order; {WORKS}"
    )
    (tree / "bin" / "sleep").symlink_to("/bin/sleep")
    cores = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(cores)})
        build.build()
    finally:
        os.sched_setaffinity(0, cores)
    assert (tree / "order").read_text().split() == ["start", "end"] * 12


def test_the_digest_changes_with_everything_that_is_compiled(tree: Path, build: Any) -> None:
    kernel = tree / "csrc" / "kernel.cpp"
    seen = [build.digest()]
    assert build.digest() == seen[0]
    kernel.write_text("int one() { return 2; }")
    seen.append(build.digest())
    kernel.rename(kernel.with_name("other.cpp"))
    seen.append(build.digest())
    assert seen[2] in build.library_path("v").name
    seen.append(loaded(tree, '"-O3"', '"-O0", "-g"').digest())
    assert len(set(seen)) == 4


def test_no_compiler(tree: Path, build: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(build.BuildError, match=r"no C\+\+ compiler \(`g\+\+` or `clang\+\+`\)"):
        build.build()
    assert build.main() == 1
    assert "Native kernels were not built: there is no C++ compiler" in capsys.readouterr().err


def test_an_unknown_architecture(tree: Path, build: Any) -> None:
    compiler(tree, "g++")
    build.VARIANTS.clear()
    message = f"there are no native kernels for `{platform.machine()}`"
    with pytest.raises(build.BuildError, match=message):
        build.build()


def test_a_compiler_that_fails_is_quoted_and_leaves_no_library(
    tree: Path, build: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler(tree, "g++", FAILS)
    with pytest.raises(build.BuildError):
        build.build()
    assert build.main() == 1
    _, first, *errors = capsys.readouterr().err.splitlines()
    assert re.search(r"/bin/g\+\+ -march=x86-64-v[34]` failed:$", first)
    assert errors[0] == "  kernel.cpp:9: error: no such luck"
    assert len(errors) == 5
    assert "warning" not in "".join(errors)
    assert list((tree / "lib").iterdir()) == []


@pytest.mark.parametrize("said", ["ld: cannot open output file", ""])
def test_a_compiler_without_errors_is_quoted_from_its_end(
    tree: Path, build: Any, said: str
) -> None:
    compiler(tree, "g++", f"echo 'x.cpp:1: warning: y' >&2; echo '{said}' >&2; exit 1")
    with pytest.raises(build.BuildError) as caught:
        build.build()
    assert str(caught.value).endswith(f"failed:\n  {said}")


def test_a_folder_that_cannot_be_written(
    tree: Path, build: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler(tree, "g++")
    (tree / "lib").touch()
    assert build.main() == 1
    assert "Native kernels were not built: " in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"lib", b"library\nand more" + bytes(32)])
def test_a_damaged_library_is_built_again(tree: Path, build: Any, content: bytes) -> None:
    compiler(tree, "g++")
    path = build.build()[0]
    whole = path.read_bytes()
    path.write_bytes(content)
    assert not build.is_whole(path)
    build.build()
    assert build.is_whole(path)
    assert path.read_bytes() == whole


def test_the_command_prints_what_it_built(
    tree: Path, build: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler(tree, "g++")
    assert build.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition("/")[2] for line in lines] == [path.name for path in build.build()]

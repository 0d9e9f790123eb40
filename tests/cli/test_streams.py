"""Closed, full and foreign streams are named, and never called a bug."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.project.source import ROOT
from tests.support.asynchronous import PATIENCE

# A model that takes no time: what is tested is around it.
SCRIPT = """
import sys
from foretoken.cli import main
from foretoken.cli.terminal import console
from tests.cli.fake_llm import FakeLLM, WithLLM

class Demo:
    def run(self, *args):
        shown = console()
        for _ in range(20000):
            shown.print("a line of the demo")

class Quick(WithLLM):
    def demo(self, llm, note):
        return Demo()

sys.argv[0] = "foretoken"
main(Quick(FakeLLM(pieces=["\\xe9", "\\u20ac"] * 3)))
"""
COMMAND = [sys.executable, "-c", SCRIPT]


def run(*args: str, shell: str = "", **variables: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["bash", "-c", f'"$@" {shell}', "bash", *COMMAND, *args],
        env={**os.environ, **variables}, cwd=ROOT, capture_output=True, check=False,
        timeout=PATIENCE,
    )  # fmt: skip


ASCII = {"PYTHONIOENCODING": "ascii"}
PLAIN_C = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}
FULL = b"Error: standard output cannot be written: No space left on device.\n"


@pytest.mark.parametrize("args", [["generate", "x"], ["generate", "-h"], ["--version"], ["demo"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk(args: list[str], unbuffered: str) -> None:
    done = run(*args, shell="> /dev/full", PYTHONUNBUFFERED=unbuffered)
    assert (done.returncode, done.stderr) == (2, FULL)


@pytest.mark.parametrize("args", [["generate", "x"], ["generate", "-h"], ["demo"]])
def test_without_a_reader(args: list[str]) -> None:
    done = run(*args, shell="| true; echo ${PIPESTATUS[0]}")
    # A short text may fit into the pipe before its reader is gone.
    assert done.stdout in ([b"141\n"] if args == ["demo"] else [b"141\n", b"0\n"])
    assert done.stderr == b""


def test_a_reader_that_is_gone_before_the_help() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    for args in (["-h"], ["generate", "x"], ["demo"]):
        done = subprocess.run(
            [*COMMAND, *args], stdout=writing, stderr=subprocess.PIPE, cwd=ROOT, check=False
        )
        assert (done.returncode, done.stderr) == (141, b"")
    os.close(writing)


def test_closed_standard_output() -> None:
    done = run("generate", "x", shell=">&-")
    assert (done.returncode, done.stderr) == (2, b"Error: standard output is closed.\n")


def test_closed_standard_input() -> None:
    assert run("generate", "x", shell="<&-").returncode == 0
    for args in (["generate", "-"], ["chat", "-"], ["chat"]):
        done = run(*args, shell="<&-")
        assert done.returncode == 2
        assert b"standard input is closed" in done.stderr


@pytest.mark.parametrize("to", ["2>&-", "2> /dev/full"])
def test_an_error_stream_that_takes_nothing(to: str) -> None:
    assert run("generate", "x", shell=to).returncode == 0
    done = run("generate", "x", "--top-p", "7", shell=to)
    assert (done.returncode, done.stdout, done.stderr) == (2, b"", b"")


@pytest.mark.parametrize("locale", [ASCII, PLAIN_C])
def test_an_output_without_the_characters(locale: dict[str, str]) -> None:
    done = run("generate", "x", **locale)
    assert (done.returncode, done.stdout) == (0, rb"\xe9\u20ac" * 3 + b"\n")
    assert done.stderr == (
        b"Characters that ascii cannot show were written as escapes; a UTF-8 locale shows them "
        b"(LC_ALL=C.UTF-8).\n"
    )


@pytest.mark.parametrize("locale", [{}, ASCII, PLAIN_C])
def test_json_is_json_in_any_locale(locale: dict[str, str]) -> None:
    """And arguments are UTF-8."""
    done = run("generate", "naïve 文", "--json", **locale)
    assert (done.returncode, done.stderr) == (0, b"")
    data: dict[str, Any] = json.loads(done.stdout)
    assert data["prompt"] == "naïve 文"
    assert data["outputs"][0]["text"] == "é€" * 3


def test_bytes_that_are_no_text() -> None:
    for locale in ({}, PLAIN_C):
        done = run("generate", os.fsdecode(b"x\xff"), **locale)
        assert (done.returncode, done.stdout) == (2, b"")
        assert done.stderr == b"Error: `prompt` is b'x\\xff': must be UTF-8 text.\n"


def test_a_missing_file_is_no_bug() -> None:
    done = run("chat", "x", "--chat-template", "nowhere.jinja")
    assert done.returncode == 2
    assert done.stderr == (
        b"Error: `chat-template` is 'nowhere.jinja': must be a file with a Jinja template.\n"
    )

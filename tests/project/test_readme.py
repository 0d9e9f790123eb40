"""The examples of README.md run as they are written."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from foretoken.cli.app import app
from tests.project.source import ROOT
from tests.support.checkpoints import save_checkpoint


def blocks(language: str) -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    return [line for line in lines if line.startswith("foretoken ")]


def test_there_are_examples() -> None:
    assert len(blocks("python")) >= 2
    assert {line.split()[1] for line in commands()} == {"generate", "chat", "bench"}


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_a_script(number: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The first as users start it."""
    if number:
        request.getfixturevalue("forked")
    script = tmp_path / "example.py"
    script.write_text(blocks("python")[number], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("line", commands())
def test_a_command(line: str, tmp_path: Path) -> None:
    """In this process; `path/to/checkpoint` is one with a chat template, `prompt.py` some code."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    if "path/to/checkpoint" in line:
        (save_checkpoint(tmp_path, seed=1) / "chat_template.jinja").write_text(template)
    words = shlex.split(line.replace("path/to/checkpoint", str(tmp_path)), comments=True)[1:]
    given = None
    if "<" in words:
        words, given = words[: words.index("<")], "import os\n"
    if "chat" in words:
        words += ["--max-tokens", "8"]  # the checkpoint has no room for more
    if "bench" in words:
        # Nobody looks at its figures.
        words += "--output-len 8 --num-requests 4 --repeats 1 --bandwidth 40".split()
    result = CliRunner().invoke(app, words, input=given)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.strip()

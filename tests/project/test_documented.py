"""What README.md and docs/ tell users to type is right: commands are read by the real parser, quick
ones run as they are written, and so do the examples in Python."""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from typer.testing import CliRunner

from foretoken import LLM, SamplingParams
from foretoken.cli.actions import Actions
from foretoken.cli.app import app
from foretoken.config import EngineConfig
from foretoken.lab.laws.chain import Setting
from tests.long import documented
from tests.long.documented import PARSED, SLOW, Documented, blocks, commands, documents, prepare
from tests.project.source import ROOT

COMMANDS = commands()
COMPLETION = "foretoken --install-completion"  # it would write to the settings of who tests
OURS = [
    command
    for command in COMMANDS
    if command.line.startswith("foretoken ") and command.line != COMPLETION
]
QUICK = [command for command in OURS if not command.slow and not command.only_parsed]


# Modules that read no options, and where they begin.
BUILD = "foretoken.ops.backends.native.build"
WITHOUT_OPTIONS = {"foretoken": "foretoken.__main__", BUILD: BUILD}


def named(command: Documented) -> str:
    return re.sub(r"\W+", "-", command.line)[:60]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("documented"))


@pytest.fixture
def place(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of a command."""
    monkeypatch.chdir(shelf)
    monkeypatch.syspath_prepend(shelf)
    return shelf


def given(command: Documented) -> str:
    """Standard input."""
    file = re.search(r" < (\S+)$", command.line)
    return Path(file[1]).read_text(encoding="utf-8") if file else ""


def test_commands_are_found() -> None:
    assert len(COMMANDS) > 60
    assert len(QUICK) > 10
    of_readme = {command.line for command in COMMANDS if command.document == "README.md"}
    assert {"make demo", "foretoken bench", "foretoken generate --help"} <= of_readme
    assert "foretoken audit --gallery" in {command.line for command in COMMANDS}
    wrapped = [command for command in OURS if "synthetic_acceptance_length" in command.line]
    assert all("rejection_sample_method" in command.words[-1] for command in wrapped)


@pytest.mark.parametrize("place", [*SLOW, *PARSED])
def test_no_exception_is_stale(place: str) -> None:
    assert any(documented.begins(command.line, {place: ""}) for command in COMMANDS)


# Options ------------------------------------------------------------------------------------------


class Reached(Actions):
    """Ends where a command has read its options, and checks those of its engine."""

    def __init__(self) -> None:
        self.engines: list[dict[str, Any]] = []

    def reach(self, engine: dict[str, Any], *others: Any) -> NoReturn:
        EngineConfig(**engine)
        self.engines.append(engine)
        raise SystemExit(0)

    serve = serve_replicas = reach

    def load(self, model: str, speculative_config: Any, **options: Any) -> NoReturn:
        self.reach({"model": model, "speculative_config": speculative_config, **options})

    def bench(self, reporter: Any, asked: Any, params: Any, engine: dict[str, Any]) -> NoReturn:
        self.reach(engine)

    def plan(self, reporter: Any, engine: dict[str, Any], *others: Any) -> NoReturn:
        self.reach(engine)

    def audit(self, reporter: Any, parts: Any, asked: Any, engine: Any, params: Any) -> NoReturn:
        self.reach(engine if "engine" in parts else {"model": engine["model"]})

    def train(self, options: Any, *others: Any) -> NoReturn:
        self.reach({"model": options.model})


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("command", OURS, ids=named)
def test_options_are_read(command: Documented) -> None:
    """Commands end before they load, serve or measure anything."""
    reached = Reached()
    result = CliRunner().invoke(app, command.words[1:], input=given(command), obj=reached)
    if command.shown and command.shown[0].startswith("Error:"):
        assert result.stderr == command.shown[0] + "\n"
        return
    assert result.exit_code == 0, result.stderr
    assert len(reached.engines) == 1 or command.line.endswith("--help")


def test_completion_can_be_installed() -> None:
    assert COMPLETION in {command.line for command in COMMANDS}
    assert "--install-completion" in CliRunner().invoke(app, ["--help"]).stdout


def test_an_option_that_is_gone_is_noticed() -> None:
    reached = Reached()
    for words in (["bench", "--no-such-option"], ["audit", "--speculative-config", "{}}"]):
        assert CliRunner().invoke(app, words, obj=reached).exit_code == 2
    assert reached.engines == []


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("command", [c for c in COMMANDS if "python -m" in c.line], ids=named)
def test_options_of_modules_are_read(command: Documented, monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks end after they have read them."""
    parse = argparse.ArgumentParser.parse_args

    def parsed(self: Any, *given: Any) -> None:
        parse(self, *given)
        raise SystemExit(0)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    _, _, name, *words = command.words
    if name in WITHOUT_OPTIONS:
        assert words == []
        assert importlib.util.find_spec(WITHOUT_OPTIONS[name])
        return
    module = importlib.import_module(name)
    if hasattr(module, "__path__"):
        module = importlib.import_module(f"{name}.__main__")
    monkeypatch.setattr(sys, "argv", [name, *words])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 0


def test_targets_of_make_exist() -> None:
    names = {c.words[1] for c in COMMANDS if c.words[0] == "make"}
    phony = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert names >= {"demo", "test", "serve"}
    assert names <= set(phony[0].split())


# Running ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("command", QUICK, ids=named)
def test_a_quick_command_runs(command: Documented) -> None:
    result = CliRunner().invoke(app, command.words[1:], input=given(command))
    if command.shown and command.shown[0].startswith("Error:"):
        assert (result.exit_code, result.stderr) == (2, command.shown[0] + "\n")
        return
    assert result.exit_code == 0, result.stderr
    # A conversation reads its messages from standard input, and ends with it.
    assert result.stdout.strip() or command.line == "foretoken chat --model path/to/checkpoint"


def scripts(document: Path) -> list[str]:
    return [text for language, text in blocks(document) if language == "python"]


@pytest.mark.parametrize("number", range(len(scripts(ROOT / "README.md"))))
def test_a_script_of_the_readme(
    number: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The first as users start it."""
    if number:
        request.getfixturevalue("forked")
    script = tmp_path / "example.py"
    script.write_text(scripts(ROOT / "README.md")[number], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def names_of_readers() -> dict[str, Any]:
    """The names that a piece of Python in a document uses: models, prompts, tensors."""
    kept, drafts, vocabulary = 2, 4, 16
    random = torch.Generator().manual_seed(0)
    return {
        "LLM": LLM, "SamplingParams": SamplingParams, "Path": Path, "torch": torch,
        "target": "tiny-python", "draft": "tiny-python-draft", "head": "tiny-python-eagle3",
        "prompt": "import os\n", "prompts": ["import os\n", "def f():\n"],
        "params": Setting().params(kept, 0, torch.device("cpu")),
        "slot_B": torch.arange(kept), "position_B": torch.tensor([3, 5]),
        "draft_logits_BKV": torch.randn(kept, drafts, vocabulary, generator=random),
        "target_logits_NV": torch.randn(kept * (drafts + 1), vocabulary, generator=random),
        "token_BK": torch.randint(vocabulary, (kept, drafts), generator=random),
        "num_B": torch.full((kept,), drafts), "real_q_B": torch.ones(kept, dtype=torch.bool),
    }  # fmt: skip


PIECES = [d for d in documents() if scripts(d) and d.name not in ("README.md", "audit.md")]


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("document", PIECES, ids=lambda document: document.name)
def test_pieces_of_python_run_one_after_another(document: Path) -> None:
    """Those of README.md are above, the verifier of docs/audit.md in `cli/test_audit.py`."""
    names = names_of_readers()
    for code in scripts(document):
        exec(compile(code, document.name, "exec"), names)

"""The command line is an interface: what commands add to the dataclasses' fields is pinned.

After a change that is meant, write the new surface with `python -m tests.cli.test_surface` and
say in CHANGELOG.md what changed. Options that are fields follow their dataclass;
`project/test_surface.py` compares the fields with CHANGELOG.md.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import foretoken
from foretoken.cli.app import SET_BY_AUDIT, SET_BY_BENCH, app
from foretoken.cli.options import NOT_OPTIONS
from foretoken.config import DTYPES
from foretoken.ops import BACKENDS
from foretoken.sampling.params import SamplingParams

PINNED = Path(__file__).with_name("surface.txt")


FIELDS = {
    field.name: field
    for cls, others in NOT_OPTIONS.items()
    for field in fields(cls)
    if field.name not in others
}
OTHER_DEFAULTS = {
    "generate": {"model": "tiny-python", "max_tokens": 128, "temperature": 0.8},
    "chat": {"model": "tiny-python", "max_tokens": 512, "temperature": 0.8},
    "bench": {
        "model": "tiny-python",
        "temperature": 0.0,
        "enable_prefix_caching": False,
        **dict.fromkeys(("max_num_seqs", "max_num_batched_tokens", "kv_cache_gib")),
    },
    "audit": {"model": None, "backend": None},
    "serve": {"model": None},
}
WITHOUT = {
    "bench": SET_BY_BENCH,
    "audit": SET_BY_AUDIT,
    "serve": {field.name for field in fields(SamplingParams)},
}


def offered(command: str | None) -> set[str]:
    """The fields that are options of a command."""
    without = WITHOUT.get(command or "", set())
    return FIELDS.keys() - without if command in OTHER_DEFAULTS else set()


def surface() -> str:
    """Every command with its help, and with its options that are no fields."""
    root: Any = get_command(app)
    lines = []
    for command in (root, *root.commands.values()):
        lines += [f"foretoken {command.name or ''}", *(command.help or "").splitlines()]
        for option in command.params:
            if option.name not in offered(command.name):
                names = ", ".join([*option.opts, *option.secondary_opts])
                shown = [names, option.metavar or "", f"[default: {option.default}]:", option.help]
                lines.append("  " + " ".join(filter(None, shown)))
    return "\n".join(line.rstrip() for line in lines) + "\n"


def test_the_surface_is_the_pinned_one() -> None:
    assert surface() == PINNED.read_text(encoding="utf-8")


def test_help_and_version() -> None:
    runner = CliRunner()
    assert "generate" in runner.invoke(app, ["--help"]).output
    for args in (["generate", "-h"], ["chat", "-h"], ["demo", "--help"]):
        result = runner.invoke(app, args)
        assert result.exit_code == 0
        assert "--max-tokens" in result.output
    assert runner.invoke(app, ["--version"]).output == f"foretoken {foretoken.__version__}\n"


@pytest.mark.parametrize(
    "command", ["", "generate", "chat", "bench", "audit", "serve", "train-eagle3", "demo"]
)
def test_help_loads_no_heavy_library(command: str) -> None:
    code = (
        f"import sys; sys.argv = ['foretoken', *{command.split()}, '--help']\n"
        "from foretoken.cli import main\n"
        "try:\n    main()\nexcept SystemExit as leave:\n    assert not leave.code\n"
        "sys.exit(bool({'torch', 'transformers', 'fastapi'} & {*sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


@pytest.mark.parametrize("module", ["foretoken", "foretoken.cli"])
def test_module_is_the_command(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, "--version"], capture_output=True, text=True
    )
    assert done.stdout == f"foretoken {foretoken.__version__}\n"


def options(command: str) -> dict[str, Any]:
    found: Any = get_command(app)
    parameters = found.commands[command].params
    return {p.name: p for p in parameters if p.param_type_name == "option"}


@pytest.mark.parametrize("cls", NOT_OPTIONS)
@pytest.mark.parametrize("command", OTHER_DEFAULTS)
def test_every_field_is_an_option_or_said_not_to_be(command: str, cls: Any) -> None:
    names = {field.name for field in fields(cls)}
    assert names > NOT_OPTIONS[cls]
    found = options(command)
    for name in names & offered(command):
        default = OTHER_DEFAULTS[command].get(name, FIELDS[name].default)
        assert found[name].default == (None if default == () else default)
        assert f"--{name.replace('_', '-')}" in found[name].opts
        kind = str(FIELDS[name].type)
        is_list = any(word in kind for word in ("Sequence[", "tuple[", "list["))
        assert found[name].multiple == (is_list and not kind.startswith("str |"))
        assert bool(found[name].secondary_opts) == (
            "bool" in kind and FIELDS[name].default is not False
        )


def test_the_help_is_what_the_dataclasses_say() -> None:
    helps = {name: option.help for name, option in options("generate").items()}
    told = "Keeps the k most likely tokens (all ties at the k-th); 0 or -1 is off."
    assert helps["top_k"] == told
    assert helps["presence_penalty"] == helps["frequency_penalty"] != ""
    assert not [text for text in helps.values() if not text or "None" in text]
    assert helps["max_tokens"] == "Most tokens to generate, >= 1.", "left out, it is the default"
    # Written out, because importing `ops` would load torch for a page of help.
    for name in (*BACKENDS, "auto"):
        assert f"`{name}`" in helps["backend"]
    for name in DTYPES:
        assert f"`{name}`" in helps["dtype"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_needs_nothing_but_the_command(shell: str) -> None:
    """A shell asks the command itself, by the variables that `--show-completion` sets."""
    words = "foretoken generate --max-t"
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.argv = ['foretoken']; "
         "from foretoken.cli import main; main()"],
        env={**os.environ, "_FORETOKEN_COMPLETE": f"complete_{shell}", "COMP_WORDS": words,
             "COMP_CWORD": "2", "_TYPER_COMPLETE_ARGS": words,
             "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert "--max-tokens" in done.stdout
    assert "--min-p" not in done.stdout
    assert done.stderr == ""


if __name__ == "__main__":
    PINNED.write_text(surface(), encoding="utf-8")

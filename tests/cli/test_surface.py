"""The command line is an interface: every option, default and help text is pinned.

After a change that is meant, write the new surface with `python -m tests.cli.test_surface` and
say in CHANGELOG.md what changed.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

import foretoken
from foretoken.cli import app

PINNED = Path(__file__).with_name("surface.txt")


def surface() -> str:
    runner = CliRunner(env={"COLUMNS": "100", "TERMINAL_WIDTH": "100"})
    calls: list[list[str]] = [[], ["generate"], ["demo"]]
    return "\n".join(runner.invoke(app, [*args, "--help"]).output for args in calls)


def test_the_surface_is_the_pinned_one() -> None:
    assert surface() == PINNED.read_text(encoding="utf-8")


def test_help_and_version() -> None:
    runner = CliRunner()
    assert "generate" in runner.invoke(app, ["--help"]).output
    for args in (["generate", "-h"], ["demo", "--help"]):
        result = runner.invoke(app, args)
        assert result.exit_code == 0
        assert "--max-tokens" in result.output
    assert runner.invoke(app, ["--version"]).output == f"foretoken {foretoken.__version__}\n"


def test_help_loads_no_heavy_library() -> None:
    code = (
        "import sys; sys.argv = ['foretoken', 'generate', '--help']\n"
        "from foretoken.cli import main\n"
        "try:\n    main()\nexcept SystemExit as leave:\n    assert not leave.code\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


def test_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "foretoken", "--version"], capture_output=True, text=True
    )
    assert done.stdout == f"foretoken {foretoken.__version__}\n"


if __name__ == "__main__":
    PINNED.write_text(surface(), encoding="utf-8")

"""The `foretoken` command. Heavy libraries load inside the commands, so that help is instant."""

from __future__ import annotations

import sys
from typing import Any


def main(actions: Any = None) -> None:
    """Entry point of the `foretoken` script; errors before a command runs are reported, too.

    Args:
        actions: see `cli/actions.py`; None: the defaults.
    """
    from foretoken.cli.terminal import CLOSED_PIPE, prepare, reporting

    with reporting():
        prepare()
        from foretoken.cli.app import app

        output = sys.stdout
        try:
            app(obj=actions)
        finally:
            if sys.stdout is not output:  # Typer replaces it if its help meets a closed pipe
                raise SystemExit(CLOSED_PIPE)
            output.flush()

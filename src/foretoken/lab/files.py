"""Files that a command of the laboratory is going to write. No torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from foretoken.errors import ConfigError


def check_file(name: str, given: str | None, *suffixes: str) -> None:
    """Raise `ConfigError` before minutes of measuring for a file that cannot be written after."""
    if given is None:
        return
    path = Path(given)
    if path.suffix not in suffixes:
        raise ConfigError(name, given, f"a file that ends in {', '.join(suffixes)}")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(name, given, "a file in a folder that exists and can be written to")


def check_outputs(given: Sequence[str]) -> None:
    """The same for files of results: data, or figures, or a page of both."""
    for path in given:
        check_file("output", path, ".json", ".csv", ".svg", ".html")


def stem(output: Sequence[str], default: str) -> str:
    """The name of results: the JSON file's stem in lower case, of letters, digits, underscores."""
    path = next((path for path in output if path.endswith(".json")), default)
    name = Path(path).stem.lower()
    return "".join(c if c.isascii() and c.isalnum() else "_" for c in name)

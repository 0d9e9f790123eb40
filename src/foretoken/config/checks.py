"""Checks of options, which raise `ConfigError`; the environment; the machine's memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from difflib import get_close_matches
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from foretoken.errors import ConfigError

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def from_environment(name: str) -> str | None:
    """The value of an environment variable, or None."""
    return os.environ.get(name)


def set_in_environment(**values: str) -> None:
    """Set variables for this process and its children, unless they are set already."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


def machine_bytes() -> int | None:
    """Memory of the machine, or of the container if that is less; None if unknown."""
    limits = []
    with suppress(AttributeError, OSError, ValueError):  # in case this is not a POSIX system
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for path in _CGROUP_LIMITS:
        with suppress(OSError, ValueError):  # no such file, or its text is "max"
            limits.append(int(Path(path).read_text(encoding="ascii")))
    return min((limit for limit in limits if limit > 0), default=None)


def plain(value: Any) -> Any:
    """A scalar of numpy or torch as a Python number or bool; any other value unchanged."""
    is_scalar = getattr(value, "shape", None) == () and hasattr(value, "item")
    return value.item() if is_scalar else value


def check_int(field: str, value: Any, low: int, high: int | None = None, remedy: str = "") -> None:
    """Raise `ConfigError` unless `value` is an int, not a bool, in [low, high]."""
    bad_type = isinstance(value, bool) or not isinstance(value, int)
    if bad_type or value < low or (high is not None and value > high):
        bound = f"an integer >= {low}" if high is None else f"an integer in [{low}, {high}]"
        raise ConfigError(field, value, bound, remedy)


def check_number(field: str, value: Any, low: float, high: float, remedy: str = "") -> None:
    """Raise `ConfigError` unless `value` is a number, not bool or NaN, in [low, high]."""
    bad_type = isinstance(value, bool) or not isinstance(value, (int, float))
    if bad_type or not low <= value <= high:
        raise ConfigError(field, value, f"a number in [{low:g}, {high:g}]", remedy)


def check_choice(field: str, value: Any, choices: tuple[str, ...], remedy: str = "") -> None:
    """Raise `ConfigError` unless `value` is one of `choices`."""
    if value not in choices:
        near = get_close_matches(str(value), choices, n=1)
        remedy = remedy or (f"Did you mean `{near[0]}`?" if near else "")
        raise ConfigError(field, value, f"one of {', '.join(choices)}", remedy)


def check_model(field: str, value: Any, remedy: str = "") -> str:
    """The name, folder or hub id of a model as a string; `ConfigError` for any other value."""
    text = fspath(value) if isinstance(value, PathLike) else value
    if not isinstance(text, str) or not text:
        raise ConfigError(field, value, "a model name, a folder or a hub id", remedy)
    return text


def check_revision(field: str, value: Any) -> None:
    """Raise `ConfigError` unless `value` is None or a text that may name a revision."""
    if value is not None and (not isinstance(value, str) or not value):
        raise ConfigError(field, value, "a branch, a tag or a commit", "None means `main`.")


def make_plain(config: Any) -> None:
    """In a frozen dataclass, replace scalars of numpy and torch by Python's own scalars."""
    for f in fields(config):
        object.__setattr__(config, f.name, plain(getattr(config, f.name)))


def template_text(name: str, value: str) -> str:
    """A chat template: the text of the file `value`, or `value` itself if it is Jinja text or may
    name one of the tokenizer's templates. `ConfigError` if the file is missing or not UTF-8."""
    if "{{" in value or "{%" in value:
        return value
    path = Path(value)
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError):
        if path.suffix or len(path.parts) > 1:
            raise ConfigError(name, value, "a file with a Jinja template") from None
        return value
    except UnicodeDecodeError:
        raise ConfigError(name, value, "a file of UTF-8 text") from None


def check_file(name: str, value: str | None, *suffixes: str) -> None:
    """Raise `ConfigError` for an output file with another suffix, or that cannot be written."""
    if value is None:
        return
    path = Path(value)
    if path.suffix not in suffixes:
        raise ConfigError(name, value, f"a file that ends in {', '.join(suffixes)}")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(name, value, "a file in a folder that exists and can be written to")


def check_outputs(paths: Sequence[str]) -> None:
    """`check_file` for files of results."""
    for path in paths:
        check_file("output", path, ".json", ".csv", ".svg", ".html")

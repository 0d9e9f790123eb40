"""The command line of `vllm serve`, as far as it differs from ours.

Charter: words. Which options are ours in another spelling, which take a value, or several; what
the others may say is in `foretoken/foreign/`. None of them is in `--help`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from typer import Context
from typer.core import TyperCommand, TyperOption

from foretoken.errors import ConfigError
from foretoken.foreign.engine import ENGINE_OPTIONS
from foretoken.foreign.server import SERVER_OPTIONS
from foretoken.foreign.table import without_foreign

_TABLE = ENGINE_OPTIONS | SERVER_OPTIONS
_OTHER_NAMES = {
    "--uvicorn-log-level": "--log-level", "--shutdown-timeout": "--drain-timeout",
    "--gpu-memory-utilization": "--memory-fraction",
    "-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size", "-q": "--quantization",
    "-dp": "--data-parallel-size", "-dcp": "--decode-context-parallel-size", "-n": "--nnodes",
    "-pcp": "--prefill-context-parallel-size", "-ep": "--enable-expert-parallel",
    "-r": "--node-rank", "-asc": "--api-server-count", "-sc": "--speculative-config",
    "-cc": "--compilation-config", "-O": "--optimization-level",
}  # fmt: skip
_MEANT = {
    "disable_uvicorn_access_log=True": ["--log-level", "warning"],
    "scheduling_policy=priority": ["--allow-priority"],
}
"""What says the same here, whatever else the command line says."""
_KEY = __name__


class ServeCommand(TyperCommand):
    """A command that also takes what `vllm serve` takes."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Put what is not ours aside, for `foreign_options`."""
        line = _Line(args, [param for param in self.params if isinstance(param, TyperOption)])
        ctx.meta[_KEY] = line.foreign
        return super().parse_args(ctx, line.own)


def foreign_options(ctx: Context) -> tuple[dict[str, Any], list[str]]:
    """Of the options that are not ours, those of the engine, and those without effect here.

    Raises:
        ConfigError: one of the others would change something.
    """
    given: dict[str, Any] = ctx.meta[_KEY]
    for name, value in given.items():
        if "." in name:
            option = "--" + name.partition(".")[0].replace("_", "-")
            raise ConfigError(name, value, "left out", f"Write {option} and one JSON object.")
    others = {name: value for name, value in given.items() if name in SERVER_OPTIONS}
    engine = {name: value for name, value in given.items() if name not in others}
    without_foreign(others, SERVER_OPTIONS, ConfigError)
    return engine, [name for name in given if ... in _TABLE[name].harmless]


class _Line:
    """A command line, sorted.

    Words behind the value of an option that takes several are values, too. Where MODEL is nowhere
    else, and no --model, the last of them is MODEL.

    Attributes:
        own: the words that our parser takes.
        foreign: values of the options that a table knows, by their names there.
    """

    def __init__(self, words: Sequence[str], options: Sequence[TyperOption]) -> None:
        self._ours = {name: each for each in options for name in each.opts + each.secondary_opts}
        self._words, self._groups = [*words], list[list[str]]()
        self._has_model, self._more = False, list[list[str]]()
        self._several: str | list[Any] | None = None
        self.foreign = dict[str, Any]()
        self._read()
        if self._more and not self._has_model:
            del self._more[-1][0]
        self.own = [word for group in self._groups for word in group]
        for said, meant in _MEANT.items():
            name, _, value = said.partition("=")
            if str(self.foreign.get(name)) == value:
                del self.foreign[name]
                self.own += meant

    def _read(self) -> None:
        while self._words:
            word = self._words.pop(0)
            if word == "--":
                self._groups.append([word, *self._words])
                break
            if not word.startswith("-") or word == "-":
                self._add_word(word)
                continue
            name, given = _spelled(word)
            self._several = None
            if name in self._ours:
                self._add_ours(name, given)
            elif not self._add_foreign(name, given):
                self._groups.append([word])  # which the parser refuses

    def _add_word(self, word: str) -> None:
        if isinstance(self._several, list):
            self._several.append(_parsed(word))
        elif self._several is not None:
            self._more.append([self._several, word])
            self._groups.append(self._more[-1])
        else:
            self._groups.append([word])
            self._has_model = True

    def _add_ours(self, name: str, given: str | None) -> None:
        option = self._ours[name]
        self._has_model |= name == "--model"
        if not option.is_flag and given is None and self._words:
            given = self._words.pop(0)
        if given is None:
            self._groups.append([name])
        elif option.multiple:
            self._groups += [[name, value] for value in _listed(given)]
            self._several = name
        else:
            self._groups.append([f"{name}={given}"])

    def _add_foreign(self, name: str, given: str | None) -> bool:
        """Take an option that a table knows; whether one does."""
        key = name.removeprefix("--").replace("-", "_")
        whole, positive = key.partition(".")[0], key.removeprefix("no_")
        if whole != key and (whole in _TABLE or "--" + whole.replace("_", "-") in self._ours):
            self.foreign[key] = _parsed(self._value(given))
        elif positive != key and "--" + positive.replace("_", "-") in self._ours:
            pass  # a flag that is off where it is left out
        elif positive != key and _is_flag(positive):
            self.foreign[positive] = False
        elif _is_flag(key):
            if given is None and self._words and self._words[0].lower() in ("true", "false"):
                given = self._words.pop(0)
            self.foreign[key] = given is None or _parsed(given)
        elif key in _TABLE:
            value = _parsed(self._value(given))
            if [] in _TABLE[key].harmless:
                self._several = value = value if isinstance(value, list) else [value]
            self.foreign[key] = value
        else:
            return False
        return True

    def _value(self, given: str | None) -> str:
        """What was given, or the next word."""
        if given is None and self._words and not self._words[0].startswith("--"):
            return self._words.pop(0)
        return given or ""


def _is_flag(name: str) -> bool:
    return name in _TABLE and any(isinstance(value, bool) for value in _TABLE[name].harmless)


def _spelled(word: str) -> tuple[str, str | None]:
    """An option as we spell it, and what it is said to be in the same word."""
    name, has_value, value = word.partition("=")
    if name.startswith("-O") and len(name) > 2:
        name, has_value, value = "-O", "=", name.removeprefix("-O")
    if name.startswith("--"):
        name = "--" + name.removeprefix("--").replace("_", "-")
    return _OTHER_NAMES.get(name, name), value if has_value else None


def _listed(text: str) -> list[str]:
    """One value, or those of a list in JSON."""
    values = _parsed(text) if text.startswith("[") else None
    return list(map(str, values)) if isinstance(values, list) else [text]


def _parsed(text: str) -> Any:
    """A value as Python has it."""
    try:
        return {"None": None, "True": True, "False": False}[text]
    except KeyError:
        pass
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text

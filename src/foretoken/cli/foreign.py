"""The command line of `vllm serve`, where it differs from ours.

Charter: parsing words: which options are ours in another spelling, and which take one value or
several. `foretoken/foreign.py` has the values that other options may have. `--help` shows none of
them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, cast

from typer import Context
from typer.core import TyperCommand, TyperOption

from foretoken.errors import ConfigError
from foretoken.foreign import ENGINE_OPTIONS, SERVER_OPTIONS, without_foreign

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
_SIZES = ("--max-model-len", "--max-num-batched-tokens", "--max-num-seqs")
_TIMES = {"k": 1000, "K": 2**10, "m": 10**6, "M": 2**20}
_MEANT = {
    "disable_uvicorn_access_log=True": ["--log-level", "warning"],
    "scheduling_policy=priority": ["--allow-priority"],
}
"""Options of vLLM that mean the same as these words of ours."""
_KEY = __name__


class ServeCommand(TyperCommand):
    """A command that also takes what `vllm serve` takes."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Set options that are not ours aside, for `foreign_options`."""
        line = _Line(args, [param for param in self.params if isinstance(param, TyperOption)])
        if line.fault:
            ctx.fail(line.fault)
        ctx.meta[_KEY] = line.foreign
        return super().parse_args(ctx, line.own)


def foreign_options(ctx: Context) -> tuple[dict[str, Any], list[str]]:
    """The engine's options among those that are not ours, and the names of those without effect.

    Raises:
        ConfigError: an option would have an effect that is not supported.
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
    """A command line, sorted into our options and others.

    After an option that takes several values, further words are values, too, unless the first was
    joined to the option by `=`. If MODEL is nowhere else and there is no --model, the last of these
    words is MODEL. After --api-key this is an error instead of a guess: a key taken for MODEL would
    be shown, and sent to the hub.

    Attributes:
        own: the words for our parser.
        foreign: values of the options in `foretoken/foreign.py`, by their names there.
        fault: what is wrong with the line, or empty.
    """

    def __init__(self, words: Sequence[str], options: Sequence[TyperOption]) -> None:
        self._ours = {name: each for each in options for name in each.opts + each.secondary_opts}
        self._words, self._groups = [*words], list[list[str]]()
        self._has_model, self._several = False, cast(str | list[Any] | None, None)
        self._last = list[Any](), 0, ""  # the list with the last of several words, its index, it
        self.foreign, self.fault = dict[str, Any](), ""
        self._read()
        if not self._has_model:
            values, start, word = self._last
            del values[start:]
            self._groups += [[word]] if word else []
        for said, meant in _MEANT.items():
            name, _, value = said.partition("=")
            if str(self.foreign.get(name)) == value:
                del self.foreign[name]
                self._groups.append(meant)
        self.own = [word for group in self._groups for word in group] + self._words

    def _read(self) -> None:
        """Sort the words before `--`; that and the rest, which is MODEL, stay in `_words`."""
        while self._words:
            if self._words[0] == "--":
                self._has_model |= len(self._words) > 1
                break
            word = self._words.pop(0)
            if not word.startswith("-") or word == "-":
                self._add_word(word)
                continue
            name, given = _spelled(word)
            self._several = None
            if name in self._ours:
                self._add_ours(name, given)
            elif not self._add_foreign(name, given):
                self._groups.append([word])  # the parser refuses it

    def _add_word(self, word: str) -> None:
        if self._several is None:
            self._groups.append([word])
            self._has_model = True
        elif isinstance(self._several, list):
            self._last = self._several, len(self._several), word
            self._several.append(_parsed(word))
        else:
            if self._several == "--api-key" and not self._has_model:
                words = "Several words behind --api-key"
                self.fault = f"{words}: name the model first, or repeat --api-key."
            self._groups.append([self._several, word])
            self._last = self._groups[-1], 0, word

    def _add_ours(self, name: str, given: str | None) -> None:
        option, is_joined = self._ours[name], given is not None
        self._has_model |= name == "--model"
        if not option.is_flag and given is None and self._words:
            given = self._words.pop(0)
        if given is None and not option.is_flag:
            self.fault = f"Option '{name}' requires an argument."
        elif given is None:
            self._groups.append([name])
        elif option.multiple:
            self._groups += [[name, value] for value in _listed(given)]
            self._several = None if is_joined else name
        elif not (name in _SIZES and given in ("auto", "-1")):  # both mean the engine's default
            self._groups.append([f"{name}={_digits(given) if name in _SIZES else given}"])

    def _add_foreign(self, name: str, given: str | None) -> bool:
        """Take an option of the tables; False if it is not in them."""
        key = name.removeprefix("--").replace("-", "_")
        whole = key.partition(".")[0]
        if whole != key and (whole in _TABLE or "--" + whole.replace("_", "-") in self._ours):
            self.foreign[key] = _parsed(self._value(given))
        elif key.startswith("no_") and given is None:
            return self._turn_off(key.removeprefix("no_"))
        elif _is_flag(key):
            if given is None and self._words and self._words[0].lower() in ("true", "false"):
                given = self._words.pop(0)
            self.foreign[key] = given is None or _parsed(given)
        elif key in _TABLE:
            value = _parsed(self._value(given))
            if [] in _TABLE[key].harmless and value is not None:
                value = value if isinstance(value, list) else [value]
                self._several = value if given is None else None
            self.foreign[key] = value
        else:
            return False
        return True

    def _turn_off(self, key: str) -> bool:
        """Take `--no-KEY`; False if KEY is not a flag."""
        option = self._ours.get("--" + key.replace("_", "-"))
        if option is not None and option.is_flag:  # off when it is left out
            self._groups = [group for group in self._groups if group[0] not in option.opts]
        elif _is_flag(key):
            self.foreign[key] = False
        else:
            return False
        return True

    def _value(self, given: str | None) -> str:
        if given is None and self._words and not self._words[0].startswith("--"):
            return self._words.pop(0)
        return given or ""


def _is_flag(name: str) -> bool:
    return name in _TABLE and any(isinstance(value, bool) for value in _TABLE[name].harmless)


def _spelled(word: str) -> tuple[str, str | None]:
    """The name of an option in our spelling, and the value joined to it, if any."""
    name, has_value, value = word.partition("=")
    if name.startswith("-O") and len(name) > 2:
        name, has_value, value = "-O", "=", name.removeprefix("-O")
    if name.startswith("--"):
        name = "--" + name.removeprefix("--").replace("_", "-")
    return _OTHER_NAMES.get(name, name), value if has_value else None


def _digits(text: str) -> str:
    """A size as vLLM takes it: `8k` is 8000, `8K` is 8192, `25.6k` is 25600."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM])", text)
    whole = float(found[1]) * _TIMES[found[2]] if found else 0.0
    return str(int(whole)) if whole and whole.is_integer() else text


def _listed(text: str) -> list[str]:
    """The values of a JSON list; any other text is one value."""
    values = _parsed(text) if text.startswith("[") else None
    return list(map(str, values)) if isinstance(values, list) else [text]


def _parsed(text: str) -> Any:
    """A word as a Python value: None, a bool, JSON, or else the text itself."""
    try:
        return {"None": None, "True": True, "False": False}[text]
    except KeyError:
        pass
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text

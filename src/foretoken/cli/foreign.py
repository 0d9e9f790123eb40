"""The command line of `vllm serve`, where it differs from ours.

Some options of vLLM are ours in another spelling, and some options take several values. The values
of options that only vLLM has are in `foretoken/foreign.py`. `--help` shows no option of vLLM.
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
_OUR_NAMES = {
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
# Options of vLLM, and our words with the same meaning.
_EQUIVALENTS = {
    "disable_uvicorn_access_log=True": ["--log-level", "warning"],
    "scheduling_policy=priority": ["--allow-priority"],
}
_META_KEY = __name__  # in `Context.meta`


class ServeCommand(TyperCommand):
    """A command that also takes what `vllm serve` takes."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Parse our options; keep values of options that only vLLM has for `foreign_options`."""
        line = _Line(args, [param for param in self.params if isinstance(param, TyperOption)])
        if line.error:
            ctx.fail(line.error)
        ctx.meta[_META_KEY] = line.foreign
        return super().parse_args(ctx, line.own)


def foreign_options(ctx: Context) -> tuple[dict[str, Any], list[str]]:
    """Options that only vLLM has: values for the engine to check, and names without effect here.

    Raises:
        ConfigError: an option would have an effect that is not supported.
    """
    values: dict[str, Any] = ctx.meta[_META_KEY]
    for name, value in values.items():
        if "." in name:
            option = "--" + name.partition(".")[0].replace("_", "-")
            raise ConfigError(name, value, "left out", f"Write {option} and one JSON object.")
    server_values = {name: value for name, value in values.items() if name in SERVER_OPTIONS}
    engine_values = {name: value for name, value in values.items() if name not in server_values}
    without_foreign(server_values, SERVER_OPTIONS, ConfigError)
    without_effect = [name for name in values if ... in _TABLE[name].harmless]  # `...`: any value
    return engine_values, without_effect


class _Line:
    """A command line, split into our options and the options that only vLLM has.

    After an option that takes several values, further words are values, too, unless the first value
    was joined to the option by `=`. If nothing else names the model, the last of these words is
    MODEL. After --api-key such a line is an error instead: a key mistaken for MODEL would be shown,
    and sent to the hub.

    Attributes:
        own: the words for our parser.
        foreign: values of vLLM's options, by their names in `foretoken/foreign.py`.
        error: what is wrong with the line; "" if it is valid.
    """

    def __init__(self, words: Sequence[str], options: Sequence[TyperOption]) -> None:
        self._our_options = {name: o for o in options for name in o.opts + o.secondary_opts}
        self._words = [*words]  # not read yet
        self._groups = list[list[str]]()  # each option of ours with its values
        self._has_model = False
        # The option that takes further words: the name of our option, or the values of vLLM's.
        self._open_option = cast(str | list[Any] | None, None)
        # The last further word: a list, the index at which the list is cut if the word is MODEL,
        # and the word.
        self._model_candidate = list[Any](), 0, ""
        self.foreign, self.error = dict[str, Any](), ""
        self._read()
        if not self._has_model:
            values, start, word = self._model_candidate
            del values[start:]
            self._groups += [[word]] if word else []
        for vllm_option, our_words in _EQUIVALENTS.items():
            name, _, value = vllm_option.partition("=")
            if str(self.foreign.get(name)) == value:
                del self.foreign[name]
                self._groups.append(our_words)
        self.own = [word for group in self._groups for word in group] + self._words

    def _read(self) -> None:
        """Read the words before `--`; the rest stays in `_words`, unchanged for our parser."""
        while self._words:
            if self._words[0] == "--":
                self._has_model |= len(self._words) > 1
                break
            word = self._words.pop(0)
            if not word.startswith("-") or word == "-":
                self._add_word(word)
                continue
            name, value = _split_option(word)
            self._open_option = None
            if name in self._our_options:
                self._add_ours(name, value)
            elif not self._add_foreign(name, value):
                self._groups.append([word])  # the parser refuses it

    def _add_word(self, word: str) -> None:
        """Take a word that is no option: a further value of the previous option, or MODEL."""
        if self._open_option is None:
            self._groups.append([word])
            self._has_model = True
        elif isinstance(self._open_option, list):
            self._model_candidate = self._open_option, len(self._open_option), word
            self._open_option.append(_parse_value(word))
        else:
            if self._open_option == "--api-key" and not self._has_model:
                words = "Several words after --api-key"
                self.error = f"{words}: name the model first, or repeat --api-key."
            self._groups.append([self._open_option, word])
            self._model_candidate = self._groups[-1], 0, word

    def _add_ours(self, name: str, value: str | None) -> None:
        """Take an option of ours; its value is the one joined by `=`, or the next word."""
        option, is_joined = self._our_options[name], value is not None
        self._has_model |= name == "--model"
        if not option.is_flag and value is None and self._words:
            value = self._words.pop(0)
        if value is None and not option.is_flag:
            self.error = f"Option '{name}' requires an argument."
        elif value is None:
            self._groups.append([name])
        elif option.multiple:
            self._groups += [[name, item] for item in _list_values(value)]
            self._open_option = None if is_joined else name
        elif not (name in _SIZES and value in ("auto", "-1")):  # both mean the engine's default
            self._groups.append([f"{name}={_digits(value) if name in _SIZES else value}"])

    def _add_foreign(self, name: str, joined_value: str | None) -> bool:
        """Take an option of vLLM, with any value joined to it by `=`; False if vLLM lacks it."""
        key = name.removeprefix("--").replace("-", "_")
        table_key = key.partition(".")[0]  # `--option.field VALUE` sets one field of an option
        option = "--" + table_key.replace("_", "-")
        if table_key != key and (table_key in _TABLE or option in self._our_options):
            self.foreign[key] = _parse_value(self._value(joined_value))
        elif key.startswith("no_") and joined_value is None:
            return self._turn_off(key.removeprefix("no_"))
        elif _is_flag(key):
            if joined_value is None and self._words and self._words[0].lower() in ("true", "false"):
                joined_value = self._words.pop(0)
            self.foreign[key] = joined_value is None or _parse_value(joined_value)
        elif key in _TABLE:
            value = _parse_value(self._value(joined_value))
            if [] in _TABLE[key].harmless and value is not None:
                value = value if isinstance(value, list) else [value]
                self._open_option = value if joined_value is None else None
            self.foreign[key] = value
        else:
            return False
        return True

    def _turn_off(self, key: str) -> bool:
        """Take `--no-KEY`; False if KEY is not a flag."""
        option = self._our_options.get("--" + key.replace("_", "-"))
        if option is not None and option.is_flag:  # a flag is off unless it is given
            self._groups = [group for group in self._groups if group[0] not in option.opts]
        elif _is_flag(key):
            self.foreign[key] = False
        else:
            return False
        return True

    def _value(self, joined_value: str | None) -> str:
        """The value joined to an option, or the next word; "" if the next word is an option."""
        if joined_value is None and self._words and not self._words[0].startswith("--"):
            return self._words.pop(0)
        return joined_value or ""


def _is_flag(name: str) -> bool:
    return name in _TABLE and any(isinstance(value, bool) for value in _TABLE[name].harmless)


def _split_option(word: str) -> tuple[str, str | None]:
    """The name of an option in our spelling, and the value joined to it, or None."""
    name, has_value, value = word.partition("=")
    if name.startswith("-O") and len(name) > 2:
        name, has_value, value = "-O", "=", name.removeprefix("-O")
    if name.startswith("--"):
        name = "--" + name.removeprefix("--").replace("_", "-")
    return _OUR_NAMES.get(name, name), value if has_value else None


def _digits(text: str) -> str:
    """A size as vLLM takes it: `8k` is 8000, `8K` is 8192, `25.6k` is 25600."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM])", text)
    size = float(match[1]) * _TIMES[match[2]] if match else 0.0
    return str(int(size)) if size and size.is_integer() else text


def _list_values(text: str) -> list[str]:
    """The values of a JSON list; any other text is one value."""
    values = _parse_value(text) if text.startswith("[") else None
    return list(map(str, values)) if isinstance(values, list) else [text]


def _parse_value(text: str) -> Any:
    """A word as a Python value: None, a bool, JSON, or else the text itself."""
    try:
        return {"None": None, "True": True, "False": False}[text]
    except KeyError:
        pass
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text

"""Command-line options made from fields of dataclasses: name, type, default and documentation."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Set
from dataclasses import MISSING, Field, fields
from typing import Annotated, Any, TypeVar

import typer
from typer.models import ArgumentInfo

from foretoken.cli.terminal import as_utf8
from foretoken.config import EngineConfig
from foretoken.errors import RequestError
from foretoken.sampling.params import SamplingParams

NOT_OPTIONS: dict[type, set[str]] = {
    # All requests of a command draft by `--speculative-config`, with equal priority.
    SamplingParams: {"num_speculative_tokens", "drafter", "rejection_sample_method", "priority"},
    # `--seed` fills the field of `SamplingParams`. A single request does not wait, and states all
    # of its parameters.
    EngineConfig: {"speculative_config", "seed", "max_num_waiting", "generation_config"},
}
SPECULATION: dict[str, Any] = {
    "speculative_config": Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help='How to draft, for example \'{"method": "ngram", "num_speculative_tokens": 4}\'. '
            "Default: tiny-python drafts with its own draft model, other models decode plainly.",
        ),
    ],
    "suffix_corpus": Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Draft by suffix, also from this text. In place of --speculative-config "
            '\'{"method": "suffix", "suffix_corpus": FILE}\'.',
        ),
    ],
    "no_speculation": Annotated[
        bool, typer.Option("--no-speculation", help="Decode one token per pass.")
    ],
}
"""Options that all fill the field `speculative_config` of `EngineConfig`."""
_NONE = frozenset[str]()
_Command = TypeVar("_Command", bound=Callable[..., None])


def with_fields(
    *own: type,
    engine: bool = True,
    sampling: bool = True,
    without: Set[str] = _NONE,
    also: Set[str] = _NONE,
    **defaults: Any,
) -> Callable[[_Command], _Command]:
    """Give a command the options of `EngineConfig`, `SPECULATION` and `SamplingParams`.

    The command gets their values in its `**options`. An option that is not given has the field's
    default, or None if the field has no default or an empty one.

    Args:
        own: further dataclasses, with options that `--help` shows first.
        engine: False: only the options of `own`.
        sampling: False: no options of `SamplingParams`.
        without: fields that do not become options.
        also: fields of `NOT_OPTIONS` that do become options.
        defaults: defaults that differ from the fields' defaults.
    """

    def decorate(command: _Command) -> _Command:
        parameters = list(inspect.signature(command, eval_str=True).parameters.values())
        declared = [p.replace(kind=p.KEYWORD_ONLY) for p in parameters[:-1]]  # without `**options`
        context = [p for p in declared if p.annotation is typer.Context]
        declared = [p for p in declared if p not in context]
        arguments = [p for p in declared if isinstance(p.annotation.__metadata__[0], ArgumentInfo)]
        *command_options, debug = [p for p in declared if p not in arguments]
        own_options = [p for cls in own for p in _parameters(cls, defaults)]
        ordered = [*arguments, *own_options, *command_options, debug]
        if engine:
            place = len(command_options) - any(p.name == "as_json" for p in command_options)
            command_options[place:place] = [
                _parameter(name, False if name == "no_speculation" else None, annotation)
                for name, annotation in SPECULATION.items()
                if name not in without
            ]
            model, *engine_options = _parameters(EngineConfig, defaults, without, also)
            params = _parameters(SamplingParams, defaults, without) if sampling else []
            ordered = [*arguments, model, *own_options, *command_options, *params]
            ordered += [*engine_options, debug]
        signature = inspect.Signature([*context, *ordered])
        command.__signature__ = signature  # type: ignore[attr-defined]
        return command

    return decorate


def fields_given(cls: type, options: dict[str, Any], also: Set[str] = _NONE) -> dict[str, Any]:
    """The values of a dataclass's fields that the options of a command give, by field name.

    Raises:
        RequestError: a text is not UTF-8, or a map is no JSON object with the right keys.
    """
    values = {}
    for field in _option_fields(cls, also):
        value = options.get(field.name)
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            value = [as_utf8(field.name, item) for item in value]
        elif value is not None and _is_text(field):
            value = as_utf8(field.name, value)
        if value is not None:
            values[field.name] = _parse_map(field, value) if _is_map(field) else value
    return values


def _option_fields(cls: Any, also: Set[str]) -> list[Field[Any]]:
    not_options = NOT_OPTIONS.get(cls, set()) - also
    return [field for field in fields(cls) if field.name not in not_options]


def _parameters(
    cls: Any, defaults: dict[str, Any], without: Set[str] = _NONE, also: Set[str] = _NONE
) -> list[inspect.Parameter]:
    """A parameter for each field of a dataclass that becomes an option; see `with_fields`."""
    texts = _field_texts(cls)
    parameters = []
    for field in _option_fields(cls, also):
        if field.name not in without:
            # Typer cannot show an empty list as a default: the option is None instead.
            default = None if field.default in (MISSING, ()) else field.default
            annotation = _annotation(field, _help(field, texts.get(field.name, "")))
            parameters.append(_parameter(field.name, defaults.get(field.name, default), annotation))
    return parameters


def _parameter(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def _field_texts(cls: type) -> dict[str, str]:
    """The text of each field under `Attributes:` in a class's docstring."""
    section = (inspect.getdoc(cls) or "").partition("Attributes:\n")[2]
    texts = {}
    for names, text in re.findall(r"^    ([\w, ]+): (.+(?:\n {8}.+)*)", section, re.MULTILINE):
        texts.update(dict.fromkeys(names.split(", "), " ".join(text.split())))
    return texts


def _help(field: Field[Any], text: str) -> str:
    """A field's text as help, with "left out" for None, the value of an option left out."""
    if field.default is not None:  # an option left out has the default, which is not None
        text = re.sub(r"; None: [^.;]*", "", text)
    text = re.sub(r"(?<=\. )None\b", "Left out", text[:1].upper() + text[1:])
    return re.sub(r"\bNone\b", "left out", text)


def _annotation(field: Field[Any], text: str) -> Any:
    """The annotation of a field's option for Typer, from the text of the field's annotation."""
    option = "--" + field.name.replace("_", "-")
    names = re.findall(r"\b(str|int|float|bool)\b", str(field.type))
    if _is_map(field):
        return Annotated[str | None, typer.Option(option, metavar="JSON", help=text)]
    if _is_text(field):
        return Annotated[str | None, typer.Option(option, help=text)]
    if re.search(r"(list|tuple|Sequence)\[", str(field.type)):
        items = list[int] if names[0] == "int" else list[str]
        return Annotated[items | None, typer.Option(option, help=f"{text} May be repeated.")]
    value_type = {"int": int, "float": float, "bool": bool}.get(names[0], str)
    if value_type is bool and field.default is False:
        return Annotated[bool, typer.Option(option, help=text)]  # no --no-option
    return Annotated[value_type | None, typer.Option(help=text)]


def _is_map(field: Field[Any]) -> bool:
    return "Mapping[" in str(field.type)


def _is_text(field: Field[Any]) -> bool:
    """Whether a field is a text or token ids, of which a command line takes only a text."""
    return str(field.type).startswith("str | Sequence")


def _parse_map(field: Field[Any], text: str) -> dict[Any, Any]:
    """A JSON object as a dict; keys that are token ids become integers."""
    by_token = "Mapping[int" in str(field.type)
    try:
        return {int(key) if by_token else key: value for key, value in json.loads(text).items()}
    except (ValueError, AttributeError, RecursionError):
        example = "'{\"42\": -5.0}'" if by_token else '\'{"regex": "[a-z]+"}\''
        bound = f"a JSON object{' of token ids' * by_token}, such as {example}"
        raise RequestError(field.name, text, bound) from None

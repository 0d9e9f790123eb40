"""`SamplingParams.structured_outputs` as users write it: one of vLLM's keys, checked, as texts.

Charter: what can be said without a tokenizer. Whether a schema, regex or grammar means anything is
known when it is compiled (`grammar.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from foretoken.errors import RequestError, check_known_keys
from foretoken.sampling.schemas import as_text

MOST_CHARACTERS = 2**18
"""Of a schema or grammar: 5 000 required properties (110 000 characters) compile in 0.2 s."""

FIELD = "structured_outputs"
WHITE_SPACE = ("disable_any_whitespace", "whitespace_pattern")
"""Options beside what the text must be."""
ANY_OBJECT = {"type": "object"}
"""The schema of `json_object`."""


def read_structured_outputs(given: Any) -> dict[str, Any]:
    """A checked copy that shares nothing with what was given, with one key.

    `json` is the text of a schema in it, which says how its white space is: there is none unless
    the schema or an option says otherwise.

    Raises:
        RequestError: it names the key at fault.
    """
    if not isinstance(given, Mapping):
        raise RequestError(FIELD, given, f"a map with one of the keys {', '.join(_READ)}")
    check_known_keys(FIELD, given, (*_READ, *WHITE_SPACE, *_ABSENT), RequestError)
    given = {key: value for key, value in given.items() if value is not None}
    for name, instead in _ABSENT.items():
        if (absent := given.pop(name, False)) is not False:
            raise RequestError(f"{FIELD}.{name}", absent, "left out", instead)
    items = [(key, value) for key, value in given.items() if key in _READ]
    if len(items) != 1:
        raise RequestError(FIELD, given, f"a map with exactly one of {', '.join(_READ)}")
    [(key, value)] = items
    name, white_space = f"{FIELD}.{key}", _white_space(key, given)
    read = _schema(name, value, white_space) if key == "json" else _READ[key](name, value)
    if key == "json_object" and white_space:
        key, read = "json", _schema(name, ANY_OBJECT, white_space)
    size = sum(map(len, read)) if isinstance(read, (str, list)) else 0
    if size > MOST_CHARACTERS:
        bound = f"at most {MOST_CHARACTERS} characters long"
        raise RequestError(f"{FIELD}.{key}", f"{size} characters", bound)
    return {key: read}


def _white_space(kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's options, as llguidance has them; those that change nothing may stand anywhere."""
    found: dict[str, Any] = {}
    if (compact := given.get("disable_any_whitespace")) is not None:
        if not isinstance(compact, bool):
            raise RequestError(f"{FIELD}.disable_any_whitespace", compact, "true or false")
        found["whitespace_flexible"] = not compact
    if (pattern := given.get("whitespace_pattern")) is not None:
        name = f"{FIELD}.whitespace_pattern"
        if compact or not kind.startswith("json"):
            bound = "left out beside " + ("`disable_any_whitespace`: true" if compact else kind)
            raise RequestError(name, pattern, bound)
        found["whitespace_pattern"] = _text(name, pattern)
    return found if kind.startswith("json") else {}


def _schema(name: str, value: Any, white_space: Mapping[str, Any]) -> str:
    try:
        if isinstance(value, str):
            value = json.loads(value)
        if not isinstance(value, dict):
            raise RequestError(name, value, "a JSON schema: an object, or its JSON text")
        own = value.get("x-guidance", {})
        if isinstance(own, Mapping) and white_space:  # what is asked for beside the schema wins
            value = {**value, "x-guidance": {**own, **white_space}}
        return _text(name, as_text(name, value))
    except RequestError:
        raise
    except (TypeError, ValueError) as error:  # its message says where
        raise RequestError(name, value, f"a JSON schema: {error}") from None
    except RecursionError:
        raise RequestError(name, "...", "a JSON schema that is nested less deep") from None


def _true(name: str, value: Any) -> bool:
    if value is not True:
        raise RequestError(name, value, "true, or left out")
    return True


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise RequestError(name, value, "a non-empty text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        bound = f"text, without the lone surrogate at index {error.start}"
        raise RequestError(name, value[error.start : error.end], bound) from None
    return value


def _choices(name: str, value: Any) -> list[str]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise RequestError(name, value, "a non-empty list of texts")
    return [_text(f"{name}[{i}]", choice) for i, choice in enumerate(value)]


_READ: dict[str, Callable[..., Any]] = {
    "json": _schema,
    "json_object": _true,
    "regex": _text,
    "choice": _choices,
    "grammar": _text,
}
_ABSENT = {
    "disable_additional_properties": "Write `additionalProperties: false` into the schema.",
    "structural_tag": "Write a `grammar`.",
}

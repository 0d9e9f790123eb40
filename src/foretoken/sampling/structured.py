"""`SamplingParams.structured_outputs` as users write it: one of vLLM's keys, checked, as texts.

Charter: what can be said without a tokenizer. Whether a schema, regex or grammar means anything is
known when it is compiled (`grammar.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from foretoken.errors import RequestError, check_known_keys

MOST_CHARACTERS = 2**18
"""Of a schema or grammar: 5 000 required properties (110 000 characters) compile in 0.2 s."""

FIELD = "structured_outputs"


def read_structured_outputs(given: Any) -> dict[str, Any]:
    """A checked copy that shares nothing with what was given: `json` is a JSON text in it.

    Raises:
        RequestError: it names the key at fault.
    """
    if not isinstance(given, Mapping):
        raise RequestError(FIELD, given, f"a map with one of the keys {', '.join(_READ)}")
    check_known_keys(FIELD, given, _READ, RequestError)
    items = [(key, value) for key, value in given.items() if value is not None]
    if len(items) != 1:
        found = [key for key, _ in items]
        raise RequestError(FIELD, found, f"a map with exactly one of {', '.join(_READ)}")
    [(key, value)] = items
    read = _READ[key](f"{FIELD}.{key}", value)
    size = sum(map(len, read)) if isinstance(read, (str, list)) else 0
    if size > MOST_CHARACTERS:
        bound = f"at most {MOST_CHARACTERS} characters long"
        raise RequestError(f"{FIELD}.{key}", f"{size} characters", bound)
    return {key: read}


def _schema(name: str, value: Any) -> str:
    try:
        if isinstance(value, str):
            value = json.loads(value)
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:  # its message says where
        raise RequestError(name, value, f"a JSON schema: {error}") from None
    except RecursionError:
        raise RequestError(name, "...", "a JSON schema that is nested less deep") from None
    if not isinstance(value, dict):
        raise RequestError(name, value, "a JSON schema: an object, or its JSON text")
    return _text(name, text)


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


_READ: dict[str, Callable[[str, Any], Any]] = {
    "json": _schema,
    "json_object": _true,
    "regex": _text,
    "choice": _choices,
    "grammar": _text,
}

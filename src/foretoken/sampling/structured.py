"""`SamplingParams.structured_outputs` as users write it: one of vLLM's keys, checked.

Charter: checks that need no tokenizer. Whether a schema, regex or grammar is valid is found when it
is compiled (`grammar.py`).

JSON schemas are rewritten for llguidance: compact by default, without keywords that it ignores.
llguidance refuses keywords of the schema's draft that no grammar can express, but silently ignores
those of other drafts, such as `dependentRequired` if `$schema` names draft 7. Here all of them are
refused, whatever the draft, unless they change nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from foretoken.errors import RequestError, check_known_keys

MOST_CHARACTERS = 2**18
"""In a schema or grammar; 5 000 required properties (110 000 characters) compile in 0.2 s."""

FIELD = "structured_outputs"
WHITE_SPACE = ("disable_any_whitespace", "whitespace_pattern")
"""Options that may stand next to the one key."""
ANY_OBJECT = {"type": "object"}
"""The schema of `json_object`."""


def read_structured_outputs(given: Any) -> dict[str, Any]:
    """A checked, independent copy with exactly one key.

    Its `json` is a schema's text, which states the white space: none unless the schema or an option
    allows it.

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
    """vLLM's options as llguidance's; those that change nothing are allowed with any key."""
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
        if isinstance(own, Mapping) and white_space:  # options outside the schema win
            value = {**value, "x-guidance": {**own, **white_space}}
        return _text(name, as_text(name, value))
    except RequestError:
        raise
    except (TypeError, ValueError) as error:  # its message names the place
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

_IGNORED: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "propertyNames": (True, {}, {"type": "string"}),
    "contains": (),
    "minContains": (),
    "maxContains": (),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "if": (),
    "not": (False,),
    "$dynamicRef": (),
    "$recursiveRef": (),
    "divisibleBy": (),
    "extends": (),
    "disallow": (),
}
"""Keywords that llguidance lacks, with the values at which each changes nothing."""
# Equal in meaning unless the schema has a keyword of `_IN_PLACE`, which may evaluate members, too.
_SAME = {"unevaluatedProperties": "additionalProperties", "unevaluatedItems": "items"}
_IN_PLACE = {"allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "$recursiveRef", "if", "not",
             "dependentSchemas"}  # fmt: skip
_ANY_TEXT = ("path", "file-path", "directory-path", "password", "binary")
"""Formats that any text satisfies; llguidance refuses formats that it does not know."""
_OF_MAPS = ("properties", "patternProperties")
_OF_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_OF_ONE = ("items", "additionalItems", "additionalProperties")
_DEFINED, _UNUSED = ("$defs", "definitions"), ("then", "else", "contentSchema")
"""Keywords with schemas that have no effect unless something refers to them."""
_GUIDANCE = "x-guidance"  # where llguidance reads options in a schema


def as_text(name: str, schema: Mapping[str, Any], **white_space: Any) -> str:
    """A schema's text for llguidance, alone or within a grammar.

    Args:
        name: of the schema, for errors.
        white_space: llguidance's options for what the schema's own `x-guidance` leaves open; by
            default no white space.

    Raises:
        RequestError: a keyword cannot be expressed in a grammar; it is named with its place.
        ValueError, TypeError, RecursionError: the schema is not JSON.
    """
    root = json.loads(json.dumps(schema, ensure_ascii=False, allow_nan=False))
    own = root.get(_GUIDANCE, {})
    if not isinstance(own, dict):
        raise RequestError(f"{name}.{_GUIDANCE}", own, "an object of llguidance's options")
    root[_GUIDANCE] = own = {"whitespace_flexible": False, **white_space, **own}
    if own.get("lenient") is not True and not _mend_all(name, root):
        _mend_all(name, root, with_defined=True)
    return json.dumps(root, ensure_ascii=False)


def _mend_all(name: str, root: dict[str, Any], *, with_defined: bool = False) -> bool:
    """Mend all schemas that the root leads to; `with_defined` also definitions without a known use.

    Returns False if there are references by name, which may lead to any definition.
    """
    seen, left, is_all = set[int](), [(name, root)], True
    while left:
        place, part = left.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        _mend(place, part)
        left += _parts(place, part, with_defined=with_defined)
        if isinstance(reference := part.get("$ref"), str):
            left.append(_referred(name, reference, root))
            is_all &= left[-1][1] is not None
        if part is not root:  # pointers within a part with an id start at that part
            is_all &= not {"$id", "id"} & part.keys()
    return is_all


def _mend(place: str, schema: dict[str, Any]) -> None:
    """Remove keywords that llguidance lacks if they change nothing; refuse the others."""
    for key, harmless in _IGNORED.items():
        if key not in schema:
            continue
        value, same = schema.pop(key), _SAME.get(key)
        if any(value == one and type(value) is type(one) for one in harmless):
            continue
        if same is None or _IN_PLACE & schema.keys():
            raise RequestError(f"{place}.{key}", value, "left out: no grammar here can hold it")
        is_tuple = same == "items" and isinstance(schema.get(same), list)
        schema.setdefault("additionalItems" if is_tuple else same, value)
    least = schema.get("minProperties", 0)
    named = max(1, len(schema.get("required", ())))
    if isinstance(least, int) and least > named and _has_open_keys(schema):
        bound = f"at most {named} (1, or as many as are `required`): an open key may come twice"
        raise RequestError(f"{place}.minProperties", least, bound)
    if schema.get("format") in _ANY_TEXT:
        del schema["format"]


def _has_open_keys(schema: Mapping[str, Any]) -> bool:
    """Whether unnamed keys may occur; a grammar cannot remember which ones already have."""
    return bool(schema.get("patternProperties")) or schema.get("additionalProperties") is not False


def _parts(place: str, schema: dict[str, Any], *, with_defined: bool) -> Iterator[tuple[str, Any]]:
    """The schemas within a schema; unused ones, such as definitions, only `with_defined`."""
    of_maps = (*_OF_MAPS, *_DEFINED) if with_defined else _OF_MAPS
    for key in of_maps:
        if isinstance(named := schema.get(key), dict):
            yield from ((f"{place}.{key}.{name}", part) for name, part in named.items())
    for key in _OF_LISTS:
        if isinstance(listed := schema.get(key), list):
            yield from ((f"{place}.{key}[{i}]", part) for i, part in enumerate(listed))
    of_one = (*_OF_ONE, *_UNUSED) if with_defined else _OF_ONE
    yield from ((f"{place}.{key}", schema.get(key)) for key in of_one)


def _referred(name: str, reference: str, root: dict[str, Any]) -> tuple[str, Any]:
    """A JSON pointer's place and target; the target is None if there is none, or no pointer."""
    head, *steps = unquote(reference).split("/")
    found: Any = root if head == "#" else None
    for step in steps:
        step = step.replace("~1", "/").replace("~0", "~")
        try:
            found = found[int(step)] if isinstance(found, list) else found[step]
        except (LookupError, TypeError, ValueError):
            found = None
    return ".".join((name, *steps)), found

"""Checks of `SamplingParams.structured_outputs` that need no tokenizer. A bad regex or grammar is
found later, when it is compiled (`grammar.py`).

JSON schemas are rewritten for llguidance: compact by default, and without keywords that llguidance
lacks. llguidance itself refuses a keyword that it lacks only if the keyword belongs to the version
of JSON Schema that `$schema` names. It silently ignores such keywords of other versions, for
example `dependentRequired` under draft 7. Here all keywords that llguidance lacks are refused,
unless they change nothing or an equivalent keyword can replace them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from foretoken.errors import RequestError, check_known_keys

MOST_CHARACTERS = 2**18
"""Limit of a schema or grammar. 5 000 required properties (110 000 characters) compile in 0.2 s."""

FIELD = "structured_outputs"
WHITE_SPACE = ("disable_any_whitespace", "whitespace_pattern")  # options next to the one key
ANY_OBJECT = {"type": "object"}
"""The schema of `json_object`."""


def read_structured_outputs(outputs: Any) -> dict[str, Any]:
    """A checked, independent copy with exactly one key; `RequestError` for a bad key or value. The
    value of `json` becomes the text of a schema, without white space unless `outputs` allow it."""
    if not isinstance(outputs, Mapping):
        raise RequestError(FIELD, outputs, f"a map with one of the keys {', '.join(_CHECKS)}")
    check_known_keys(FIELD, outputs, (*_CHECKS, *WHITE_SPACE, *_UNSUPPORTED), RequestError)
    outputs = {key: value for key, value in outputs.items() if value is not None}
    for name, remedy in _UNSUPPORTED.items():
        if (value := outputs.pop(name, False)) is not False:
            raise RequestError(f"{FIELD}.{name}", value, "left out", remedy)
    items = [(key, value) for key, value in outputs.items() if key in _CHECKS]
    if len(items) != 1:
        raise RequestError(FIELD, outputs, f"a map with exactly one of {', '.join(_CHECKS)}")
    [(key, value)] = items
    name, white_space = f"{FIELD}.{key}", _white_space_options(key, outputs)
    checked = _schema_text(name, value, white_space) if key == "json" else _CHECKS[key](name, value)
    if key == "json_object" and white_space:
        key, checked = "json", _schema_text(name, ANY_OBJECT, white_space)
    size = sum(map(len, checked)) if isinstance(checked, (str, list)) else 0
    if size > MOST_CHARACTERS:
        bound = f"at most {MOST_CHARACTERS} characters long"
        raise RequestError(f"{FIELD}.{key}", f"{size} characters", bound)
    return {key: checked}


def _white_space_options(key: str, outputs: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's options for white space as llguidance's options; {} unless `key` is of JSON."""
    options: dict[str, Any] = {}
    if (compact := outputs.get("disable_any_whitespace")) is not None:
        if not isinstance(compact, bool):
            raise RequestError(f"{FIELD}.disable_any_whitespace", compact, "true or false")
        options["whitespace_flexible"] = not compact
    if (pattern := outputs.get("whitespace_pattern")) is not None:
        name = f"{FIELD}.whitespace_pattern"
        if compact or not key.startswith("json"):
            bound = "left out with " + ("`disable_any_whitespace`: true" if compact else key)
            raise RequestError(name, pattern, bound)
        options["whitespace_pattern"] = _check_text(name, pattern)
    return options if key.startswith("json") else {}


def _schema_text(name: str, value: Any, white_space: Mapping[str, Any]) -> str:
    """The text for llguidance of a JSON schema, which is a map or JSON text. `white_space` has
    llguidance's options, which take precedence over options in the schema."""
    try:
        if isinstance(value, str):
            value = json.loads(value)
        if not isinstance(value, dict):
            raise RequestError(name, value, "a JSON schema: an object, or its JSON text")
        options = value.get(_GUIDANCE, {})
        if isinstance(options, Mapping) and white_space:
            value = {**value, _GUIDANCE: {**options, **white_space}}
        return _check_text(name, as_text(name, value))
    except RequestError:
        raise
    except (TypeError, ValueError) as error:  # the message says where in the schema
        raise RequestError(name, value, f"a JSON schema: {error}") from None
    except RecursionError:
        raise RequestError(name, "...", "a JSON schema with less nesting") from None


def _check_true(name: str, value: Any) -> bool:
    if value is not True:
        raise RequestError(name, value, "true, or left out")
    return True


def _check_text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise RequestError(name, value, "a non-empty text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        bound = f"text, without the lone surrogate at index {error.start}"
        raise RequestError(name, value[error.start : error.end], bound) from None
    return value


def _check_choices(name: str, value: Any) -> list[str]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise RequestError(name, value, "a non-empty list of texts")
    return [_check_text(f"{name}[{i}]", choice) for i, choice in enumerate(value)]


_CHECKS: dict[str, Callable[..., Any]] = {
    "json": _schema_text, "json_object": _check_true, "regex": _check_text,
    "choice": _check_choices, "grammar": _check_text,
}  # fmt: skip
"""Functions that check the value of a key and return it in the form that is kept."""
_UNSUPPORTED = {
    "disable_additional_properties": "Write `additionalProperties: false` into the schema.",
    "structural_tag": "Write a `grammar`.",
}
"""Options of vLLM that are refused, and the remedy."""

_LACKING: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,), "unevaluatedProperties": (True, {}), "unevaluatedItems": (True, {}),
    "propertyNames": (True, {}, {"type": "string"}), "contains": (), "minContains": (),
    "maxContains": (), "dependentRequired": ({},), "dependentSchemas": ({},), "dependencies": ({},),
    "if": (), "not": (False,), "$dynamicRef": (), "$recursiveRef": (), "divisibleBy": (),
    "extends": (), "disallow": (),
}  # fmt: skip
"""Keywords that llguidance lacks, each with the values with which it changes nothing."""
# A keyword on the left means the same as the one on the right, unless the schema also has an
# applicator: a keyword with schemas for the same value, which may evaluate members, too.
_EQUIVALENTS = {"unevaluatedProperties": "additionalProperties", "unevaluatedItems": "items"}
_APPLICATORS = {"allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "$recursiveRef", "if", "not",
                "dependentSchemas"}  # fmt: skip
_ANY_TEXT = ("path", "file-path", "directory-path", "password", "binary")
"""Formats that any text satisfies. llguidance refuses formats that it does not know."""
# Keywords with a map of schemas, a list of schemas, a single schema.
_MAP_KEYWORDS = ("properties", "patternProperties")
_LIST_KEYWORDS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE_KEYWORDS = ("items", "additionalItems", "additionalProperties")
_DEFINITION_MAPS, _UNUSED_SINGLES = ("$defs", "definitions"), ("then", "else", "contentSchema")
"""Keywords with schemas that have no effect unless a reference leads to them."""
_GUIDANCE = "x-guidance"  # where llguidance reads options in a schema


def as_text(name: str, schema: Mapping[str, Any], **white_space: Any) -> str:
    """The text of the schema `name` for llguidance, to be used alone or within a grammar.

    The schema's options `x-guidance` take precedence over llguidance's options `white_space`.
    Without either, JSON has no white space.

    Raises:
        RequestError: llguidance cannot express a keyword, or `x-guidance` is not an object; the
            error says where.
        ValueError, TypeError, RecursionError: the schema is not JSON.
    """
    root = json.loads(json.dumps(schema, ensure_ascii=False, allow_nan=False))
    options = root.get(_GUIDANCE, {})
    if not isinstance(options, dict):
        raise RequestError(f"{name}.{_GUIDANCE}", options, "an object of llguidance's options")
    root[_GUIDANCE] = options = {"whitespace_flexible": False, **white_space, **options}
    if options.get("lenient") is not True and not _rewrite_all(name, root):
        _rewrite_all(name, root, with_definitions=True)
    return json.dumps(root, ensure_ascii=False)


def _rewrite_all(name: str, root: dict[str, Any], *, with_definitions: bool = False) -> bool:
    """Call `_rewrite` for the root, and for all schemas that it contains or refers to.

    Schemas that have no effect unless a reference leads to them, such as definitions, are rewritten
    only if a reference leads to them, or `with_definitions`.

    Returns False if it is not known which of these schemas have an effect: a reference could not be
    followed, or a schema below the root has an id.
    """
    seen, pending, followed_all = set[int](), [(name, root)], True
    while pending:
        place, schema = pending.pop()
        if not isinstance(schema, dict) or id(schema) in seen:
            continue
        seen.add(id(schema))
        _rewrite(place, schema)
        pending += _subschemas(place, schema, with_definitions=with_definitions)
        if isinstance(reference := schema.get("$ref"), str):
            pending.append(_follow(name, reference, root))
            followed_all &= pending[-1][1] is not None
        if schema is not root:  # pointers within a schema that has an id start at that schema
            followed_all &= not {"$id", "id"} & schema.keys()
    return followed_all


def _rewrite(place: str, schema: dict[str, Any]) -> None:
    """Remove the keywords and formats that llguidance lacks, or replace them by equivalent ones, in
    place. `RequestError` for a keyword with an effect that llguidance cannot express."""
    for key, harmless_values in _LACKING.items():
        if key not in schema:
            continue
        value, equivalent = schema.pop(key), _EQUIVALENTS.get(key)
        if any(value == other and type(value) is type(other) for other in harmless_values):
            continue
        if equivalent is None or _APPLICATORS & schema.keys():
            raise RequestError(f"{place}.{key}", value, "left out: llguidance cannot express it")
        is_tuple = equivalent == "items" and isinstance(schema.get(equivalent), list)
        schema.setdefault("additionalItems" if is_tuple else equivalent, value)
    min_keys = schema.get("minProperties", 0)
    limit = max(1, len(schema.get("required", ())))  # of `minProperties`
    if isinstance(min_keys, int) and min_keys > limit and _has_open_keys(schema):
        bound = f"at most {limit} (1, or as many as are `required`): an open key may come twice"
        raise RequestError(f"{place}.minProperties", min_keys, bound)
    if schema.get("format") in _ANY_TEXT:
        del schema["format"]


def _has_open_keys(schema: Mapping[str, Any]) -> bool:
    """Whether keys may occur that the schema does not name. A grammar cannot keep them distinct."""
    return bool(schema.get("patternProperties")) or schema.get("additionalProperties") is not False


def _subschemas(
    place: str, schema: dict[str, Any], *, with_definitions: bool
) -> Iterator[tuple[str, Any]]:
    """The schemas directly within a schema, as (place, schema). Those that have no effect without a
    reference are included only `with_definitions`."""
    map_keywords, single_keywords = [*_MAP_KEYWORDS], [*_SINGLE_KEYWORDS]
    if with_definitions:
        map_keywords += _DEFINITION_MAPS
        single_keywords += _UNUSED_SINGLES
    for key in map_keywords:
        if isinstance(schemas := schema.get(key), dict):
            yield from ((f"{place}.{key}.{name}", part) for name, part in schemas.items())
    for key in _LIST_KEYWORDS:
        if isinstance(schemas := schema.get(key), list):
            yield from ((f"{place}.{key}[{i}]", part) for i, part in enumerate(schemas))
    yield from ((f"{place}.{key}", schema.get(key)) for key in single_keywords)


def _follow(name: str, reference: str, root: dict[str, Any]) -> tuple[str, Any]:
    """The place and the target of a reference; the target is None if there is no such place."""
    head, *steps = unquote(reference).split("/")
    target: Any = root if head == "#" else None
    for step in steps:
        step = step.replace("~1", "/").replace("~0", "~")
        try:
            target = target[int(step)] if isinstance(target, list) else target[step]
        except (LookupError, TypeError, ValueError):
            target = None
    return ".".join((name, *steps)), target

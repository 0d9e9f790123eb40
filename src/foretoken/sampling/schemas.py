"""JSON schemas as llguidance takes them: compact by default, with nothing in them that it ignores.

Charter: which keywords no grammar holds. llguidance refuses those that the schema's draft has, and
leaves others out in silence: `dependentRequired` where `$schema` names draft 7. Here they are
refused whatever the draft, unless they change nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from foretoken.errors import RequestError

_ABSENT: dict[str, tuple[Any, ...]] = {
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
"""Keywords that llguidance does not have, and values at which each changes nothing."""
# Where nothing but these may have evaluated a member, one keyword means the other.
_SAME = {"unevaluatedProperties": "additionalProperties", "unevaluatedItems": "items"}
_IN_PLACE = {"allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "$recursiveRef", "if", "not",
             "dependentSchemas"}  # fmt: skip
_OF_MAPS = ("properties", "patternProperties")
_OF_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_OF_ONE = ("items", "additionalItems", "additionalProperties")
_GUIDANCE = "x-guidance"  # where llguidance reads options in a schema


def as_text(name: str, schema: Mapping[str, Any], **white_space: Any) -> str:
    """A schema's text for llguidance, alone or within a grammar.

    Args:
        name: of the schema, for errors.
        white_space: of llguidance's options what holds where the schema's own `x-guidance` says
            nothing; by default there is none.

    Raises:
        RequestError: a keyword that cannot be held is named with its place.
        ValueError, TypeError, RecursionError: it is no JSON.
    """
    schema = json.loads(json.dumps(schema, ensure_ascii=False, allow_nan=False))
    own = schema.get(_GUIDANCE, {})
    if not isinstance(own, dict):
        raise RequestError(f"{name}.{_GUIDANCE}", own, "an object of llguidance's options")
    schema[_GUIDANCE] = own = {"whitespace_flexible": False, **white_space, **own}
    if own.get("lenient") is not True:
        seen, left = set[int](), [(name, schema)]
        while left:
            place, part = left.pop()
            if isinstance(part, dict) and id(part) not in seen:
                seen.add(id(part))
                _mend(place, part)
                left += _parts(place, part, schema)
    return json.dumps(schema, ensure_ascii=False)


def _mend(place: str, schema: dict[str, Any]) -> None:
    """Take out keywords that change nothing, or refuse them."""
    for key, harmless in _ABSENT.items():
        if key not in schema:
            continue
        value, same = schema[key], _SAME.get(key)
        if same and not _IN_PLACE & schema.keys():
            schema.setdefault(same, value)
        elif not any(value == one and type(value) is type(one) for one in harmless):
            raise RequestError(f"{place}.{key}", value, "left out: no grammar here can hold it")
        del schema[key]


def _parts(place: str, schema: dict[str, Any], root: Any) -> Iterator[tuple[str, Any]]:
    """The schemas within one, and the one that it refers to; of definitions only those."""
    for key in _OF_MAPS:
        if isinstance(named := schema.get(key), dict):
            yield from ((f"{place}.{key}.{name}", part) for name, part in named.items())
    for key in _OF_LISTS:
        if isinstance(listed := schema.get(key), list):
            yield from ((f"{place}.{key}[{i}]", part) for i, part in enumerate(listed))
    for key in _OF_ONE:
        yield f"{place}.{key}", schema.get(key)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        found = root
        for step in unquote(reference[2:]).split("/"):
            step = step.replace("~1", "/").replace("~0", "~")
            found = found.get(step) if isinstance(found, dict) else None
        yield reference, found

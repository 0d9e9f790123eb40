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
_ANY_TEXT = ("path", "file-path", "directory-path", "password", "binary")
"""Formats that every text has; llguidance refuses those that it does not know."""
_OF_MAPS = ("properties", "patternProperties")
_OF_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_OF_ONE = ("items", "additionalItems", "additionalProperties")
_DEFINED, _UNUSED = ("$defs", "definitions"), ("then", "else", "contentSchema")
"""Where schemas lie that count for nothing unless something refers to them."""
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
    root = json.loads(json.dumps(schema, ensure_ascii=False, allow_nan=False))
    own = root.get(_GUIDANCE, {})
    if not isinstance(own, dict):
        raise RequestError(f"{name}.{_GUIDANCE}", own, "an object of llguidance's options")
    root[_GUIDANCE] = own = {"whitespace_flexible": False, **white_space, **own}
    if own.get("lenient") is not True and not _mend_all(name, root):
        _mend_all(name, root, with_defined=True)
    return json.dumps(root, ensure_ascii=False)


def _mend_all(name: str, root: dict[str, Any], *, with_defined: bool = False) -> bool:
    """Mend what the root leads to, and, where asked, what is defined without a known use.

    False: there are references by names, which may lead to any of what is defined.
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
        if part is not root:  # pointers within a part that has a name begin at that part
            is_all &= not {"$id", "id"} & part.keys()
    return is_all


def _mend(place: str, schema: dict[str, Any]) -> None:
    """Take out keywords that change nothing, or refuse them."""
    for key, harmless in _ABSENT.items():
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
    """Whether keys may come that have no name: grammars have no memory of those that did."""
    return bool(schema.get("patternProperties")) or schema.get("additionalProperties") is not False


def _parts(place: str, schema: dict[str, Any], *, with_defined: bool) -> Iterator[tuple[str, Any]]:
    """What lies within a schema; definitions count where something refers to them, or if asked."""
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
    """What a JSON pointer leads to, and its place; None where there is nothing, or no pointer."""
    head, *steps = unquote(reference).split("/")
    found: Any = root if head == "#" else None
    for step in steps:
        step = step.replace("~1", "/").replace("~0", "~")
        try:
            found = found[int(step)] if isinstance(found, list) else found[step]
        except (LookupError, TypeError, ValueError):
            found = None
    return ".".join((name, *steps)), found

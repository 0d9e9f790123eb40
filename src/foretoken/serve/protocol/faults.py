"""What is wrong with a body, as one error about one field, in the words of all our errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any, get_args

from foretoken.errors import RequestError
from foretoken.serve.protocol.common import Fields

_BOUNDS = {
    "int_type": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a text",
    "string_unicode": "a text without lone surrogates",
    "string_pattern_mismatch": "a text that matches {pattern}",
    "list_type": "a list",
    "dict_type": "an object",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "literal_error": "{expected}",
    "too_long": "of at most {max_length} members",
    "missing": "given",
    "extra_forbidden": "left out: there is no such field",
    "value_error": "{error}",
}
"""What a value must be, by what pydantic calls an error of its type."""


def field_error(kind: type[Fields], errors: Sequence[Any], where: str = "") -> RequestError:
    """The error of the first field that is wrong; of a union's members, of those that went far.

    Args:
        kind: what was read.
        errors: a `ValidationError`'s, their places within it.
        where: its name, if it is not the body.
    """
    near = [e for e in errors if e["loc"][:1] == errors[0]["loc"][:1]]
    # A wrong `type` says more than what the right one would have beside it.
    first = max(near, key=lambda e: (len(e["loc"]), e["type"] == "literal_error"))
    name, fields = _place(kind, first["loc"], where)
    told = first.get("ctx", {}).get("error")
    if isinstance(told, RequestError):  # of a field that is not in the schema: see `foreign`
        place = f"{name}.{told.field}" if name else told.field
        return RequestError(place, told.value, told.bound, told.remedy)
    if first["type"] == "extra_forbidden":
        last = str(first["loc"][-1])
        name = f"{name}.{last}" if name else last
        found = get_close_matches(last, fields, n=1, cutoff=0.6)
        remedy = f"Did you mean `{found[0]}`?" if found else ""
    else:
        near = [e for e in near if _place(kind, e["loc"], where)[0] == name]
        remedy = ""
    bound = ", or ".join(dict.fromkeys(map(_bound, near if name else [first])))
    value = None if first["type"] == "missing" else first["input"]
    return RequestError(name, value, bound, remedy)


def _bound(error: Any) -> str:
    return _BOUNDS.get(error["type"], "{msg}").format_map({**error, **error.get("ctx", {})})


def _place(kind: type[Fields], loc: Sequence[str | int], name: str) -> tuple[str, dict[str, Any]]:
    """The name of what is at a place, as its client wrote it, and the fields that may stand there.

    Parts that are no fields are members of unions, or keys of a map.
    """
    fields = dict(_fields(kind))
    for part in loc:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part in fields:
            name += f".{part}" if name else part
            fields = dict(_fields(fields[part]))
    return name, fields


def _fields(kind: Any) -> Iterator[tuple[str, Any]]:
    """Names and types of the fields of a type's objects, those of a union's members together."""
    if isinstance(kind, type) and issubclass(kind, Fields):
        for name, field in kind.model_fields.items():
            yield field.alias or name, field.annotation
    for part in get_args(kind):
        yield from _fields(part)

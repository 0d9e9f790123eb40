"""What a foreign name is: where it is harmless, and what to write where it is not."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple, TypeVar

from foretoken.errors import ConfigError, RequestError, check_known_keys

_Class = TypeVar("_Class")
_log = logging.getLogger(__name__)


class Foreign(NamedTuple):
    """A name we do not have: where it is harmless, and what to write where it is not.

    Attributes:
        harmless: values at which it changes nothing, None always; `...` is any value.
        instead: what to write at other values.
        note: what is logged where its value is true and harmless.
    """

    harmless: tuple[Any, ...]
    instead: str
    note: str = ""


def same_for(names: str, *foreign: Any) -> dict[str, Foreign]:
    """The same for each of these names: a `Foreign`, or what one is made of."""
    one = foreign[0] if isinstance(foreign[0], Foreign) else Foreign(*foreign)
    return dict.fromkeys(names.split(), one)


def without_foreign(
    given: Mapping[str, Any],
    table: Mapping[str, Foreign],
    error: type[ConfigError] | type[RequestError],
    where: str = "",
) -> dict[str, Any]:
    """What is given without the names of `table`.

    Args:
        where: stands before a name in an error.

    Raises:
        error: one of them has a value that would change something.
    """
    for name in [name for name in given if name in table]:
        harmless, instead, note = table[name]
        if given[name] is not None and not any(_is_same(given[name], v) for v in harmless):
            shown = " or ".join(repr(value) for value in harmless if value is not None)
            bound = f"left out, or {shown}" if shown else "left out"
            raise error(where + name, given[name], bound, instead)
        if note and given[name]:
            _log.warning(note)
    return {name: value for name, value in given.items() if name not in table}


def names_checked(
    table: Mapping[str, Foreign],
    error: type[ConfigError] | type[RequestError],
    where: str,
    prefix: str = "",
) -> Callable[[type[_Class]], type[_Class]]:
    """A decorator: names that a dataclass lacks are refused by an error of ours, not `TypeError`.

    Args:
        where: what the class is called in errors.
        prefix: stands before a name of `table` in one.
    """

    def decorate(cls: type[_Class]) -> type[_Class]:
        initialise: Any = cls.__init__
        first, *others = fields(cls)  # type: ignore[arg-type]
        names = [first.name, *(field.name for field in others)]

        @functools.wraps(initialise)
        def checked(self: _Class, *unnamed: Any, **given: Any) -> None:
            if unnamed and first.kw_only:
                remedy = f"Write {cls.__name__}({first.name}=...), and so on."
                raise error(where, unnamed, "given by their names", remedy)
            given = without_foreign(given, table, error, prefix)
            check_known_keys(where, given, names, error)
            initialise(self, *unnamed, **given)

        cls.__init__ = checked  # type: ignore[assignment]
        return cls

    return decorate


def _is_same(given: Any, value: Any) -> bool:
    """Equal and of the same kind: True is not 1 here. A member of an enum goes by its name."""
    if value is ...:
        return True
    if value is None or isinstance(value, bool):
        return given is value
    if isinstance(value, str):
        return bool(getattr(given, "name", given) == value)
    kinds = (int, float) if isinstance(value, (int, float)) else type(value)
    return isinstance(given, kinds) and not isinstance(given, bool) and given == value


OFF = (False,)
ONE_PROCESS = Foreign((1,), "This version computes in one process.")
NO_MEDIA = Foreign(({},), "This version takes text alone.")
NO_LORA = Foreign((False,), "Merge the adapter into the checkpoint's weights.")
WHOLE_TEXT = (
    "Every output holds the whole text so far: print what is new in it, or have `AsyncEngine` "
    "yield what is new by deltas=True."
)
EITHER = Foreign((True, False), "Leave it out.")
OWN_CONFIG = "Edit config.json in a copy of the checkpoint."
NO_PLUGIN = "No plugin reads it here."
GENERATES = "This version generates text."
# What sets up a feature that is not here changes nothing, whatever it is.
ANY, ANY_FLAG = (...,), (..., True)

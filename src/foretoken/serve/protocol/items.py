"""Members of lists whose kinds have names: items of a response's input, blocks of a message.

Each is checked by the model of its kind alone, so that an error names one field and not a union.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from foretoken.errors import RequestError
from foretoken.serve.protocol.common import Fields
from foretoken.serve.protocol.faults import field_error

T = TypeVar("T", bound=Fields)


def read_item(kinds: Mapping[str, type[T]], where: str, item: Any, default: str | None = None) -> T:
    """An item as its kind; null stands for a field that is left out, as clients echo them.

    Args:
        where: the item, as errors name it.
        default: its kind if it names none.
    """
    if not isinstance(item, dict):
        raise RequestError(where, item, "an object")
    name = item.get("type", default)
    if not isinstance(name, str) or name not in kinds:
        raise RequestError(f"{where}.type", name, f"one of {', '.join(kinds)}")
    try:
        given = {key: value for key, value in item.items() if value is not None}
        return kinds[name].model_validate(given)
    except ValidationError as error:
        raise field_error(kinds[name], error.errors(), where) from None

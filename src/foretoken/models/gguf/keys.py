"""Single values of a GGUF file's metadata, checked.

Belongs here: their types, their bounds, and the one form of an error about them. Does not: what
they mean.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.models.gguf.reader import shown
from foretoken.models.gguf.split import GgufFile

_MAX_SIZE = 2**31 - 1
_TOKENIZER = "tokenizer.ggml."


class Keys:
    """The metadata of a file; names without the architecture in front of them."""

    def __init__(self, file: GgufFile) -> None:
        self.path: Path = file.path
        self._metadata = file.metadata
        name = file.metadata.get("general.architecture")
        if not isinstance(name, str) or not name:
            raise CheckpointError(
                f"`{file.path}` gives `general.architecture` as {shown(name)}: must be a name. "
                "Is it a model?"
            )
        self.architecture = name

    def __contains__(self, name: str) -> bool:
        return self._full(name) in self._metadata

    def get(self, name: str, default: Any = None) -> Any:
        """A value of any type; see `_full` for its name."""
        return self._metadata.get(self._full(name), default)

    def whole(self, name: str, default: int | None = None) -> int:
        """A whole number of 1 or more; one for each layer are one if they are equal."""
        value = self._needed(name, default)
        if isinstance(value, list) and value:
            if any(item != value[0] for item in value):
                self.refuse(name, value, "the same for all layers")
            value = value[0]
        if type(value) is not int or not 1 <= value <= _MAX_SIZE:
            self.wrong(name, value, f"a whole number in 1..{_MAX_SIZE}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number above 0, as it was written before it was rounded to float32."""
        value = self._needed(name, default)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            self.wrong(name, value, "a number above 0")
        single = np.float32(value)
        return float(str(single)) if float(single) == value else float(value)

    def token(self, name: str) -> int | None:
        """The id of a token that the tokenizer has; None if the file does not say it."""
        value = self._metadata.get(_TOKENIZER + name)
        tokens = self._metadata.get(f"{_TOKENIZER}tokens")
        if value is None or value == 2**32 - 1:  # llama.cpp's mark of none
            return None
        count = len(tokens) if isinstance(tokens, list) else _MAX_SIZE
        if type(value) is not int or not 0 <= value < count:
            raise CheckpointError(
                f"`{self.path}` gives `{_TOKENIZER}{name}` as {shown(value)}: must be a token id "
                f"in 0..{count - 1}."
            )
        return value

    def wrong(self, name: str, value: Any, bound: str) -> NoReturn:
        """Raise for a value that no model can have."""
        raise CheckpointError(
            f"`{self.path}` gives `{self._full(name)}` as {shown(value)}: must be {bound}."
        )

    def refuse(self, name: str, value: Any, bound: str) -> NoReturn:
        """Raise for a value that a model can have, and that is not served."""
        raise UnsupportedModelError(
            f"`{self.path}` gives `{self._full(name)}` as {shown(value)}, which is not served: "
            f"must be {bound}."
        )

    def _full(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def _needed(self, name: str, default: Any) -> Any:
        value = self.get(name, default)
        if value is None:
            raise CheckpointError(
                f"`{self.path}` has no key `{self._full(name)}`: it holds no model, or a part of "
                "one."
            )
        return value

"""All errors that users can meet; every error raised on purpose is a `ForetokenError`.

Messages follow one form: the field in backticks, the value, the bound, the remedy.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, Self


class ForetokenError(Exception):
    """Base class of all errors that Foretoken raises on purpose."""

    def caused_by(self, cause: BaseException) -> Self:
        """This error with `cause` as `__cause__`, as `raise ... from` sets it."""
        self.__cause__ = cause
        return self


class _FieldError(ForetokenError, ValueError):
    """An error about one value.

    Args:
        field: the name of the option, as the user typed it.
        bound: what the value must be; completes the sentence "must be ...".
        remedy: what to do about it, one sentence.
    """

    def __init__(self, field: str, value: Any, bound: str, remedy: str = "") -> None:
        self.field, self.value, self.bound, self.remedy = field, value, bound, remedy
        shown = repr(value)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        super().__init__(f"`{field}` is {shown}: must be {bound}.{' ' + remedy if remedy else ''}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.field, self.value, self.bound, self.remedy)


class ConfigError(_FieldError):
    """An engine or speculative option is unknown or out of bounds."""


class RequestError(_FieldError):
    """A prompt or a sampling parameter is out of bounds; only that request ends."""


class CapacityError(RequestError):
    """A request that can never fit the context length or the block pool."""


class OverloadedError(RequestError):
    """The queue is as long as `max_num_waiting` allows; the same request may be taken later."""


class CheckpointError(ForetokenError):
    """A checkpoint cannot be read: missing path, broken config, corrupt weights."""


class UnsupportedModelError(ForetokenError):
    """A checkpoint loads, but a guard found that it would not be computed exactly."""


class NonFiniteLogitsError(ForetokenError):
    """The target's logits for a row were NaN, +inf or all -inf; that request ends."""


class ProcessingError(ForetokenError):
    """Work for one request raised this error's `__cause__`. Only that request ends."""


class StepError(ForetokenError):
    """A step of the batch raised this error's `__cause__`. All requests of the step end; later
    requests are served."""


class EngineMemoryError(ForetokenError, MemoryError):
    """Memory ran out, or would: the message says how much was asked and what to lower."""


class EngineBrokenError(ForetokenError):
    """The device failed: its engine computes nothing any more, and all its requests have ended."""


class UsageError(ForetokenError, RuntimeError):
    """A call after `close()`, in a forked child, or from a signal handler within another call."""


class AbsentError(UsageError, AttributeError):
    """A name of vLLM's that Foretoken lacks was used: the message says what to write instead."""


class IntegrityError(ForetokenError):
    """The engine's own bookkeeping contradicts itself. This is a bug in Foretoken."""


def check_known_keys(
    where: str,
    given: Mapping[str, Any],
    known: Iterable[str],
    error: type[ConfigError] | type[RequestError] = ConfigError,
) -> None:
    """Raise `error`, with the nearest known key, for the first key that is not in `known`.

    Args:
        where: prefix of the key in the message.
    """
    known = sorted(known)
    for key, value in given.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
            remedy = f"Did you mean `{near[0]}`? " if near else ""
            bound = "left out: there is no such name"
            raise error(f"{where}.{key}", value, bound, f"{remedy}Known are {', '.join(known)}.")

"""Objects that stand in the place of an engine's parts, and do some of what these do otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

from foretoken import LLM
from foretoken.config import EngineConfig
from foretoken.engine.build import EngineParts, build_engine
from foretoken.engine.engine import Engine

ON_HOST = EngineParts()
ON_DEVICE = EngineParts(on_host=lambda device: False)
"""Slots as on an asynchronous device, whatever the device is."""


class Double:
    """All that `real` is, with these methods in the place of its own."""

    def __init__(self, real: Any, **methods: Any) -> None:
        self.real = real
        vars(self).update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


@contextmanager
def double(owner: Any, part: str, **methods: Callable[..., Any]) -> Iterator[Any]:
    """Inside, a `Double` is in the place of a part; each method gets the real one as `real`."""
    real = getattr(owner, part)
    given = {name: partial(method, getattr(real, name)) for name, method in methods.items()}
    setattr(owner, part, Double(real, **given))
    try:
        yield real
    finally:
        setattr(owner, part, real)


def always(*args: Any, **kwargs: Any) -> bool:
    return True


def failing(error: BaseException, when: Callable[..., bool] = always) -> Callable[..., Any]:
    """A method for `double` that raises `error` where `when` says so of its arguments."""

    def call(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if when(*args, **kwargs):
            raise error
        return real(*args, **kwargs)

    return call


def nth(number: int) -> Callable[..., bool]:
    calls = count(1)
    return lambda *args, **kwargs: next(calls) == number


def engine_of(parts: EngineParts, model: Any, speculation: Any = None, **options: Any) -> Engine:
    config = EngineConfig.parse(model=str(model), speculative_config=speculation, **options)
    return build_engine(config, parts)


def llm_of(parts: EngineParts, model: Any, speculation: Any = None, **options: Any) -> LLM:
    return LLM.from_engine(engine_of(parts, model, speculation, **options))

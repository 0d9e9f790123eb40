"""Steps of an engine: with something that happens in the midst of one, or committed one late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from foretoken import LLM
from foretoken.engine.engine import Engine, Launched
from foretoken.engine.request import RequestGroup


def at_step(llm: LLM, number: int, act: Callable[[], Any]) -> Callable[[], Any]:
    """The engine's step, which does something else, too, in its step `number`."""
    step, calls = llm.engine.step, 0

    def counted() -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            act()
        return step()

    return counted


def break_call(number: int, error: BaseException, real: Callable[..., Any]) -> Callable[..., Any]:
    """`real`, whose call `number` (from 1) raises `error`; whoever goes on would not notice."""
    calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            raise error
        return real(*args, **kwargs)

    return call


class OneLate:
    """The steps of an engine, each committed after the next one was launched.

    meanwhile: called between the two, while two steps wait for their commit
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        engine.runs_ahead = True  # who edits logits waits for the tokens before
        self.launched: Launched | None = None
        self.meanwhile: Callable[[], Any] = lambda: None

    @property
    def has_work(self) -> bool:
        return self.engine.has_work or self.launched is not None

    def step(self) -> list[RequestGroup]:
        plan = self.engine.scheduler.schedule()
        latest = self.engine.launch(plan)
        self.meanwhile()
        changed = [] if self.launched is None else self.engine.commit(self.launched)
        self.launched = latest if latest.groups else None
        if not self.engine.has_work:
            self.engine.check_integrity()
        return changed

"""Steps of an engine: with something that happens at the end of one, or committed one late."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

from foretoken import LLM
from foretoken.engine.engine import Engine, Launched
from foretoken.engine.request import RequestGroup
from foretoken.engine.trace import StepTrace


def at_step(llm: LLM, number: int, act: Callable[[], Any]) -> None:
    """Have `act` called at the end of the engine's step `number` from now (from 1)."""
    steps = count(1)

    def told(_: StepTrace) -> None:
        if next(steps) == number:
            llm.engine.on_step = None
            act()

    llm.engine.on_step = told


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

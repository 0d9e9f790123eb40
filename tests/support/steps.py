"""Something that happens in the midst of a call: within one of the engine's steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from foretoken import LLM


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

"""An event loop that tells of the calls that other threads have it make."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class WatchedLoop(asyncio.SelectorEventLoop):
    """on_call: gets the arguments of each `call_soon_threadsafe`, before the call."""

    def __init__(self) -> None:
        super().__init__()
        self.on_call: Callable[[tuple[Any, ...]], object] = lambda call: None

    def call_soon_threadsafe(self, *call: Any, **options: Any) -> Any:
        self.on_call(call)
        return super().call_soon_threadsafe(*call, **options)


def watched_loop() -> WatchedLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, WatchedLoop)
    return loop

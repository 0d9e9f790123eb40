"""A progress bar for calls of many requests that take a while, on a terminal only. No torch."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TextIO

_PATIENCE_S = 2.0  # a call that ends sooner needs no bar, and a flash of one disturbs


@contextmanager
def progress_bar(
    count: Callable[[], int],
    total: int,
    asked: bool,
    stream: TextIO | None = None,
    patience: float = _PATIENCE_S,
) -> Iterator[Callable[[], None]]:
    """A bar over requests on a terminal; the caller invokes what it yields after every step.

    Args:
        count: how many requests have ended.
        total: how many there are; a single one has nothing to show.
        stream: where the bar is shown; None: the error stream.
        patience: seconds before it is shown.
    """
    stream = stream or sys.stderr
    if not asked or total < 2 or stream is None or not stream.isatty():
        yield lambda: None
        return
    start, show = time.perf_counter(), None
    with ExitStack() as stack:

        def update() -> None:
            nonlocal show
            if show is None and time.perf_counter() - start > patience:
                show = _open_bar(stack, total, stream)
            if show is not None:
                show(count())

        yield update


def _open_bar(stack: ExitStack, total: int, stream: TextIO) -> Callable[[int], None]:
    from rich import console, progress

    count, left = progress.MofNCompleteColumn(), progress.TimeRemainingColumn()
    columns = (progress.TextColumn("requests"), progress.BarColumn(), count, left)
    shown = progress.Progress(*columns, console=console.Console(file=stream), transient=True)
    bar = stack.enter_context(shown)
    task = bar.add_task("requests", total=total)
    return lambda done: bar.update(task, completed=done)

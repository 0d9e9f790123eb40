"""A progress bar for long calls with many requests, on a terminal only. No torch."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TextIO

_PATIENCE_S = 2.0  # in a call that ends sooner, a bar would only flash up


@contextmanager
def progress_bar(
    count: Callable[[], int], total: int, enabled: bool, stream: TextIO | None = None,
    patience: float = _PATIENCE_S,
) -> Iterator[Callable[[], None]]:  # fmt: skip
    """A progress bar; yields a function to call after every step.

    Args:
        count: returns the number of requests that have ended.
        total: number of requests; a single request gets no bar.
        stream: where the bar is shown, if that is a terminal; None: the error stream.
        patience: seconds before the bar is shown.
    """
    stream = stream or sys.stderr
    if not enabled or total < 2 or stream is None or not stream.isatty():
        yield lambda: None
        return
    start, set_completed = time.perf_counter(), None
    with ExitStack() as stack:

        def update() -> None:
            nonlocal set_completed
            if set_completed is None and time.perf_counter() - start > patience:
                set_completed = _open_bar(stack, total, stream)
            if set_completed is not None:
                set_completed(count())

        yield update


def _open_bar(stack: ExitStack, total: int, stream: TextIO) -> Callable[[int], None]:
    """Show a bar until `stack` closes; returns a function that sets how many requests ended."""
    from rich import console, progress

    count, time_left = progress.MofNCompleteColumn(), progress.TimeRemainingColumn()
    columns = (progress.TextColumn("requests"), progress.BarColumn(), count, time_left)
    display = progress.Progress(*columns, console=console.Console(file=stream), transient=True)
    bar = stack.enter_context(display)
    task = bar.add_task("requests", total=total)
    return lambda num_ended: bar.update(task, completed=num_ended)

"""A progress bar for long calls with many requests, on a terminal only. No torch."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

_PATIENCE_S = 2.0  # in a call that ends sooner, a bar would only flash up


@contextmanager
def progress_bar(
    count: Callable[[], int], total: int, enabled: bool
) -> Iterator[Callable[[], None]]:
    """A progress bar on the error stream; yields a function to call after every step.

    Args:
        count: returns the number of requests that have ended.
        total: number of requests; a single request gets no bar.
        enabled: whether the caller wants a bar.
    """
    if not enabled or total < 2 or sys.stderr is None or not sys.stderr.isatty():
        yield lambda: None
        return
    start, show = time.perf_counter(), None
    with ExitStack() as stack:

        def update() -> None:
            nonlocal show
            if show is None and time.perf_counter() - start > _PATIENCE_S:
                show = _open_bar(stack, total)
            if show is not None:
                show(count())

        yield update


def _open_bar(stack: ExitStack, total: int) -> Callable[[int], None]:
    """Show a bar until `stack` closes; returns a function that sets how far it is."""
    from rich import console, progress

    count, time_left = progress.MofNCompleteColumn(), progress.TimeRemainingColumn()
    columns = (progress.TextColumn("requests"), progress.BarColumn(), count, time_left)
    display = progress.Progress(*columns, console=console.Console(stderr=True), transient=True)
    bar = stack.enter_context(display)
    task = bar.add_task("requests", total=total)
    return lambda num_ended: bar.update(task, completed=num_ended)

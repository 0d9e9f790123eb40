"""`foretoken bench`: measures, shows progress, prints tables and writes the files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from foretoken.lab.bench.chart import chart
from foretoken.lab.bench.options import BenchOptions
from foretoken.lab.bench.report import as_text, results, tables
from foretoken.lab.bench.run import Bench
from foretoken.lab.results import replace_text, write_file
from foretoken.sampling.params import SamplingParams

if TYPE_CHECKING:
    from foretoken.llm import LLM


class Command:
    """One call of the command.

    Args:
        command: as typed, for the results file.
        console, errors: for tables, and for progress.
        note: gets what has been done so far, which Ctrl-C reports.
    """

    def __init__(
        self, command: str, console: Console, errors: Console, note: Callable[[str], None]
    ) -> None:
        self._command, self._console, self._errors, self._note = command, console, errors, note

    def run(
        self, llm: LLM, options: BenchOptions, params: SamplingParams, notes: Sequence[str] = ()
    ) -> None:
        """Measure and report; what was measured is reported, too, if an exception ends it."""
        bench, said = Bench(llm, options, params), [*notes]
        # It vanishes when done, and on anything but a terminal nothing is written. It is drawn
        # between runs alone: the thread that would redraw it takes time from a step.
        bar = Progress(
            BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"),
            TimeRemainingColumn(), console=self._errors, auto_refresh=False, transient=True,
            disable=not self._errors.is_terminal,
        )  # fmt: skip
        task = bar.add_task("", total=bench.num_runs)

        def report(done: int, what: str) -> None:
            bar.update(task, completed=done, description=what, refresh=True)
            self._note(f"{done} of {bench.num_runs} runs were done.")

        try:
            with bar:
                bench.run(report)
        except BaseException as error:
            done = sum(map(len, bench.measured.values()))
            said.append(f"Ended early by {type(error).__name__}, after {done} measured runs.")
            raise
        finally:
            self._finish(bench, said)

    def _finish(self, bench: Bench, notes: Sequence[str]) -> None:
        measured, options = results(bench, self._command, notes), bench.options
        if measured is None:
            return
        for title, table in tables(measured.rows).items():
            self._console.print(title, style="bold", markup=False)
            self._console.print(as_text(table), markup=False, soft_wrap=True)
        origin = "given" if options.bandwidth else "measured"
        floor = f"The floor is for memory that reads {bench.floor.bandwidth:.1f} GB/s ({origin})."
        self._console.print(floor, markup=False, soft_wrap=True)
        if options.output is not None:
            write_file(measured, Path(options.output))
        if options.plot is not None:
            replace_text(Path(options.plot), chart(measured))
        if written := [path for path in (options.output, options.plot) if path is not None]:
            self._errors.print(f"Wrote {' and '.join(written)}.", markup=False, soft_wrap=True)

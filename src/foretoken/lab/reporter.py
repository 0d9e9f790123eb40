"""The output of `audit`, `bench` and `plan`: progress, tables, and files of results."""

from __future__ import annotations

import csv
import io
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from foretoken.lab.plot import html, html_charts, html_contents, html_list, html_table, page
from foretoken.lab.results import Results, Row, Spread, replace_text, validate, write_file

_EVERY_S = 5.0  # between two lines of progress without a terminal
Report = Callable[[int, str], None]
"""Shows progress: (amount of work done, name of the work in progress)."""


class Table(NamedTuple):
    """Headings, and lines with one cell per heading."""

    header: list[str]
    lines: list[list[str]]


class Section(NamedTuple):
    """Charts that belong together, as SVG texts."""

    title: str = ""  # what the charts show; "": all measurements
    lines: Sequence[str] = ()  # the findings, one sentence each
    charts: Sequence[str] = ()
    folded: Sequence[str] = ()  # charts that a page shows after a click


@dataclass(frozen=True)
class Reporter:
    """The output of one call of a command."""

    command_line: str  # for the results file
    console: Console  # standard output, for findings
    errors: Console  # the error stream, for progress
    note: Callable[[str], None]  # takes a line about the work done, which Ctrl-C reports
    as_json: bool = False  # print the results file, and nothing else

    @contextmanager
    def status(self, text: str) -> Iterator[None]:
        """Show the text while the context runs; without a terminal it is printed as a line."""
        if not self.errors.is_terminal:
            self._print_error(text)
            yield
            return
        with self.errors.status(text):
            yield

    def _print_error(self, line: str) -> None:
        self.errors.print(line, markup=False, soft_wrap=True)

    @contextmanager
    def progress(self, total: int, unit: str, first_work: str = "") -> Iterator[Report]:
        """Show progress: on a terminal a bar that vanishes, else a line every few seconds.

        Yields a function to report progress with. `unit` is the plural name of what `total` counts,
        `first_work` the name of the work that comes first.
        """
        is_terminal, printed_at = self.errors.is_terminal, -math.inf
        bar = Progress(
            BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}", markup=False),
            TimeRemainingColumn(), console=self.errors, transient=True, disable=not is_terminal,
            auto_refresh=False,  # a thread that redraws the bar would take time from a step
        )  # fmt: skip
        task = bar.add_task(unit, total=total)

        def report(done: int, work: str) -> None:
            nonlocal printed_at
            now = time.monotonic()
            if not is_terminal and done < total and now - printed_at > _EVERY_S:
                current = f"; now {work}" if work else ""
                self._print_error(f"{done:,} of {total:,} {unit} done{current}")
                printed_at = now
            bar.update(task, completed=done, description=f"{unit} {work}", refresh=True)
            self.note(f"{done:,} of {total:,} {unit} were done.")

        with bar:
            report(0, first_work)
            yield report

    def say(self, line: str, style: str = "") -> None:
        if not self.as_json:
            self.console.print(line, style=style, markup=False, emoji=False, soft_wrap=True)

    def show(self, tables: Mapping[str, Table], lines: Sequence[str]) -> None:
        for title, table in tables.items():
            self.say(title, "bold")
            self.say(as_text(table))
        for line in lines:
            self.say(line)

    def write(
        self, results: Results, output: Sequence[str], tables: Mapping[str, Table],
        sections: Sequence[Section],
    ) -> None:  # fmt: skip
        """Write the files in the format of their suffix; with `as_json`, print the results."""
        if self.as_json:
            data = asdict(results)
            validate(data)
            self.console.print(json.dumps(data), markup=False, soft_wrap=True)
        for path in map(Path, output):
            if path.suffix == ".json":
                write_file(results, path)
            elif path.suffix == ".csv":
                replace_text(path, as_csv(results.rows))
            elif path.suffix == ".svg":
                charts = [chart for part in sections for chart in (*part.charts, *part.folded)]
                replace_text(path, page(charts))
            else:
                replace_text(path, as_html(results, tables, sections))
        if output:
            self._print_error(f"Wrote {' and '.join(output)}.")


def as_text(table: Table) -> str:
    """A table for a terminal: the first column left-aligned, other columns right-aligned."""
    widths = [max(map(len, column)) for column in zip(table.header, *table.lines, strict=True)]
    text = ""
    for first, *cells in (table.header, *table.lines):
        aligned = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        text += "  ".join([first.ljust(widths[0]), *aligned]).rstrip() + "\n"
    return text


def as_csv(rows: Sequence[Row]) -> str:
    """CSV with one line per value of each row: case, labels, spread; a number is a median."""
    labels = list(dict.fromkeys(name for row in rows for name in row.labels))
    spread = [field.name for field in fields(Spread)]
    text = io.StringIO()
    lines = csv.DictWriter(text, ["case", *labels, "value", *spread], lineterminator="\n")
    lines.writeheader()
    for row in rows:
        for name, value in row.values.items():
            summary = asdict(value) if isinstance(value, Spread) else {"median": value}
            lines.writerow({"case": row.case, **row.labels, "value": name, **summary})
    return text.getvalue()


def as_html(results: Results, tables: Mapping[str, Table], sections: Sequence[Section]) -> str:
    """A report in one file: contents, tables, charts, notes, and the machine."""
    names = ("command", "date", "commit", "hardware", "versions")
    about: dict[str, Any] = {name: getattr(results, name) for name in names}
    lines_of = {part.title: part.lines for part in sections if part.title}
    contents = [html_contents(lines_of)] if len(lines_of) > 1 else []
    figures = [html_table(title, table.header, table.lines) for title, table in tables.items()]
    charts = [html_charts(*part) for part in sections]
    parts = contents + (charts + figures if lines_of else figures + charts)
    parts.append(html_list("What the figures mean", results.notes))
    about |= results.shapes
    pairs = [[k, v if isinstance(v, str) else json.dumps(v)] for k, v in about.items()]
    parts.append(html_table("What was measured, and where", ["", ""], pairs, "words"))
    return html(" ".join(results.command.split()[:2]), parts)

"""The output of a command of the laboratory, alike for `audit`, `bench` and `plan`.

Charter: progress, tables, files. Each command makes its own figures.
"""

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
"""Gets the amount done, and what is under way."""


class Table(NamedTuple):
    """Headings, and lines with one cell per heading."""

    header: list[str]
    lines: list[list[str]]


class Section(NamedTuple):
    """Charts that belong together.

    Attributes:
        title: what they show; "": all measurements.
        lines: the findings, one sentence each.
        charts: as SVG.
        folded: as SVG; a page shows them on demand.
    """

    title: str = ""
    lines: Sequence[str] = ()
    charts: Sequence[str] = ()
    folded: Sequence[str] = ()


@dataclass(frozen=True)
class Desk:
    """The place where one call of a command reports.

    Attributes:
        typed: the command line, for the results file.
        console: for findings.
        errors: for progress.
        note: gets a line about the work done so far, which Ctrl-C reports.
        as_json: print the results file, and nothing else.
    """

    typed: str
    console: Console
    errors: Console
    note: Callable[[str], None]
    as_json: bool = False

    @contextmanager
    def status(self, text: str) -> Iterator[None]:
        """Show what is under way, without progress; on a terminal only until it is done."""
        if not self.errors.is_terminal:
            self._tell(text)
            yield
            return
        with self.errors.status(text):
            yield

    def _tell(self, line: str) -> None:
        self.errors.print(line, markup=False, soft_wrap=True)

    @contextmanager
    def progress(self, total: int, of: str, first: str = "") -> Iterator[Report]:
        """On a terminal a bar with the remaining time, which vanishes when done. Elsewhere a line
        at once, and then one every few seconds.

        The bar is drawn only by updates: a thread that redraws it would take time from a step.
        """
        is_terminal, said = self.errors.is_terminal, -math.inf
        bar = Progress(
            BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}", markup=False),
            TimeRemainingColumn(), console=self.errors, auto_refresh=False, transient=True,
            disable=not is_terminal,
        )  # fmt: skip
        task = bar.add_task(of, total=total)

        def report(done: int, what: str) -> None:
            nonlocal said
            now = time.monotonic()
            if not is_terminal and done < total and now - said > _EVERY_S:
                self._tell(f"{done:,} of {total:,} {of} done" + (f"; now {what}" if what else ""))
                said = now
            bar.update(task, completed=done, description=f"{of} {what}", refresh=True)
            self.note(f"{done:,} of {total:,} {of} were done.")

        with bar:
            report(0, first)
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
        self, found: Results, output: Sequence[str], tables: Mapping[str, Table],
        sections: Sequence[Section],
    ) -> None:  # fmt: skip
        """Print the results as JSON for `as_json`, and write the files by their suffixes."""
        if self.as_json:
            data = asdict(found)
            validate(data)
            self.console.print(json.dumps(data), markup=False, soft_wrap=True)
        for path in map(Path, output):
            if path.suffix == ".json":
                write_file(found, path)
            elif path.suffix == ".csv":
                replace_text(path, as_csv(found.rows))
            elif path.suffix == ".svg":
                every = [chart for part in sections for chart in (*part.charts, *part.folded)]
                replace_text(path, page(every))
            else:
                replace_text(path, as_html(found, tables, sections))
        if output:
            self._tell(f"Wrote {' and '.join(output)}.")


def as_text(made: Table) -> str:
    """A table for a terminal: the first column left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(made.header, *made.lines, strict=True)]
    text = ""
    for first, *cells in (made.header, *made.lines):
        numbers = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        text += "  ".join([first.ljust(widths[0]), *numbers]).rstrip() + "\n"
    return text


def as_csv(rows: Sequence[Row]) -> str:
    """One line per row and value: the case, its labels, and the spread, or only a median."""
    labels = list(dict.fromkeys(name for row in rows for name in row.labels))
    spread = [field.name for field in fields(Spread)]
    text = io.StringIO()
    lines = csv.DictWriter(text, ["case", *labels, "value", *spread], lineterminator="\n")
    lines.writeheader()
    for row in rows:
        for name, value in row.values.items():
            numbers = asdict(value) if isinstance(value, Spread) else {"median": value}
            lines.writerow({"case": row.case, **row.labels, "value": name, **numbers})
    return text.getvalue()


def as_html(found: Results, tables: Mapping[str, Table], sections: Sequence[Section]) -> str:
    """A report in one file: contents, tables, charts, notes, and the machine."""
    about: dict[str, Any] = {
        name: getattr(found, name) for name in ("command", "date", "commit", "hardware", "versions")
    }
    titled = {part.title: part.lines for part in sections if part.title}
    contents = [html_contents(titled)] if len(titled) > 1 else []
    numbers = [html_table(title, made.header, made.lines) for title, made in tables.items()]
    pictures = [html_charts(*part) for part in sections]
    parts = contents + (pictures + numbers if titled else numbers + pictures)
    parts.append(html_list("What the figures mean", found.notes))
    pairs = [
        [name, value if isinstance(value, str) else json.dumps(value)]
        for name, value in (about | found.shapes).items()
    ]
    parts.append(html_table("What was measured, and where", ["", ""], pairs, "words"))
    return html(" ".join(found.command.split()[:2]), parts)

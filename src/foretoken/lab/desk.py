"""What a command of the laboratory shows and writes: one look for `audit`, `bench` and `plan`.

Charter: progress, tables, files. What the figures are is each command's affair.
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

_EVERY_S = 5.0  # between two lines where there is no terminal
Report = Callable[[int, str], None]
"""Gets how much is done, and what is under way."""


class Table(NamedTuple):
    """Headings, and lines of as many cells."""

    header: list[str]
    lines: list[list[str]]


class Section(NamedTuple):
    """Pictures that belong together.

    Attributes:
        title: what they are of; "": of all that was measured.
        lines: what was found, each a sentence.
        charts, folded: SVG; a page shows the folded ones when it is asked to.
    """

    title: str = ""
    lines: Sequence[str] = ()
    charts: Sequence[str] = ()
    folded: Sequence[str] = ()


@dataclass(frozen=True)
class Desk:
    """Where one call of a command reports.

    Attributes:
        typed: the command, for the results file.
        console, errors: for what was found, and for progress.
        note: gets what has been done so far, which Ctrl-C reports.
        as_json: print the results file, and nothing else.
    """

    typed: str
    console: Console
    errors: Console
    note: Callable[[str], None]
    as_json: bool = False

    @contextmanager
    def status(self, text: str) -> Iterator[None]:
        """What is under way, where nothing tells how far: on a terminal until it is done."""
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
        """A bar with the time that is left, on a terminal; it vanishes when done. Elsewhere a line
        at once, and then one every few seconds.

        The bar is drawn when it is updated: a thread that would redraw it takes time from a step.
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
        """A line of what was found."""
        if not self.as_json:
            self.console.print(line, style=style, markup=False, emoji=False, soft_wrap=True)

    def show(self, tables: Mapping[str, Table], lines: Sequence[str]) -> None:
        """Tables with their titles, then sentences."""
        for title, table in tables.items():
            self.say(title, "bold")
            self.say(as_text(table))
        for line in lines:
            self.say(line)

    def write(
        self, found: Results, output: Sequence[str], tables: Mapping[str, Table],
        sections: Sequence[Section],
    ) -> None:  # fmt: skip
        """The results as JSON if that was asked for, and the files, by their suffixes."""
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
    """Lines for a terminal: the first column to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(made.header, *made.lines, strict=True)]
    text = ""
    for first, *cells in (made.header, *made.lines):
        numbers = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        text += "  ".join([first.ljust(widths[0]), *numbers]).rstrip() + "\n"
    return text


def as_csv(rows: Sequence[Row]) -> str:
    """One line per row and value: the case, its labels, and the spread, or a median alone."""
    labels = list(dict.fromkeys(name for row in rows for name in row.labels))
    spread = [field.name for field in fields(Spread)]
    text = io.StringIO()
    lines = csv.DictWriter(text, ["case", *labels, "value", *spread], lineterminator="\n")
    lines.writeheader()
    for row in rows:
        for name, value in row.values.items():
            told = asdict(value) if isinstance(value, Spread) else {"median": value}
            lines.writerow({"case": row.case, **row.labels, "value": name, **told})
    return text.getvalue()


def as_html(found: Results, tables: Mapping[str, Table], sections: Sequence[Section]) -> str:
    """A report in one file: contents, tables, figures, notes, and where it was measured."""
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

"""What a generated table is: columns over the rows of a results file, and where it comes from.

Charter: cells, `Table`, and Markdown. Which tables there are is declared in the other files here;
a table whose lines are not rows of one file is a function from a folder to Markdown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from foretoken.lab.results import Label, Results, Row, Spread, read

Cell = Callable[[Row], str]


def markdown(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    header = [*header]
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def where(results: Results) -> str:
    """One line under a table: machine, versions, date, commit, file."""
    hardware, versions = results.hardware, results.versions
    cpu = f"{hardware['cpu']}, {hardware['cores']} cores"
    if results.shapes.get("device", "cpu") != "cpu":
        cpu = f"{hardware['accelerator']}; {cpu}"
    if "read_gb_per_s" in hardware:
        cpu += f" with {hardware['vector_instructions']} reading {hardware['read_gb_per_s']} GB/s"
    return (
        f"\n{cpu}; torch {versions['torch']}, "
        f"transformers {versions['transformers']}; {results.date[:10]}, commit "
        f"{results.commit[:10]}; `benchmarks/results/{results.name}.json`.\n"
    )


def median(row: Row | None, name: str) -> float | None:
    """A value's median; None where there is no row or no such value."""
    value = None if row is None else row.values.get(name)
    return value.median if isinstance(value, Spread) else value


def number(row: Row | None, name: str, digits: int = 2) -> str:
    value = median(row, name)
    return "" if value is None else f"{value:.{digits}f}"


def percent(row: Row | None, name: str) -> str:
    value = median(row, name)
    return "" if value is None else f"{value:.1%}"


def spread(row: Row, name: str, digits: int = 2) -> str:
    """Median, and from the least to the most."""
    value = row.values[name]
    text = number(row, name, digits)
    if isinstance(value, Spread):
        text += f" ({value.min:.{digits}f}–{value.max:.{digits}f})"
    return text


def quartiles(row: Row | None, name: str, digits: int = 2) -> str:
    """Median, and between which quartiles it lies; empty where there is no spread."""
    value = None if row is None else row.values.get(name)
    if not isinstance(value, Spread):
        return ""
    return f"{value.median:.{digits}f} ({value.q1:.{digits}f}–{value.q3:.{digits}f})"


def case(row: Row) -> str:
    return row.case


def of(write: Callable[..., str], name: str, *digits: int, unit: str = "") -> Cell:
    """A cell that writes one value with `number`, `percent`, `spread` or `quartiles`."""
    return lambda row: write(row, name, *digits) + unit


def count(name: str, whole: str) -> Cell:
    """`3 of 32`, by the names of two values."""
    return lambda row: f"{row.values[name]} of {row.values[whole]}"


def find(results: Results, **labels: Label) -> list[Row]:
    """The rows that have these labels."""
    return [row for row in results.rows if labels.items() <= row.labels.items()]


def runs(stem: str, folder: Path) -> list[Results]:
    """The results of one benchmark on every machine (`--machine`), the first without a name."""
    paths = [folder / f"{stem}.json", *sorted(folder.glob(f"{stem}_*.json"))]
    return [read(path) for path in paths]


@dataclass(frozen=True)
class Table:
    """Lines that are rows of a results file.

    Attributes:
        file: the file's name, without `.json`.
        columns: title -> cell.
        shown: which rows have a line.
        after: Markdown between the table and the line that says where it comes from.
    """

    file: str
    columns: dict[str, Cell]
    shown: Callable[[Row], bool] = lambda row: True
    after: Callable[[Results], str] = lambda results: ""

    def __call__(self, folder: Path) -> str:
        results = read(folder / f"{self.file}.json")
        return self.text(results) + where(results)

    def text(self, results: Results) -> str:
        """The table alone."""
        lines = [
            [cell(row) for cell in self.columns.values()]
            for row in filter(self.shown, results.rows)
        ]
        return markdown(self.columns, lines) + self.after(results)


@dataclass(frozen=True)
class OfMachines:
    """A table for each machine that ran a benchmark, each with where its figures come from."""

    file: str
    text: Callable[[Results], str]

    def __call__(self, folder: Path) -> str:
        made = [(self.text(results), where(results)) for results in runs(self.file, folder)]
        return "\n".join(text + place for text, place in made if text)


def of_machines(table: Table) -> OfMachines:
    return OfMachines(table.file, table.text)

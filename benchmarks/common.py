"""What the benchmarks share: options, where results go, progress."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from foretoken.lab.results import Row, collect, write

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TARGET, DRAFT = "tiny-python", "tiny-python-draft"
T = TypeVar("T")


def parse(description: str | None, **defaults: int) -> argparse.Namespace:
    """Read the options of a benchmark: one integer option per default, and where to write."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    for name, value in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results file")
    return parser.parse_args()


def record(name: str, out: Path, shapes: dict[str, Any], rows: list[Row], notes: list[str]) -> None:
    """Write the results file and say where it is."""
    command = shlex.join(["python", "-m", f"benchmarks.{name}", *sys.argv[1:]])
    path = write(collect(name, command, shapes, rows, notes), out)
    print(f"wrote {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")


def progress(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """A progress bar on the error stream around a loop that takes more than two seconds."""
    from rich.console import Console
    from rich.progress import track

    return iter(track(items, what, total=total, console=Console(stderr=True), transient=True))

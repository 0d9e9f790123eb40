"""What the benchmarks share: options, where results go, progress."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from foretoken.lab.results import Row, Spread, collect, commit, write

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TARGET, DRAFT = "tiny-python", "tiny-python-draft"
SMOLLM2 = "smollm2-135m"
CODE = commit()  # of the code that this process loaded, whatever is committed while it runs
T = TypeVar("T")


def arguments(description: str | None, **defaults: int) -> argparse.ArgumentParser:
    """The options of a benchmark: one integer option per default, and where to write."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    for name, value in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results file")
    parser.add_argument("--machine", default="", help="ends the file's name: one of several kinds")
    parser.add_argument("--commit", type=whole_commit, help="of this code, where git cannot tell")
    return parser


def parse(description: str | None, **defaults: int) -> argparse.Namespace:
    """What was typed, where a benchmark has no other options."""
    return arguments(description, **defaults).parse_args()


def whole_commit(text: str) -> str:
    """An option that names the commit of this code; all digits, or the record would be refused."""
    if not re.fullmatch(r"[0-9a-f]{40}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not the 40 digits of a commit")
    return text


def use_cores(count: int) -> None:
    """Keep this process to the first `count` cores that it may use."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])


def heldout_tokens() -> list[int]:
    """All held-out texts, prompts and how they go on, as one run of token ids."""
    from foretoken.lab.workloads import heldout
    from foretoken.models import load_tokenizer

    tokenizer = load_tokenizer(TARGET)
    return [i for item in heldout() for i in tokenizer.encode(item.prompt + item.reference)]


def record(
    name: str,
    options: argparse.Namespace,
    shapes: dict[str, Any],
    rows: list[Row],
    notes: list[str],
    module: str | None = None,
) -> None:
    """Write the results file, where the options of `arguments` say, and say where it is.

    Args:
        module: the program that ran; None: `benchmarks.<name>`.
    """
    # Of an absolute path only the name: where it lay is this machine's affair.
    typed = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    command = shlex.join(["python", "-m", module or f"benchmarks.{name}", *typed])
    file = f"{name}_{options.machine}" if options.machine else name
    code = (options.commit, False) if options.commit else CODE
    path = write(collect(file, command, shapes, rows, notes, code), options.out)
    print(f"wrote {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")


def goal(what: str, row: Row, value: str, bound: float, least: bool = True) -> str:
    """A note for the results file: a median against its goal.

    Args:
        bound: to reach or exceed, or with `least` False not to exceed.
    """
    measured = row.values[value]
    median = measured.median if isinstance(measured, Spread) else measured
    reached = median >= bound if least else median <= bound
    sign = ">=" if least else "<="
    return f"{what} {median:.3g}, goal {sign} {bound:g}: {'reached' if reached else 'NOT reached'}."


class QuietTimer:
    """Times work on this process's cores, and times it again if other processes were busy there.

    On a shared machine a neighbour's work does not slow every case alike: what waits at many small
    barriers suffers most. A timing during which others used more than `limit` of the cores is
    dropped, and the next waits for a quiet second; after `patience` seconds in all it takes what
    it gets. `dropped` and `disturbed` count both kinds, for the notes of the results file.

    Attributes:
        processes: ids of other processes whose work is what is measured: servers started here.
    """

    def __init__(self, limit: float = 0.08, patience: float = 1200.0) -> None:
        self.limit, self.patience = limit, patience
        self.processes: list[int] = []
        self.dropped = self.disturbed = 0
        self.cores = sorted(os.sched_getaffinity(0))

    def __call__(self, work: Callable[[], T]) -> tuple[float, T]:
        """Seconds that `work` took, and its result."""
        while True:
            self._wait()
            busy, own, start = self._busy(), self._own(), time.perf_counter()
            result = work()
            took = time.perf_counter() - start
            others = (self._busy() - busy - (self._own() - own)) / (took * len(self.cores))
            if others <= self.limit:
                return took, result
            if self.patience <= 0:
                self.disturbed += 1
                return took, result
            self.dropped += 1
            self.patience -= took

    def note(self) -> str:
        """One sentence for the results file."""
        return (
            f"A timing during which other processes used more than {self.limit:.0%} of the cores "
            f"was repeated: {self.dropped} were; {self.disturbed} were kept although disturbed."
        )

    def _wait(self) -> None:
        while self.patience > 0:
            busy, own = self._busy(), self._own()
            time.sleep(0.5)
            others = (self._busy() - busy - (self._own() - own)) / (0.5 * len(self.cores))
            if others <= self.limit:
                return
            self.patience -= 0.5

    def _busy(self) -> float:
        """CPU seconds that anyone has spent on our cores since the machine started."""
        tick = os.sysconf("SC_CLK_TCK")
        total = 0
        for line in Path("/proc/stat").read_text().splitlines():
            name, *counts = line.split()
            if name.startswith("cpu") and name[3:] and int(name[3:]) in self.cores:
                user, nice, system, _, _, irq, softirq, steal, *_ = map(int, counts)
                total += user + nice + system + irq + softirq + steal
        return total / tick

    def _own(self) -> float:
        times = os.times()
        mine = times.user + times.system + times.children_user + times.children_system
        return mine + sum(map(_cpu_seconds, self.processes))


def _cpu_seconds(pid: int) -> float:
    """CPU seconds of a running process, all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    user, system = map(int, fields[11:13])
    return (user + system) / os.sysconf("SC_CLK_TCK")


def progress(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """A progress bar on the error stream around a loop that takes more than two seconds."""
    from rich.console import Console
    from rich.progress import track

    return iter(track(items, what, total=total, console=Console(stderr=True), transient=True))

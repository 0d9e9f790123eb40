"""The file format of all measurements: what was run, where, and the spread of its figures.

A results file is one JSON object, with one line per field, row and note:

    schema    the version of this format
    name      the name of the benchmark, which is also the stem of the file's name
    date      when the file was written, ISO 8601 with the time zone
    commit    the commit of the code that ran; `dirty`: whether tracked code differed from it
    command   the command as typed, from the repository root
    hardware  what `hardware` returns; `tunings`: what native decoders chose when they were loaded
    versions  python, torch, transformers, foretoken
    shapes    settings shared by all rows: models, prompts, tokens, options
    rows      one row per case: `case`, `labels`, and `values`, each a number or a `Spread`
    notes     sentences that a reader needs to understand the figures
"""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import subprocess
import timeit
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken import __version__
from foretoken.errors import ConfigError

if TYPE_CHECKING:
    import torch

SCHEMA = 1
_HARDWARE = {*"cpu vector_instructions read_gb_per_s cores threads memory_gib accelerator".split()}
Label = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Spread:
    """The summary of repeated measurements of one quantity."""

    unit: str
    repeats: int
    median: float
    min: float
    q1: float
    q3: float
    max: float

    @classmethod
    def of(cls, measured: Sequence[float], unit: str) -> Spread:
        """Median, quartiles (inclusive method) and range of the measurements."""
        if not measured:
            raise ConfigError("measured", [], "at least one measurement")
        ordered = sorted(measured)
        enough = ordered if len(ordered) > 1 else ordered * 2  # quantiles need two numbers
        q1, median, q3 = statistics.quantiles(enough, n=4, method="inclusive")
        return cls(unit, len(ordered), median, ordered[0], q1, q3, ordered[-1])


Value = int | float | Spread


@dataclass(frozen=True, slots=True)
class Row:
    """One case of a benchmark: a readable name, labels to select by, and measurements."""

    case: str
    labels: dict[str, Label]
    values: dict[str, Value]


@dataclass(frozen=True, slots=True)
class Results:
    """The results of one run of a benchmark; the fields are described at the top of this file."""

    name: str
    command: str
    shapes: dict[str, Any]
    rows: list[Row]
    notes: list[str]
    date: str
    commit: str
    dirty: bool
    hardware: dict[str, Any]
    versions: dict[str, str]
    schema: int = SCHEMA


def collect(
    name: str,
    command: str,
    shapes: dict[str, Any],
    rows: list[Row],
    notes: Sequence[str] = (),
    code: tuple[str, bool] | None = None,
) -> Results:
    """Make the results of a run that has just ended; adds the date, the machine and the commit.

    code: the result of `commit()` when the run began; None: its result now
    """
    date = datetime.now(UTC).isoformat(timespec="seconds")
    code = code or commit()
    return Results(name, command, shapes, rows, [*notes], date, *code, hardware(), versions())


def write(results: Results, folder: Path) -> Path:
    """Check `results` and write `folder/<name>.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{results.name}.json"
    write_file(results, path)
    return path


def write_file(results: Results, path: Path) -> None:
    """Check `results` and write them to a file of any name."""
    data = asdict(results)
    validate(data)
    replace_text(path, as_text(data))


def replace_text(path: Path, text: str) -> None:
    """Replace a file's text; if this is interrupted, the file keeps the former text."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def as_text(data: Mapping[str, Any]) -> str:
    """A JSON object with one line per field, row and note, so that diffs show single lines."""

    def encoded(value: Any) -> str:
        if not isinstance(value, list):
            return json.dumps(value, ensure_ascii=False)
        items = ",".join(f"\n  {json.dumps(item, ensure_ascii=False)}" for item in value)
        return f"[{items}\n ]"

    fields = ",".join(f"\n {json.dumps(name)}: {encoded(value)}" for name, value in data.items())
    return f"{{{fields}\n}}\n"


def read(path: Path) -> Results:
    """Read and check a results file."""
    data = json.loads(path.read_text(encoding="utf-8"))
    validate(data)
    rows = []
    for row in data.pop("rows"):
        spreads = {k: Spread(**v) for k, v in row["values"].items() if isinstance(v, dict)}
        rows.append(Row(row["case"], row["labels"], row["values"] | spreads))
    return Results(rows=rows, **data)


def validate(data: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for the first violation of the format in `data`."""
    _check_names("results", data, set(Results.__slots__))
    if data["schema"] != SCHEMA:
        raise ConfigError("schema", data["schema"], f"{SCHEMA}")
    for name, pattern in (
        ("name", r"[a-z0-9_]+"),
        ("date", r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00"),
        ("commit", r"[0-9a-f]{40}|unknown"),
        ("command", r"\S.*"),
    ):
        if not isinstance(data[name], str) or not re.fullmatch(pattern, data[name]):
            raise ConfigError(name, data[name], f"text that matches {pattern}")
    _check_names("hardware", data["hardware"], _HARDWARE, optional={"tunings"})  # older files
    _check_names("versions", data["versions"], {"python", "torch", "transformers", "foretoken"})
    if not data["shapes"]:
        raise ConfigError("shapes", data["shapes"], "given: models, prompts, tokens, options")
    if not data["rows"]:
        raise ConfigError("rows", [], "at least one row")
    cases = [row["case"] for row in data["rows"]]
    if len(set(cases)) != len(cases):
        raise ConfigError("rows", cases, "named differently, each by its own `case`")
    for row in data["rows"]:
        _check_names("rows", row, {"case", "labels", "values"})
        for name, value in row["values"].items():
            _check_value(f"{row['case']}.{name}", value)


def _check_names(
    field_name: str, data: Mapping[str, Any], names: set[str], optional: Set[str] = frozenset()
) -> None:
    """Raise `ConfigError` unless `data` has all fields `names`, and at most `optional` besides."""
    if not names <= set(data) <= names | optional:
        raise ConfigError(field_name, sorted(data), f"an object of {', '.join(sorted(names))}")


def _check_value(field_name: str, value: Any) -> None:
    if isinstance(value, Mapping):
        _check_names(field_name, value, set(Spread.__slots__))
        order = [value[k] for k in ("min", "q1", "median", "q3", "max")]
        if value["repeats"] < 1 or order != sorted(order):
            raise ConfigError(field_name, value, "min <= q1 <= median <= q3 <= max, repeats >= 1")
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(field_name, value, "a number or a spread")


def hardware() -> dict[str, Any]:
    """The properties of this machine that explain figures."""
    import torch  # not at the top: this import takes two seconds

    from foretoken.ops import get_backend, unavailable

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": _cpu_name(),
        "vector_instructions": torch.backends.cpu.get_cpu_capability(),
        "read_gb_per_s": round(read_bandwidth(), 1),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "memory_gib": round(memory, 1),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "tunings": {} if unavailable("native") else get_backend("native").tunings(),
    }


def read_bandwidth(device: torch.device | str = "cpu") -> float:
    """GB/s at which a device reads its memory: the best of five passes.

    Machines with the same name differ threefold in this speed, which decides the time of a decode
    step. On a CPU all of PyTorch's threads read 512 MiB. On a GPU 1 GiB is read ten times per pass,
    so that the time of launching does not matter.

    Raises:
        torch.OutOfMemoryError: the GPU does not have 1 GiB of free memory.
    """
    import torch

    device = torch.device(device)
    if device.type == "cpu":
        numbers = torch.ones(2**27)
        return numbers.nbytes / min(timeit.repeat(numbers.sum, number=1, repeat=5)) / 1e9
    numbers, repeats = torch.ones(2**28, device=device), 10

    def read() -> None:
        for _ in range(repeats):
            numbers.sum()
        torch.cuda.synchronize(device)

    return repeats * numbers.nbytes / min(timeit.repeat(read, number=1, repeat=5)) / 1e9


def versions() -> dict[str, str]:
    """Versions of the software that affects speed and tokens."""
    installed = {name: version(name) for name in ("torch", "transformers")}
    return {"python": platform.python_version(), "foretoken": __version__, **installed}


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, flags=re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def commit(source: Path = Path(__file__)) -> tuple[str, bool]:
    """The commit of this code, and whether code differs from it; ("unknown", False) without git."""

    def git(*args: str, folder: Path = source.parent) -> str:
        command = ["git", "-C", str(folder), *args]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        # This fails if the file is only a copy inside another repository.
        git("ls-files", "--error-unmatch", source.name)
        code = ("src", "benchmarks/*.py", "pyproject.toml")
        changed = git(
            "status", "--porcelain", "--", *code, folder=Path(git("rev-parse", "--show-toplevel"))
        )
        return git("rev-parse", "HEAD"), bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return "unknown", False


def stem(output: Sequence[str], default: str) -> str:
    """The name of results: the stem of the first JSON file in `output`, or else `default`.

    It is in lower case, with underscores in place of other characters than letters and digits.
    """
    path = next((path for path in output if path.endswith(".json")), default)
    name = Path(path).stem.lower()
    return "".join(c if c.isascii() and c.isalnum() else "_" for c in name)

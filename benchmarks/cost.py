"""What it costs to start: import time, time to the first token, peak memory of the demo.

Each figure is taken from a fresh process, as a user at a terminal would start it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.common import TARGET, QuietTimer, parse, progress, record
from foretoken.lab.results import Row, Spread

FORETOKEN = [sys.executable, "-m", "foretoken"]


def import_seconds() -> float:
    """`import foretoken` in a fresh interpreter, without the interpreter's own start."""
    code = "import time; t = time.perf_counter(); import foretoken; print(time.perf_counter() - t)"
    return float(subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE).stdout)


def first_token_seconds() -> float:
    """From starting `foretoken generate` to the first character on its standard output."""
    start = time.perf_counter()
    command = [*FORETOKEN, "generate", "def fibonacci(n):\n", "--max-tokens", "16"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        if process.stdout is None or not process.stdout.read(1):
            raise RuntimeError("foretoken generate wrote nothing")
        took = time.perf_counter() - start
        process.stdout.read()
    return took


def demo_cost() -> tuple[float, float]:
    """Peak memory in MiB and seconds of one `foretoken demo`."""
    start = time.perf_counter()
    process = subprocess.Popen([*FORETOKEN, "demo"], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"foretoken demo ended with {process.returncode}")
    return usage.ru_maxrss / 1024, time.perf_counter() - start


def package_mib() -> float:
    """Size of the package's files, the embedded models included."""
    import foretoken

    top = Path(foretoken.__file__).parent
    files = (p for p in top.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    return sum(p.stat().st_size for p in files) / 2**20


def main() -> None:
    options = parse(__doc__, repeats=5, demos=1)
    first_token_seconds()  # warms the disk
    imports = [import_seconds() for _ in progress(range(options.repeats), "import")]
    timer = QuietTimer()
    runs = progress(range(options.repeats), "first token")
    first = [timer(first_token_seconds)[1] for _ in runs]
    demos = [timer(demo_cost)[1] for _ in progress(range(options.demos), "demo")]
    memory, seconds = zip(*demos, strict=True)
    rows = [
        Row("import foretoken", {}, {"seconds": Spread.of(imports, "s")}),
        Row("first token of foretoken generate", {}, {"seconds": Spread.of(first, "s")}),
        Row(
            "foretoken demo",
            {},
            {"peak_memory": Spread.of(memory, "MiB"), "seconds": Spread.of(seconds, "s")},
        ),
        Row("installed package", {}, {"mebibytes": package_mib()}),
    ]
    for row in rows:
        print(row.case, {k: getattr(v, "median", v) for k, v in row.values.items()})
    record(
        "cost",
        options,
        {"model": TARGET, "first_token_prompt": "def fibonacci(n):", "demo": "default options"},
        rows,
        ["Fresh processes on a warm disk.", timer.note()],
    )


if __name__ == "__main__":
    main()

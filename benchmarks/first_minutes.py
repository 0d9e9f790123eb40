"""What a new user waits for: `foretoken plan`, `audit` and `serve`, on a machine that others use.

    python -m benchmarks.first_minutes --busy 2

So many processes that compute without an end run beside each command. Measured: seconds to the
first line that it says, the longest silence between two lines, and seconds to its end. The goal of
`plan` is two minutes on two busy cores.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time

from benchmarks.common import goal, parse, record
from benchmarks.served import served
from foretoken.lab.results import Row, Spread

COMMANDS = {
    "plan": ["plan"],
    "audit of an engine": ["audit", "--draws", "2000"],
}
PLAN_S = 120.0


def watched(words: list[str], folder: str) -> dict[str, float]:
    """Run a command to its end, its lines as they come."""
    start = last = time.perf_counter()
    first, silence = 0.0, 0.0
    with subprocess.Popen(
        [sys.executable, "-m", "foretoken", *words], cwd=folder, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            if not line.strip():
                continue
            now = time.perf_counter()
            first = first or now - start
            silence, last = max(silence, now - last), now
    if process.returncode:
        raise SystemExit(f"`foretoken {' '.join(words)}` ended with {process.returncode}")
    return {"first_line": first, "silence": silence, "end": time.perf_counter() - start}


def started() -> dict[str, float]:
    """A server, until it listens."""
    start = time.perf_counter()
    with served():
        return {"end": time.perf_counter() - start}


def main() -> None:
    """Each command so often, in turns."""
    options = parse(__doc__, busy=2, repeats=3)
    found: dict[str, list[dict[str, float]]] = {}
    burners = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(options.busy)
    ]
    try:
        with tempfile.TemporaryDirectory() as folder:
            for repeat in range(options.repeats):
                for name, words in COMMANDS.items():
                    found.setdefault(name, []).append(watched(words, folder))
                    print(f"{repeat}: {name}: {found[name][-1]}", flush=True)
                found.setdefault("serve", []).append(started())
    finally:
        for process in burners:
            process.kill()
            process.wait()
    rows = [
        Row(
            name,
            {"command": name},
            {f"seconds_{k}": Spread.of([one[k] for one in all_], "s") for k in all_[0]},
        )
        for name, all_ in found.items()
    ]
    notes = [goal("seconds of plan", rows[0], "seconds_end", PLAN_S, least=False)]
    record("first_minutes", options, {"busy": options.busy, "model": "tiny-python"}, rows, notes)
    print(*rows, *notes, sep="\n")


if __name__ == "__main__":
    main()

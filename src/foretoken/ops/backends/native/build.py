"""Compiles the native kernels: `python -m foretoken.ops.backends.native.build`.

This file imports the standard library only, since the hook that builds a wheel loads this file by
its path before anything is installed. There is one library per instruction set, so that a wheel
built anywhere runs anywhere. A library's name holds a digest of the sources, so that a library of
other sources is never loaded. The last bytes of a library, which the system's loader does not read,
are a digest of all other bytes: a damaged library is detected by this digest before the library
kills the process with SIGBUS.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "csrc"
LIBRARIES = HERE / "lib"

# Flags of each instruction set, the most capable first. x86 servers have v3 since 2014 or so; v4
# has 512-bit vectors; VNNI adds up products of 8-bit numbers in one operation instead of three.
VARIANTS: dict[str, dict[str, list[str]]] = {
    "x86_64": {
        "x86-64-v4-vnni": ["-march=x86-64-v4", "-mavx512vnni"],
        "x86-64-v4": ["-march=x86-64-v4"],
        "x86-64-v3-vnni": ["-march=x86-64-v3", "-mavxvnni"],
        "x86-64-v3": ["-march=x86-64-v3"],
    },
    "aarch64": {"aarch64": []},
}
_VNNI_SOURCE = "quantised.cpp"  # the only source compiled with a variant's second flag
_FLAGS = ["-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-Wall", "-Wextra"]
_SHARED = ["-shared", "-fPIC", "-pthread"]
_DIGEST_BYTES = hashlib.sha256().digest_size  # at the end of a library
_UNFINISHED = ".partial"  # suffix of a library that is being linked
_MAX_ERROR_LINES = 5  # of a compiler's output, in the message of a `BuildError`
_REPORT_S = 5.0  # between two lines of progress
_MAX_BUILD_S = 3600.0  # an older unfinished file was left by a killed build
Report = Callable[[int, int], None]


class BuildError(Exception):
    """The kernels could not be compiled; the message says why."""


def digest() -> str:
    """Twelve digits that change with the sources and with the compiler's flags."""
    sha = hashlib.sha256(repr((VARIANTS, _VNNI_SOURCE, _FLAGS, _SHARED, _DIGEST_BYTES)).encode())
    for path in sorted(SOURCES.iterdir()):
        sha.update(path.name.encode() + path.read_bytes())
    return sha.hexdigest()[:12]


def library_path(variant: str) -> Path:
    """Where a variant's library for the current sources is, or will be when it is built."""
    return LIBRARIES / f"foretoken-{digest()}-{variant}.so"


def is_whole(path: Path) -> bool:
    """Whether a library is undamaged; the check takes 0.35 ms for 200 kB."""
    content = path.read_bytes()
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


def build(report: Report = lambda done, total: None) -> list[Path]:
    """Compile the missing and damaged libraries of this architecture; delete outdated libraries.

    Args:
        report: called with (files compiled, total number of files) at least every few seconds; not
            called if nothing is missing.

    Raises:
        BuildError: no C++ compiler, an unknown architecture, or compiler errors.
        OSError: the folder of the libraries is not writable.
    """
    variants = VARIANTS.get(platform.machine())
    if variants is None:
        raise BuildError(f"there are no native kernels for `{platform.machine()}`")
    LIBRARIES.mkdir(exist_ok=True)
    flags_of = {library_path(variant): flags for variant, flags in variants.items()}
    missing = {path: flags_of[path] for path in flags_of if not (path.exists() and is_whole(path))}
    if missing:
        _compile(missing, report)
    for path in LIBRARIES.glob("*.so"):
        if path not in flags_of:
            path.unlink(missing_ok=True)
    for path in LIBRARIES.iterdir():  # delete what killed builds have left
        with contextlib.suppress(FileNotFoundError):  # another build has just deleted this
            if time.time() - path.stat().st_mtime <= _MAX_BUILD_S:
                continue
            if path.is_dir():
                shutil.rmtree(path)
            elif path.suffix == _UNFINISHED:
                path.unlink()
    return [*flags_of]


def _compile(missing: dict[Path, list[str]], report: Report) -> None:
    """Compile the sources in parallel, one on each core; then link each missing library."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise BuildError("there is no C++ compiler (`g++` or `clang++`)")
    # The longest source first: if it came last, all cores but one would wait for it.
    sources = sorted(SOURCES.glob("*.cpp"), key=lambda path: -path.stat().st_size)
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))  # those that `taskset` or a container allows
    temporary = tempfile.TemporaryDirectory(dir=LIBRARIES)
    with temporary as folder, ThreadPoolExecutor(cores) as pool:
        objects: dict[Path, list[str]] = {path: [] for path in missing}
        object_of: dict[tuple[str, ...], str] = {}  # by source and flags
        tasks = []
        for path, flags in missing.items():
            for source in sources:
                source_flags = flags if source.name == _VNNI_SOURCE else flags[:1]
                key = (source.stem, *source_flags)
                if key not in object_of:
                    object_of[key] = f"{folder}/{source.stem}-{len(object_of)}.o"
                    files = ["-c", str(source), "-o", object_of[key]]
                    command = [compiler, *_FLAGS, *source_flags, *_SHARED[1:], *files]
                    tasks.append(pool.submit(_run, command, source_flags))
                objects[path].append(object_of[key])
        try:
            running = {*tasks}
            while running:
                report(len(tasks) - len(running), len(tasks))
                finished, running = wait(running, _REPORT_S, return_when=FIRST_COMPLETED)
                for task in finished:
                    task.result()
            report(len(tasks), len(tasks))
        finally:
            pool.shutdown(cancel_futures=True)
        for path, flags in missing.items():
            _link([compiler, *_SHARED, *objects[path]], flags, path)


def _link(command: list[str], flags: list[str], path: Path) -> None:
    """Link a library and append its digest; only the complete file gets its final name."""
    unfinished = path.with_suffix(f".{os.getpid()}{_UNFINISHED}")
    try:
        _run([*command, "-o", str(unfinished)], flags)
        with unfinished.open("ab") as library:
            library.write(hashlib.sha256(unfinished.read_bytes()).digest())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _run(command: list[str], shown_flags: list[str]) -> None:
    """Run a command of the compiler. If the command fails, raise a `BuildError` with the first
    errors, else the last lines, and with only `shown_flags` of the command's arguments."""
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode == 0:
        return
    lines = [line.strip() for line in process.stderr.splitlines() if "warning:" not in line]
    errors = [line for line in lines if re.search(r"\berror\b|undefined reference", line)]
    shown = errors[:_MAX_ERROR_LINES] or lines[-_MAX_ERROR_LINES:]
    raise BuildError("\n  ".join([f"`{' '.join([command[0], *shown_flags])}` failed:", *shown]))


class _Progress:
    """Prints progress: on a terminal one line that changes, elsewhere a line every few seconds."""

    def __init__(self) -> None:
        self._start, self._printed_at = time.monotonic(), -math.inf

    def __call__(self, done: int, total: int) -> None:
        now, is_terminal = time.monotonic(), sys.stderr.isatty()
        if is_terminal or done == total or now - self._printed_at >= _REPORT_S:
            bar = f"[{'#' * (20 * done // total):20}] " if is_terminal else ""
            line = f"Compiling C++ kernels: {bar}{done} of {total} files, {now - self._start:.0f} s"
            end = "\n" if done == total or not is_terminal else ""
            print(f"\r{line}" if is_terminal else line, end=end, file=sys.stderr, flush=True)
            self._printed_at = now


def main() -> int:
    """Build the libraries, and print their paths or the error."""
    try:
        for path in build(_Progress()):
            print(path.relative_to(HERE.parent))
    except (BuildError, OSError) as error:
        print(f"Native kernels were not built: {error}.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

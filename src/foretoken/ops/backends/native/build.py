"""Compiles the native kernels: `python -m foretoken.ops.backends.native.build`, or by its path.

Belongs here: compiler, flags, file names. Standard library only, and no import of this package: the
hook that builds a wheel loads this file by its path before anything is installed.

There is one library per instruction set, chosen at load time, so that a wheel built anywhere runs
anywhere. A file's name holds a digest of the sources, so that a library of other sources is never
loaded. The file's last bytes, which the system's loader does not read, are a digest of the rest of
the file. So a damaged library is detected before it kills the process with SIGBUS.
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

# Most capable first. x86-64-v4 has 512-bit vectors, v3 is every x86 server since about 2014; VNNI
# adds up products of eight-bit numbers in one operation instead of three.
VARIANTS: dict[str, dict[str, list[str]]] = {
    "x86_64": {
        "x86-64-v4-vnni": ["-march=x86-64-v4", "-mavx512vnni"],
        "x86-64-v4": ["-march=x86-64-v4"],
        "x86-64-v3-vnni": ["-march=x86-64-v3", "-mavxvnni"],
        "x86-64-v3": ["-march=x86-64-v3"],
    },
    "aarch64": {"aarch64": []},
}
# A variant's flags after the first apply only to this source. All other sources are compiled once
# for two variants.
_EXTENDED = "quantised.cpp"
_FLAGS = ["-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-Wall", "-Wextra"]
_SHARED = ["-shared", "-fPIC", "-pthread"]
_SEAL = hashlib.sha256().digest_size  # bytes at the end of a library
_PARTIAL = ".partial"
_SHOWN = 5  # lines of a compiler's errors
_EVERY_S = 5.0  # between two lines of progress
_LONGEST_S = 3600.0  # of a build: older unfinished files are from a killed build
Report = Callable[[int, int], None]


class BuildError(Exception):
    """The kernels could not be compiled; the message says why."""


def digest() -> str:
    """Twelve digits that change with the sources and with the compiler's flags."""
    sha = hashlib.sha256(repr((VARIANTS, _EXTENDED, _FLAGS, _SHARED, _SEAL)).encode())
    for path in sorted(SOURCES.iterdir()):
        sha.update(path.name.encode() + path.read_bytes())
    return sha.hexdigest()[:12]


def library_path(variant: str) -> Path:
    """The path of a variant's library for the current sources, whether it is built or not."""
    return LIBRARIES / f"foretoken-{digest()}-{variant}.so"


def is_whole(path: Path) -> bool:
    """Whether a library is undamaged; the check takes 0.35 ms for 200 kB."""
    content = path.read_bytes()
    return hashlib.sha256(content[:-_SEAL]).digest() == content[-_SEAL:]


def build(report: Report = lambda done, total: None) -> list[Path]:
    """Compile every missing variant of this machine's architecture; delete outdated libraries.

    Unfinished files of a killed build are deleted, too, if they are older than an hour.

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
    for path in LIBRARIES.iterdir():
        with contextlib.suppress(FileNotFoundError):  # a build that has just ended deleted it
            if time.time() - path.stat().st_mtime <= _LONGEST_S:
                continue
            if path.is_dir():
                shutil.rmtree(path)
            elif path.suffix == _PARTIAL:
                path.unlink()
    return [*flags_of]


def _num_cores() -> int:
    """Cores that this process may use, within the limits of a container or `taskset`."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _compile(missing: dict[Path, list[str]], report: Report) -> None:
    """Compile each source, one per core at a time, then link each library."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise BuildError("there is no C++ compiler (`g++` or `clang++`)")
    # The longest source first: last, it would keep a single core busy while the others are idle.
    sources = sorted(SOURCES.glob("*.cpp"), key=lambda path: -path.stat().st_size)
    with (
        tempfile.TemporaryDirectory(dir=LIBRARIES) as folder,
        ThreadPoolExecutor(_num_cores()) as pool,
    ):
        objects: dict[Path, list[str]] = {path: [] for path in missing}
        object_of: dict[tuple[str, ...], str] = {}  # by source and flags
        tasks = []
        for path, flags in missing.items():
            for source in sources:
                source_flags = flags if source.name == _EXTENDED else flags[:1]
                key = (source.stem, *source_flags)
                if key not in object_of:
                    object_of[key] = f"{folder}/{source.stem}-{len(object_of)}.o"
                    files = ["-c", str(source), "-o", object_of[key]]
                    command = [compiler, *_FLAGS, *source_flags, *_SHARED[1:], *files]
                    tasks.append(pool.submit(_run, command, source_flags))
                objects[path].append(object_of[key])
        try:
            left = {*tasks}
            while left:
                report(len(tasks) - len(left), len(tasks))
                done, left = wait(left, _EVERY_S, return_when=FIRST_COMPLETED)
                for task in done:
                    task.result()
            report(len(tasks), len(tasks))
        finally:
            pool.shutdown(cancel_futures=True)
        for path, flags in missing.items():
            _link([compiler, *_SHARED, *objects[path]], flags, path)


def _link(command: list[str], flags: list[str], path: Path) -> None:
    """Link a library and append its digest.

    The file gets its name when it is complete, so that an incomplete library is never loaded.
    """
    partial = path.with_suffix(f".{os.getpid()}{_PARTIAL}")
    try:
        _run([*command, "-o", str(partial)], flags)
        with partial.open("ab") as library:
            library.write(hashlib.sha256(partial.read_bytes()).digest())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _run(command: list[str], flags: list[str]) -> None:
    """Run the compiler; `BuildError` with its first errors if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        shown = " ".join([command[0], *flags])
        raise BuildError(f"`{shown}` failed:\n{_first_errors(done.stderr)}")


def _first_errors(output: str) -> str:
    """The first errors in the compiler's output, without warnings."""
    lines = [line.strip() for line in output.splitlines() if "warning:" not in line]
    errors = [line for line in lines if re.search(r"\berror\b|undefined reference", line)]
    return "\n".join(f"  {line}" for line in errors[:_SHOWN] or lines[-_SHOWN:])


class _Progress:
    """Prints progress: on a terminal one line that changes, elsewhere a line every few seconds."""

    def __init__(self) -> None:
        self._start, self._printed_at = time.monotonic(), -math.inf

    def __call__(self, done: int, total: int) -> None:
        now, is_terminal = time.monotonic(), sys.stderr.isatty()
        if is_terminal or done == total or now - self._printed_at >= _EVERY_S:
            bar = f"[{'#' * (20 * done // total):20}] " if is_terminal else ""
            line = f"Compiling C++ kernels: {bar}{done} of {total} files, {now - self._start:.0f} s"
            end = "\n" if done == total or not is_terminal else ""
            print(f"\r{line}" if is_terminal else line, end=end, file=sys.stderr, flush=True)
            self._printed_at = now


def main() -> int:
    """Build, and print the libraries or the error."""
    try:
        for path in build(_Progress()):
            print(path.relative_to(HERE.parent))
    except (BuildError, OSError) as error:
        print(f"Native kernels were not built: {error}.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

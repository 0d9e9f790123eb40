"""Between the commands and the system: streams, messages, exit codes.

Every failure becomes one line on the error stream and an exit code: 2 for what the user or the
system can mend, 1 for our bugs, 130 after Ctrl-C, 143 after SIGTERM, 141 if the reader of the
output has gone.
"""

from __future__ import annotations

import codecs
import errno
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from foretoken.errors import (
    ForetokenError,
    IntegrityError,
    ProcessingError,
    RequestError,
    StepError,
)

if TYPE_CHECKING:
    from rich.console import Console

Note = Callable[[str], None]
CLOSED_PIPE = 141  # the exit code of a process ended by SIGPIPE, as a shell shows it
_BUGS = (IntegrityError, ProcessingError, StepError)
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_escaped: list[str] = []  # the encoding of an output in which a character had to be escaped


def prepare() -> None:
    """Make the standard streams safe to use, even if some of them are closed.

    Characters that an output cannot encode are escaped, and a message at the end says so.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # closed: the next file that is opened would become this stream
            os.open(os.devnull, os.O_RDWR)
    if sys.stderr is None:  # libraries write to it without a check
        sys.stderr = os.fdopen(2, "w", encoding="utf-8")
    if sys.stdout is None:
        _end(2, "Error: standard output is closed.")
    codecs.register_error("foretoken", _escape)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="foretoken")
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")


def _escape(error: UnicodeError) -> tuple[str | bytes, int]:
    _escaped[:] = [getattr(error, "encoding", "")]
    return codecs.backslashreplace_errors(error)


def is_utf8(stream: TextIO) -> bool:
    """Whether a stream can show any text."""
    return codecs.lookup(stream.encoding or "ascii").name == "utf-8"


def as_utf8(field: str, argument: str) -> str:
    """A command-line argument as UTF-8 text; `RequestError` if it is not UTF-8."""
    return _decoded(field, os.fsencode(argument))


def as_typed() -> str:
    """The command line of this process, without the folders of absolute paths."""
    words = [os.path.basename(word) if word.startswith("/") else word for word in sys.argv[1:]]
    return shlex.join(["foretoken", *words])


def read_input(field: str) -> str:
    """All of standard input, as UTF-8; `RequestError` if it is closed or not UTF-8."""
    if sys.stdin is None:
        raise RequestError(field, "-", "readable: standard input is closed")
    return _decoded(field, sys.stdin.buffer.read())


def read_line(field: str) -> str:
    """The next line of standard input, as UTF-8; empty at its end; `RequestError` if not UTF-8."""
    return _decoded(field, sys.stdin.buffer.readline())


def _decoded(field: str, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        excerpt = data[max(error.start - 10, 0) : error.end + 10]
        raise RequestError(field, excerpt, "UTF-8 text") from None


@contextmanager
def reporting(debug: bool = False) -> Iterator[Note]:
    """Turn a failure into one message and an exit code; with `debug`, errors are raised.

    Yields a function that takes a line about the work done, for the message after Ctrl-C.
    """
    progress = "nothing was generated."

    def note(text: str) -> None:
        nonlocal progress
        progress = text

    try:
        yield note
    except KeyboardInterrupt:
        say(f"\nInterrupted: {progress}", interrupted=True)
        raise SystemExit(130) from None
    except BrokenPipeError:
        _discard(sys.stdout)
        raise SystemExit(CLOSED_PIPE) from None
    except Exception as error:
        if debug:
            raise
        if isinstance(error, OSError):
            _end(2, f"Error: {_system_error(error)}.")
        if isinstance(error, ForetokenError) and not isinstance(error, _BUGS):
            _end(2, f"Error: {error}")
        say(f"Unexpected {type(error).__name__}: {error}", style="bold red")
        say("This is a bug in Foretoken; --debug shows where it happened.")
        raise SystemExit(1) from None
    finally:
        if _escaped:
            say(
                f"Characters that {_escaped.pop()} cannot show were written as escapes; "
                "a UTF-8 locale shows them (LC_ALL=C.UTF-8)."
            )


def _system_error(error: OSError) -> str:
    if error.filename is None and error.errno in _NO_SPACE:
        _discard(sys.stdout)
        return f"standard output cannot be written: {error.strerror}"
    return str(error)


def _discard(stream: TextIO) -> None:
    """Discard later output of a stream, so that Python can end without an error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _end(code: int, text: str) -> NoReturn:
    say(text, style="bold red")
    raise SystemExit(code) from None


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Let SIGTERM raise `SystemExit`, so that progress bars show the cursor again."""

    def raise_exit(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, raise_exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def say(text: str, style: str = "", interrupted: bool = False) -> None:
    """Print a message on the error stream, in colour if the terminal has it."""
    error_console = console(stderr=True, highlight=False, soft_wrap=True)
    try:
        if interrupted:
            error_console.show_cursor()  # a progress bar may have been hiding it
        error_console.print(text, style=style, markup=False)
    except OSError:  # the error stream has no reader
        with suppress(OSError):
            _discard(sys.stderr)


def console(**options: Any) -> Console:
    """A Rich console; on a closed pipe it raises `BrokenPipeError`, which `reporting` handles."""
    from rich.console import Console

    class Plain(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return Plain(**options)

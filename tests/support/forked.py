"""Python programs that tests start, as forks of a process that has imported what takes seconds.

    @pytest.mark.usefixtures("forked")  # `subprocess.run([sys.executable, ...])` is quick in it

Streams, exit codes and signals are those of a real start; what is of the interpreter (-X, -W and
PYTHON...) is not. PyTorch and Transformers take 5 s of a core where they are imported.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from multiprocessing.connection import Connection
from typing import Any

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    """foretoken.async_engine foretoken.cli.app foretoken.llm foretoken.models.loader
    foretoken.serve.app transformers.models.llama.modeling_llama""".split()
)


class Forked(subprocess.Popen[Any]):
    """`subprocess.Popen` of a child that the fork server has."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        if args[0] != sys.executable:
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        cwd, env, pipes = rest[4], rest[5], rest[9:15]
        ends = zip(pipes[0:1] + pipes[3::2], range(3), strict=True)
        streams = [Connection(os.dup(pipe if pipe >= 0 else own)) for pipe, own in ends]
        place = (cwd or os.getcwd(), dict(env or os.environ), rest[20])
        self._fork = _FORKS.Process(target=_run, args=([*map(str, args[1:])], streams, *place))
        self._fork.start()
        self.pid, self._child_created = self._fork.pid, True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _try_wait(self, flags: int) -> tuple[int, int]:
        if not hasattr(self, "_fork"):
            return super()._try_wait(flags)  # type: ignore[misc, no-any-return]
        self._fork.join(0 if flags else None)
        code = self._fork.exitcode
        return (0, 0) if code is None else (self.pid, -code if code < 0 else code << 8)

    def _internal_poll(self, *given: Any, **named: Any) -> int | None:
        if self.returncode is None and self._try_wait(os.WNOHANG)[0]:
            self._handle_exitstatus(self._try_wait(os.WNOHANG)[1])  # type: ignore[attr-defined]
        return self.returncode


def _run(
    argv: list[str], streams: list[Connection], cwd: str, env: dict[str, str], leads: bool
) -> None:
    """In the fork: what `python argv` does."""
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
        stream.close()
    if leads:
        os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", 1)  # noqa: SIM115
    try:
        if argv[0] == "-c":
            sys.argv = ["-c", *argv[2:]]
            exec(compile(argv[1], "<string>", "exec"), {"__name__": "__main__"})
        elif argv[0] == "-m":
            sys.argv = argv[1:]
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = argv
            runpy.run_path(argv[0], run_name="__main__")
    except KeyboardInterrupt:  # as the interpreter ends by it
        sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)

"""A server as a process of its own, with the faults that a test asks for: `python -m` with JSON."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import httpx

from foretoken import AsyncEngine
from foretoken.serve.app import build_app
from foretoken.serve.options import ServeOptions
from foretoken.serve.server import serve
from tests.project.source import ROOT


class Child(NamedTuple):
    process: subprocess.Popen[str]
    http: httpx.Client

    def end(self, by: int = signal.SIGTERM, seconds: float = 20) -> int:
        """The exit code that a signal brings."""
        self.process.send_signal(by)
        return self.process.wait(seconds)


@contextmanager
def child(model: Any, *, engine: Any = None, breaks: str = "", **options: Any) -> Iterator[Child]:
    """A server that has begun to listen; it is gone afterwards.

    Args:
        breaks: what the fourth step raises: `device` as a GPU that failed, or `thread`, a bug.
    """
    asked = {"engine": {"model": str(model), **(engine or {})}, "breaks": breaks}
    words = [sys.executable, "-m", "tests.serve.child", json.dumps({**asked, "options": options})]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[-1]
            with httpx.Client(base_url=url, timeout=30) as http:
                yield Child(process, http)
        finally:
            process.kill()


def main() -> None:
    asked = json.loads(sys.argv[1])
    engine = AsyncEngine(**asked["engine"])
    options = ServeOptions(port=0, **asked["options"])
    if asked["breaks"]:
        _break(engine, asked["breaks"])
    serve(build_app(engine, options), options, lambda line: print(line, flush=True))


def _break(engine: AsyncEngine, how: str) -> None:
    inner, count = engine.engine, 0
    owner, name = (inner, "step") if how == "thread" else (inner.runner, "run")
    right = getattr(owner, name)

    def wrong(*given: Any) -> Any:
        nonlocal count
        count += 1
        if count > 3:
            raise RuntimeError("CUDA error: an illegal memory access" if how == "device" else how)
        return right(*given)

    setattr(owner, name, wrong)


if __name__ == "__main__":
    main()

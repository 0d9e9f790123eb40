"""A server in a process of its own, with faults: `python -m tests.serve.child JSON`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import httpx

from foretoken import AsyncEngine
from foretoken.ops.passes import pass_begins
from foretoken.serve.app import build_app
from foretoken.serve.options import ServeOptions
from foretoken.serve.server import bind, exit_now, serve
from tests.project.source import ROOT
from tests.serve.running import fail_later
from tests.support.asynchronous import PATIENCE, until

TIME_IS_UP, LAST_CALL = signal.SIGUSR1, signal.SIGUSR2
"""Signals to a server that drains: `drain_timeout` is over; the grace period is over, too."""


class Child(NamedTuple):
    process: subprocess.Popen[str]
    http: httpx.Client

    def end(self, by: int = signal.SIGTERM, seconds: float = PATIENCE) -> int:
        self.process.send_signal(by)
        return self.process.wait(seconds)

    @property
    def said(self) -> str:
        return self.process.stdout.read() if self.process.stdout else ""


@contextmanager
def child(
    model: Any,
    *,
    engine: Any = None,
    breaks: str = "",
    expects: int = 0,
    step_seconds: float = 0.0,
    **options: Any,
) -> Iterator[Child]:
    """A server that has begun to listen; it is gone afterwards.
    breaks: what the fourth step raises: `device` as a GPU that failed, or `thread`, a bug
    expects: steps wait while fewer requests are open
    step_seconds: what every step takes more
    """
    asked = {
        "engine": {"model": str(model), **(engine or {})}, "options": options,
        "breaks": breaks, "expects": expects, "step_seconds": step_seconds,
    }  # fmt: skip
    words = [sys.executable, "-m", "tests.serve.child", json.dumps(asked)]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            url = next(line for line in process.stdout if "http" in line).split()[-1]
            with httpx.Client(base_url=url, timeout=PATIENCE) as http:
                yield Child(process, http)
        finally:
            process.kill()


def main() -> None:
    asked = json.loads(sys.argv[1])
    engine = AsyncEngine(**asked["engine"])
    options = ServeOptions(port=0, **asked["options"])
    if asked["breaks"] == "thread":
        fail_later(engine.engine, "step", "the step is broken")
    elif asked["breaks"]:
        fail_later(engine.engine.runner, "begin", "CUDA error: an illegal memory access")
    step = engine.engine.step

    def later() -> Any:
        until(lambda: engine.status.num_open >= asked["expects"])
        pass_begins()  # which takes long
        time.sleep(asked["step_seconds"])
        return step()

    engine.engine.step = later  # type: ignore[method-assign]
    served = build_app(engine, options)
    life = served.state.context.lifetime
    for number, late in ((TIME_IS_UP, 0), (LAST_CALL, 60)):
        signal.signal(number, lambda *_, late=late: setattr(life, "_end", time.monotonic() - late))
    serve(served, life, bind(options), ["ready"], partial(print, flush=True))
    exit_now(0)


if __name__ == "__main__":
    main()

"""A server to measure: `foretoken serve` as a process, or one in a thread; what it holds."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from benchmarks.common import TARGET
from foretoken import AsyncEngine
from foretoken.serve.app import build_app
from foretoken.serve.options import ServeOptions
from foretoken.serve.server import bind, make_server

_HELD = re.compile(r"vllm:(?:num_requests_\w+|kv_cache_usage_perc)\{.*\} (.*)")


class Served(NamedTuple):
    """`foretoken serve`, which has begun to listen."""

    process: subprocess.Popen[str]
    url: str

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.url.rpartition(":")[2])

    def metrics(self) -> str:
        """What Prometheus would scrape."""
        return httpx.get(f"{self.url}/metrics", timeout=30).text

    def num_held(self) -> float:
        """Requests that run or wait, and the share of blocks that are held: 0 when idle."""
        return sum(map(float, _HELD.findall(self.metrics())))

    def resident_mib(self) -> float:
        """Memory of the process."""
        statm = Path(f"/proc/{self.process.pid}/statm").read_text(encoding="ascii")
        return int(statm.split()[1]) * 4096 / 2**20

    def seconds_to_free(self) -> float:
        """How long it takes from now until nothing is held; 30 at most."""
        start = time.perf_counter()
        while self.num_held() and time.perf_counter() - start < 30:
            time.sleep(0.01)
        return time.perf_counter() - start

    def end(self) -> int:
        """The exit code that SIGTERM brings."""
        self.process.terminate()
        return self.process.wait(60)


@contextmanager
def served(
    *options: str, model: str = TARGET, port: int = 0, module: str = "foretoken"
) -> Iterator[Served]:
    """A server of its own process on one thread; it logs what fails, and is gone afterwards."""
    words = [sys.executable, "-m", module, "serve", model, "--port", str(port)]
    words += ["--threads", "1", "--log-level", "warning", *options]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "Serving on" in line)
        # A pipe that nobody reads holds 64 KiB; then who writes to it stands still.
        reader = threading.Thread(target=sys.stderr.writelines, args=(process.stderr,))
        reader.start()
        try:
            yield Served(process, re.findall(r"http\S+", line)[0])
        finally:
            process.kill()
            reader.join()


class InThread(NamedTuple):
    """A server in a thread, and the loop that it runs on."""

    port: int
    loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def run(self, work: Any) -> Any:
        """The result of a coroutine on the server's own loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()


@contextmanager
def in_thread(engine: AsyncEngine, options: ServeOptions) -> Iterator[InThread]:
    """An engine's server on a free port and the loop that `foretoken serve` has; both end."""
    server = make_server(build_app(engine, options))
    loop = (server.config.get_loop_factory() or asyncio.new_event_loop)()
    with bind(ServeOptions(port=0)) as bound:

        def run() -> None:
            asyncio.set_event_loop(loop)
            loop.run_until_complete(server.serve([bound]))

        thread = threading.Thread(target=run)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield InThread(bound.getsockname()[1], loop)
        finally:
            server.should_exit = True
            thread.join()


async def leave(client: httpx.AsyncClient, path: str, body: dict[str, Any], seconds: float) -> None:
    """Ask, and hang up after so many seconds, whatever has come by then."""
    asking = asyncio.create_task(client.post(path, json=body))
    await asyncio.wait({asking}, timeout=seconds)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)

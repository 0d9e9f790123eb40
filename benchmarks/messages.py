"""What a message of a replica costs, by each of Ray Serve's two ways; prints one JSON object.

    python -m benchmarks.messages

A replica without an engine sends pieces of 200 bytes: one each 5 ms, for their time on the way, and
as fast as it can to eight readers, for the CPU time of both processes. `benchmarks.replicas` runs
this in a process of its own.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from typing import Any

WAYS = {"store": True, "grpc": False}
"""By the name of a way, what Ray Serve's `_by_reference` is."""
READERS, PIECES = 8, 500


class Sender:
    """A replica that sends pieces, each with the time at which it was made."""

    async def send(self, count: int, seconds: float) -> Any:
        """So many pieces, with so much time between two of them."""
        for _ in range(count):
            if seconds:
                await asyncio.sleep(seconds)
            yield time.time(), b"x" * 200

    async def cpu(self) -> float:
        """Seconds of CPU time so far."""
        return time.process_time()


async def read(handle: Any, count: int, seconds: float) -> list[float]:
    """Milliseconds that pieces were on their way."""
    found = []
    async for made, _ in handle.remote(count, seconds):
        found.append(1e3 * (time.time() - made))
    return found


async def measure(replica: Any) -> dict[str, dict[str, float]]:
    """Of each way the median delay, and milliseconds of CPU per message."""
    found = {}
    for name, by_reference in WAYS.items():
        handle = replica.options(stream=True, method_name="send", _by_reference=by_reference)
        await read(handle, 20, 0.005)
        delays = [delay for _ in range(5) for delay in await read(handle, 100, 0.005)]
        before, there = time.process_time(), await replica.cpu.remote()
        await asyncio.gather(*(read(handle, PIECES, 0) for _ in range(READERS)))
        spent = time.process_time() - before + await replica.cpu.remote() - there
        found[name] = {
            "delay_ms": statistics.median(delays),
            "cpu_ms": 1e3 * spent / (READERS * PIECES),
        }
    return found


def main() -> None:
    from foretoken.serve.command import prepare_own_cluster

    prepare_own_cluster()
    import ray
    from ray import serve

    ray.init("local", include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        serve.start(proxy_location="Disabled")
        options = {"max_ongoing_requests": 100, "logging_config": {"enable_access_log": False}}
        app = serve.deployment(Sender).options(ray_actor_options={"num_cpus": 1}, **options).bind()
        print(json.dumps(asyncio.run(measure(serve.run(app, name="a", route_prefix=None)))))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()

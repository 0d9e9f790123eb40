"""Clocks for calls of microseconds: CUDA-graph replay and host loops, over rotated inputs.

A *shot* is one timed pass over many calls; it gives microseconds per call. Repeats are shots, and
shots that are compared take turns, so that whatever else the machine does falls on all alike.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Call = Callable[[], Any]
Shot = Callable[[], float]

SHOT_US = 1500.0  # a graph's own launch, about 8 us, is then within half a percent
LEAST_CALL_US = 8.0
MOST_CALLS = 256
FLOOR_BYTES = 2 * 2**30
CPU_FLOOR_BYTES = 2**28
SETTLE_S = 0.01


def graph_shot(calls: Sequence[Call]) -> Shot:
    """Captures all calls in one CUDA graph; a shot replays it between two events.

    Each call runs once before: nothing may be compiled or loaded during a capture.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in dict.fromkeys(calls):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def shot() -> float:
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return 1000 * float(start.elapsed_time(end)) / len(calls)

    shot()  # the first replay uploads the graph
    return shot


def host_shot(calls: Sequence[Call], device: torch.device) -> Shot:
    """A shot makes all calls in a row by the host's clock; on a GPU it waits for the last.

    On a CPU untimed calls come first, for SETTLE_S: the threads of what was timed before go on
    spinning for some milliseconds, and would be charged to this (2.4 ms for a call of 1.2).
    """

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def shot() -> float:
        wait()
        settled = time.perf_counter() + (SETTLE_S if device.type == "cpu" else 0)
        while time.perf_counter() < settled:  # whole rounds: they leave the same in the caches
            for call in calls:
                call()
        start = time.perf_counter()
        for call in calls:
            call()
        wait()
        return 1e6 * (time.perf_counter() - start) / len(calls)

    return shot


def enough(calls: Sequence[Call], slow_us: float, least_us: float) -> list[Call]:
    """The calls, over and over, until a shot of them is long enough to be timed well.

    Args:
        slow_us: what one call takes eagerly.
        least_us: what it can take at the least.
    """
    if slow_us > SHOT_US:
        return list(calls)
    count = math.ceil(SHOT_US / max(min(least_us, slow_us), LEAST_CALL_US))
    rounds = math.ceil(min(count, MOST_CALLS) / len(calls))
    return list(calls) * rounds


def in_turns(
    shots: dict[str, Shot], most: int, seconds: float, least: int = 3
) -> dict[str, list[float]]:
    """Microseconds per call of every repeat.

    Args:
        most: repeats of each; fewer, but at least `least`, once its `seconds` are used up.
    """
    found: dict[str, list[float]] = {name: [] for name in shots}
    spent = dict.fromkeys(shots, 0.0)
    for repeat in range(most):
        # To and fro, so that no shot always follows the same other one.
        for name, shot in list(shots.items())[:: -1 if repeat % 2 else 1]:
            if repeat >= least and spent[name] > seconds:
                continue
            start = time.perf_counter()
            found[name].append(shot())
            spent[name] += time.perf_counter() - start
    return found


def read_gb_per_s(device: torch.device) -> float:
    """GB/s of reading memory once: the fastest of ten passes, of the fastest way that there is."""
    if device.type != "cuda":
        numbers = torch.ones(CPU_FLOOR_BYTES // 4)
        shots = [host_shot([numbers.sum], device)]
    else:
        numbers = torch.rand(FLOOR_BYTES // 4, device=device)
        ways: list[Call] = [numbers.sum, lambda: numbers.view(-1, 16_384).amax(1)]
        try:
            from benchmarks.ops import read
        except ImportError:
            pass
        else:
            out = numbers.new_empty(len(numbers) // read.WHOLE)
            ways.append(lambda: read.read(numbers, out))
        shots = [graph_shot([way]) for way in ways]
    best_us = min(shot() for shot in shots for _ in range(10))
    return numbers.nbytes / best_us / 1e3


def extra_bytes(call: Call) -> int:
    """Most device memory that PyTorch's allocator held during a call, above what it held before.

    Results count, and so does what the call keeps; memory kept from earlier calls does not.
    """
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before

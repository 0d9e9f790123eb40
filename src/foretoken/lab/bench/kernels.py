"""The kernels of decode steps: which there are, how long each takes, and what it reads.

Charter: from what a profiler saw to figures. What a step must read is counted in `floor.py`.

A kernel that is launched dependently (PDL) starts while the one before it ends, and its duration
counts that wait: durations add up to more than the step. Beside them stands the time that is a
kernel's own, from the end of all before it to its own end. Own times and idle time make the step.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, supported_activities

from foretoken.lab.bench.figures import Step

SETTLING, RECORDED = 3, 8
"""Steps of the whole batch that pass before, and that are recorded."""

KINDS = {
    "split-K sums": "splitKreduce",
    "product": "gemv|streamk|nvjet|gemm|cutlass",
    "attention": "^(decode|prefill)_kernel",
    "attention merge": "^merge_kernel",
    "rows": "^(embed|scale|norm|silu|join|spread|write_new)_kernel",
    "slots": "^(count|put|advance|shift|search|found|pack|plan)_kernel",
    "sampling": "^(edit|filter|pick|scan|sweep|guess|wide|settle|residual|decide|write|measure"
    "|likeliest)_kernel",
    "torch": r"at::|cub::|^void \(anonymous namespace\)",
    "copies": "^Mem(cpy|set)",
}
"""What a kernel is by its name, the first that fits; otherwise it is `other`."""
_BEHIND = ("o", "gate_up", "down", "head", "draft features")  # products, in order, after attention
_BETWEEN = 3  # of them between two layers; behind them stands the next one's qkv
_FIRST = ("embed_kernel", "join_kernel")  # a pass begins with one of them
_OF_DRAFTER = {k: f"draft {k}" for k in ("qkv", "attention", "attention merge", *_BEHIND[:4])}


class Kernel(NamedTuple):
    """A launch that was recorded, in microseconds."""

    name: str
    start: float
    duration: float


class Recorder:
    """Records the kernels of a few steps in which the whole batch decodes.

    To be called whenever a step is done. The device is waited for at both ends, so that what is
    recorded is whole steps, also where the next one has been launched by then.

    Attributes:
        kernels: what was recorded; empty until enough steps have been seen.
        steps: those steps.
    """

    def __init__(self, batch: int) -> None:
        self.kernels: list[Kernel] = []
        self.steps: Sequence[Step] = ()
        self._batch, self._seen = batch, 0
        self._profile: Any = profile(activities=[ProfilerActivity.CUDA], acc_events=True)

    def __call__(self, steps: Sequence[Step]) -> None:
        trace = steps[-1].trace
        if not trace.num_requests == trace.num_decoding == self._batch:
            return
        self._seen += 1
        if self._seen == SETTLING:
            torch.cuda.synchronize()
            self._profile.start()
        elif self._seen == SETTLING + RECORDED:
            torch.cuda.synchronize()
            self._profile.stop()
            self.kernels, self.steps = launches(self._profile.events()), steps[-RECORDED:]


def sees_kernels() -> bool:
    """Whether PyTorch was built with a profiler of the device."""
    return ProfilerActivity.CUDA in supported_activities()  # type: ignore[no-untyped-call]


def launches(events: Iterable[Any]) -> list[Kernel]:
    """What ran on the device, of a profiler's events."""
    return [
        Kernel(event.name, event.time_range.start, event.time_range.elapsed_us())
        for event in events
        if event.device_type.name == "CUDA"
    ]


def kernel_figures(
    seen: Iterable[Kernel],
    layers: int | None,
    call_bytes: Mapping[str, float],
    bandwidth: float,
    steps: int = RECORDED,
) -> dict[str, dict[str, float]]:
    """Figures (`figures.UNITS`) of each kind, the most time first, then of `idle` and of `all`.

    Args:
        seen: kernels of so many whole steps, in any order.
        layers: see `kinds`.
        call_bytes: what one call must read, of the kinds of which that is known.
        bandwidth: GB/s.
    """
    ordered = sorted(seen, key=lambda kernel: kernel.start)
    found, idle, first = dict[str, list[float]](), 0.0, ordered[0].start
    end = first
    for kernel, kind in zip(ordered, kinds([k.name for k in ordered], layers), strict=True):
        use, stop = found.setdefault(kind, [0, 0.0, 0.0]), kernel.start + kernel.duration
        own = max(0.0, stop - max(kernel.start, end))
        use[:] = use[0] + 1, use[1] + kernel.duration, use[2] + own
        idle += max(0.0, kernel.start - end)
        end = max(end, stop)
    found = dict(sorted(found.items(), key=lambda item: -item[1][2]))
    total = [sum(column) for column in zip(*found.values(), strict=True)]
    found |= {"idle": [0, 0.0, idle], "all": [*total[:2], end - first]}
    made = {}
    for kind, (calls, duration, own) in found.items():
        values = {"calls": calls / steps, "duration_ms": duration / steps / 1e3}
        values |= {"kernel_ms": own / steps / 1e3, "share_of_step": own / (end - first)}
        if calls:
            values["call_us"] = duration / calls
        if kind in call_bytes and own:
            speed = calls * call_bytes[kind] / own / 1e3
            values["read_gb"] = values["calls"] * call_bytes[kind] / 1e9
            values |= {"read_gb_per_s": speed, "share_of_floor": speed / bandwidth}
        made[kind] = values
    return made


def kinds(names: Sequence[str], layers: int | None) -> list[str]:
    """The kind of each kernel of whole steps, in order.

    One kernel computes several products. In a fused pass four stand between two layers' attention,
    so that a product's place says what it is. A pass of `layers` is the target's, any other a
    drafter's. Without `layers` products stay `product`, and nothing is a drafter's.
    """
    found = [kind_of(name) for name in names]
    if layers is None:
        return found
    gaps: list[list[int]] = [[]]  # products before, between and behind the calls of attention
    begins = set()  # gaps in which a pass begins
    for i, kind in enumerate(found):
        if names[i] in _FIRST:
            begins.add(len(gaps) - 1)
        if kind == "product":
            gaps[-1].append(i)
        elif kind == "attention" and gaps[-1]:
            gaps.append([])
    starts = [gap.pop() for gap in gaps[:-1]]
    for start in starts:
        found[start] = "qkv"
    if gaps[0]:  # before any pass: a drafter's first logits
        found[gaps[0][0]] = "draft head"
    first = 0  # call of attention of a pass
    for call, gap in enumerate(gaps[1:], 1):
        for place, name in zip(gap, _BEHIND, strict=False):
            found[place] = name
        if len(gap) == _BETWEEN and call < len(starts) and call not in begins:
            continue  # the same pass goes on
        if call - first != layers:
            for place in range(starts[first], max(gap[:4], default=len(found) - 1) + 1):
                found[place] = _OF_DRAFTER.get(found[place], found[place])
        first = call
    return found


def kind_of(name: str) -> str:
    """By its name alone; see `KINDS`."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "other")

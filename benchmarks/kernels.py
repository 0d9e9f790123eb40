"""The kernels of decode steps on a GPU: which there are, how long each takes, and what it reads.

    python -m benchmarks.kernels --model benchmarks/shapes/llama-3.1-8b --load-format dummy \\
        --dtype bfloat16 --batch-size 1,8,64

One batch per size is run under PyTorch's profiler, plain and, with `--speculative-config`, with
drafts. What a step must read at least is counted as in `foretoken.lab.bench.floor`.

A kernel that is launched dependently (PDL) starts while the one before it ends, and its duration
counts that wait: durations add up to more than the step. Beside them stands the time that is a
kernel's own, from the end of all before it to its own end. Own times and idle time make the step.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, supported_activities

from foretoken import LLM, SamplingParams
from foretoken.engine.engine import Engine
from foretoken.engine.trace import StepTrace
from foretoken.errors import ConfigError
from foretoken.lab.bench.floor import Floor, Reads
from foretoken.lab.bench.options import BenchOptions
from foretoken.lab.results import Row, Spread, collect, write_file
from foretoken.ops import LoadedStack, Stack
from foretoken.ops.stack import linears

UNITS = {
    "calls": "per decode step",
    "call_us": "us per call",
    "duration_ms": "ms per decode step, with waits for the kernel before",
    "kernel_ms": "ms per decode step, behind the end of all before",
    "share_of_step": "kernel_ms / that of all",
    "read_gb": "GB per decode step, at least",
    "read_gb_per_s": "GB/s",
    "share_of_floor": "floor / kernel_ms",
}
NOTE = (
    "Kernels were recorded in a few steps near the beginning of a run; a profiler slows them down. "
    "duration_ms is from a kernel's start to its end; some start while the one before ends, and "
    "wait. kernel_ms is from the end of all before to the kernel's own; with `idle` it adds up to "
    "the step, `all`."
)
SETTLING, RECORDED = 3, 8
"""Steps of the whole batch that pass before, and that are recorded."""

KINDS = {
    "split-K sums": "splitKreduce",
    "product": "gemv|streamk|nvjet|gemm|cutlass",
    "attention": "^(decode|prefill)_kernel",
    "attention merge": "^merge_kernel",
    "rows": "^(embed|scale|norm|silu|join|spread|write_new)_kernel",
    "slots": "^(count|write_drafts|advance|shift|search|copy_match|pack|plan)_kernel",
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
        self.steps: list[StepTrace] = []
        self._batch, self._seen = batch, 0
        self._profile: Any = profile(activities=[ProfilerActivity.CUDA], acc_events=True)

    def __call__(self, trace: StepTrace) -> None:
        if not trace.num_requests == trace.num_decoding == self._batch:
            return
        self._seen += 1
        if SETTLING < self._seen <= SETTLING + RECORDED:
            self.steps.append(trace)
        if self._seen == SETTLING:
            torch.cuda.synchronize()
            self._profile.start()
        elif self._seen == SETTLING + RECORDED:
            torch.cuda.synchronize()
            self._profile.stop()
            self.kernels = launches(self._profile.events())


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
    """Figures (`UNITS`) of each kind, the most time first, then of `idle` and of `all`.

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


def measure(llm: LLM, batch: int, num_drafts: int | None, lengths: tuple[int, int]) -> list[Row]:
    """Rows of a batch's kinds of kernels, the last two `idle` and `all`.

    Args:
        num_drafts: K; None: the engine's.
        lengths: tokens of each prompt and of each output.

    Raises:
        ConfigError: the profiler saw no kernels.
    """
    recorder, engine, chance = Recorder(batch), llm.engine, random.Random(batch)
    prompts = [chance.choices(range(100, 1000), k=lengths[0]) for _ in range(batch)]
    params = SamplingParams(
        temperature=0, max_tokens=lengths[1], ignore_eos=True, num_speculative_tokens=num_drafts
    )
    engine.on_step = recorder
    try:
        llm.generate(prompts, params, use_tqdm=False)
    finally:
        engine.on_step = None
    if not recorder.kernels:
        bound = "longer: a run has too few steps, or PyTorch's profiler sees no kernels here"
        raise ConfigError("output_len", lengths[1], bound)
    stacks = [engine.runner.model.network, network_of(engine.runner.drafter)]
    fused = not any(one is not None and one.multiplies_masked_keys for one in stacks)
    floor = Floor.of(engine, None)
    context = sum(step.num_context for step in recorder.steps) / RECORDED / batch
    found = kernel_figures(
        recorder.kernels,
        len(floor.target.layers) if fused else None,
        call_bytes(engine, floor, batch, context),
        floor.bandwidth,
    )
    speculation = llm.config.speculative_config
    drafted = speculation is not None and num_drafts is None
    case = f"batch {batch}, " + (f"{speculation.method}" if speculation and drafted else "plain")
    return [
        Row(
            f"{case}: {kind}",
            {"batch": batch, "drafted": drafted, "kernels": kind},
            {name: Spread.of([value], UNITS[name]) for name, value in values.items()},
        )
        for kind, values in found.items()
    ]


def call_bytes(engine: Engine, floor: Floor, batch: int, context: float) -> dict[str, float]:
    """Bytes that one launch of what a fused decoder computes reads, by `kinds`."""

    def per_call(reads: Reads, products: Mapping[str, float]) -> dict[str, float]:
        kept = reads.per_pass(batch, context) - reads.weights
        return {**products, "attention": kept / max(1, len(reads.layers))}

    own = per_call(floor.target, products_of(engine.runner.model.network))
    drafted = per_call(floor.drafter, products_of(network_of(engine.runner.drafter)))
    return own | {f"draft {kind}": n for kind, n in drafted.items()}


def network_of(drafter: Any) -> LoadedStack | None:
    """What a drafter runs, if it runs a stack."""
    head = getattr(drafter, "head", None)
    return head if head is not None else getattr(getattr(drafter, "model", None), "network", None)


def products_of(network: Any) -> dict[str, float]:
    """Bytes of a layer's products by their names, on average over layers."""
    stack: Stack | None = getattr(network, "stack", None)
    if stack is None:
        return {}
    sizes = dict[str, float]()
    for name, linear in linears(stack):
        kind = "features" if name == "fc" else name
        share = linear.weight.nbytes / (1 if name in ("head", "fc") else len(stack.layers))
        sizes[kind] = sizes.get(kind, 0.0) + share
    return sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="tiny-python")
    parser.add_argument("--speculative-config")
    parser.add_argument("--batch-size", default="1,8,64")
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--output", type=Path, help="a results file, *.json")
    args = parser.parse_args()
    if not sees_kernels():
        raise SystemExit("PyTorch's profiler sees no kernels here: it takes a GPU.")
    lengths = str(args.input_len), str(args.output_len)
    sizes = BenchOptions(concurrency=args.batch_size, input_len=lengths[0], output_len=lengths[1])
    engine = {"model": args.model, "load_format": args.load_format, "dtype": args.dtype}
    engine |= {"speculative_config": args.speculative_config, "enable_prefix_caching": False}
    rows: list[Row] = []
    with LLM(**sizes.sized(engine)) as llm:
        for load in sizes.loads:
            for k in (0, None) if args.speculative_config else (0,):
                made = measure(llm, load.concurrency, k, (args.input_len, args.output_len))
                for row in made:
                    shown = {
                        name: getattr(value, "median", value) for name, value in row.values.items()
                    }
                    print(row.case, shown)
                rows += made
    if args.output is not None:
        command = f"python -m benchmarks.kernels {' '.join(sys.argv[1:])}"
        shapes = {**engine, "input_len": args.input_len, "output_len": args.output_len}
        write_file(collect(args.output.stem, command, shapes, rows, [NOTE]), args.output)


if __name__ == "__main__":
    main()

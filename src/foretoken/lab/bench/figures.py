"""The figures of one run: latency, throughput, acceptance, where its time went, and the floor.

Charter: arithmetic on what a run recorded. Which phase of a step's trace is whose work is said in
`device_seconds` alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from foretoken.engine.trace import StepTrace
from foretoken.lab.bench.floor import Floor
from foretoken.outputs import RequestMetrics, RequestOutput

PARTS = {"draft": ("draft", "observe"), "target": ("forward",), "verify": ("verify",)}
"""What a device does in a step, and the phases of a trace that it is timed by."""
UNITS = {
    "ttft_ms": "ms",
    "tpot_ms": "ms per token of a request",
    "output_tokens_per_second": "tokens/s",
    "total_tokens_per_second": "tokens/s, prompts included",
    "requests_per_second": "requests/s",
    **dict.fromkeys(("wall_s", "prefill_s", "decode_s", "tail_s"), "s"),
    "cached_tokens": "prompt tokens per request",
    "acceptance_length": "tokens per verification",
    "acceptance_rate": "accepted / drafted",
    **dict.fromkeys(
        ("step_ms", "draft_ms", "target_ms", "verify_ms", "host_gap_ms", "floor_ms"),
        "ms per decode step",
    ),
    "tokens_per_step": "tokens per request and decode step",
    "decode_ms_per_token": "ms per token of a request",
    "read_gb": "GB per decode step, at least",
    "share_of_floor": "floor / step",
    "read_gb_per_s": "GB/s of the step",
    "target_gb_per_s": "GB/s of the target's pass",
    "draft_gb_per_s": "GB/s of drafting",
    "speedup": "x, tokens/s to plain",
    "tpot_speedup": "x, TPOT of plain to this",
    "calls": "per decode step",
    "call_us": "us per call",
    "duration_ms": "ms per decode step, with waits for the kernel before",
    "kernel_ms": "ms per decode step, behind the end of all before",
    "share_of_step": "kernel_ms / that of all",
}


class Step(NamedTuple):
    """One step of the engine; `seconds` count from the end of the one before it."""

    seconds: float
    trace: StepTrace


@dataclass(frozen=True, slots=True)
class Run:
    """One batch, from its submission to its last output.

    Attributes:
        seconds: in all; those behind the last step included.
        prompt_len: tokens of each prompt.
    """

    seconds: float
    prompt_len: int
    outputs: list[RequestOutput]
    steps: list[Step]


def device_seconds(trace: StepTrace) -> dict[str, float]:
    """Seconds of a step that are draft, target and verify; what they leave of it is host gap."""
    seconds = {
        part: sum(trace.seconds.get(phase, 0.0) for phase in phases)
        for part, phases in PARTS.items()
    }
    if not trace.num_drafts:
        seconds["draft"] = 0.0  # finding that there is nothing to draft is the host's work
    return seconds


def figures(run: Run, floor: Floor) -> dict[str, float]:
    """Every figure of a run that it can tell, by its name in `UNITS`, and `accepted_at_1`...K.

    Without a decode step of the whole batch there is nothing about steps, without drafts nothing
    about acceptance, and with one token per request no TPOT.
    """
    parts = split_steps(run)
    found = _latency(run) | _throughput(run) | _acceptance(run)
    for name, steps in parts.items():
        found[f"{name}_s"] = sum(step.seconds for step in steps)
    found["tail_s"] += run.seconds - sum(step.seconds for step in run.steps)
    if parts["decode"]:
        found |= _decode_steps(run, parts["decode"], floor)
    return found


def split_steps(run: Run) -> dict[str, list[Step]]:
    """The steps by what they are: `prefill`, `decode` of the whole batch, `tail` of what is left.

    The first step that only decodes counts as prefill: in it a draft model computes the prompts.
    """
    parts: dict[str, list[Step]] = {"prefill": [], "decode": [], "tail": []}
    decoded = False
    for step in run.steps:
        trace = step.trace
        decodes = trace.num_requests == trace.num_decoding
        whole = trace.num_requests == len(run.outputs)
        name = "prefill" if not (decodes and decoded) else "decode" if whole else "tail"
        parts[name].append(step)
        decoded = decodes
    return parts


def _latency(run: Run) -> dict[str, float]:
    first, per_token = [], []
    for output in run.outputs:
        metrics, count = output.metrics, len(output.outputs[0].token_ids)
        to_first = metrics.time_to_first_token or 0.0
        first.append(to_first)
        if count > 1:
            per_token.append((count / metrics.tokens_per_second - to_first) / (count - 1))
    found = {"ttft_ms": 1000 * statistics.fmean(first)}
    if per_token:
        found["tpot_ms"] = 1000 * statistics.fmean(per_token)
    return found


def _throughput(run: Run) -> dict[str, float]:
    requests = len(run.outputs)
    tokens = sum(len(output.outputs[0].token_ids) for output in run.outputs)
    cached = sum(output.metrics.num_cached_tokens for output in run.outputs)
    return {
        "output_tokens_per_second": tokens / run.seconds,
        "total_tokens_per_second": (tokens + requests * run.prompt_len) / run.seconds,
        "requests_per_second": requests / run.seconds,
        "wall_s": run.seconds,
        "cached_tokens": cached / requests,
    }


def _acceptance(run: Run) -> dict[str, float]:
    """Lengths count the token after the accepted drafts; a position counts if all before it do."""
    metrics = RequestMetrics()
    for output in run.outputs:
        metrics.add(output.metrics)
    if not metrics.num_drafts:
        return {}
    counts = zip(metrics.accepted_per_position, metrics.drafted_per_position, strict=True)
    return {
        "acceptance_length": metrics.mean_acceptance_length,
        "acceptance_rate": metrics.acceptance_rate,
        **{f"accepted_at_{i}": a / d for i, (a, d) in enumerate(counts, start=1)},
    }


def _decode_steps(run: Run, steps: list[Step], floor: Floor) -> dict[str, float]:
    """Means over the decode steps of the whole batch."""
    count, batch = len(steps), len(run.outputs)
    step_s = sum(step.seconds for step in steps) / count
    device_s = dict.fromkeys(PARTS, 0.0)
    for step in steps:
        for part, seconds in device_seconds(step.trace).items():
            device_s[part] += seconds / count
    tokens = 1 + sum(step.trace.num_accepted for step in steps) / (count * batch)
    found = {
        "step_ms": 1000 * step_s,
        **{f"{part}_ms": 1000 * seconds for part, seconds in device_s.items()},
        "host_gap_ms": 1000 * (step_s - sum(device_s.values())),
        "tokens_per_step": tokens,
        "decode_ms_per_token": 1000 * step_s / tokens,
    }
    context = mean_context(run, steps)
    passes = sum(step.trace.num_drafts for step in steps) / (count * batch)
    target = floor.target.per_pass(batch, context) / 1e9
    drafter = passes * floor.drafter.per_pass(batch, context) / 1e9
    floor_s = (target + drafter) / floor.bandwidth
    found |= {
        "read_gb": target + drafter,
        "floor_ms": 1000 * floor_s,
        "share_of_floor": floor_s / step_s,
        "read_gb_per_s": (target + drafter) / step_s,
    }
    for part, gigabytes in (("target", target), ("draft", drafter)):
        if gigabytes and device_s[part]:
            found[f"{part}_gb_per_s"] = gigabytes / device_s[part]
    return found


def mean_context(run: Run, steps: Sequence[Step]) -> float:
    """Tokens of a request before a decode step: its prompt, and what it had generated by then."""
    generated, before, timed = 0.0, 0.0, {id(step) for step in steps}
    for step in run.steps:
        if id(step) in timed:
            before += generated
        generated += (step.trace.num_decoding + step.trace.num_accepted) / len(run.outputs)
    return run.prompt_len + 1 + before / len(steps)

"""The figures of one run, from its records: latency, throughput, acceptance, step times, floor."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain, pairwise

import numpy as np

from foretoken.engine.trace import StepTrace
from foretoken.lab.bench.floor import Floor
from foretoken.lab.bench.load import Record, Run, Step
from foretoken.outputs import SpeculationMetrics

PARTS = {"draft": ("draft", "observe"), "target": ("forward",), "verify": ("verify",)}
"""The parts of a step on the device, each with its phases in a trace."""
LATENCIES = {
    "ttft_ms": "ms",
    "tpot_ms": "ms per token of a request",
    "itl_ms": "ms between pieces of an answer",
    "e2e_ms": "ms",
}
PERCENTILES = (50, 90, 95, 99)
UNITS = {
    **LATENCIES,
    "ttft_ms_max": "ms, of the request that waited longest",
    "output_tokens_per_second": "tokens/s",
    "total_tokens_per_second": "tokens/s, prompts included",
    "tokens_per_second_per_user": "tokens/s of a request, after its first piece",
    "requests_per_second": "requests/s",
    "offered_requests_per_second": "requests/s that were due",
    "sent_requests_per_second": "requests/s that the client sent",
    "send_lag_ms": "ms from when a request was due until it was sent",
    "goodput_requests_per_second": "requests/s that met every bound",
    "slo_met": "requests that met every bound / sent",
    "wall_s": "s",
    "requests": "requests",
    "failed_requests": "requests",
    "output_tokens": "tokens per request",
    "acceptance_length": "tokens per verification",
    "acceptance_rate": "accepted / drafted",
    **dict.fromkeys(
        ("step_ms", "draft_ms", "target_ms", "verify_ms", "host_gap_ms", "floor_ms"),
        "ms per decode step",
    ),
    "requests_per_step": "requests per decode step",
    "tokens_per_step": "tokens per request and decode step",
    "decode_ms_per_token": "ms per token of a request",
    "read_gb": "GB per decode step, at least",
    "share_of_floor": "floor / step",
    "speedup": "x, tokens/s relative to plain decoding",
    "tpot_speedup": "x, TPOT of plain decoding relative to this",
    "e2e_speedup": "x, E2E of plain decoding relative to this",
}
POSITIONS = {
    "unconditional_at_": "accepted with all drafts before it / drafted",
    "conditional_at_": "accepted / tested; a draft is tested if all drafts before it are accepted",
    "length_share_": "verifications that gave so many tokens / all",
}
"""Prefixes of figures that are numbered 1, 2, .., and their units."""


def unit_of(name: str) -> str:
    """The unit of a figure."""
    return UNITS.get(name) or next(u for n, u in POSITIONS.items() if name.startswith(n))


def device_seconds(trace: StepTrace) -> dict[str, float]:
    """The seconds of a step's parts draft, target and verify; the rest of the step is host gap."""
    seconds = {
        part: sum(trace.seconds.get(phase, 0.0) for phase in phases)
        for part, phases in PARTS.items()
    }
    if not trace.num_drafts:  # then the phase `draft` is work of the host, not of the device
        seconds["draft"] = trace.seconds.get("observe", 0.0)
    return seconds


def figures(run: Run, floor: Floor | None, bounds: Mapping[str, float]) -> dict[str, float]:
    """Every figure that follows from one run, by its name in `UNITS` or `POSITIONS`.

    Figures of steps need a step that only decodes, figures of acceptance need drafts, and TPOT and
    ITL need answers of more than one piece. An answer of several tokens in one piece fails every
    bound on TPOT and ITL. For percentiles, which cover several runs, see `percentiles`.

    bounds: the SLO of each request: ms by name in `LATENCIES`
    """
    done = run.done
    result: dict[str, float] = {"requests": len(done), "failed_requests": len(run.failed)}
    result |= _throughput(run) | _sending(run.records)
    for name, values in latencies(done).items():
        result[name] = statistics.fmean(values)
        if name == "ttft_ms":
            result["ttft_ms_max"] = max(values)
        if name == "tpot_ms" and all(values):
            result["tokens_per_second_per_user"] = statistics.fmean(1000 / x for x in values)
    if bounds:
        num_good = sum(_meets(record, bounds) for record in done)
        result["goodput_requests_per_second"] = num_good / run.seconds
        result["slo_met"] = num_good / len(run.records)
    if run.speculation is not None and run.speculation.num_drafts:
        result |= _acceptance(run.speculation, *outcomes(run))
    if decoding := decode_steps(run.steps, run.concurrency):
        result |= _decode_steps(decoding, floor)
    return result


def _latencies(record: Record) -> dict[str, float]:
    """The latencies of a request in ms by name; ITL is the request's longest gap."""
    first, last = record.arrivals[0], record.arrivals[-1]
    seconds_of = {"ttft_ms": first - record.due, "e2e_ms": last - record.due}
    if len(record.arrivals) > 1:
        seconds_of["tpot_ms"] = (last - first) / max(record.num_output - record.num_first, 1)
        seconds_of["itl_ms"] = max(b - a for a, b in pairwise(record.arrivals))
    return {name: 1000 * seconds for name, seconds in seconds_of.items()}


def _meets(record: Record, bounds: Mapping[str, float]) -> bool:
    latency_ms, unknown_ms = _latencies(record), math.inf if record.num_output > 1 else 0.0
    return all(latency_ms.get(name, unknown_ms) <= ms for name, ms in bounds.items())


def latencies(done: Sequence[Record]) -> dict[str, list[float]]:
    """The latencies of all requests in ms by name; ITL has every gap of every request."""
    by_request, names = [_latencies(record) for record in done], ("ttft_ms", "tpot_ms", "e2e_ms")
    by_name = {n: [values[n] for values in by_request if n in values] for n in names}
    by_name["itl_ms"] = [1000 * (b - a) for r in done for a, b in pairwise(r.arrivals)]
    return {name: values for name, values in by_name.items() if values}


def percentiles(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median, and percentiles for which a sample is large enough: P99 needs 100 values."""
    return {
        f"{name}_p{p}": float(np.percentile(values, p))
        for name, values in samples.items()
        for p in PERCENTILES
        if len(values) * (100 - p) >= 100 or p == 50
    }


def _sending(records: Sequence[Record]) -> dict[str, float]:
    """Under a request rate: how late the client was, and the offered and the sent rate."""
    sent = [record.sent for record in records if record.sent is not None]
    due = [record.due for record in records]
    if len(sent) < 2:
        return {}
    gaps = len(sent) - 1
    return {
        "send_lag_ms": 1000 * statistics.fmean(b - a for a, b in zip(due, sent, strict=True)),
        "offered_requests_per_second": gaps / max(due[-1] - due[0], 1e-9),
        "sent_requests_per_second": gaps / max(sent[-1] - sent[0], 1e-9),
    }


def _throughput(run: Run) -> dict[str, float]:
    done = run.done
    tokens, prompts = sum(r.num_output for r in done), sum(r.num_input for r in done)
    result = {
        "output_tokens_per_second": tokens / run.seconds,
        "requests_per_second": len(done) / run.seconds,
        "wall_s": run.seconds,
        "output_tokens": tokens / len(done),
    }
    if prompts:
        result["total_tokens_per_second"] = (tokens + prompts) / run.seconds
    return result


def outcomes(run: Run) -> tuple[Counter[int], Counter[int]]:
    """Numbers of accepted and of rejected drafts, by draft index.

    A draft counts only if all drafts before it were accepted. If the client does not know the
    origins of tokens, a server's counts are used, as if all verifications had equally many
    drafts.
    """
    accepted, rejected = Counter[int](), Counter[int]()
    for record in run.records:
        index = 0
        for origin in record.origins:
            if origin == "accepted":
                accepted[index] += 1
                index += 1
                continue
            rejected[index] += origin == "resampled"
            index = 0
    if not any(record.origins for record in run.records) and run.speculation is not None:
        at_least = _num_accepting(run.speculation)
        accepted.update(dict(enumerate(at_least[1:])))
        rejected.update({i: a - b for i, (a, b) in enumerate(pairwise(at_least))})
    return accepted, rejected


def _num_accepting(counts: SpeculationMetrics) -> list[int]:
    """The numbers of verifications with at least 0, 1, .. accepted drafts.

    A server's K may exceed the case's K: indices that were never drafted are left out.
    """
    positions = [*counts.drafted_per_position, 0].index(0) or len(counts.accepted_per_position)
    return [counts.num_drafts, *counts.accepted_per_position[:positions]]


def _acceptance(
    counts: SpeculationMetrics, accepted: Mapping[int, int], rejected: Mapping[int, int]
) -> dict[str, float]:
    """Figures of acceptance; lengths include the token after the drafts, positions count from 1.

    accepted, rejected: the result of `outcomes`
    """
    verifications, *at_least = _num_accepting(counts)
    drafted = counts.drafted_per_position or [verifications] * len(at_least)
    result = {"acceptance_length": counts.mean_acceptance_length}
    result["acceptance_rate"] = counts.acceptance_rate
    for i, (num_accepted, num_drafted) in enumerate(zip(at_least, drafted, strict=False), start=1):
        result[f"unconditional_at_{i}"] = num_accepted / num_drafted
    for i in range(len(at_least)):
        if tested := accepted[i] + rejected[i]:
            result[f"conditional_at_{i + 1}"] = accepted[i] / tested
    for i, (a, b) in enumerate(pairwise([verifications, *at_least, 0]), start=1):
        result[f"length_share_{i}"] = (a - b) / verifications
    return result


def decode_steps(steps: Sequence[Step], concurrency: int) -> list[Step]:
    """The steps in which all requests decode, except the first such step after a prompt.

    In that first step a draft model computes the prompt, and the step may have waited for the
    prompt. With a fixed concurrency, only steps of the whole batch count: requests that began
    together do not all end together.
    """
    is_decode = [0 < s.trace.num_requests == s.trace.num_decoding for s in steps]
    triples = zip(chain([False], is_decode), is_decode, steps, strict=False)
    decoding = [step for before, now, step in triples if before and now]
    largest = max((step.trace.num_requests for step in decoding), default=0)
    return [step for step in decoding if step.trace.num_requests >= min(largest, concurrency)]


def _decode_steps(steps: Sequence[Step], floor: Floor | None) -> dict[str, float]:
    count, requests = len(steps), sum(trace.num_requests for _, trace in steps)
    step_s = sum(step.seconds for step in steps) / count
    device_s = dict.fromkeys(PARTS, 0.0)
    for step in steps:
        for part, seconds in device_seconds(step.trace).items():
            device_s[part] += seconds / count
    tokens = 1 + sum(trace.num_accepted for _, trace in steps) / requests
    result = {
        "requests_per_step": requests / count,
        "step_ms": 1000 * step_s,
        **{f"{part}_ms": 1000 * seconds for part, seconds in device_s.items()},
        "host_gap_ms": 1000 * (step_s - sum(device_s.values())),
        "tokens_per_step": tokens,
        "decode_ms_per_token": 1000 * step_s / tokens,
    }
    if floor is None:
        return result
    target = drafter = 0.0
    for _, trace in steps:
        batch = trace.num_requests
        context, passes = trace.num_context / batch, trace.num_drafts / batch
        target += floor.target.per_pass(batch, context) / count / 1e9
        drafter += passes * floor.drafter.per_pass(batch, context) / count / 1e9
    floor_s = (target + drafter) / floor.bandwidth
    read = {"read_gb": target + drafter, "floor_ms": 1000 * floor_s}
    return result | read | {"share_of_floor": floor_s / step_s}

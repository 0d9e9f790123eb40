"""Runs of `foretoken bench` made by hand, and the options of a small one."""

from __future__ import annotations

from foretoken.config import SpeculativeConfig
from foretoken.engine.trace import StepTrace
from foretoken.lab.bench.load import Record, Run, Step
from foretoken.outputs import SpeculationMetrics

SMALL = {"input_len": "12", "output_len": "9", "num_requests": "4", "bandwidth": 40.0}
NGRAM = SpeculativeConfig("ngram", num_speculative_tokens=4)


def step(
    ms: float, decoding: int, accepted: int = 0, *, requests: int = 2, drafts: int = 0
) -> Step:
    """A step: half of its time is the target's pass, a tenth drafting, a tenth verification."""
    seconds = {"schedule": 0.1, "draft": 0.1, "forward": 0.5, "verify": 0.1, "commit": 0.1}
    trace = StepTrace(
        {phase: share * ms / 1000 for phase, share in seconds.items()}, num_requests=requests,
        num_decoding=decoding, num_context=10 * requests, num_drafts=drafts, num_accepted=accepted,
    )  # fmt: skip
    return Step(ms / 1000, trace)


def counted(*rounds: tuple[int, int]) -> SpeculationMetrics:
    metrics = SpeculationMetrics()
    for drafted, accepted in rounds:
        metrics.observe(drafted, accepted)
    return metrics


def by_hand() -> Run:
    """Three requests, of 5, 1 and 3 tokens, the last of which failed; sent late by 10 to 30 ms."""
    first = Record(10.0, [10.1, 10.2, 10.4], 10.41, 20, 5)
    first.origins, first.sent = ["plain", "accepted", "resampled", "accepted", "accepted"], 10.01
    second = Record(10.0, [10.3], 10.3, 30, 1, ["plain"], sent=10.02)
    failed = Record(10.2, [10.3, 10.4], None, 0, 3, ["resampled"], "it broke off", 10.23)
    steps = [
        step(100, 0),
        step(10, 2, 0, drafts=4),  # the first that only decodes: a draft model catches up in it
        step(4, 2, 3, drafts=4),
        step(6, 1, 1, requests=1, drafts=2),
        step(50, 1, 1, drafts=2),
        step(8, 2, 1, drafts=2),
    ]
    return Run([first, second, failed], 0.5, steps, counted((2, 1), (2, 2), (1, 0)))

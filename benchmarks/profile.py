"""Where the time of a decode step goes, at batch 1 and in a full batch, plain and speculative.

Steps that compute prompts are left out: what is asked is what a token costs once all requests run.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from benchmarks.common import (
    DRAFT,
    TARGET,
    QuietTimer,
    goal,
    parse,
    progress,
    record,
    use_cores,
)
from foretoken import LLM, SamplingParams
from foretoken.engine.trace import StepTrace
from foretoken.lab.results import Row, Spread, Value
from foretoken.lab.workloads import heldout

TEMPERATURES = (0.0, 0.8)
BATCHES = (1, 16)
METHODS = ("plain", "draft model", "eagle3")
HOST_GOAL = 0.10
PARTS = {
    "target pass": "forward",
    "drafting": "draft",
    "drafter over the target's rows": "observe",
    "sampling and verification": "verify",
    "scheduling": "schedule",
    "commit": "commit",
}  # names in the results file, and phases of `StepTrace`


@dataclass
class DecodeSteps:
    """What an engine's steps take while it is `watched`; kept of those in which all decode.

    The first of them after a prompt is left out: in it the drafter computes the prompt.

    Attributes:
        outside: seconds in no step of either kind: what the caller's side does before and after.
    """

    traces: list[StepTrace] = field(default_factory=list)
    outside: float = 0.0
    _decoded: bool = False

    @contextmanager
    def watched(self, llm: LLM) -> Iterator[None]:
        """Have an engine report its steps."""
        llm.engine.on_step = self._take
        start = time.perf_counter()
        try:
            yield
        finally:
            self.outside += time.perf_counter() - start
            llm.engine.on_step = None

    def _take(self, trace: StepTrace) -> None:
        self.outside -= trace.total
        decodes = 0 < trace.num_requests == trace.num_decoding
        if decodes and self._decoded:
            self.traces.append(trace)
        self._decoded = decodes

    @property
    def num_requests(self) -> int:
        """Summed over the steps."""
        return sum(trace.num_requests for trace in self.traces)

    @property
    def num_tokens(self) -> int:
        """Tokens that came of the steps."""
        return self.num_requests + sum(trace.num_accepted for trace in self.traces)

    def split(self) -> tuple[dict[str, float], dict[str, float]]:
        """Milliseconds per step of each part, and shares of the step."""

        def ms(seconds: float) -> float:
            return 1000 * seconds / len(self.traces)

        parts = {
            part: ms(sum(trace.seconds.get(phase, 0.0) for trace in self.traces))
            for part, phase in PARTS.items()
        }
        step = ms(sum(trace.total for trace in self.traces))
        rest = step - sum(parts.values())
        drafting = parts["drafting"] if any(trace.num_drafts for trace in self.traces) else 0.0
        shares = {
            "host_overhead": step - parts["target pass"] - drafting,
            "scheduling_and_sampling": parts["scheduling"] + parts["sampling and verification"],
        }
        parts |= {"step": step, "the rest": rest, "outside the step": ms(self.outside)}
        return parts, {name: value / step for name, value in shares.items()}


def measure(llm: LLM, method: str, batch: int, temperature: float, options: Any, timer: Any) -> Row:
    """Milliseconds per decode step of each part, over the repeats."""
    k = options.k if method != "plain" else 0
    parts: dict[str, list[float]] = defaultdict(list)
    shares: dict[str, list[float]] = defaultdict(list)
    steps = requests = tokens = 0
    rounds = max(options.prompts // batch, 1)
    prompts = [item.prompt for item in heldout(rounds * batch)]
    for repeat in range(options.repeats):
        params = SamplingParams(
            temperature=temperature,
            max_tokens=options.max_tokens,
            ignore_eos=True,
            seed=repeat,
            num_speculative_tokens=k,
        )

        def work(params: SamplingParams = params) -> DecodeSteps:
            decoding = DecodeSteps()
            with decoding.watched(llm):
                for i in range(rounds):
                    some = prompts[i * batch : (i + 1) * batch]
                    llm.generate(some, params, use_tqdm=False)
            return decoding

        _, decoding = timer(work)
        steps, requests = steps + len(decoding.traces), requests + decoding.num_requests
        tokens += decoding.num_tokens
        ms, of_step = decoding.split()
        for part, value in of_step.items():
            shares[part].append(value)
        for part, value in ms.items():
            parts[part].append(value)
    values: dict[str, Value] = {p: Spread.of(v, "ms per step") for p, v in parts.items()}
    values |= {name: Spread.of(v, "of the step") for name, v in shares.items()}
    values["requests_per_step"] = requests / steps
    values["tokens_per_step"] = tokens / steps
    name = f"batch {batch}, " + (f"{method}, K={k}" if k else "plain")
    labels = {"batch": batch, "k": k, "temperature": temperature, "method": method}
    return Row(f"{name}, T={temperature:g}", labels, values)


def main() -> None:
    options = parse(__doc__, prompts=16, max_tokens=64, repeats=5, k=5, cores=2)
    use_cores(options.cores)
    timer = QuietTimer()
    rows = []
    size = {
        "max_num_seqs": max(BATCHES),
        "max_num_batched_tokens": 8192,  # one prefill step for a whole batch: no mixed steps
        "threads": options.cores,
        "enable_prefix_caching": False,  # prompts are repeated: every repeat computes its own
    }
    with ExitStack() as stack:
        llms = {}
        for method in METHODS:
            drafts = {"method": method.replace(" ", "_"), "num_speculative_tokens": options.k}
            llm = LLM(TARGET, None if method == "plain" else drafts, **size)
            llms[method] = stack.enter_context(llm)
            llm.generate(heldout(1)[0].prompt)  # warms up
        cases = list(product(BATCHES, METHODS, TEMPERATURES))
        for batch, method, temperature in progress(cases, "profile"):
            rows.append(measure(llms[method], method, batch, temperature, options, timer))
    for row in rows:
        shown = {k: round(getattr(v, "median", v), 2) for k, v in row.values.items()}
        print(row.case, shown)
    full = [r for r in rows if r.labels["batch"] == max(BATCHES) and not r.labels["k"]]
    record(
        "profile",
        options,
        {
            "target": TARGET,
            "draft": DRAFT,
            "batches": list(BATCHES),
            "prompts": options.prompts,
            "max_tokens": options.max_tokens,
            "dtype": "float32",
            "cores": options.cores,
        },
        rows,
        [
            "Milliseconds per decode step of the engine, by the phases of its own trace "
            "(`StepTrace`); steps in which target or drafter compute prompts are left out.",
            "drafting: the whole of a step's proposal: the drafter's passes, draws and host work. "
            "Files that split it into `draft passes` and `drafting, beside its passes` are "
            "older: with the native decoder passes and draws are one call.",
            "host_overhead: all of a step but the target's pass and drafting, over the step: "
            "scheduling, logit edits, batch, sampling, verification, commit; in older files also "
            "drafting beside its passes. The goal is about scheduling_and_sampling alone.",
            "the rest: admitting, logit edits, the batch, what slots learn of the outcome; in "
            "older files the drafter over the target's rows, too. commit includes reading the "
            "step's result.",
            "outside the step: encoding prompts, decoding texts and the rest of the call, per "
            "decode step; it is in neither the step nor its host overhead.",
            timer.note(),
            *(
                goal(
                    f"{r.case}: scheduling and sampling, of the step",
                    r,
                    "scheduling_and_sampling",
                    HOST_GOAL,
                    False,
                )
                for r in full
            ),
        ],
    )


if __name__ == "__main__":
    main()

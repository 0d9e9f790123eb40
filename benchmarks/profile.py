"""Where the time of a decode step goes, at batch 1 and in a full batch, plain and speculative.

Steps that compute prompts are left out: what is asked is what a token costs once all requests run.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
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
from foretoken.lab.results import Row, Spread, Value
from foretoken.lab.workloads import heldout

TEMPERATURES = (0.0, 0.8)
BATCHES = (1, 16)
HOST_GOAL = 0.10


@dataclass
class Stopwatch:
    """Seconds per part of the engine over its decode steps, while `attached`.

    outside:  seconds in no step of either kind: what the caller's side does before and after
    """

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    outside: float = 0.0
    steps: int = 0
    requests: int = 0
    _now: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _running: int = 0
    _prefills: bool = False

    def wrap(self, owner: Any, name: str, part: str) -> None:
        """Count the time of a method to `part`."""
        inner = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self._now[part] += time.perf_counter() - start

        setattr(owner, name, timed)

    @contextmanager
    def attached(self, llm: LLM) -> Iterator[None]:
        """Times the parts of one engine; the attributes it sets vanish afterwards."""
        engine = llm.engine
        parts = [
            (engine, "_commit", "commit"),
            (engine.scheduler, "schedule", "scheduling"),
            (engine.runner.model, "forward", "target pass"),
            (engine.runner.sampler, "verify", "sampling and verification"),
            (engine, "step", "step"),
        ]
        if engine.drafter is not None:
            parts.append((engine.drafter, "propose", "proposing"))
            if (model := getattr(engine.drafter, "model", None)) is not None:
                parts.append((model, "forward", "draft passes"))
                if model.fused is not None:  # all passes of a step in one native call
                    parts.append((model.fused, "draft", "draft passes"))
        for part in parts:
            self.wrap(*part)
        self._watch(engine)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.outside += time.perf_counter() - start
            for owner, name, _ in parts:
                delattr(owner, name)

    def _watch(self, engine: Any) -> None:
        """Keep a step's times if it was a decode step, drop them if it computed prompts."""
        schedule, step = engine.scheduler.schedule, engine.step

        def scheduled() -> Any:
            plan = schedule()
            self._prefills = any(share.num_tokens > 1 for share in plan.shares)
            self._running = len(plan.shares)
            return plan

        def stepped() -> Any:
            self._now.clear()
            changed = step()
            self.outside -= self._now["step"]
            if not self._prefills and self._running:
                self.steps += 1
                self.requests += self._running
                for part, seconds in self._now.items():
                    self.seconds[part] += seconds
            return changed

        engine.scheduler.schedule, engine.step = scheduled, stepped


def split(watch: Stopwatch) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds per decode step of each part, and shares of the step."""
    ms = {part: 1000 * seconds / watch.steps for part, seconds in watch.seconds.items()}
    ms["outside the step"] = 1000 * watch.outside / watch.steps
    drafting, passes = ms.pop("proposing", 0.0), ms.get("draft passes", 0.0)
    ms["drafting, beside its passes"] = drafting - passes
    known = ("target pass", "sampling and verification", "scheduling", "commit")
    ms["the rest"] = ms["step"] - drafting - sum(ms[part] for part in known)
    shares = {
        "host_overhead": ms["step"] - ms["target pass"] - passes,
        "scheduling_and_sampling": ms["scheduling"] + ms["sampling and verification"],
    }
    return ms, {name: value / ms["step"] for name, value in shares.items()}


def measure(llm: LLM, batch: int, k: int, temperature: float, options: Any, timer: Any) -> Row:
    """Milliseconds per decode step of each part, over the repeats."""
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

        def work(params: SamplingParams = params) -> tuple[Stopwatch, list[Any]]:
            watch, outputs = Stopwatch(), []
            with watch.attached(llm):
                for i in range(rounds):
                    some = prompts[i * batch : (i + 1) * batch]
                    outputs += llm.generate(some, params, use_tqdm=False)
            return watch, outputs

        _, (watch, outputs) = timer(work)
        steps, requests = steps + watch.steps, requests + watch.requests
        tokens += sum(len(o.outputs[0].token_ids) - 1 for o in outputs)  # one is the prefill's
        ms, of_step = split(watch)
        for part, value in of_step.items():
            shares[part].append(value)
        for part, value in ms.items():
            parts[part].append(value)
    values: dict[str, Value] = {p: Spread.of(v, "ms per step") for p, v in parts.items()}
    values |= {name: Spread.of(v, "of the step") for name, v in shares.items()}
    values["requests_per_step"] = requests / steps
    values["tokens_per_step"] = tokens / steps
    name = f"batch {batch}, " + (f"draft model, K={k}" if k else "plain")
    labels = {"batch": batch, "k": k, "temperature": temperature}
    return Row(f"{name}, T={temperature:g}", labels, values)


def main() -> None:
    options = parse(__doc__, prompts=16, max_tokens=64, repeats=5, k=5, cores=2)
    use_cores(options.cores)
    speculation = {"method": "draft_model", "num_speculative_tokens": options.k}
    timer = QuietTimer()
    rows = []
    size = {
        "max_num_seqs": max(BATCHES),
        "max_num_batched_tokens": 8192,  # one prefill step for a whole batch: no mixed steps
        "threads": options.cores,
        "enable_prefix_caching": False,  # prompts are repeated: every repeat computes its own
    }
    with LLM(TARGET, speculation, **size) as drafted, LLM(TARGET, None, **size) as plain:
        for llm in (drafted, plain):
            llm.generate(heldout(1)[0].prompt)  # warms up
        cases = [(b, k, t) for b in BATCHES for k in (0, options.k) for t in TEMPERATURES]
        for batch, k, temperature in progress(cases, "profile"):
            llm = drafted if k else plain
            rows.append(measure(llm, batch, k, temperature, options, timer))
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
            "Milliseconds per decode step of the engine; steps that compute prompts are left out.",
            "host_overhead: all of a step but the forward passes of target and drafter, over the "
            "step: scheduling, sampling, verification, commit, and drafting beside its passes. The "
            "goal is about scheduling_and_sampling alone.",
            "outside the step: encoding prompts, decoding texts and the rest of the call, per "
            "decode step; it is in neither the step nor its host overhead.",
            "With the native decoder all passes and draws of a step's drafts are one call: "
            "`draft passes` then includes the drawing.",
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

"""Where the time of a step goes: target pass, drafting, verification, at batch 1."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.common import DRAFT, TARGET, QuietTimer, parse, progress, record
from foretoken import LLM, SamplingParams
from foretoken.lab.results import Row, Spread, Value
from foretoken.lab.workloads import heldout
from foretoken.outputs import uninterrupted

TEMPERATURES = (0.0, 0.8)


@dataclass
class Stopwatch:
    """Seconds and calls per part of the engine, while `attached`."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def wrap(self, owner: Any, name: str, part: str) -> None:
        inner = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds[part] += time.perf_counter() - start
                self.calls[part] += 1

        setattr(owner, name, timed)

    @contextmanager
    def attached(self, llm: LLM) -> Iterator[None]:
        """Times the parts of one engine; the attributes it sets vanish afterwards."""
        engine = llm.engine
        parts = [
            (engine, "step", "step"),
            (engine.runner.model, "forward", "target pass"),
            (engine.runner.sampler, "verify", "sampling and verification"),
        ]
        if engine.drafter is not None:
            parts.append((engine.drafter, "propose", "proposing"))
            if hasattr(engine.drafter, "model"):
                parts.append((engine.drafter.model, "forward", "draft passes"))
        for part in parts:
            self.wrap(*part)
        try:
            yield
        finally:
            for owner, name, _ in parts:
                delattr(owner, name)


def measure(llm: LLM, k: int, temperature: float, options: Any, timer: QuietTimer) -> Row:
    """Milliseconds per step of each part, over the repeats."""
    per_step: dict[str, list[float]] = defaultdict(list)
    tokens = steps = 0
    for repeat in range(options.repeats):
        params = SamplingParams(
            temperature=temperature,
            max_tokens=options.max_tokens,
            ignore_eos=True,
            seed=repeat,
            num_speculative_tokens=k,
        )

        def work(params: SamplingParams = params) -> tuple[Stopwatch, list[Any]]:
            watch = Stopwatch()
            with watch.attached(llm):
                outputs = [
                    uninterrupted(llm.generate(item.prompt, params))[0]
                    for item in heldout(options.prompts)
                ]
            return watch, outputs

        _, (watch, outputs) = timer(work)
        count = watch.calls["step"]
        steps += count
        tokens += sum(len(o.outputs[0].token_ids) for o in outputs)
        ms = {part: 1000 * seconds / count for part, seconds in watch.seconds.items()}
        drafting = ms.pop("proposing", 0.0)
        ms["drafting, beside its passes"] = drafting - ms.get("draft passes", 0.0)
        ms["the rest"] = ms["step"] - drafting - ms["target pass"] - ms["sampling and verification"]
        for part, value in ms.items():
            per_step[part].append(value)
    values: dict[str, Value] = {p: Spread.of(v, "ms per step") for p, v in per_step.items()}
    values["tokens_per_step"] = tokens / steps
    name = f"draft model, K={k}" if k else "plain"
    return Row(f"{name}, T={temperature:g}", {"k": k, "temperature": temperature}, values)


def main() -> None:
    options = parse(__doc__, prompts=8, max_tokens=64, repeats=5, k=5)
    speculation = {"method": "draft_model", "num_speculative_tokens": options.k}
    timer = QuietTimer()
    rows = []
    # Prompts are repeated: every repeat must compute its own.
    with LLM(TARGET, speculation, max_num_seqs=1, enable_prefix_caching=False) as llm:
        llm.generate(heldout(1)[0].prompt)  # warms up
        cases = [(k, t) for k in (0, options.k) for t in TEMPERATURES]
        for k, temperature in progress(cases, "profile"):
            rows.append(measure(llm, k, temperature, options, timer))
    for row in rows:
        shown = {k: round(getattr(v, "median", v), 2) for k, v in row.values.items()}
        print(row.case, shown)
    record(
        "profile",
        options.out,
        {
            "target": TARGET,
            "draft": DRAFT,
            "batch": 1,
            "prompts": options.prompts,
            "max_tokens": options.max_tokens,
            "dtype": "float32",
        },
        rows,
        ["Milliseconds per step of the engine, prefill steps included.", timer.note()],
    )


if __name__ == "__main__":
    main()

"""How cost grows: a step with batch and with context, a prefill with its prompt; fitted lines."""

from __future__ import annotations

import statistics
import time
from typing import Any

from benchmarks.common import (
    DRAFT,
    TARGET,
    QuietTimer,
    heldout_tokens,
    parse,
    progress,
    record,
    use_cores,
)
from foretoken import LLM, SamplingParams
from foretoken.lab.results import Row, Spread, Value

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (128, 256, 512, 1024, 1536, 1920)
CONTEXT_BATCHES = (1, 8)
PROMPTS = (128, 256, 512, 1024, 1536, 2000)
Ids = list[int]


def steps_ms(llm: LLM, prompts: list[Ids], k: int, steps: int) -> float:
    """Mean milliseconds of `steps` decode steps of all prompts together, drafting included."""
    engine = llm.engine
    params = SamplingParams(
        temperature=0.0,
        max_tokens=(steps + 3) * (k + 1),
        ignore_eos=True,
        num_speculative_tokens=k,
    )
    groups = [engine.add(str(i), ids, params) for i, ids in enumerate(prompts)]
    try:
        while not all(group.samples[0].decodes for group in groups):
            engine.step()
        start = time.perf_counter()
        for _ in range(steps):
            engine.step()
        took = time.perf_counter() - start
        if any(group.finished for group in groups):
            raise RuntimeError("a request ended while its steps were timed")
        return 1000 * took / steps
    finally:
        engine.abort_all()


def prefill_ms(llm: LLM, prompt: Ids) -> float:
    """Milliseconds to the first token of a prompt that is computed whole."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    output = llm.generate(prompt, params)[0]
    return 1000 * (output.metrics.time_to_first_token or 0.0)


def fit(points: list[Row]) -> dict[str, Value]:
    """The least-squares line through the medians, and how far they are from it."""
    x = [float(row.labels["x"]) for row in points]  # type: ignore[arg-type]
    y = [row.values["ms"].median for row in points]  # type: ignore[union-attr]
    line = statistics.linear_regression(x, y)
    fitted = [line.intercept + line.slope * at for at in x]
    around = sum((b - statistics.fmean(y)) ** 2 for b in y)
    left = sum((a - b) ** 2 for a, b in zip(fitted, y, strict=True))
    return {
        "intercept": line.intercept,
        "slope": line.slope,
        "r_squared": 1 - left / around if around else 1.0,
        "largest_deviation": max(abs(a - b) / b for a, b in zip(fitted, y, strict=True)),
    }


def step_cases(options: Any) -> list[dict[str, Any]]:
    """The labels of every point of the two step curves."""
    by_batch = [
        {"curve": "batch", "k": k, "x": b, "batch": b, "context": options.context}
        for k in (0, options.k)
        for b in BATCHES
    ]
    by_context = [
        {"curve": f"context, batch {b}", "k": k, "x": c, "batch": b, "context": c}
        for b in CONTEXT_BATCHES
        for k in (0, options.k)
        for c in CONTEXTS
    ]
    return by_batch + by_context


def name_of(labels: dict[str, Any]) -> str:
    how = f"K={labels['k']}" if labels["k"] else "plain"
    return f"{labels['curve']}, {how}"


def measure(options: Any, timer: QuietTimer) -> list[Row]:
    """Every point of every curve, repeat by repeat, so that a disturbance falls on all alike."""
    stream = heldout_tokens()
    speculation = {"method": "draft_model", "num_speculative_tokens": options.k}
    # Prompts come again in every repeat; only decode steps are timed, so reuse spares set-up.
    size = {"max_num_seqs": max(BATCHES), "threads": options.cores, "kv_cache_gib": 2.0}
    whole = {"max_num_batched_tokens": 2**15}  # all prompts in one step: none decodes before
    cases = step_cases(options)
    cases += [{"curve": "prefill", "k": 0, "x": n, "batch": 1, "context": n} for n in PROMPTS]
    found: list[list[float]] = [[] for _ in cases]
    with (
        LLM(TARGET, None, **size | whole) as plain,
        LLM(TARGET, speculation, **size | whole) as drafted,
        LLM(TARGET, None, **size | {"enable_prefix_caching": False}) as uncached,
    ):

        def work(labels: dict[str, Any]) -> float:
            prompts = [stream[i * 700 :][: labels["context"]] for i in range(labels["batch"])]
            if labels["curve"] == "prefill":
                return prefill_ms(uncached, prompts[0])
            llm = drafted if labels["k"] else plain
            return steps_ms(llm, prompts, labels["k"], options.steps)

        rounds = [(r, i) for r in range(options.repeats + 1) for i in range(len(cases))]
        for repeat, i in progress(rounds, "curves"):
            if not repeat:  # the first round warms up and fills the caches
                work(cases[i])
                continue
            found[i].append(timer(lambda i=i: work(cases[i]))[1])
    return [
        Row(f"{name_of(labels)}, x={labels['x']}", labels, {"ms": Spread.of(ms, "ms")})
        for labels, ms in zip(cases, found, strict=True)
    ]


def main() -> None:
    options = parse(__doc__, context=256, steps=16, repeats=5, k=4, cores=2)
    use_cores(options.cores)
    timer = QuietTimer()
    points = measure(options, timer)
    rows, notes = list(points), []
    for name in dict.fromkeys(name_of(row.labels) for row in points):
        own = [row for row in points if name_of(row.labels) == name]
        line = fit(own)
        labels = {key: own[0].labels[key] for key in ("curve", "k")} | {"fit": True}
        rows.append(Row(f"line: {name}", labels, line))
        notes.append(
            f"{name}: {line['intercept']:.3g} + {line['slope']:.3g} x ms, R^2 "
            f"{line['r_squared']:.3f}, farthest point {line['largest_deviation']:.0%} off."
        )
    print("\n".join(notes))
    record(
        "curves",
        options,
        {
            "target": TARGET,
            "draft": DRAFT,
            "context_of_the_batch_curve": options.context,
            "steps": options.steps,
            "temperature": 0.0,
            "dtype": "float32",
            "cores": options.cores,
            "repeats": options.repeats,
        },
        rows,
        [
            "ms: mean over the decode steps of a repeat, drafting included, or to the first token "
            "of a prompt. x: the batch, or the tokens before the first timed step; contexts grow "
            "by the tokens of the timed steps.",
            "Lines are least squares through the medians; deviations are relative to the measured "
            "median.",
            timer.note(),
            *notes,
        ],
    )


if __name__ == "__main__":
    main()

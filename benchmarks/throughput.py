"""Tokens per second of whole batches: ours, Transformers' static batch, its continuous batching.

Prompts of one length (the static batch needs no padding then), greedy, a fixed number of new
tokens. All cases of a batch size take turns within each repeat, on the same cores.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from benchmarks import opponents
from benchmarks.common import (
    DRAFT,
    TARGET,
    QuietTimer,
    goal,
    heldout_tokens,
    parse,
    progress,
    record,
    use_cores,
)
from foretoken import LLM, SamplingParams
from foretoken.lab.results import Row, Spread, Value

BATCHES = (4, 16)
DRAFT_KS = (2, 4)
STATIC_GOALS = {16: 1.15}
CONTINUOUS_GOAL = 2.5
Ids = list[int]


@dataclass(frozen=True)
class Case:
    """One way to complete a batch.

    open:      what must be running meanwhile, outside the timing
    complete:  from what `open` gave and the prompts to the new tokens
    """

    name: str
    labels: dict[str, Any]
    open: Callable[[], AbstractContextManager[Any]]
    complete: Callable[[Any, list[Ids]], list[Ids]]


def our_cases(options: Any) -> list[Case]:
    """Plain decoding, and the draft model at several K for information."""

    def case(name: str, llm: LLM, k: int) -> Case:
        params = SamplingParams(
            temperature=0.0,
            max_tokens=options.max_tokens,
            ignore_eos=True,
            num_speculative_tokens=k,
        )

        def complete(_: Any, prompts: list[Ids]) -> list[Ids]:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            return [output.outputs[0].token_ids for output in outputs]

        method = "draft_model" if k else "plain"
        labels = {"engine": "foretoken", "method": method, "k": k}
        return Case(name, labels, nullcontext, complete)

    # Prompts are repeated: every repeat must compute its own, as the others do.
    size = {"max_num_seqs": max(BATCHES), "threads": options.cores, "enable_prefix_caching": False}
    drafted = LLM(
        TARGET, {"method": "draft_model", "num_speculative_tokens": max(DRAFT_KS)}, **size
    )
    return [
        case("plain", LLM(TARGET, None, **size), 0),
        *(case(f"draft model, K={k}", drafted, k) for k in DRAFT_KS),
    ]


def static_cases(target: Any, options: Any) -> list[Case]:
    """`generate` with either cache."""

    def case(how: str, arguments: dict[str, Any]) -> Case:
        def complete(_: Any, prompts: list[Ids]) -> list[Ids]:
            with opponents.torch_threads(options.cores):
                return opponents.generate(target, prompts, options.max_tokens, 0.0, **arguments)

        labels = {"engine": "transformers", "method": "generate", "k": 0}
        return Case(f"Transformers generate{how}", labels, nullcontext, complete)

    return [case(how, arguments) for how, arguments in opponents.CACHES.items()]


def continuous_case(model: Any, batch: int, options: Any) -> Case:
    """Transformers' continuous batching, its manager sized to this batch."""
    engine = opponents.ContinuousBatching(model, batch, options.prompt_tokens + options.max_tokens)

    def complete(manager: Any, prompts: list[Ids]) -> list[Ids]:
        return engine.complete(manager, prompts, options.max_tokens)

    labels = {"engine": "transformers", "method": "continuous", "k": 0}
    return Case("Transformers continuous batching", labels, engine.running, complete)


def measure(
    cases: list[Case], prompts: list[Ids], options: Any, timer: QuietTimer
) -> tuple[dict[str, list[float]], dict[str, list[Ids]]]:
    """Tokens per second of every repeat, and the tokens of the last one."""
    speeds: dict[str, list[float]] = {case.name: [] for case in cases}
    tokens: dict[str, list[Ids]] = {}
    rounds = [(r, case) for r in range(options.repeats + 1) for case in cases]
    for repeat, case in progress(rounds, f"throughput, batch {len(prompts)}"):
        # PyTorch's setting also reaches the thread that continuous batching starts here.
        ours = case.labels["engine"] == "foretoken"
        threads = nullcontext() if ours else opponents.torch_threads(options.cores)
        with threads, case.open() as opened:
            if not repeat:  # the first round warms up
                case.complete(opened, prompts)
                continue
            took, new = timer(lambda c=case, o=opened: c.complete(o, prompts))
        tokens[case.name] = new
        speeds[case.name].append(sum(map(len, new)) / took)
    return speeds, tokens


def rows_of(
    cases: list[Case], speeds: dict[str, list[float]], same: dict[str, dict], batch: int
) -> list[Row]:
    """Speed of each case, and its ratios to plain and to the two of Transformers."""
    static = [c.name for c in cases if c.labels["method"] == "generate"]
    baselines = {
        "plain": "plain",
        "generate": max(static, key=lambda name: statistics.median(speeds[name])),
        "continuous": "Transformers continuous batching",
    }
    rows = []
    for case in cases:
        mine = speeds[case.name]
        values: dict[str, Value] = {"tokens_per_second": Spread.of(mine, "tokens/s")}
        for short, other in baselines.items():
            ratios = [a / b for a, b in zip(mine, speeds[other], strict=True)]
            values[f"ratio_to_{short}"] = Spread.of(ratios, "x")
        labels = case.labels | {"batch": batch}
        rows.append(Row(f"batch {batch}, {case.name}", labels, values | same[case.name]))
    return rows


def goal_notes(rows: list[Row]) -> list[str]:
    notes = []
    for row in (r for r in rows if r.labels["method"] == "plain"):
        batch = row.labels["batch"]
        if batch in STATIC_GOALS:
            what = f"batch {batch}: plain to generate (static batch)"
            notes.append(goal(what, row, "ratio_to_generate", STATIC_GOALS[batch]))
        what = f"batch {batch}: plain to continuous batching"
        notes.append(goal(what, row, "ratio_to_continuous", CONTINUOUS_GOAL))
    return notes


def main() -> None:
    options = parse(__doc__, prompt_tokens=128, max_tokens=64, repeats=5, cores=2)
    use_cores(options.cores)
    stream, length = heldout_tokens(), options.prompt_tokens
    ours, target = our_cases(options), opponents.load(TARGET)
    paged = {batch: opponents.load(TARGET) for batch in BATCHES}  # each keeps a manager
    rows, timer = [], QuietTimer()
    for batch in BATCHES:
        prompts = [stream[i * 1000 :][:length] for i in range(batch)]
        others = static_cases(target, options)
        cases = [*ours, *others, continuous_case(paged[batch], batch, options)]
        speeds, tokens = measure(cases, prompts, options, timer)
        same = {
            name: opponents.agreement(target, prompts, t, tokens["plain"])
            for name, t in tokens.items()
        }
        rows += rows_of(cases, speeds, same, batch)
    for row in rows:
        print(f"{row.case:<46} {row.values['tokens_per_second'].median:7.0f} tokens/s")
    record(
        "throughput",
        options,
        {
            "target": TARGET,
            "draft": DRAFT,
            "batches": list(BATCHES),
            "prompt_tokens": length,
            "max_tokens": options.max_tokens,
            "temperature": 0.0,
            "dtype": "float32",
            "cores": options.cores,
            "repeats": options.repeats,
        },
        rows,
        [
            "One process, cases interleaved within each repeat; the first round warms up. Speed "
            "counts generated tokens over the whole call, prefill included; end-of-text is "
            "ignored. No case reuses prefixes.",
            "Ratios are taken repeat by repeat. generate is the faster of dynamic cache and static "
            "cache without compilation; continuous batching has a manager that is kept between "
            "repeats, its start and stop outside the timing, and passes of at most 256 tokens: "
            "it was fastest so.",
            "near_ties: prompts whose tokens part from plain decoding's where the logits of the "
            f"two tokens are within {opponents.TIE:g}; differ: that part elsewhere. The native "
            "decoder gives equal bits in any batch; passes of other modules may part at ties.",
            timer.note(),
            *goal_notes(rows),
        ],
    )


if __name__ == "__main__":
    main()

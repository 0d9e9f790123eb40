"""What each drafter accepts and brings, beside the embedded draft model on the same prompts.

Free-running at batch 1 on held-out code. Within a repeat every drafter completes the same prompts,
one after the other, so that whatever else the machine does falls on all of them alike; each repeat
has prompts of its own, so that nothing can be looked up in what an earlier repeat put out.

    python -m benchmarks.drafters --repeats 15
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from benchmarks.common import TARGET, QuietTimer, arguments, goal, progress, record, use_cores
from benchmarks.prediction import missing
from foretoken import LLM, SamplingParams
from foretoken.lab.results import Row, Spread, Value
from foretoken.lab.workloads import heldout
from foretoken.outputs import SpeculationMetrics

TEMPERATURES = (0.0, 0.8)
BASE = "draft_model"


@dataclass(frozen=True)
class Kind:
    """A drafter, and what a reader of the table wants to know of it beside figures.

    Attributes:
        speculation: None decodes plainly.
    """

    name: str
    speculation: dict[str, Any] | None
    needs: str = ""
    wins: str = ""


KINDS = (
    Kind("plain", None),
    Kind(
        BASE,
        {"method": "draft_model"},
        "a small model, with the target's tokens or some of them",
        "there is one of the same family; any text",
    ),
    Kind(
        "eagle3",
        {"method": "eagle3"},
        "a head that was trained for this target: `foretoken train-eagle3`",
        "there is one; any text",
    ),
    Kind("ngram", {"method": "ngram"}, "nothing", "the output repeats its prompt or itself"),
    Kind(
        "suffix",
        {"method": "suffix"},
        "a CPU with the native kernels",
        "outputs resemble each other, or a corpus",
    ),
    Kind(
        "prediction",
        {"method": "prediction"},
        "a text that the output may be like, with the request",
        "the output is an edit of it (here: of the target's greedy text, a line in 8 missing)",
    ),
    Kind(
        "draft_text",
        {"method": "draft_text"},
        "a small model with any tokenizer",
        "none shares the target's tokens",
    ),
    Kind(
        "hybrid",
        {"drafters": [{"method": "suffix"}, {"method": BASE}]},
        "what `suffix` and `draft_model` need",
        "some of the text repeats",
    ),
    Kind(
        "hybrid_eagle3",
        {"drafters": [{"method": "suffix"}, {"method": "eagle3"}]},
        "what `suffix` and `eagle3` need",
        "some of the text repeats, and the head is much better than a draft model",
    ),
)


@dataclass
class Count:
    """What one drafter did at one temperature."""

    speeds: list[float] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)
    metrics: SpeculationMetrics = field(default_factory=SpeculationMetrics)


Work = list[tuple[str, SamplingParams]]


def complete(llm: LLM, work: Work) -> tuple[int, SpeculationMetrics]:
    """Tokens and counts of the prompts, one after the other."""
    tokens, metrics = 0, SpeculationMetrics()
    for prompt, params in work:
        output = llm.generate(prompt, params)[0]
        tokens += len(output.outputs[0].token_ids)
        metrics.add(output.metrics)
    return tokens, metrics


def measure(
    llms: dict[str, LLM], temperature: float, options: argparse.Namespace, timer: QuietTimer
) -> dict[str, Count]:
    """Every drafter over every repeat's prompts; the first repeat warms up."""
    counts, size = defaultdict[str, Count](Count), options.prompts
    texts = [one.prompt for one in heldout((options.repeats + 1) * size)]
    params = SamplingParams(temperature=temperature, max_tokens=options.max_tokens, ignore_eos=True)
    rounds = [(r, name) for r in range(options.repeats + 1) for name in llms]
    for repeat, name in progress(rounds, f"drafters, T={temperature:g}"):
        prompts = texts[repeat * size :][:size]
        work = [(prompt, params) for prompt in prompts]
        if name == "prediction":
            work = predicted(llms["plain"], prompts, params)
        took, (tokens, metrics) = timer(partial(complete, llms[name], work))
        if repeat:
            counts[name].speeds.append(tokens / took)
            counts[name].lengths.append(tokens_per_step(metrics))
            counts[name].metrics.add(metrics)
    return counts


def predicted(llm: LLM, prompts: list[str], params: SamplingParams) -> Work:
    """Prompts with what the target's greedy text predicts, some of its lines missing."""
    rng, greedy = random.Random(prompts[0]), replace(params, temperature=0.0)
    texts = [output.outputs[0].text for output in llm.generate(prompts, greedy)]
    told = [replace(params, prediction=missing(rng, text)) for text in texts]
    return list(zip(prompts, told, strict=True))


def tokens_per_step(metrics: SpeculationMetrics) -> float:
    """Tokens of a decode step, those without drafts included: what a pass of the target brings."""
    return 1 + metrics.num_accepted_tokens / metrics.num_steps


def row_of(
    kind: Kind, llm: LLM, counts: dict[str, Count], temperature: float, options: argparse.Namespace
) -> Row:
    """Acceptance and speed, beside plain decoding's and the embedded draft model's."""
    mine, drafter = counts[kind.name], llm.engine.runner.drafter
    values: dict[str, Value] = {
        "tokens_per_second": Spread.of(mine.speeds, "tokens/s"),
        "tokens_per_step": Spread.of(mine.lengths, "tokens"),
        "mean_acceptance_length": mine.metrics.mean_acceptance_length,
        "share_of_steps_with_drafts": mine.metrics.num_drafts / mine.metrics.num_steps,
    }
    for other in ("plain", BASE):
        pairs = zip(mine.speeds, counts[other].speeds, strict=True)
        values[f"speed_to_{other}"] = Spread.of([a / b for a, b in pairs], "x")
    pairs = zip(mine.lengths, counts[BASE].lengths, strict=True)
    values[f"length_to_{BASE}"] = Spread.of([a / b for a, b in pairs], "x")
    if drafter is not None:
        block_size = llm.engine.scheduler.pool.block_size
        values["kv_bytes_per_token"] = drafter.kv_bytes_per_block / block_size
        values["bytes_per_request"] = drafter.bytes_per_slot
        values["bytes_shared"] = drafter.bytes_shared
    labels = {"drafter": kind.name, "temperature": temperature, "k": options.k}
    labels |= {"needs": kind.needs, "wins": kind.wins}
    return Row(f"{kind.name}, T={temperature:g}", labels, values)


def main() -> None:
    parser = arguments(
        __doc__, prompts=6, max_tokens=96, repeats=15, k=5, cores=2, threads=1, patience=300
    )
    options = parser.parse_args()
    use_cores(options.cores)
    timer, rows = QuietTimer(patience=options.patience), list[Row]()
    with ExitStack() as opened:
        llms = dict[str, LLM]()
        for kind in KINDS:
            k = {"num_speculative_tokens": options.k}
            speculation = kind.speculation and kind.speculation | k
            llm = LLM(
                TARGET, speculation, max_num_seqs=1, enable_prefix_caching=False,
                threads=options.threads,
            )  # fmt: skip
            llms[kind.name] = opened.enter_context(llm)
        for temperature in TEMPERATURES:
            counts = measure(llms, temperature, options, timer)
            for kind in KINDS:
                row = row_of(kind, llms[kind.name], counts, temperature, options)
                length, speed = row.values[f"length_to_{BASE}"], row.values[f"speed_to_{BASE}"]
                print(f"{row.case:<24} {length.median:.3f} {speed.median:.3f}")
                rows.append(row)
    shapes = {
        "target": TARGET, "batch": 1, "prompts": options.prompts, "max_tokens": options.max_tokens,
        "k": options.k, "dtype": "float32", "threads": options.threads, "repeats": options.repeats,
    }  # fmt: skip
    record("drafters", options, shapes, rows, [*notes(rows), timer.note()])


def notes(rows: list[Row]) -> list[str]:
    """What the figures mean, and the best drafter against the goals at each temperature."""
    said = [
        "Ratios are taken repeat by repeat, on the same prompts; every repeat has prompts of its "
        "own. Speed counts generated tokens over the whole call, prefill included.",
        "tokens_per_step counts steps without drafts, too; mean_acceptance_length does not.",
    ]
    for temperature in TEMPERATURES:
        new = [r for r in rows if r.labels["temperature"] == temperature]
        new = [r for r in new if r.labels["drafter"] not in ("plain", BASE, "prediction")]
        best = max(new, key=lambda r: r.values[f"speed_to_{BASE}"].median)
        said.append(goal(f"{best.case}: length to {BASE}", best, f"length_to_{BASE}", 1.08))
        said.append(goal(f"{best.case}: speed to {BASE}", best, f"speed_to_{BASE}", 1.15))
    return said


if __name__ == "__main__":
    main()

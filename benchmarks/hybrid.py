"""What `hybrid` gains over its draft model alone: the embedded pair, one request at a time.

Each held-out prompt is completed by both, one after the other, in turns, with the same K. Outputs
that finished are looked up, too, as in service: each engine sees a prompt once.

    python -m benchmarks.hybrid
"""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple

from benchmarks.common import DRAFT, TARGET, goal, parse, record
from foretoken import LLM, SamplingParams
from foretoken.lab.results import Row, Spread
from foretoken.lab.workloads import heldout
from foretoken.outputs import SpeculationMetrics

ALONE = {"method": "draft_model"}
HYBRID = {"drafters": [{"method": "suffix"}, {"method": "draft_model"}]}
LENGTH, SPEED = 1.08, 1.15  # goals of the best new drafter, as ratios


class Completion(NamedTuple):
    """How long a prompt took, and what was accepted."""

    seconds_per_token: float
    metrics: SpeculationMetrics


def complete(
    llm: LLM, prompt: str, temperature: float, seed: int | None, tokens: int
) -> Completion:
    """One prompt by itself."""
    params = SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True, seed=seed)
    begin = time.perf_counter()
    (output,) = llm.generate([prompt], params)
    return Completion((time.perf_counter() - begin) / tokens, output.metrics)


def measure(temperature: float, seeded: bool, count: int, tokens: int, k: int) -> Row:
    """Both over all prompts; the first two prompts, which warm up, are not counted."""
    prompts = [one.prompt for one in heldout(count + 2)]
    llms = [LLM(TARGET, {**told, "num_speculative_tokens": k}) for told in (ALONE, HYBRID)]
    totals, speeds, lengths = [SpeculationMetrics(), SpeculationMetrics()], [], []
    for i, prompt in enumerate(prompts):
        done: dict[int, Completion] = {}
        for j in (0, 1) if i % 2 else (1, 0):
            done[j] = complete(llms[j], prompt, temperature, i if seeded else None, tokens)
        if i < 2:
            continue
        speeds.append(done[0].seconds_per_token / done[1].seconds_per_token)
        lengths.append([done[j].metrics.mean_acceptance_length for j in (0, 1)])
        for j in (0, 1):
            totals[j].add(done[j].metrics)
    for llm in llms:
        llm.close()
    alone, hybrid = totals
    found = hybrid.drafters["suffix"]
    values = {
        "length_alone": alone.mean_acceptance_length,
        "length_hybrid": hybrid.mean_acceptance_length,
        "length_ratio": hybrid.mean_acceptance_length / alone.mean_acceptance_length,
        "length_ratio_of_prompts": Spread.of([b / a for a, b in lengths], "ratio"),
        "speed_ratio": Spread.of(speeds, "ratio"),
        "looked_up_rounds": found.num_drafts / hybrid.num_drafts,
        "looked_up_length": 1 + found.num_accepted_tokens / found.num_drafts,
    }
    name = f"T={temperature:g}{', seeds' if seeded else ''}"
    print(name, values["length_ratio"], statistics.median(speeds))
    return Row(name, {"temperature": temperature, "seeded": seeded}, values)


def main() -> None:
    args = parse(__doc__, prompts=40, max_tokens=96, k=5)
    cases = ((0.0, False), (0.8, False), (0.8, True))
    rows = [measure(*case, args.prompts, args.max_tokens, args.k) for case in cases]
    shapes = {
        "target": TARGET, "draft": DRAFT, "prompts": args.prompts, "max_tokens": args.max_tokens,
        "k": args.k, "batch": 1,
    }  # fmt: skip
    notes = ["Seeded requests choose by a fixed bound; others by what was measured."]
    for row in rows:
        notes.append(goal(f"speed, {row.case}", row, "speed_ratio", SPEED))
        notes.append(goal(f"mean acceptance length, {row.case}", row, "length_ratio", LENGTH))
    record("hybrid", args, shapes, rows, notes)


if __name__ == "__main__":
    main()

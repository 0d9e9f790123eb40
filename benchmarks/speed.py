"""Tokens per second at batch 1: plain, speculative, and Transformers on the same weights.

All cases run in one process on the same held-out prompts, one after the other within each repeat,
so that whatever else the machine does falls on all of them alike. Every case generates the same
number of tokens per prompt (end-of-text is ignored). Both sides have the same cores.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import opponents
from benchmarks.common import DRAFT, TARGET, QuietTimer, goal, parse, progress, record, use_cores
from foretoken import LLM, SamplingParams
from foretoken.lab.results import Row, Spread, Value
from foretoken.lab.workloads import heldout
from foretoken.models import load_tokenizer

TEMPERATURES = (0.0, 0.8)
DRAFT_KS = (2, 3, 4, 5, 6, 7, 8)
NGRAM_KS = (3, 6)
ASSISTED_KS = (3, 5)
Ids = list[int]


@dataclass(frozen=True)
class Case:
    """One way to complete a prompt: from token ids, temperature and seed to the new tokens."""

    name: str
    labels: dict[str, Any]
    complete: Callable[[Ids, float, int], Ids]


def our_case(name: str, llm: LLM, method: str, k: int, max_tokens: int) -> Case:
    def complete(ids: Ids, temperature: float, seed: int) -> Ids:
        params = SamplingParams(
            temperature=temperature,
            max_tokens=max_tokens,
            ignore_eos=True,
            num_speculative_tokens=k,
            seed=seed,
        )
        return llm.generate(ids, params)[0].outputs[0].token_ids

    return Case(name, {"engine": "foretoken", "method": method, "k": k}, complete)


def our_cases(max_tokens: int, threads: int) -> list[Case]:
    """Plain decoding and every drafter at several K: K is a request's choice within one engine."""

    def load(speculation: dict[str, Any] | None) -> LLM:
        # Prompts are repeated: every repeat must compute its own, as the others do.
        return LLM(
            TARGET, speculation, max_num_seqs=1, enable_prefix_caching=False, threads=threads
        )

    drafted = {"method": "draft_model", "num_speculative_tokens": max(DRAFT_KS)}
    sampled = load(drafted)
    greedy = load({**drafted, "num_speculative_tokens": 4, "draft_sample_method": "greedy"})
    ngram = load({"method": "ngram", "num_speculative_tokens": max(NGRAM_KS)})
    plain = load(None)
    return [
        our_case("plain", plain, "plain", 0, max_tokens),
        *(our_case(f"draft model, K={k}", sampled, "draft_model", k, max_tokens) for k in DRAFT_KS),
        our_case("draft model, greedy, K=4", greedy, "draft_model_greedy", 4, max_tokens),
        *(our_case(f"n-gram, K={k}", ngram, "ngram", k, max_tokens) for k in NGRAM_KS),
    ]


def transformers_cases(max_tokens: int, threads: int) -> list[Case]:
    """`generate` and assisted generation of Transformers, same weights, float32."""
    target, assistant = opponents.load(TARGET), opponents.load(DRAFT)

    def case(name: str, k: int, options: dict[str, Any]) -> Case:
        def complete(ids: Ids, temperature: float, seed: int) -> Ids:
            torch.manual_seed(seed)
            if k:
                config = assistant.generation_config
                config.num_assistant_tokens = k
                config.num_assistant_tokens_schedule = "constant"
                config.assistant_confidence_threshold = 0.0
            with opponents.torch_threads(threads):
                return opponents.generate(target, [ids], max_tokens, temperature, **options)[0]

        method = "assisted" if k else "generate"
        return Case(name, {"engine": "transformers", "method": method, "k": k}, complete)

    assisted = {"assistant_model": assistant}
    return [
        *(case(f"Transformers generate{how}", 0, opts) for how, opts in opponents.CACHES.items()),
        *(case(f"Transformers assisted, K={k}", k, assisted) for k in ASSISTED_KS),
    ]


def measure(
    cases: list[Case], prompts: list[Ids], temperature: float, repeats: int, timer: QuietTimer
) -> tuple[dict[str, list[float]], dict[str, list[Ids]]]:
    """Tokens per second of every repeat, and the tokens of the last one."""
    speeds: dict[str, list[float]] = {case.name: [] for case in cases}
    tokens: dict[str, list[Ids]] = {}
    rounds = [(r, case) for r in range(repeats + 1) for case in cases]
    for repeat, case in progress(rounds, f"speed, T={temperature:g}"):
        if not repeat:  # the first round warms up
            case.complete(prompts[0], temperature, 0)
            continue

        def work(case: Case = case, first: int = repeat * len(prompts)) -> list[Ids]:
            seeded = enumerate(prompts, start=first)
            return [case.complete(ids, temperature, seed) for seed, ids in seeded]

        took, new = timer(work)
        tokens[case.name] = new
        speeds[case.name].append(sum(map(len, new)) / took)
    return speeds, tokens


def row(case: Case, temperature: float, speeds: dict[str, list[float]], same: int) -> Row:
    """Speed of a case, and its ratios to the three baselines, repeat by repeat."""
    mine = speeds[case.name]
    baselines = {
        "plain": "plain",
        "generate": fastest(speeds, "Transformers generate"),
        "best_assisted": fastest(speeds, "Transformers assisted"),
    }
    values: dict[str, Value] = {"tokens_per_second": Spread.of(mine, "tokens/s")}
    for short, other in baselines.items():
        ratios = [a / b for a, b in zip(mine, speeds[other], strict=True)]
        values[f"ratio_to_{short}"] = Spread.of(ratios, "x")
    if temperature == 0.0:
        values["prompts_equal_to_plain"] = same
    return Row(
        f"{case.name}, T={temperature:g}", case.labels | {"temperature": temperature}, values
    )


def fastest(speeds: dict[str, list[float]], prefix: str) -> str:
    """The case with the highest median among those whose names begin so."""
    names = [name for name in speeds if name.startswith(prefix)]
    return max(names, key=lambda name: statistics.median(speeds[name]))


def goal_notes(rows: list[Row]) -> list[str]:
    """Per temperature, how far plain and the best speculative case are from what was asked."""
    notes = []
    for temperature in TEMPERATURES:
        ours = [
            r
            for r in rows
            if r.labels["engine"] == "foretoken" and r.labels["temperature"] == temperature
        ]
        plain = [r for r in ours if r.labels["method"] == "plain"]
        drafted = [r for r in ours if r.labels["method"] != "plain"]
        best = max(drafted, key=lambda r: r.values["tokens_per_second"].median)
        notes += [
            goal(f"{plain[0].case}: to generate", plain[0], "ratio_to_generate", 1.3),
            goal(f"{best.case}: to plain", best, "ratio_to_plain", 1.5),
            goal(f"{best.case}: to best assisted", best, "ratio_to_best_assisted", 1.7),
        ]
    return notes


def main() -> None:
    options = parse(__doc__, prompts=8, max_tokens=128, repeats=5, cores=2)
    use_cores(options.cores)
    size = (options.max_tokens, options.cores)
    cases = our_cases(*size) + transformers_cases(*size)
    tokenizer = load_tokenizer(TARGET)
    prompts = [list(tokenizer.encode(item.prompt)) for item in heldout(options.prompts)]
    rows, timer = [], QuietTimer()
    for temperature in TEMPERATURES:
        speeds, tokens = measure(cases, prompts, temperature, options.repeats, timer)
        for case in cases:
            pairs = zip(tokens[case.name], tokens["plain"], strict=True)
            rows.append(row(case, temperature, speeds, sum(a == b for a, b in pairs)))
            print(f"{rows[-1].case:<36} {statistics.median(speeds[case.name]):7.0f} tokens/s")
    record(
        "speed",
        options.out,
        {
            "target": TARGET,
            "draft": DRAFT,
            "batch": 1,
            "prompts": options.prompts,
            "prompt_tokens": [len(ids) for ids in prompts],
            "max_tokens": options.max_tokens,
            "dtype": "float32",
            "cores": options.cores,
            "repeats": options.repeats,
        },
        rows,
        [
            "One process, cases interleaved within each repeat; the first round warms up. Speed "
            "counts generated tokens over the whole call, prefill included.",
            "Ratios are taken repeat by repeat, then summed up; generate and best_assisted are the "
            "cases of Transformers with the highest median at that temperature (generate: dynamic "
            "cache or static without compilation). Seeds differ from repeat to repeat.",
            "Both sides compute with `cores` threads: ours in the native pool, beside which "
            "PyTorch has one; PyTorch's are set around each call of Transformers.",
            timer.note(),
            "prompts_equal_to_plain: at T=0, prompts whose tokens all equal plain decoding's; "
            "the native decoder gives equal bits, passes of other modules over 1 and K+1 rows may "
            "part at near-ties.",
            *goal_notes(rows),
        ],
    )


if __name__ == "__main__":
    main()

"""Tokens per second at batch 1: plain, speculative, and other engines on the same weights.

All cases of a number of threads run on the same held-out prompts, one after the other within each
repeat, so that whatever else the machine does falls on all of them alike. Every case generates the
same number of tokens per prompt (end-of-text is ignored), with the same threads on the same cores.
The others are Transformers, and llama.cpp where `--llama-cpp` names its server; with a GGUF file
as `--model` it is llama.cpp as a library (`benchmarks.speed_gguf`).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import llama_cpp, llama_library, opponents, speed_gguf
from benchmarks.common import (
    DRAFT,
    TARGET,
    QuietTimer,
    arguments,
    goal,
    progress,
    record,
    use_cores,
)
from benchmarks.speed_cases import Case, Ids, llama_cpp_cases, our_cases, transformers_cases
from foretoken.lab.results import Row, Spread, Value
from foretoken.lab.workloads import heldout
from foretoken.models import load_tokenizer

TEMPERATURES = (0.0, 0.8)
OTHERS = {  # what the names of another engine's cases begin with; the fastest of them counts
    "generate": "Transformers generate",
    "best_assisted": "Transformers assisted",
    "best_llama_cpp_drafted": "llama.cpp ",
}
Agreement = Callable[[dict[str, list[Ids]]], dict[str, dict[str, int]]]


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

        def work(case: Case = case, first: int = repeat * len(prompts)) -> list[tuple[Ids, float]]:
            seeded = enumerate(prompts, start=first)
            return [case.complete(ids, temperature, seed) for seed, ids in seeded]

        _, completed = timer(work)
        new, seconds = zip(*completed, strict=True)
        tokens[case.name] = list(new)
        speeds[case.name].append(sum(map(len, new)) / sum(seconds))
    return speeds, tokens


def row(
    case: Case, labels: dict[str, Any], speeds: dict[str, list[float]], same: dict[str, int]
) -> Row:
    """Speed of a case, and its ratios to the baselines, repeat by repeat.

    Args:
        labels: threads and temperature.
        same: how its tokens compare with plain decoding's; empty where they are sampled.
    """
    mine = speeds[case.name]
    baselines = {"plain": "plain"}
    if "llama.cpp" in speeds:
        baselines["llama_cpp"] = "llama.cpp"
    for short, prefix in OTHERS.items():
        if any(other.startswith(prefix) for other in speeds):
            baselines[short] = fastest(speeds, prefix)
    values: dict[str, Value] = {"tokens_per_second": Spread.of(mine, "tokens/s")}
    for short, other in baselines.items():
        ratios = [a / b for a, b in zip(mine, speeds[other], strict=True)]
        values[f"ratio_to_{short}"] = Spread.of(ratios, "x")
    name = f"{case.name}, {count(labels['threads'])}, T={labels['temperature']:g}"
    return Row(name, case.labels | labels, values | same)


def count(threads: int) -> str:
    return f"{threads} thread{'s' if threads > 1 else ''}"


def fastest(speeds: dict[str, list[float]], prefix: str) -> str:
    """The case with the highest median among those whose names begin so."""
    names = [name for name in speeds if name.startswith(prefix)]
    return max(names, key=lambda name: statistics.median(speeds[name]))


def goal_notes(rows: list[Row], *, is_gguf: bool = False) -> list[str]:
    """How far plain and the best speculative case of one temperature and threads are from goals."""
    ours = [r for r in rows if r.labels["engine"] == "foretoken"]
    plain = next(r for r in ours if r.labels["method"] == "plain")
    drafted = [r for r in ours if r.labels["method"] != "plain"]
    best = max(drafted, key=lambda r: r.values["tokens_per_second"].median)
    goals = [
        (plain, "generate", "generate", 1.3),
        (best, "plain", "plain", 1.5),
        (best, "best assisted", "best_assisted", 1.7),
        (plain, "llama.cpp", "llama_cpp", 1.1),
        (best, "best drafted llama.cpp", "best_llama_cpp_drafted", 1.5),
    ]
    if is_gguf:
        goals = [
            (plain, "llama.cpp", "llama_cpp", 1.1),
            (best, "plain", "plain", 1.2),
            (best, "best drafted llama.cpp", "best_llama_cpp_drafted", 1.1),
        ]
    return [
        goal(f"{row.case}: to {what}", row, f"ratio_to_{value}", bound)
        for row, what, value, bound in goals
        if f"ratio_to_{value}" in row.values
    ]


def check_weights(same: dict[str, dict[str, int]], prompts: int) -> None:
    """Raise `RuntimeError` where llama.cpp cannot have computed with the same weights."""
    differ = same.get("llama.cpp", {}).get("differ", 0)
    if 2 * differ > prompts:
        raise RuntimeError(f"llama.cpp's greedy tokens differ on {differ} of {prompts} prompts")


def pair_cases(
    threads: int,
    prompts: list[Ids],
    options: argparse.Namespace,
    timer: QuietTimer,
    opened: ExitStack,
) -> tuple[list[Case], Agreement]:
    """All cases of the embedded pair, and how their tokens compare."""
    target = opponents.load(TARGET)
    cases = our_cases(options.max_tokens, threads, opened)
    cases += transformers_cases(target, options.max_tokens, threads)
    if options.llama_cpp:
        others, timer.processes = llama_cpp_cases(
            options.llama_cpp, options.max_tokens, threads, opened
        )
        cases += others

    def agree(tokens: dict[str, list[Ids]]) -> dict[str, dict[str, int]]:
        same = {
            name: opponents.agreement(target, prompts, mine, tokens["plain"])
            for name, mine in tokens.items()
        }
        check_weights(same, len(prompts))
        return same

    return cases, agree


def rows_of_threads(
    threads: int,
    prompts: list[Ids],
    options: argparse.Namespace,
    timer: QuietTimer,
    library: llama_library.Library | None,
) -> tuple[list[Row], list[str]]:
    """Rows and goals of all cases with so many threads."""
    rows: list[Row] = []
    notes: list[str] = []
    with ExitStack() as opened:
        if library:
            cases = speed_gguf.cases(options, library, threads, opened)
            agree: Agreement = speed_gguf.agreement
        else:
            cases, agree = pair_cases(threads, prompts, options, timer, opened)
        for temperature in TEMPERATURES:
            if library and temperature:  # the loop over llama.cpp's library is greedy
                cases = [case for case in cases if case.labels["engine"] == "foretoken"]
            speeds, tokens = measure(cases, prompts, temperature, options.repeats, timer)
            same = {} if temperature else agree(tokens)
            labels = {"threads": threads, "temperature": temperature}
            fresh = [row(case, labels, speeds, same.get(case.name, {})) for case in cases]
            for line in fresh:
                print(f"{line.case:<46} {line.values['tokens_per_second'].median:7.0f} tokens/s")
            rows += fresh
            notes += goal_notes(fresh, is_gguf=library is not None)
    timer.processes = []
    return rows, notes


def pair_notes(timer: QuietTimer) -> list[str]:
    """What a reader of the embedded pair's figures must know."""
    return [
        "Cases interleaved within each repeat; the first round warms up. Speed counts "
        "generated tokens over the whole call, prefill included.",
        "Ratios are taken repeat by repeat, then summed up; generate, best_assisted and "
        "best_llama_cpp_drafted are the cases of Transformers and of drafted llama.cpp with "
        "the highest median at that temperature and number of threads (generate: dynamic "
        "cache or static without compilation). Seeds differ from repeat to repeat.",
        "All have `cores` cores, and compute with as many threads as the case says: ours in "
        "the native pool, beside which PyTorch has one; PyTorch's are set around each call of "
        "Transformers.",
        "llama.cpp: a server per case on the same cores, asleep between its requests; the "
        "weights as float32 GGUF, prompts and answers as token ids, no prompt cached, always "
        "K drafts, by its own rule (the draft's likeliest token, verified by sampling). Its "
        "seconds are those that it reports for prompt and generation, without HTTP.",
        timer.note(),
        "At T=0, prompts_equal_to_plain: all tokens equal plain decoding's; near_ties: they "
        f"part where the logits of both tokens are within {opponents.TIE:g}; differ: "
        "elsewhere. The native decoder gives equal bits, passes of others over 1 and K+1 rows "
        "may part at near-ties.",
    ]


def gguf_notes(timer: QuietTimer) -> list[str]:
    """What a reader of a GGUF file's figures must know."""
    return [*pair_notes(timer)[:1], speed_gguf.NOTE, timer.note()]


def opponent(options: argparse.Namespace, library: llama_library.Library | None) -> str | None:
    """The version of llama.cpp, if it is there; of a library also the backend it chose."""
    if library:
        return f"{library.version}, {library.variant}"
    return llama_cpp.version(options.llama_cpp) if options.llama_cpp else None


def main() -> None:
    parser = arguments(__doc__, prompts=8, max_tokens=128, repeats=5, cores=2)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--llama-cpp", type=Path, metavar="SERVER", help="llama.cpp's llama-server")
    speed_gguf.add_options(parser)
    options = parser.parse_args()
    speed_gguf.check_options(parser, options)
    use_cores(options.cores)
    library = llama_library.load(options.llama_library) if options.model else None
    if library:
        prompts = speed_gguf.prompts(options.model, options.prompts)
    else:
        tokenizer = load_tokenizer(TARGET)
        prompts = [list(tokenizer.encode(item.prompt)) for item in heldout(options.prompts)]
    rows, goals, timer = [], [], QuietTimer()
    for threads in options.threads:
        if library:
            rows += speed_gguf.starts(library, options.model, threads, options.repeats)
        if not options.only_starts:
            measured, reached = rows_of_threads(threads, prompts, options, timer, library)
            rows += measured
            goals += reached
    if library and not options.only_starts:
        rows += speed_gguf.acceptance(options.model, 2 * options.prompts, max(options.threads))
    record(
        "gguf" if library else "speed",
        options,
        {
            "target": options.model.name if library else TARGET,
            "bytes": options.model.stat().st_size if library else None,
            "draft": None if library else DRAFT,
            "batch": 1,
            "prompts": options.prompts,
            "prompt_tokens": [len(ids) for ids in prompts],
            "max_tokens": options.max_tokens,
            "dtype": "as the file has it" if library else "float32",
            "cores": options.cores,
            "threads": options.threads,
            "repeats": options.repeats,
            "llama_cpp": opponent(options, library),
        },
        rows,
        [*(gguf_notes if library else pair_notes)(timer), *goals],
        "benchmarks.speed",
    )


if __name__ == "__main__":
    main()

"""Tokens per second with K fixed at 0 to 8, and with K = `auto`, in batches of several sizes.

All cases of a batch size and a temperature take turns on the same prompts; the next turn has
others. Fixed K and `auto` have an engine each.
"""

from __future__ import annotations

import argparse
import time
from math import comb
from statistics import median
from typing import Any

from benchmarks.common import DRAFT, TARGET, arguments, goal, record, use_cores
from foretoken import LLM, SamplingParams
from foretoken.lab.results import Row, Spread, Value, read
from foretoken.lab.workloads import heldout

BATCHES = (1, 4, 16, 64)
TEMPERATURES = (0.0, 0.8)
MOST = 8
CASES: list[int | str] = [*range(MOST + 1), "auto"]
TOKENS = {1: 128, 4: 128, 16: 64, 64: 32}
SCOUTS = 6  # turns of all cases
TURNS = {1: 8, 4: 4, 16: 2, 64: 1}  # of the fastest, times `--repeats`
Speeds = dict[int | str, list[float]]


def engine(k: int | str) -> LLM:
    speculation = {"method": "draft_model", "num_speculative_tokens": k}
    return LLM(TARGET, speculation, max_num_seqs=max(BATCHES))


def _params(temperature: float, max_tokens: int, k: int | str) -> SamplingParams:
    return SamplingParams(
        temperature=temperature, max_tokens=max_tokens, ignore_eos=True, num_speculative_tokens=k
    )


def tokens_per_second(llm: LLM, prompts: list[str], params: SamplingParams) -> float:
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds


def measure(fixed: LLM, auto: LLM, batch: int, temperature: float, repeats: int) -> Speeds:
    """All cases for a few turns; plain decoding, the fastest three and `auto` for many more.

    Sampled texts differ from case to case, and with them how many drafts are accepted: a turn's
    ratios spread by a fifth and more at batch 1.
    """
    some = turns(fixed, auto, batch, temperature, range(SCOUTS), CASES)
    ranked = sorted((k for k in some if k not in (0, "auto")), key=lambda k: -median(some[k]))
    many = range(SCOUTS, SCOUTS + TURNS[batch] * repeats)
    return some | turns(fixed, auto, batch, temperature, many, [0, *ranked[:3], "auto"])


def turns(
    fixed: LLM, auto: LLM, batch: int, temperature: float, numbers: range, cases: list[int | str]
) -> Speeds:
    """These cases in turns, behind one that is left out; each turn begins with another case."""
    texts = [item.prompt for item in heldout()]
    speeds: Speeds = {case: [] for case in cases}
    for turn in (numbers.start, *numbers):
        prompts = [texts[(turn * batch + i) % len(texts)] for i in range(batch)]
        for llm, k in ((fixed, MOST), (auto, "auto")):  # prompts are in both caches, drafts' too
            llm.generate(prompts, _params(temperature, 8, k), use_tqdm=False)
        for i in range(len(cases)):
            case = cases[(i + turn) % len(cases)]
            llm = auto if case == "auto" else fixed
            # The processor's caches hold the weights of the engine that ran last, mostly the fixed
            # one's.
            llm.generate(prompts, _params(temperature, 8, case), use_tqdm=False)
            speeds[case].append(
                tokens_per_second(llm, prompts, _params(temperature, TOKENS[batch], case))
            )
    return {case: found[1:] for case, found in speeds.items()}


def median_interval(found: list[float]) -> tuple[float, float]:
    """Order statistics around the median: 95 % at least, if turns are independent."""
    ordered, below, rank = sorted(found), 0.0, 0
    while (below := below + comb(len(found), rank) / 2 ** len(found)) <= 0.025:
        rank += 1
    rank = max(rank - 1, 0)
    return ordered[rank], ordered[-1 - rank]


def best_fixed(speeds: Speeds, part: slice) -> int | str:
    """The K that is fastest in these turns, of those that took as many as `auto`."""
    count = len(speeds["auto"])
    compared = [k for k in speeds if k != "auto" and len(speeds[k]) == count]
    return max(compared, key=lambda k: median(speeds[k][part]))


def ratios_to_best(speeds: Speeds) -> list[float]:
    """`auto` to the best fixed K, turn by turn.

    Which K is best is seen in every other turn and compared in those between, and the other way
    round: the best of nine medians of the turns compared would be the luckiest, by 6 % at batch 1.
    """
    ratios = [0.0] * len(speeds["auto"])
    even, odd = slice(0, None, 2), slice(1, None, 2)
    for half, other in ((even, odd), (odd, even)):
        best = best_fixed(speeds, other)
        pairs = zip(speeds["auto"][half], speeds[best][half], strict=True)
        ratios[half] = [auto / fixed for auto, fixed in pairs]
    return ratios


def rows_of(speeds: Speeds, batch: int, what: str, **about: Any) -> list[Row]:
    """A row per case; of `auto` also its ratio to plain decoding and to the best fixed K.

    Args:
        speeds: of two turns at least.
        what, about: beside batch and K, what ends a case's name, and its labels.
    """
    rows = []
    for case, found in speeds.items():
        labels: dict[str, Any] = {"batch": batch, "k": case, **about}
        values: dict[str, Value] = {"tokens_per_second": Spread.of(found, "tokens/s")}
        if case == "auto":
            labels["best_k"] = best_fixed(speeds, slice(None))
            to_plain = [a / b for a, b in zip(found, speeds[0], strict=True)]
            both = {"ratio_to_plain": to_plain, "ratio_to_best": ratios_to_best(speeds)}
            for name, ratios in both.items():
                values[name] = Spread.of(ratios, "ratio")
                values[f"{name}_low"], values[f"{name}_high"] = median_interval(ratios)
        rows.append(Row(f"batch {batch}, K={case}, {what}", labels, values))
    return rows


def save(options: argparse.Namespace, rows: list[Row], notes: list[str]) -> None:
    """Write what was measured so far, beside the cases of an earlier file if they are kept."""
    file = options.out / f"auto{'_' if options.machine else ''}{options.machine}.json"
    if options.keep and file.exists():
        before, new = read(file), {row.case for row in rows}
        rows = [row for row in before.rows if row.case not in new] + rows
        notes = [*dict.fromkeys([*before.notes, *notes])]
    shapes = {
        "target": TARGET, "draft": DRAFT, "most_drafts": MOST, "cores": options.cores,
        "max_tokens": {str(batch): tokens for batch, tokens in TOKENS.items()}, "dtype": "float32",
    }  # fmt: skip
    record("auto", options, shapes, rows, notes)


def main() -> None:
    parser = arguments(__doc__, repeats=15, cores=2)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, choices=BATCHES)
    parser.add_argument("--temperatures", type=float, nargs="+", default=TEMPERATURES)
    parser.add_argument("--keep", action="store_true", help="other cases of the file that is there")
    options = parser.parse_args()
    if options.repeats < 2:
        parser.error(f"--repeats is {options.repeats}; at least 2: the best K is of other turns")
    use_cores(options.cores)
    fixed, auto = engine(MOST), engine("auto")
    rows: list[Row] = []
    notes = [
        "One process, an engine with K=8, whose requests name their K, and one with K = `auto` of "
        "at most 8. Whole calls are timed, their prompts were computed before; the first turn is "
        f"left out. {SCOUTS} turns of all K, and as many as are said of plain decoding, the best "
        "three and `auto`, whose ratios are taken turn by turn; the best K is the one of every "
        "other turn, compared in those between.",
    ]
    print(f"costs at start:\n{auto.engine.scheduler.control.costs.table.shown()}")
    for batch in options.batches:
        for temperature in options.temperatures:
            speeds = measure(fixed, auto, batch, temperature, options.repeats)
            found = rows_of(speeds, batch, f"T={temperature:g}", temperature=temperature)
            rows += found
            what = f"batch {batch}, auto, T={temperature:g}"
            notes.append(goal(f"{what}: to best K", found[-1], "ratio_to_best", 0.95))
            notes.append(goal(f"{what}: to plain", found[-1], "ratio_to_plain", 1.0))
            print(*(f"{row.case}: {row.values}" for row in found), sep="\n", flush=True)
            save(options, rows, notes)


if __name__ == "__main__":
    main()

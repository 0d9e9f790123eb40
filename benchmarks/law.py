"""The statistical laws of sampling and verification on one backend: the full matrix, recorded.

    python -m benchmarks.law --backend triton --device cuda --out benchmarks/results/law.json

Runs all of `foretoken.lab.laws`: the joint distribution of every combination of rule, K, q, filter,
noise and draft dtype, acceptance against exact enumeration, large vocabularies, ties, nearly
uniform rows and tails, the synthetic rates, and every mutant, which must be rejected. Each number
that a law bounds is one row of the results file. Ends with exit status 1 if a law is broken.

The laws are shared out to `--jobs` processes: on a GPU most of the time is spent on compilation.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import shlex
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch

from benchmarks.common import CODE, whole_commit
from foretoken.lab.laws.chain import TRIALS
from foretoken.lab.laws.findings import CORRECT_P, MUTANT_P, Finding
from foretoken.lab.laws.suite import Task, find, tasks
from foretoken.lab.results import Row, collect, write
from foretoken.ops import BACKENDS


def findings(task: Task) -> list[Finding]:
    """What one task finds; runs in a process of its own."""
    torch.set_num_threads(1)
    return find(task)


def row(law: str, finding: Finding, backend: str, device: torch.device) -> Row:
    """One line of the results file."""
    labels = {"law": law, "statistic": finding.statistic, "backend": backend, "device": device.type}
    labels |= {"low": str(finding.low), "high": str(finding.high), "passed": finding.passed}
    values = {finding.statistic: finding.value, "trials": finding.trials}
    return Row(f"{finding.case}: {finding.statistic}", labels, values)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    gpu = torch.cuda.is_available()
    parser.add_argument(
        "--backend", default="triton" if gpu else "native", choices=sorted(BACKENDS)
    )
    parser.add_argument("--device", default="cuda" if gpu else "cpu", type=torch.device)
    parser.add_argument("--trials", default=TRIALS, type=int, help="of one joint distribution")
    parser.add_argument("--jobs", default=os.cpu_count() or 1, type=int, help="processes")
    parser.add_argument("--quick", action="store_true", help="the pairwise selection alone")
    parser.add_argument("--commit", type=whole_commit, help="of this code, without its repository")
    parser.add_argument("--out", type=Path, help="default: law.json, or law_gpu.json, of results")
    options = parser.parse_args()
    name = "law_gpu" if options.device.type == "cuda" else "law"
    options.out = options.out or Path(f"benchmarks/results/{name}.json")
    return options


def main() -> None:
    options = parse()
    start = time.perf_counter()
    todo = tasks(options.backend, options.device, trials=options.trials, quick=options.quick)
    found: dict[Task, list[Finding]] = {task: [] for task in todo}
    broken, said = 0, ""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, context) as pool:
        running = {pool.submit(findings, task): task for task in found}
        for number, done in enumerate(as_completed(running), 1):
            task = running[done]
            try:
                found[task] = done.result()
            except Exception as error:  # the other laws are recorded all the same
                traceback.print_exception(error)
                found[task] = [Finding(f"{task.law} {task.number}", "error", math.nan, 0, 0, 0)]
            broken += sum(not finding.passed for finding in found[task])
            for finding in found[task]:
                if not finding.passed:
                    print(f"BROKEN  {finding}", flush=True)
            if number % 20 == 0 or number == len(running):
                took = time.perf_counter() - start
                print(f"{took:6.1f} s  {number} of {len(running)}: {task.law}", flush=True)
                said = save(options, found, took, len(running) - number)
    print(said)
    sys.exit(bool(broken))


def save(
    options: argparse.Namespace, found: dict[Task, list[Finding]], took: float, left: int
) -> str:
    """Write what there is, now and then: a run that is cut short keeps it, and says so."""
    rows = [
        row(task.law, finding, options.backend, options.device)
        for task in found
        for finding in found[task]
    ]
    broken = sum(not finding.passed for each in found.values() for finding in each)
    shapes = {"backend": options.backend, "device": str(options.device), "trials": options.trials}
    shapes |= {"jobs": options.jobs}
    shapes |= {"matrix": "pairwise" if options.quick else "full", "seconds": round(took, 1)}
    notes = [
        f"{len(rows)} numbers, {broken} outside their bounds, in {took:.0f} s.",
        f"Passes: p > {CORRECT_P:g}; of a mutant, p < {MUTANT_P:g}.",
    ]
    notes += [f"Cut short: {left} of {len(found)} tasks are missing."] if left else []
    code = (options.commit, False) if options.commit else CODE
    command = shlex.join(["python", "-m", "benchmarks.law", *sys.argv[1:]])
    path = write(collect(options.out.stem, command, shapes, rows, notes, code), options.out.parent)
    return f"{notes[0]} Wrote {path}"


if __name__ == "__main__":
    main()

"""The statistical laws of sampling and verification on one backend: the full matrix, recorded.

    python -m benchmarks.law --backend triton --device cuda --out benchmarks/results/law.json

Runs without pytest what `make law` runs with it (the cases are those of `tests/support`): the joint
law of every combination of rule, K, q, filter, noise and draft dtype, acceptance against exact
enumeration, large vocabularies, ties, nearly uniform rows and tails, the synthetic rates, and every
mutant, which must be rejected. Each number that a law bounds is one row of the results file. Ends
with exit status 1 if a law is broken.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from foretoken.lab.results import Row, collect, commit, write
from foretoken.ops import BACKENDS, Backend, Rule, get_backend
from tests.support import law_accept, law_noise, law_synthetic
from tests.support.law import CORRECT_P, MUTANT_P, TRIALS
from tests.support.law_cases import Finding, check_case, extra_cases, matrix, pairwise
from tests.support.law_model import Setting
from tests.support.law_mutant_cases import READ_RULES, check_mutant, mutants, rule_mutants
from tests.support.law_rounds import several_rounds

CODE = commit()
NOISE = {
    "fp32": Setting(),
    "fp64": Setting(fp64_noise=True),
    "flat": Setting(rule=Rule.COUPLED),
}
Law = Callable[[Backend, torch.device, int], list[Finding]]
"""(backend, device, trials) -> what was found."""


def noise(backend: Backend, device: torch.device, trials: int) -> list[Finding]:
    """Vocabularies, ties, nearly uniform rows, tails; on a GPU with the draws of the goal.

    A CPU takes 0.3 ns per logit, 20 per token of flat noise: fewer draws, smaller vocabularies.
    """
    gpu = device.type == "cuda"
    findings = law_noise.ties(backend, device, trials)
    for vocabulary in law_noise.VOCABULARIES:
        rows = 20_000 if gpu else max(100, min(5000, 2**24 // vocabulary))
        findings += law_noise.vocabulary_law(backend, device, vocabulary, rows)
    for name, setting in NOISE.items():
        draw = law_noise.sampler(backend, setting)
        vocabulary, draws = (200_000, 400_000) if gpu else (10_000, 20_000)
        if gpu and name == "fp32":
            draws = 4_000_000
        findings += law_noise.near_uniform(draw, device, vocabulary, draws, f"near_uniform-{name}")
        for vocabulary in (1024, 200_000) if gpu else (1024,):
            draws = (32 if gpu else 1) * 2**31 // vocabulary
            if gpu or name == "fp32":
                findings += law_noise.tail(draw, device, vocabulary, draws, f"tail-{name}")
    return findings


def synthetic(backend: Backend, device: torch.device, trials: int) -> list[Finding]:
    """Rates per position, mean rates through the solver, rejections at T = 0."""
    return [
        *law_synthetic.per_position(backend, device),
        *law_synthetic.mean_rates(backend, device),
        *law_synthetic.greedy_rejections(backend, device),
    ]


LAWS: dict[str, Law] = {
    "several_rounds": lambda backend, device, _: several_rounds(backend, device),
    "mean_accepted": law_accept.mean_accepted,
    "overlap": law_accept.overlap,
    "always_and_never": law_accept.always_and_never,
    "nucleus": law_accept.outside_the_nucleus,
    "ends_of_u": lambda backend, device, _: law_accept.ends_of_u(backend, device),
    "noise": noise,
    "synthetic": synthetic,
}


def findings(
    name: str, device: torch.device, trials: int, quick: bool
) -> Iterator[tuple[str, Finding]]:
    """(which law, one number of it), as they come."""
    backend = get_backend(name)
    cases = pairwise(matrix()) if quick else matrix()
    for case in (*cases, *extra_cases()):
        for finding in check_case(case, backend, device, trials):
            yield "joint", finding
    for law, run in LAWS.items():
        for finding in run(backend, device, trials):
            yield law, finding
    for mutant in (*mutants(), *(rule_mutants() if name in READ_RULES else ())):
        yield "mutants", check_mutant(mutant, backend, device)


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
        "--backend", default="triton" if gpu else "native_cpu", choices=sorted(BACKENDS)
    )
    parser.add_argument("--device", default="cuda" if gpu else "cpu", type=torch.device)
    parser.add_argument("--trials", default=TRIALS, type=int, help="of one case of the joint law")
    parser.add_argument("--quick", action="store_true", help="the pairwise selection alone")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/law.json"))
    return parser.parse_args()


def main() -> None:
    options = parse()
    start, last = time.perf_counter(), ""
    rows: list[Row] = []
    broken: list[Finding] = []
    for law, finding in findings(options.backend, options.device, options.trials, options.quick):
        if law != last:
            print(f"{time.perf_counter() - start:6.1f} s  {law}", flush=True)
            last = law
        rows.append(row(law, finding, options.backend, options.device))
        if not finding.passed:
            broken.append(finding)
            print(f"BROKEN  {finding}", flush=True)
    took = time.perf_counter() - start
    shapes = {"backend": options.backend, "device": str(options.device), "trials": options.trials}
    shapes |= {"matrix": "pairwise" if options.quick else "full", "seconds": round(took, 1)}
    notes = [
        f"{len(rows)} numbers, {len(broken)} outside their bounds, in {took:.0f} s.",
        f"Passes: p > {CORRECT_P:g}; of a mutant, p < {MUTANT_P:g}.",
    ]
    command = shlex.join(["python", "-m", "benchmarks.law", *sys.argv[1:]])
    path = write(collect(options.out.stem, command, shapes, rows, notes, CODE), options.out.parent)
    print(f"{notes[0]} Wrote {path}")
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()

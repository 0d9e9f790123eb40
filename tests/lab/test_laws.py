"""The suite of laws: every law, case and mutant is a task of its own, which any process can do; and
the statistics by which findings are judged: known values, and both ways they must answer."""

from __future__ import annotations

import math
import pickle
from collections import Counter

import pytest

from foretoken.errors import NonFiniteLogitsError
from foretoken.lab.laws.chain import CPU, batches
from foretoken.lab.laws.findings import (
    MUTANT_P,
    ChiSquare,
    Finding,
    goodness_of_fit,
    poisson,
    upper_tail,
)
from foretoken.lab.laws.joint import check_case, extra_cases, matrix, pairwise
from foretoken.lab.laws.mutants import mutants, replaced, rule_mutants
from foretoken.lab.laws.suite import LAWS, Task, find, tasks
from foretoken.ops import get_backend


def test_everything_is_a_task() -> None:
    quick, full = (Counter(t.law for t in tasks("torch", CPU, quick=q)) for q in (True, False))
    assert {law: full[law] for law in LAWS} == dict.fromkeys(LAWS, 1)
    assert full["mutants"] == quick["mutants"] == len(mutants()) + len(rule_mutants())
    assert quick["joint"] == len(pairwise(matrix())) + len(extra_cases())
    assert full["joint"] == len(matrix()) + len(extra_cases())
    assert "far_rows" not in full  # 10 GB


def test_a_task_finds_the_same_in_another_process() -> None:
    for law, number in (("joint", 3), ("ends_of_u", 0)):
        task = Task(law, number, "torch", CPU, 2000)
        findings = find(task)
        assert findings == find(pickle.loads(pickle.dumps(task)))
        assert all(finding.passed for finding in findings)


def test_a_mutants_task_passes_because_its_case_fails() -> None:
    (finding,) = find(Task("mutants", 0, "torch", CPU, 0))
    assert finding.passed
    assert finding.value < finding.high == MUTANT_P


def test_a_finding_says_what_it_was() -> None:
    broken = Finding("case", "z", 5.0, -4.0, 4.0, 100)
    assert not broken.passed
    assert str(broken) == "case: z 5 in (-4, 4), 100 trials"
    assert not Finding("case", "p_value", float("nan"), 0.0, 1.0, 1).passed


def test_waves_share_the_trials_out() -> None:
    assert list(batches(60_000, CPU)) == [(0, 25_000), (1, 25_000), (2, 10_000)]
    assert list(batches(3, CPU, row_bytes=2**28)) == [(0, 1), (1, 1), (2, 1)]


def test_rows_that_a_backend_wrongly_calls_broken_are_an_error() -> None:
    backend = get_backend("torch")

    def verify(batch):
        verdict = backend.verify(batch)
        verdict.finite_B[0] = False
        return verdict

    with pytest.raises(NonFiniteLogitsError):
        check_case(matrix()[0], replaced(backend, verify=verify), CPU, 100)


# Statistics


@pytest.mark.parametrize(
    ("statistic", "degrees", "tail"),
    [
        (3.841458820694124, 1, 0.05),  # tabulated critical values
        (18.307038053275146, 10, 0.05),
        (1000.0, 900, 0.0109946089421358),
        (2.0, 2, 0.36787944117144233),  # exp(-x/2) for two degrees
        (0.0, 5, 1.0),
        (1.0, 50, 1.0),
    ],
)
def test_upper_tail(statistic: float, degrees: int, tail: float) -> None:
    assert upper_tail(statistic, degrees) == pytest.approx(tail, rel=1e-8, abs=1e-12)


def test_upper_tail_far_out() -> None:
    assert upper_tail(200.0, 2) == pytest.approx(3.720075976020836e-44, rel=1e-8)


def test_goodness_of_fit() -> None:
    fair = goodness_of_fit([30, 20, 25, 25], [0.25] * 4)
    assert (fair.statistic, fair.degrees) == (2.0, 3)
    assert fair.p_value == upper_tail(2.0, 3)
    assert goodness_of_fit([50, 20, 20, 10], [0.25] * 4).p_value < 1e-6


@pytest.mark.parametrize(
    ("counts", "percent", "statistic", "degrees"),
    [
        ([48, 46, 2, 4], [47, 47, 3, 3], 2 / 47, 2),  # two rare cells make one of 6
        ([90, 7, 3], [90, 7, 3], 0.0, 1),  # a rare pool joins the last cell
        ([3, 1], [50, 50], 0.0, 0),  # everything is rare
        ([60, 40, 0], [60, 40, 0], 0.0, 1),
    ],
)
def test_rare_cells_of_a_fit_are_pooled(
    counts: list[int], percent: list[int], statistic: float, degrees: int
) -> None:
    found = goodness_of_fit(counts, [share / 100 for share in percent])
    assert found.statistic == pytest.approx(statistic)
    assert found.degrees == degrees
    assert degrees or found.p_value == 1.0


def test_what_cannot_occur_and_did_has_no_chance() -> None:
    assert goodness_of_fit([60, 40, 1], [0.6, 0.4, 0.0]) == ChiSquare(float("inf"), 2, 0.0)


@pytest.mark.parametrize("count", [0, 3, 7, 12, 25])
def test_a_poisson_count(count: int) -> None:
    chance = [math.exp(-12) * 12**k / math.factorial(k) for k in range(60)]
    expected = min(1.0, 2 * min(sum(chance[: count + 1]), sum(chance[count:])))
    assert poisson(count, 12.0) == pytest.approx(expected, rel=1e-6)

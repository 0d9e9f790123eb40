"""The suite of laws: every law, case and mutant is a task of its own, which any process can do."""

from __future__ import annotations

import pickle
from collections import Counter

import pytest

from foretoken.errors import NonFiniteLogitsError
from foretoken.lab.laws.chain import CPU, waves
from foretoken.lab.laws.findings import MUTANT_P, Finding
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
    assert list(waves(60_000, CPU)) == [(0, 25_000), (1, 25_000), (2, 10_000)]
    assert list(waves(3, CPU, row_bytes=2**28)) == [(0, 1), (1, 1), (2, 1)]


def test_rows_that_a_backend_wrongly_calls_broken_are_an_error() -> None:
    backend = get_backend("torch")

    def verify(batch):
        verdict = backend.verify(batch)
        verdict.finite_B[0] = False
        return verdict

    with pytest.raises(NonFiniteLogitsError):
        check_case(matrix()[0], replaced(backend, verify=verify), CPU, 100)

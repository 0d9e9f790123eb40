"""The joint distribution of emitted tokens is the target's; each way to break it is noticed.

These are a pairwise selection of the matrix, on every backend of this machine; `make law` checks
and records all of it on the fastest one, by `benchmarks/law.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from foretoken.lab.laws.chain import emit
from foretoken.lab.laws.findings import CORRECT_P, MUTANT_P, p_finding
from foretoken.lab.laws.joint import (
    Case,
    check_case,
    extra_cases,
    matrix,
    pairwise,
    run_case,
    several_rounds,
)
from foretoken.lab.laws.mutants import (
    READ_RULES,
    Mutant,
    check_mutant,
    cut_before_token,
    cut_by_total,
    mutants,
    rule_mutants,
)
from foretoken.lab.laws.mutants import TRIALS as MUTANT_TRIALS
from foretoken.ops import Rule
from tests.support.laws import (
    QUICK,
    QUICK_NUCLEUS,
    RUNNABLE,
    On,
    chosen_by_control,
    cut_by_prefix,
    each_backend,
    fastest,
    require,
    without_drafts,
)  # fmt: skip

SELECTED = pairwise(matrix())


def named(argument: str, values: Sequence[Any]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(argument, values, ids=lambda value: value.name)


@each_backend
@named("case", SELECTED)
def test_joint_distribution(on: On, case: Case) -> None:
    require(check_case(case, on.backend, on.device, on.trials(case)))


@fastest
@named("case", extra_cases()[::2])
def test_joint_distribution_of_longer_runs_and_other_vocabularies(on: On, case: Case) -> None:
    require(check_case(case, on.backend, on.device, on.trials(case) // 2))


@each_backend
def test_several_rounds_of_blocks(on: On) -> None:
    require(several_rounds(on.backend, on.device, rules=(Rule.BLOCK,)))


@pytest.mark.law
@each_backend
def test_several_rounds_full(on: On) -> None:
    require(several_rounds(on.backend, on.device))


@each_backend
@pytest.mark.parametrize("rule", [Rule.STANDARD, Rule.BLOCK])
def test_ragged_lengths_that_depend_on_the_prefix(on: On, rule: Rule) -> None:
    case = Case(rule, 3, "real", "no_filter", False, rounds=None)
    trials = on.trials(case) // 2
    emission, p = run_case(case, on.backend, on.device, trials, cut_by_prefix)
    assert len(set(emission.offered)) == 3  # not all had three drafts
    require([p_finding(case.name, p, trials)])


@each_backend
@pytest.mark.parametrize("rule", [Rule.STANDARD, Rule.BLOCK])
def test_k_chosen_from_rounds_that_are_over(on: On, rule: Rule) -> None:
    require(several_rounds(on.backend, on.device, 25_000, (rule,), chosen_by_control))


@fastest
@pytest.mark.parametrize("rule", [Rule.STANDARD, Rule.BLOCK])
@pytest.mark.parametrize("mutate", [cut_before_token, cut_by_total])
def test_k_chosen_by_what_was_sampled_is_rejected(on: On, rule: Rule, mutate: Any) -> None:
    sampled, _ = several_rounds(on.backend, on.device, 25_000, (rule,), mutate)
    assert sampled.value < MUTANT_P


@each_backend
@pytest.mark.parametrize("rule", [Rule.STANDARD, Rule.BLOCK, Rule.COUPLED])
def test_rounds_without_any_draft_are_plain_sampling(on: On, rule: Rule) -> None:
    case = Case(rule, 1, "real", "top_p", False, rounds=None)
    trials = on.trials(case) // 2
    _, p = run_case(case, on.backend, on.device, trials, without_drafts)
    require([p_finding(case.name, p, trials)])


@fastest
@named("mutant", mutants())
def test_mutant_is_rejected(on: On, mutant: Mutant) -> None:
    require([check_mutant(mutant, on.backend, on.device)])


@named("mutant", rule_mutants())
def test_mutant_rule_is_rejected(mutant: Mutant) -> None:
    on = next(on for on in RUNNABLE if on.name in READ_RULES)
    require([check_mutant(mutant, on.backend, on.device)])


@fastest
def test_the_trials_of_quick_laws_suffice(on: On) -> None:
    assert min(QUICK.values()) >= MUTANT_TRIALS
    for name, trials in (
        ("residual_weight_before-block", QUICK["native"]),
        ("unfiltered-block-K3-real-top_p", QUICK_NUCLEUS),
    ):
        (mutant,) = (m for m in mutants() if m.name.startswith(name))
        finding = check_mutant(replace(mutant, trials=trials), on.backend, on.device)
        assert finding.value < CORRECT_P


def test_every_mutant_breaks_a_case_that_passes() -> None:
    """Only the mutation distinguishes their cases from tested ones."""
    tested = {
        (case.rule, case.q, case.filters)
        for case in (*matrix(), *extra_cases())
        if case.rounds in (None, 1)
    }
    assert {(m.case.rule, m.case.q, m.case.filters) for m in mutants()} <= tested


def test_the_selection_has_every_pair() -> None:
    for rule in (Rule.STANDARD, Rule.BLOCK, Rule.COUPLED):
        for axis in ("num_drafts", "q", "filters", "fp64_noise", "dtype", "temperature"):
            every = {getattr(case, axis) for case in matrix()}
            assert {getattr(case, axis) for case in SELECTED if case.rule is rule} == every
    assert len(SELECTED) <= 20


@fastest
def test_coupled_text_is_the_same_with_any_drafts(on: On) -> None:
    """The same tokens, slot by slot, with any drafter and any number of drafts."""
    texts = []
    for num_drafts, q in ((1, "real"), (5, "one_hot"), (3, "lookup")):
        case = Case(Rule.COUPLED, num_drafts, q, "top_p", False, rounds=None)
        make, target = case.make_propose(on.backend, on.device), case.chains()[0].to(on.device)
        emission = emit(on.backend, target, make, case.setting, length=6, trials=5000)
        assert sum(emission.accepted) > 0.01 * sum(emission.offered)
        texts.append(emission.token_SL)
    assert all(bool((text == texts[0]).all()) for text in texts)

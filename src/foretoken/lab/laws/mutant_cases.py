"""Which mutant must be noticed in which case of the joint distribution."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from foretoken.lab.laws.emission import Propose
from foretoken.lab.laws.findings import MUTANT_P, Finding
from foretoken.lab.laws.joint import Case, run_case
from foretoken.lab.laws.mutants import (
    BLOCK_RESIDUALS,
    RESIDUALS,
    RuleMutant,
    cut_before_token,
    cut_by_total,
    early_stop,
    edits_of_the_row_before,
    hide_token,
    mask_drops_drafts,
    mass_of_the_row_before,
    one_uniform,
    replaced_rule,
    residual,
    row_before_of_q,
    same_noise_every_round,
    shared_stream,
    unfiltered,
)
from foretoken.ops import Backend, Rule

TRIALS = 20_000  # all but two are rejected at p < 1e-100
TRIALS_OF_SUBTLE = 200_000  # what differs only once several drafts were accepted
READ_RULES = ("torch",)  # backends that take their rules from `ops/rules.py`


@dataclass(frozen=True)
class Mutant:
    """A case with one thing broken: the proposal, a function of the backend, or the rule."""

    what: str
    case: Case
    propose: Callable[[Propose], Propose] | None = None
    backend: Callable[[Backend], Backend] | None = None
    rule: RuleMutant | None = None
    trials: int = TRIALS

    @property
    def name(self) -> str:
        """What is broken, and in which case."""
        return f"{self.what}-{self.case.name}"


def check_mutant(mutant: Mutant, backend: Backend, device: torch.device) -> Finding:
    """The broken path's p-value, which must be below `MUTANT_P`."""
    broken = backend if mutant.backend is None else mutant.backend(backend)
    change = replaced_rule(mutant.case.rule, mutant.rule) if mutant.rule else nullcontext()
    with change:
        _, p = run_case(mutant.case, broken, device, mutant.trials, mutant.propose)
    return Finding(f"mutant-{mutant.name}", "p_value", p, -1.0, MUTANT_P, mutant.trials)


def _real(rule: Rule, filters: str = "no_filter", rounds: int | None = 1) -> Case:
    return Case(rule, 3, "real", filters, False, rounds=rounds)


def mutants() -> list[Mutant]:
    """All that any backend can be broken by."""
    lossless = (Rule.STANDARD, Rule.BLOCK)
    found = []
    for rule in lossless:
        found += [
            Mutant(propose.__name__, _real(rule), propose=propose)
            for propose in (hide_token, cut_before_token, cut_by_total, row_before_of_q)
        ]
        rounds = _real(rule, rounds=None)
        found += [
            Mutant("shared_stream", _real(rule), backend=shared_stream),
            Mutant("same_noise", rounds, backend=same_noise_every_round),
            Mutant("mask_drops_drafts", _real(rule, "grammar"), backend=mask_drops_drafts),
        ]
        found += [
            Mutant(f"residual_{name}", _real(rule), backend=residual(masses))
            for name, masses in RESIDUALS.items()
        ]
    for rule, filters in zip(
        (*lossless, Rule.COUPLED, *lossless),
        ("top_k", "top_p", "min_p", "penalties", "grammar"),
        strict=True,
    ):
        found.append(Mutant("unfiltered", _real(rule, filters), backend=unfiltered))
    for rule, filters in zip(lossless, ("penalties", "grammar"), strict=True):
        found.append(Mutant("edits_before", _real(rule, filters), backend=edits_of_the_row_before))
    for name, masses in BLOCK_RESIDUALS.items():
        subtle, block = residual(masses), _real(Rule.BLOCK)
        found.append(Mutant(f"residual_{name}", block, backend=subtle, trials=TRIALS_OF_SUBTLE))
    coupled = residual(RESIDUALS["one_hot"])
    found.append(Mutant("residual_one_hot", _real(Rule.COUPLED), backend=coupled))
    return found


def rule_mutants() -> list[Mutant]:
    """Of the decision, for the backends in `READ_RULES`."""
    return [
        Mutant(mutate.__name__, _real(rule), rule=mutate)
        for rule, mutate in (
            (Rule.STANDARD, one_uniform),
            (Rule.BLOCK, one_uniform),
            (Rule.BLOCK, early_stop),
            (Rule.BLOCK, mass_of_the_row_before),
        )
    ]

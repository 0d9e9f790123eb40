"""The matrix of the joint law: every combination, a pairwise selection of them, and how one runs.

A case is one way to speculate on a chain of 16 tokens whose draft has the target's logits negated.
`make law` and `benchmarks/law.py` run all of them, `make test` those of `pairwise`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from foretoken.ops import Backend, Rule, SlotParams
from tests.support.law import (
    CORRECT_P,
    TRIALS,
    Outcome,
    Propose,
    TableDrafter,
    emit,
    law_p_value,
)
from tests.support.law_model import Chain, Setting, random_chain

VOCABULARY = 16
SPREAD = 0.5  # standard deviation of the logits: about half of all drafts are accepted

FILTERS: dict[str, dict[str, Any]] = {
    "no_filter": {},
    "top_k": {"top_k": 13},
    "top_p": {"top_p": 0.95},
    "min_p": {"min_p": 0.15},
    "penalties": {"edits": "penalties"},
    "grammar": {"edits": "grammar"},
}
Q = ("real", "one_hot", "lookup")
"""Sampled drafts with their q; the same, verified as one-hot; a function of the prefix."""
DTYPES = (torch.float32, torch.bfloat16)
RULES = (Rule.STANDARD, Rule.BLOCK, Rule.COUPLED)


@dataclass(frozen=True)
class Finding:
    """One number that a law bounds: it passes if low < value < high."""

    case: str
    statistic: str
    value: float
    low: float
    high: float
    trials: int

    @property
    def passed(self) -> bool:
        return self.low < self.value < self.high

    def __str__(self) -> str:
        found = f"{self.statistic} {self.value:.3g} in ({self.low:.3g}, {self.high:.3g})"
        return f"{self.case}: {found}, {self.trials} trials"


def require(findings: Sequence[Finding]) -> None:
    """Fail with every law that is broken."""
    broken = [str(finding) for finding in findings if not finding.passed]
    assert findings
    assert not broken, "\n".join(broken)


def p_finding(case: str, p: float, trials: int) -> Finding:
    """A p-value that the correct law passes."""
    return Finding(case, "p_value", p, CORRECT_P, 1.0 + 1e-9, trials)


@dataclass(frozen=True)
class Case:
    """One combination of the matrix.

    dtype: of the draft logits
    rounds: None drafts and verifies until every token is there; see `emit`
    """

    rule: Rule
    num_drafts: int
    q: str
    filters: str
    fp64_noise: bool
    dtype: torch.dtype = torch.float32
    temperature: float = 1.0
    rounds: int | None = 1
    draft_vocabulary: int | None = None

    @property
    def name(self) -> str:
        parts = [self.rule.name.lower(), f"K{self.num_drafts}", self.q, self.filters]
        parts += ["fp64" if self.fp64_noise else "fp32", f"T{self.temperature:g}"]
        if self.dtype == torch.bfloat16:
            parts.append("bf16")
        if self.rounds is None:
            parts.append("rounds")
        if self.draft_vocabulary:
            parts.append(f"draft_vocabulary{self.draft_vocabulary}")
        return "-".join(parts)

    @property
    def setting(self) -> Setting:
        return Setting(
            temperature=self.temperature,
            rule=self.rule,
            fp64_noise=self.fp64_noise,
            **FILTERS[self.filters],
        )

    @property
    def length(self) -> int:
        return max(3, self.num_drafts + 1)

    def chains(self) -> tuple[Chain, Chain]:
        """Target and draft on the CPU."""
        return _chains(self.draft_vocabulary, self.dtype)

    def make_propose(self, backend: Backend, device: torch.device) -> Callable[..., Propose]:
        target, draft = (chain.to(device) for chain in self.chains())
        lookup = target.logits_CV.argmax(dim=1) if self.q == "lookup" else None

        def make(params: SlotParams) -> Propose:
            return TableDrafter(
                backend,
                draft,
                params,
                self.num_drafts,
                real_q=self.q == "real",
                lookup=lookup,
                fp64_noise=self.fp64_noise,
            )

        return make


@cache
def _chains(draft_vocabulary: int | None, dtype: torch.dtype) -> tuple[Chain, Chain]:
    target, draft = random_chain(VOCABULARY, 1, SPREAD, draft_vocabulary)
    return target, Chain(draft.logits_CV.to(dtype))


@cache
def _next_law(setting: Setting) -> torch.Tensor:
    return setting.next_law(_chains(None, torch.float32)[0])


def case_law(case: Case) -> torch.Tensor:
    """The exact law, which depends on the filters and the temperature alone."""
    return _next_law(Setting(case.temperature, **FILTERS[case.filters]))


def run_case(
    case: Case,
    backend: Backend,
    device: torch.device,
    trials: int = TRIALS,
    mutate: Callable[[Propose], Propose] | None = None,
    seed: int = 0,
) -> tuple[Outcome, float]:
    """Emit sequences, and the p-value of their counts under the target's law."""
    make = case.make_propose(backend, device)
    outcome = emit(
        backend,
        case.chains()[0].to(device),
        make if mutate is None else lambda params: mutate(make(params)),
        case.setting,
        length=case.length,
        trials=trials,
        seed=seed,
        rounds=case.rounds,
    )
    return outcome, law_p_value(outcome.token_SL, case_law(case))


def accepted_bounds(case: Case, trials: int) -> tuple[float, float]:
    """Of the share of first drafts that are accepted.

    A token that is looked up is accepted as often as the target draws it, to 5 standard errors;
    never where the grammar forbids it. Else drafts must be neither all wrong nor all right: without
    that the joint law would say nothing of acceptance.
    """
    if case.q != "lookup" or case.rounds is None:
        return 0.005, 0.95
    target = case.chains()[0]
    share = float(case_law(case)[target.start, target.logits_CV[target.start].argmax()])
    spread = 5 * (share * (1 - share) / trials) ** 0.5 + 1e-9
    return share - spread, share + spread


def check_case(
    case: Case, backend: Backend, device: torch.device, trials: int = TRIALS
) -> list[Finding]:
    """The joint law of one case, and how often its first draft is accepted."""
    outcome, p = run_case(case, backend, device, trials)
    share = outcome.accepted[0] / outcome.offered[0]
    low, high = accepted_bounds(case, trials)
    return [
        p_finding(case.name, p, trials),
        Finding(case.name, "accepted", share, low, high, trials),
    ]


@cache
def matrix() -> tuple[Case, ...]:
    """Every combination; T alternates. Drafts that are looked up have no logits of their own."""
    axes = itertools.product(RULES, (1, 3, 5), Q, FILTERS, (False, True), DTYPES)
    return tuple(
        Case(*axis, temperature=(0.7, 1.0)[i // 3 % 2], rounds=None if axis[1] == 1 else 1)
        for i, axis in enumerate(axes)
        if axis[2] != "lookup" or axis[5] == torch.float32
    )


def extra_cases() -> list[Case]:
    """What the matrix leaves out: several rounds of longer blocks, other draft vocabularies."""
    cases = [
        Case(rule, k, q, filters, False, rounds=None)
        for rule in RULES
        for k, q, filters in ((3, "real", "no_filter"), (3, "one_hot", "top_k"))
    ]
    cases += [
        Case(rule, 3, "real", filters, False, dtype, rounds=None, draft_vocabulary=size)
        for rule in RULES
        for filters, dtype, size in (
            ("no_filter", torch.float32, 11),
            ("top_p", torch.bfloat16, 21),
        )
    ]
    return cases


def pairwise(cases: Sequence[Case]) -> list[Case]:
    """A small selection in which each pair of values of two axes occurs; greedy, fixed."""
    axes = ("rule", "num_drafts", "q", "filters", "fp64_noise", "dtype", "temperature")

    def pairs(case: Case) -> set[tuple[str, Any, str, Any]]:
        values = [(axis, getattr(case, axis)) for axis in axes]
        return {(*a, *b) for a, b in itertools.combinations(values, 2)}

    of_case = {case: pairs(case) for case in cases}
    missing = set().union(*of_case.values())
    chosen = []
    while missing:
        best = max(of_case, key=lambda case: len(of_case[case] & missing))
        chosen.append(best)
        missing -= of_case.pop(best)
    return chosen

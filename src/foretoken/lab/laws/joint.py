"""Laws of the joint distribution: emitted tokens have the joint distribution of the target."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from foretoken.lab.laws.chain import (
    TRIALS,
    Chain,
    Emission,
    MakePropose,
    Propose,
    Setting,
    TableDrafter,
    emit,
    joint_p_value,
    random_chain,
)
from foretoken.lab.laws.findings import Finding, p_finding
from foretoken.ops import Backend, Rule, SlotParams

VOCABULARY = 16
SPREAD = 0.5  # standard deviation of the logits: about half of all drafts are accepted

FILTERS: dict[str, dict[str, Any]] = {
    "no_filter": {}, "top_k": {"top_k": 13}, "top_p": {"top_p": 0.95}, "min_p": {"min_p": 0.15},
    "penalties": {"edits": "penalties"}, "grammar": {"edits": "grammar"},
}  # fmt: skip
# Kinds of drafts: sampled and verified with their q; sampled but verified with a one-hot q; looked
# up by the last two tokens.
Q = ("real", "one_hot", "lookup")
DTYPES = (torch.float32, torch.bfloat16)
RULES = (Rule.STANDARD, Rule.BLOCK, Rule.COUPLED)
Rules = tuple[Rule, ...]


@dataclass(frozen=True)
class Case:
    """One way to speculate on a chain of 16 tokens."""

    rule: Rule
    num_drafts: int
    q: str  # a kind of drafts, one of `Q`
    filters: str  # a key of `FILTERS`
    fp64_noise: bool
    dtype: torch.dtype = torch.float32  # dtype of the draft logits
    temperature: float = 1.0
    rounds: int | None = 1  # number of rounds, as in `emit`; None: until all tokens are emitted
    draft_vocabulary: int | None = None  # size of the draft's vocabulary; None: the target's

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
        filters = FILTERS[self.filters]
        return Setting(self.temperature, rule=self.rule, fp64_noise=self.fp64_noise, **filters)

    @property
    def length(self) -> int:
        """Number of tokens to compare: one more than the drafts of a round, at least three."""
        return max(3, self.num_drafts + 1)

    def chains(self) -> tuple[Chain, Chain]:
        """Target and draft (the target's logits negated), on the CPU."""
        return _chains(self.draft_vocabulary, self.dtype)

    def next_token(self) -> Tensor:
        """P(token | context) of the target; it depends only on filters and temperature."""
        return _next_token(Setting(self.temperature, **FILTERS[self.filters]))

    def make_propose(self, backend: Backend, device: torch.device) -> MakePropose:
        target, draft = (chain.to(device) for chain in self.chains())
        lookup_C = target.logits_CV.argmax(dim=1) if self.q == "lookup" else None
        return partial(
            TableDrafter, backend, draft, num_drafts=self.num_drafts, real_q=self.q == "real",
            lookup=lookup_C, fp64_noise=self.fp64_noise,
        )  # fmt: skip


@cache
def _chains(draft_vocabulary: int | None, dtype: torch.dtype) -> tuple[Chain, Chain]:
    target, draft = random_chain(VOCABULARY, 1, SPREAD, draft_vocabulary)
    return target, Chain(draft.logits_CV.to(dtype))


@cache
def _next_token(setting: Setting) -> Tensor:
    return setting.next_token(_chains(None, torch.float32)[0])


def run_case(
    case: Case,
    backend: Backend,
    device: torch.device,
    trials: int = TRIALS,
    mutate: Callable[[Propose], Propose] | None = None,
) -> tuple[Emission, float]:
    """Emit tokens; returns them, and their p-value under the target's joint distribution.

    mutate: changes the drafter
    """
    make = case.make_propose(backend, device)
    emission = emit(
        backend, case.chains()[0].to(device),
        make if mutate is None else lambda params: mutate(make(params)),
        case.setting, length=case.length, trials=trials, rounds=case.rounds,
    )  # fmt: skip
    return emission, joint_p_value(emission.token_SL, case.next_token())


def check_case(
    case: Case, backend: Backend, device: torch.device, trials: int = TRIALS
) -> list[Finding]:
    """Findings of one case: the joint distribution, and the share of accepted first drafts."""
    emission, p = run_case(case, backend, device, trials)
    share, bounds = emission.accepted[0] / emission.offered[0], accepted_bounds(case, trials)
    accepted = Finding(case.name, "accepted", share, *bounds, trials)
    return [p_finding(case.name, p, trials), accepted]


def accepted_bounds(case: Case, trials: int) -> tuple[float, float]:
    """Bounds of the share of first drafts that are accepted.

    In one round a looked-up token is accepted as often as the target draws it, within 5 standard
    errors. In all other cases some drafts must be accepted and some rejected: otherwise the joint
    distribution would show only one of the two branches.
    """
    if case.q != "lookup" or case.rounds is None:
        return 0.005, 0.95
    target = case.chains()[0]
    share = float(case.next_token()[target.start, target.logits_CV[target.start].argmax()])
    margin = 5 * (share * (1 - share) / trials) ** 0.5 + 1e-9
    return share - margin, share + margin


@cache
def matrix() -> tuple[Case, ...]:
    """All combinations of rule, K, kind of drafts, filter, noise and dtype of draft logits.

    Temperature would double the number of cases. Instead it changes between 0.7 and 1.0 after every
    three combinations, so that both temperatures occur with every value of every axis. Cases with
    K = 1 run until all tokens are emitted, other cases for one round. Looked-up drafts have no
    logits, and therefore only one dtype.
    """
    axes = itertools.product(RULES, (1, 3, 5), Q, FILTERS, (False, True), DTYPES)
    return tuple(
        Case(rule, k, q, filters, fp64, dtype, (0.7, 1.0)[i // 3 % 2], None if k == 1 else 1)
        for i, (rule, k, q, filters, fp64, dtype) in enumerate(axes)
        if q != "lookup" or dtype == torch.float32
    )


def extra_cases() -> list[Case]:
    """Cases that are not in the matrix: several rounds of 3 drafts, other draft vocabularies."""
    several = [("real", "no_filter"), ("one_hot", "top_k")]
    vocabularies = [("no_filter", torch.float32, 11), ("top_p", torch.bfloat16, 21)]
    cases = [
        Case(rule, 3, q, filters, False, rounds=None) for rule in RULES for q, filters in several
    ]
    return cases + [
        Case(rule, 3, "real", filters, False, dtype, rounds=None, draft_vocabulary=size)
        for rule in RULES
        for filters, dtype, size in vocabularies
    ]


def pairwise(cases: Sequence[Case]) -> list[Case]:
    """A small selection of cases in which each pair of values of two axes occurs.

    It is made greedily: each step adds the case with the most pairs that are still missing.
    """
    axes = ("rule", "num_drafts", "q", "filters", "fp64_noise", "dtype", "temperature")

    def pairs(case: Case) -> set[tuple[str, Any, str, Any]]:
        values = [(axis, getattr(case, axis)) for axis in axes]
        return {(*a, *b) for a, b in itertools.combinations(values, 2)}

    pairs_of = {case: pairs(case) for case in cases}
    missing = set().union(*pairs_of.values())
    selection = []
    while missing:
        best = max(pairs_of, key=lambda case: len(pairs_of[case] & missing))
        selection.append(best)
        missing -= pairs_of.pop(best)
    return selection


LENGTH, FEW_DRAFTS, FEW_TOKENS = 6, 2, 4  # 4 ** 6 outcomes


def several_rounds(
    backend: Backend,
    device: torch.device,
    trials: int = 32_768,
    rules: Rules = (Rule.BLOCK, Rule.STANDARD),
    mutate: Callable[[Propose], Propose] = lambda propose: propose,
) -> list[Finding]:
    """Tokens of several rounds have the target's joint distribution.

    This fails if a round reuses uniforms of positions that the previous round inspected but did
    not commit. `mutate` changes the drafter.
    """
    target, draft = random_chain(FEW_TOKENS, 4, 0.5)
    device_target, device_draft = target.to(device), draft.to(device)
    findings = []
    for rule, real_q in itertools.product(rules, (True, False)):
        setting = Setting(rule=rule)
        make = partial(TableDrafter, backend, device_draft, num_drafts=FEW_DRAFTS, real_q=real_q)

        def wrapped(params: SlotParams, make: MakePropose = make) -> Propose:
            return mutate(make(params))

        emission = emit(
            backend, device_target, wrapped, setting, length=LENGTH, trials=trials, seed=9
        )
        case = f"{LENGTH}_tokens-{rule.name.lower()}-{'real' if real_q else 'one_hot'}"
        p = joint_p_value(emission.token_SL, setting.next_token(target))
        findings.append(p_finding(case, p, trials))
    return findings

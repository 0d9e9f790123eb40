"""The audit of a subject: draw until its bug has a name or the budget ends, then give a verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from foretoken.errors import RequestError
from foretoken.lab.audit.enumeration import REMEDY, NotEnumerableError
from foretoken.lab.audit.evidence import ALPHA, CONFIDENCE, TOO_MUCH, UNKNOWN, Evidence
from foretoken.lab.audit.gallery import BUGS
from foretoken.lab.audit.subjects import (
    TOYS,
    WIDE,
    BoundVerifier,
    StoppedError,
    Subject,
    Toy,
    VerifierInputs,
    toy_sources,
    up_to,
)

ROUNDING = 1e-6  # bound of the rounding error of an enumerated probability: 1e-7 in float32
NEAR = 0.25  # a bug is named if its distance from the subject is below this share of p's
INCONCLUSIVE = "inconclusive"
MAX_GROWTH = 4  # factor by which a batch may raise the number of draws after the refutation
FLAWS = {bug.key: bug.flaw for bug in BUGS} | {
    TOO_MUCH: "more drafts are accepted than any lossless rule could",
    UNKNOWN: "something is wrong that no bug of the gallery explains",
    "greedy_differs": "at temperature 0 tokens are not the target's likeliest",
    "replay_differs": "`coupled` gives other tokens without drafts",
    "parameter_ignored": "a sampling parameter does not act as it should",
    "temperature_ignored": "temperature is ignored, or drafts are tested without it",
    "nucleus_ignored": "top_p is ignored",
    "nucleus_leaks": "some tokens come from outside of top_p: drafts are tested without it",
}

Report = Callable[[int], None]
"""Called with the number of draws that are done."""


@dataclass
class Finding:
    """The result of auditing one subject."""

    subject: Subject
    evidence: Evidence
    error: float | None = None  # the largest error of enumerated probabilities, if enumerated
    same_as: str | None = None  # the bug of the gallery with the enumerated distribution, or None
    exact: list[str] = field(default_factory=list)  # lines about checks without draws
    broken: list[str] = field(default_factory=list)  # bugs that checks found
    notes: list[str] = field(default_factory=list)  # further lines from the subject
    complete: bool = False  # False if the audit was interrupted or the subject stopped
    stopped: str | None = None  # the reason why the subject stopped giving outcomes, or None

    @property
    def enumerated_wrong(self) -> bool:
        return self.error is not None and self.error > ROUNDING

    @property
    def refuted(self) -> bool:
        """Whether enumeration, a check or the evidence shows that the subject is not lossless."""
        return self.enumerated_wrong or bool(self.broken) or self.evidence.refuted_at is not None

    @property
    def bug(self) -> str | None:
        """The key of the bug, `UNKNOWN` if the gallery lacks it; None if not refuted."""
        if not self.refuted:
            return None
        if self.enumerated_wrong:
            too_much = self.evidence.name == TOO_MUCH
            return self.same_as or (TOO_MUCH if too_much else UNKNOWN)
        return self.broken[0] if self.broken else self.evidence.name or UNKNOWN

    @property
    def verdict(self) -> str:
        """One line: how the subject was refuted, what draws exclude, or why draws tell nothing."""
        evidence = self.evidence
        interrupted = "" if self.complete else " INTERRUPTED: partial."
        if self.refuted:
            by_uniforms = isinstance(self.subject.exact, BoundVerifier)
            how = "by injected uniforms" if by_uniforms else "without a draw"
            if self.enumerated_wrong:
                how = "by enumeration"
            if evidence.refuted_at is not None:
                how = f"after {evidence.refuted_at:,} draws (e-value 10^{evidence.log10_e:.1f})"
            return f"REFUTED {how}: {FLAWS[self.bug or UNKNOWN]}.{interrupted}"
        if not evidence.tallies and self.complete:
            return "not refuted: every check at temperature 0 passed; nothing is drawn there."
        if evidence.draws == 0:
            return f"{INCONCLUSIVE}: nothing was drawn.{interrupted}"
        with_drafts = [tally for tally in evidence.tallies if tally.source.num_drafts]
        if with_drafts and not any(tally.accepted for tally in with_drafts):
            return (
                f"{INCONCLUSIVE}: no draft was accepted, so acceptance was not tested.{interrupted}"
            )
        num = len(evidence.tallies)
        bound = max(tally.distance_bound(num) for tally in evidence.tallies)
        cells = max(len(tally.counts) for tally in evidence.tallies)
        line = (
            f"no difference in {evidence.draws:,} draws: TV <= {bound:.3f} with {CONFIDENCE:.0%} "
            f"confidence over {cells} outcomes{self.subject.of_tokens}.{interrupted}"
        )
        state = "lossless" if self.error is not None else "not refuted"
        if (less := evidence.accepts_less) is not None:
            state += (
                f", accepts less than it could ({less.acceptance[0]:.2f} where "
                f"`{less.source.usual_rule}` accepts {less.usual:.2f})"
            )
        exact = f"every probability equals p by enumeration{up_to(TOYS + WIDE)}; "
        return f"{state}: {exact * (self.error is not None)}{line}"


def audit(
    subject: Subject,
    draws: int | None = None,
    report: Report = lambda done: None,
    finding: Finding | None = None,
) -> Finding:
    """Audit a subject: check without draws, then draw until a bug has a name or the budget ends.

    Args:
        draws: total number of outcomes; None: the subject's own budget.
        finding: filled during the audit, so that an interrupted audit keeps its results.
    """
    finding = finding or Finding(subject, Evidence(subject.sources, ALPHA * subject.draw_share))
    budget = subject.budget if draws is None else draws
    report(0)
    if isinstance(subject.exact, BoundVerifier):
        finding.error, finding.same_as, lines = enumerate_verifier(subject.exact)
        finding.broken, uniform_lines = check_end_uniforms(subject.exact)
        finding.exact += [*lines, *uniform_lines]
    try:
        if subject.exact is not None and not isinstance(subject.exact, BoundVerifier):
            finding.broken, finding.exact = subject.exact()
        limit = budget if subject.sources and not finding.broken else 0
        _draw_until_sure(finding, limit, report)
        finding.complete = True
    except StoppedError as error:
        finding.stopped = str(error)
        finding.notes.append(f"Ended early: {error}.")
    finally:
        finding.notes += subject.notes()
    report(budget)
    return finding


def _draw_until_sure(finding: Finding, budget: int, report: Report) -> None:
    """Draw at most `budget` outcomes, until the subject is refuted and its bug has a name."""
    evidence, subject, batch, limit = finding.evidence, finding.subject, 0, budget
    while evidence.draws < limit:
        per_source = -(-(limit - evidence.draws) // len(subject.sources))
        for number in range(len(subject.sources)):
            evidence.add(number, *subject.draw(number, min(subject.batch, per_source), batch))
            report(evidence.draws)
        batch += 1
        if evidence.refuted_at is not None:
            if evidence.name is not None or finding.same_as is not None:
                break
            limit = min(budget, MAX_GROWTH * max(evidence.draws, evidence.refuted_at))


def enumerate_verifier(verify: BoundVerifier) -> tuple[float | None, str | None, list[str]]:
    """Enumerate a verifier on all toys; a wrong verifier is not enumerated on `WIDE` toys.

    Returns:
        `error`, `same_as` and `exact` of a `Finding`; the first two are None if not enumerable.
    """
    distributions, errors = [], dict[int, float]()
    try:
        for toy in (*TOYS, *WIDE):
            wide = toy in WIDE
            if wide and max(errors.values()) > ROUNDING:
                continue
            outcomes = toy.outcomes_of(verify.begin, verify.remembers, once=wide)
            distributions += [] if wide else [outcomes.probabilities]
            error = float(np.abs(outcomes.probabilities - toy.null).max())
            errors[toy.vocabulary] = max(errors.get(toy.vocabulary, 0.0), error)
    except NotEnumerableError as error:
        return None, None, [f"Not enumerated: {error}. {REMEDY}."]
    worst = max(errors.values())
    wrong_sizes = ", ".join(str(size) for size, error in sorted(errors.items()) if error > ROUNDING)
    state = f"each probability equals p to {worst:.1g}"
    if wrong_sizes:
        state = f"a probability DIFFERS from p by {worst:.3g} with {wrong_sizes} tokens"
    sizes = ", ".join(map(str, sorted(errors)))
    line = f"Enumerated with {sizes} tokens, every draft and every uniform: {state}"
    bug = nearest_bug(distributions) if wrong_sizes else None
    return worst, bug, [f"{line} (rounding explains {ROUNDING:g})."]


def nearest_bug(distributions: Sequence[Any]) -> str | None:
    """The bug of the gallery that has nearly these distributions of outcomes on `TOYS`, or None."""

    def largest_distance(alternatives: Sequence[Any]) -> float:
        pairs = zip(distributions, alternatives, strict=True)
        return max(float(np.abs(a - b).sum() / 2) for a, b in pairs)

    toys = toy_sources()
    distance_of = {bug: largest_distance([toy.bugs[bug] for toy in toys]) for bug in toys[0].bugs}
    nearest = min(distance_of, key=distance_of.__getitem__)
    is_near = distance_of[nearest] < NEAR * largest_distance([toy.null for toy in toys])
    return nearest if is_near else None


def check_end_uniforms(verify: BoundVerifier) -> tuple[list[str], list[str]]:
    """Bugs that show only with uniforms at the ends of their range, and a line about this check.

    u = 0 must not accept a draft of probability 0, and a token of probability 2^-27 must be drawn
    at one of the ends.
    """
    if not verify.takes_uniforms:
        return [], ["Not testable without a parameter `uniforms`: u = 0, tails beyond 24 bits."]
    begin, rng, rare, is_drawn, broken = verify.begin, np.random.default_rng(0), 2.0**-27, False, []
    p, q = np.array([[0, 0.5, 0.5], [0, 0.5, 0.5]]), np.array([[0.5, 0.25, 0.25]])
    try:
        inputs = VerifierInputs(p, q, [0], p)
        if len(begin()(Toy("", 3, 1, 1, 0), inputs, rng, [0.0, 0.5])) > 1:
            broken.append("accept_at_zero")
        for token in (0, 1):
            row = np.full(2, 1 - rare)
            row[token] = rare
            rows, half = np.array([[0.5, 0.5], row]), np.array([[0.5, 0.5]])
            for end in (rare / 2, 1 - rare / 2):
                inputs = VerifierInputs(rows, half, [0], rows)
                tokens = begin()(Toy("", 2, 1, 1, 0), inputs, rng, [0.25, end])
                is_drawn |= tokens[-1] == token
    except RequestError as error:
        return [], [f"Injected uniforms: not tested: {error}"]
    if not is_drawn:
        broken.append("float32_tail")
    return broken, [f"Injected uniforms: {', '.join(broken) or 'both ends are right'}."]

"""From a subject to a verdict: draw until its bug has a name, or the budget ends."""

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
    Bound,
    StoppedError,
    Subject,
    Toy,
    VerifierInputs,
    models,
    up_to,
)

EXACT = 1e-6  # bound of the rounding error of an enumerated probability: 1e-7 in float32
SAME = 0.25  # a bug is named if its distance from the subject is below this share of p's
INCONCLUSIVE = "inconclusive"
DRAWS_TO_NAME = 4  # after a refutation, go on to at most so many times its draws for a name
WHAT = {bug.key: bug.what for bug in BUGS} | {
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
"""Gets the number of draws done."""


@dataclass
class Finding:
    """The result of auditing one subject.

    Attributes:
        error: the largest error of an enumerated probability; None: it could not be enumerated.
        same_as: the bug of the gallery with the enumerated distribution; None: no bug has it.
        exact: results of enumeration and of injected uniforms, one line each.
        broken: bugs found by checks without draws.
        notes: of the subject, besides the evidence.
        complete: False if the audit was interrupted.
        stopped: why the subject stopped giving outcomes; None: it gave them all.
    """

    subject: Subject
    evidence: Evidence
    error: float | None = None
    same_as: str | None = None
    exact: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    complete: bool = False
    stopped: str | None = None

    @property
    def enumerated_wrong(self) -> bool:
        """Whether its enumerated distribution differs from the target's."""
        return self.error is not None and self.error > EXACT

    @property
    def refuted(self) -> bool:
        """Whether enumeration, a check or the draws show that it is not lossless."""
        return self.enumerated_wrong or bool(self.broken) or self.evidence.refuted_at is not None

    @property
    def bug(self) -> str | None:
        """The name of the bug, `UNKNOWN` if it has none; None: not refuted."""
        if not self.refuted:
            return None
        if self.enumerated_wrong:
            too_much = self.evidence.name == TOO_MUCH
            return self.same_as or (TOO_MUCH if too_much else UNKNOWN)
        return self.broken[0] if self.broken else self.evidence.name or UNKNOWN

    @property
    def verdict(self) -> str:
        """One line: refuted by which evidence, or what the draws exclude."""
        seen = self.evidence
        cut = "" if self.complete else " INTERRUPTED: partial."
        if self.refuted:
            by_uniforms = isinstance(self.subject.exact, Bound)
            how = "by injected uniforms" if by_uniforms else "without a draw"
            if self.enumerated_wrong:
                how = "by enumeration"
            if seen.refuted_at is not None:
                how = f"after {seen.refuted_at:,} draws (e-value 10^{seen.log10_e:.1f})"
            return f"REFUTED {how}: {WHAT[self.bug or UNKNOWN]}.{cut}"
        if not seen.sources and self.complete:
            return "not refuted: all is as it should be at temperature 0, where nothing is drawn."
        if seen.draws == 0:
            return f"{INCONCLUSIVE}: nothing was drawn.{cut}"
        drafted = [source for source in seen.sources if source.model.rounds]
        if drafted and not any(source.accepted for source in drafted):
            return f"{INCONCLUSIVE}: no draft was accepted, so nothing was at stake.{cut}"
        num = len(seen.sources)
        bound = max(source.distance_bound(num) for source in seen.sources)
        cells = max(len(source.counts) for source in seen.sources)
        line = (
            f"no difference in {seen.draws:,} draws: TV <= {bound:.3f} with {CONFIDENCE:.0%} "
            f"confidence over {cells} outcomes{self.subject.of_tokens}.{cut}"
        )
        state = "lossless" if self.error is not None else "not refuted"
        if (less := seen.accepts_less) is not None:
            state += (
                f", accepts less than it could ({less.acceptance[0]:.2f} where "
                f"`{less.model.usual_rule}` accepts {less.usual:.2f})"
            )
        exact = f"every probability equals p by enumeration{up_to(TOYS + WIDE)}; "
        return f"{state}: {exact * (self.error is not None)}{line}"


def audit(
    subject: Subject,
    draws: int | None = None,
    report: Report = lambda done: None,
    finding: Finding | None = None,
) -> Finding:
    """Draw until the budget ends, or the subject is refuted and its bug has a name.

    Args:
        draws: outcomes in all; None: the subject's own budget.
        finding: filled as the audit goes, so that an interrupted one keeps its results.
    """
    found = finding or Finding(subject, Evidence(subject.models, ALPHA * subject.drawn))
    budget = subject.budget if draws is None else draws
    report(0)
    if isinstance(subject.exact, Bound):
        found.error, found.same_as, lines = enumerated(subject.exact)
        found.broken, more = injected(subject.exact)
        found.exact += [*lines, *more]
    try:
        if subject.exact is not None and not isinstance(subject.exact, Bound):
            found.broken, found.exact = subject.exact()
        most = budget if subject.models and not found.broken else 0
        _draw_until_sure(found, most, report)
        found.complete = True
    except StoppedError as error:
        found.stopped = str(error)
        found.notes.append(f"Ended early: {error}.")
    finally:
        found.notes += subject.notes()
    report(budget)
    return found


def _draw_until_sure(found: Finding, most: int, report: Report) -> None:
    evidence, subject, wave, budget = found.evidence, found.subject, 0, most
    models = subject.models
    while evidence.draws < most:
        share = -(-(most - evidence.draws) // len(models))
        for number in range(len(models)):
            evidence.add(number, *subject.draw(number, min(subject.batch, share), wave))
            report(evidence.draws)
        wave += 1
        if evidence.refuted_at is not None:
            if evidence.name is not None or found.same_as is not None:
                break
            most = min(budget, DRAWS_TO_NAME * max(evidence.draws, evidence.refuted_at))


def enumerated(verify: Bound) -> tuple[float | None, str | None, list[str]]:
    """The largest error of any outcome's probability on any toy (None: not enumerable), the bug of
    the gallery with the same distribution, and a line about both. Wide toys are left out once the
    verifier is wrong."""
    distributions, errors = [], dict[int, float]()
    try:
        for toy in (*TOYS, *WIDE):
            wide = toy in WIDE
            if wide and max(errors.values()) > EXACT:
                continue
            found = toy.outcomes_of(verify.begin, verify.remembers, once=wide).probabilities
            distributions += [] if wide else [found]
            error = float(np.abs(found - toy.null).max())
            errors[toy.vocabulary] = max(errors.get(toy.vocabulary, 0.0), error)
    except NotEnumerableError as error:
        return None, None, [f"Not enumerated: {error}. {REMEDY}."]
    worst = max(errors.values())
    wrong = ", ".join(str(size) for size, error in sorted(errors.items()) if error > EXACT)
    state = f"DIFFERS from p by {worst:.3g} with {wrong}" if wrong else f"equals p to {worst:.1g}"
    sizes = ", ".join(map(str, sorted(errors)))
    line = (
        f"Enumerated with {sizes} tokens, every draft and every uniform: each probability {state}"
    )
    bug = same_as(distributions) if wrong else None
    return worst, bug, [f"{line} (rounding explains {EXACT:g})."]


def same_as(distributions: Sequence[Any]) -> str | None:
    """The bug of the gallery with these distributions of outcomes on `TOYS`, or nearly so."""

    def farthest(others: Sequence[Any]) -> float:
        pairs = zip(distributions, others, strict=True)
        return max(float(np.abs(a - b).sum() / 2) for a, b in pairs)  # total variation

    known = models()
    away = {bug: farthest([model.bugs[bug] for model in known]) for bug in known[0].bugs}
    bug = min(away, key=away.__getitem__)
    return bug if away[bug] < SAME * farthest([model.null for model in known]) else None


def injected(verify: Bound) -> tuple[list[str], list[str]]:
    """Bugs that show only at the ends of a uniform's range, and a line about them.

    A token of probability 2^-27 must be drawn at one end or the other, wherever it stands.
    """
    if not verify.takes_uniforms:
        return [], ["Not testable without a parameter `uniforms`: u = 0, tails beyond 24 bits."]
    begin, rng, rare, met, broken = verify.begin, np.random.default_rng(0), 2.0**-27, False, []
    p, q = np.array([[0, 0.5, 0.5], [0, 0.5, 0.5]]), np.array([[0.5, 0.25, 0.25]])
    try:
        given = VerifierInputs(p, q, [0], p)
        if len(begin()(Toy("", 3, 1, 1, 0), given, rng, [0.0, 0.5])) > 1:
            broken.append("accept_at_zero")
        for place in (0, 1):
            row = np.full(2, 1 - rare)
            row[place] = rare
            rows, half = np.array([[0.5, 0.5], row]), np.array([[0.5, 0.5]])
            for end in (rare / 2, 1 - rare / 2):
                given = VerifierInputs(rows, half, [0], rows)
                met |= begin()(Toy("", 2, 1, 1, 0), given, rng, [0.25, end])[-1] == place
    except RequestError as error:
        return [], [f"Injected uniforms: not tested: {error}"]
    if not met:
        broken.append("float32_tail")
    return broken, [f"Injected uniforms: {', '.join(broken) or 'both ends are right'}."]

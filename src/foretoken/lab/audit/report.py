"""What an audit says: a line per subject, a table, a results file, plots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from foretoken.lab.audit.evidence import CONFIDENCE, Source
from foretoken.lab.audit.verdict import Finding
from foretoken.lab.desk import Section, Table
from foretoken.lab.plot import Axes, Bar, Series, bar_chart, line_chart
from foretoken.lab.results import Label, Results, Row, Value, collect

HEADER = ["", "source", "draws", "TV bound", "G-test p", "accepted", "standard", "best"]
MEANING = [
    "The evidence is an average of e-values: above 1/alpha it refutes, however often it is read. "
    "Checks and several subjects share alpha.",
    f"TV bounds of all sources of a subject hold together with {CONFIDENCE:.0%} confidence.",
    "The G-test's p-value is that of the draws there are; it does not correct for stopping.",
    "accepted: drafts per draw, which is a token of an engine and a first round of a toy, beside "
    "what `standard` and the best lossless rule accept.",
]


def table(findings: Sequence[Finding]) -> Table:
    """A line per subject and source."""
    lines = []
    for finding in findings:
        sources = finding.evidence.sources
        for source in sources:
            mean, reach, best = source.acceptance
            told = source.model.rounds > 0 and source.draws > 0
            lines.append(
                [
                    finding.subject.name,
                    source.model.name,
                    f"{source.draws:,}",
                    f"{source.distance_bound(len(sources)):.4f}",
                    f"{source.p_value:.3g}",
                    f"{mean:.3f} ± {reach:.3f}" if told else "",
                    f"{source.usual:.3f}" if told else "",
                    f"{best:.3f}" if told else "",
                ]
            )
    return Table(HEADER, lines)


def row(finding: Finding) -> Row:
    """One subject in a results file."""
    evidence, num = finding.evidence, len(finding.evidence.sources)
    labels: dict[str, Label] = {
        "verdict": finding.verdict,
        "refuted": finding.refuted,
        "bug": finding.bug,
        "complete": finding.complete,
        "accepts_less": evidence.accepts_less is not None,
    }
    labels |= {f"check_{i}": line for i, line in enumerate([*finding.exact, *finding.notes], 1)}
    values: dict[str, Value] = {"draws": evidence.draws, "log10_e_value": evidence.log10_e}
    if evidence.refuted_at is not None:
        values["draws_to_refute"] = evidence.refuted_at
    if finding.error is not None:
        values["enumerated_error"] = finding.error
    for source in evidence.sources:
        name = source.model.name
        values[f"{name}_draws"] = source.draws
        values[f"{name}_tv"] = source.distance
        values[f"{name}_tv_bound"] = source.distance_bound(num)
        values[f"{name}_p_value"] = source.p_value
        if source.model.rounds:
            values[f"{name}_accepted"] = source.acceptance[0]
            values[f"{name}_standard"] = source.usual
            values[f"{name}_best"] = source.acceptance[2]
    return Row(finding.subject.name, labels, values)


def results(
    findings: Sequence[Finding], name: str, command: str, shapes: dict[str, Any]
) -> Results:
    """In the shared schema."""
    cut = [f"Interrupted: `{f.subject.name}` is partial." for f in findings if not f.complete]
    said = [f"{f.subject.name}: {f.verdict}" for f in findings]
    return collect(name, command, shapes, [row(f) for f in findings], [*said, *MEANING, *cut])


def sections(findings: Sequence[Finding]) -> list[Section]:
    """Of each subject what was found, its evidence, and the source that differs most; more of them
    are folded."""
    made = []
    for finding in findings:
        sources = sorted(finding.evidence.sources, key=lambda source: source.p_value)
        drawn = [_outcomes(finding, source) for source in sources if source.draws]
        first = [_path(finding)] if finding.evidence.draws else []
        said = [finding.verdict, *finding.exact, *finding.notes]
        made.append(Section(finding.subject.name, said, [*first, *drawn[:1]], drawn[1:]))
    return made


def _path(finding: Finding) -> str:
    """The evidence up to a refutation or the end."""
    evidence = finding.evidence
    limit = -math.log10(evidence.alpha)
    path = [(0, 0.0), *((n, max(log, 0.0)) for n, log in evidence.path)]
    lines = [Series("evidence of all sources", [(n, log, log, log) for n, log in path])]
    note = (
        "The height tells how many times likelier the draws are under some bug than under the "
        "target: 3 is 1,000 times, 0 is once or less. A lossless subject ever comes above the "
        f"limit in one of {1 / evidence.alpha:,.0f} audits at most."
    )
    title = f"{finding.subject.name}: evidence against losslessness"
    axes = Axes("draws, of all sources", "log10 of the e-value")
    return line_chart(title, axes, lines, level=("limit: refuted above", limit), note=note)


def _outcomes(finding: Finding, source: Source) -> str:
    """What was drawn from a source, against the target."""
    shown, draws = source.model.shown, source.draws
    names = shown.names or [*map(str, range(len(source.counts)))]
    shares, targets = source.counts / draws, source.expected / draws
    bars = [
        Bar(name, shown.axis, {"drawn": share}, target, (max(target - reach, 0), target + reach))
        for name, share, target, reach in zip(
            names, shares.tolist(), targets.tolist(), source.reach.tolist(), strict=True
        )
    ]
    title = f"{finding.subject.name}: source `{source.model.name}`"
    note = f"{draws:,} draws. {shown.about}"
    mark = f"target, and where {CONFIDENCE:.0%} of right shares are"
    return bar_chart(title, "share of the draws", bars, mark=mark, note=note)

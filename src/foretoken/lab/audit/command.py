"""`foretoken audit`: make the subjects, show progress and findings, write the files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretoken.engine.devices import choose_backend, choose_device
from foretoken.errors import ConfigError, RequestError
from foretoken.lab.audit.engine import EngineAudit, draft_reference, reference_of
from foretoken.lab.audit.evidence import CONFIDENCE, Evidence, Tally
from foretoken.lab.audit.gallery import BUGS, LOSSLESS, member
from foretoken.lab.audit.options import AuditOptions
from foretoken.lab.audit.reference import Reference
from foretoken.lab.audit.server import Client, ServerAudit
from foretoken.lab.audit.subjects import (
    Subject,
    backend_subject,
    bind,
    callable_subject,
    load_verifier,
)
from foretoken.lab.audit.verdict import INCONCLUSIVE, Finding, audit
from foretoken.lab.plot import Axes, Bar, Series, bar_chart, line_chart
from foretoken.lab.reporter import Reporter, Section, Table
from foretoken.lab.results import Label, Results, Row, Value, collect, stem
from foretoken.models.locate import resolve_checkpoint
from foretoken.models.tokenizer import load_tokenizer
from foretoken.ops import Rule
from foretoken.sampling.params import SamplingParams

HEADER = ["", "source", "draws", "TV bound", "G-test p", "accepted", "standard", "best"]
MEANING = [
    "The evidence is an average of e-values: an average above 1/alpha refutes losslessness, at any "
    "number of draws. The checks and subjects of an audit share alpha; in the gallery each subject "
    "has all of it.",
    f"TV bounds of all sources of a subject hold together with {CONFIDENCE:.0%} confidence.",
    "The G-test's p-value does not correct for the choice of when to stop.",
    "accepted, standard, best: mean numbers of drafts that the subject, `standard` and the best "
    "lossless rule accept, per token of an engine or per first round of a toy.",
]


def table(findings: Sequence[Finding]) -> Table:
    """A table with one line per source of each subject."""
    lines = []
    for finding in findings:
        tallies = finding.evidence.tallies
        for tally in tallies:
            mean, half_width, best = tally.acceptance
            cells = [finding.subject.name, tally.source.name, f"{tally.draws:,}"]
            cells += [f"{tally.distance_bound(len(tallies)):.4f}", f"{tally.p_value:.3g}"]
            if tally.source.num_drafts > 0 and tally.draws > 0:
                cells += [f"{mean:.3f} ± {half_width:.3f}", f"{tally.usual:.3f}", f"{best:.3f}"]
            lines.append(cells + [""] * (len(HEADER) - len(cells)))
    return Table(HEADER, lines)


def row(finding: Finding) -> Row:
    """The row of one subject in a results file."""
    evidence, num_sources = finding.evidence, len(finding.evidence.tallies)
    labels: dict[str, Label] = {"verdict": finding.verdict, "refuted": finding.refuted}
    labels |= {"bug": finding.bug, "complete": finding.complete}
    labels["accepts_less"] = evidence.accepts_less is not None
    labels |= {f"check_{i}": line for i, line in enumerate([*finding.exact, *finding.notes], 1)}
    values: dict[str, Value] = {"draws": evidence.draws, "log10_e_value": evidence.log10_e}
    if evidence.refuted_at is not None:
        values["draws_to_refute"] = evidence.refuted_at
    if finding.error is not None:
        values["enumerated_error"] = finding.error
    for tally in evidence.tallies:
        name = tally.source.name
        values[f"{name}_draws"] = tally.draws
        values[f"{name}_tv"] = tally.distance
        values[f"{name}_tv_bound"] = tally.distance_bound(num_sources)
        values[f"{name}_p_value"] = tally.p_value
        if tally.source.num_drafts:
            values[f"{name}_accepted"] = tally.acceptance[0]
            values[f"{name}_standard"] = tally.usual
            values[f"{name}_best"] = tally.acceptance[2]
    return Row(finding.subject.name, labels, values)


def results(
    findings: Sequence[Finding], name: str, command: str, shapes: dict[str, Any]
) -> Results:
    """The findings in the shared schema of results files."""
    verdicts = [f"{f.subject.name}: {f.verdict}" for f in findings]
    partial = [f"The audit of `{f.subject.name}` is partial." for f in findings if not f.complete]
    notes = [*verdicts, *MEANING, *partial]
    return collect(name, command, shapes, [row(f) for f in findings], notes)


def sections(findings: Sequence[Finding]) -> list[Section]:
    """A section per subject: charts of the evidence and of the source with the least p-value.

    Charts of other sources are folded.
    """
    result = []
    for finding in findings:
        tallies = sorted(finding.evidence.tallies, key=lambda tally: tally.p_value)
        outcomes = [_outcome_chart(finding, tally) for tally in tallies if tally.draws]
        evidence = [_evidence_chart(finding)] if finding.evidence.draws else []
        lines = [finding.verdict, *finding.exact, *finding.notes]
        charts = [*evidence, *outcomes[:1]]
        result.append(Section(finding.subject.name, lines, charts, outcomes[1:]))
    return result


def _evidence_chart(finding: Finding) -> str:
    evidence = finding.evidence
    limit = -math.log10(evidence.alpha)
    path = [(0, 0.0), *((n, max(log, 0.0)) for n, log in evidence.path)]
    lines = [Series("evidence of all sources", [(n, log, log, log) for n, log in path])]
    note = (
        "The height tells how many times likelier the draws are under some bug than under the "
        "target: 3 is 1,000 times, 0 is once or less. The line of a lossless subject "
        f"ever crosses the limit in at most one of {1 / evidence.alpha:,.0f} audits."
    )
    title = f"{finding.subject.name}: evidence against losslessness"
    axes = Axes("draws, of all sources", "log10 of the e-value")
    return line_chart(title, axes, lines, level=("limit: refuted above", limit), note=note)


def _outcome_chart(finding: Finding, tally: Tally) -> str:
    """A chart of the outcomes drawn from a source, compared with the target's distribution."""
    plot, draws = tally.source.plot, tally.draws
    names = plot.names or [*map(str, range(len(tally.counts)))]
    shares, targets = tally.counts / draws, tally.expected / draws
    columns = (names, *(column.tolist() for column in (shares, targets, tally.half_widths)))
    bars = [
        Bar(name, plot.axis, {"drawn": share}, target, (max(target - width, 0), target + width))
        for name, share, target, width in zip(*columns, strict=True)
    ]
    title = f"{finding.subject.name}: source `{tally.source.name}`"
    note = f"{draws:,} draws. {plot.about}"
    mark = f"target, and the range of {CONFIDENCE:.0%} of lossless subjects"
    return bar_chart(title, "share of the draws", bars, mark=mark, note=note)


Status = Callable[[str], AbstractContextManager[None]]
RULES = (Rule.STANDARD, Rule.BLOCK, Rule.COUPLED)


@dataclass(frozen=True)
class AuditScope:
    """What one call of the command audits."""

    parts: tuple[str, ...]  # kinds of subjects, see `AuditOptions.parts`
    options: AuditOptions
    engine: Mapping[str, Any]  # options of an `LLM`, of which some parts read only a few
    params: SamplingParams  # sampling parameters of an engine's requests

    def subjects(self, status: Status) -> Iterator[Subject]:
        """Make each subject when it is needed; `status` shows slow preparations."""
        seed = self.options.seed
        for part in self.parts:
            if part == "callable":
                name = str(self.options.callable)
                yield callable_subject(name, load_verifier(name), seed)
            elif part == "gallery":
                for name in (*LOSSLESS, *(bug.key for bug in BUGS)):
                    yield callable_subject(name, bind(member(name)), seed)
            elif part == "operators":
                yield from self._operators()
            elif part == "engine":
                yield from self._engine(status)
            elif part == "server":
                with status(f"Asking {self.options.url}, and loading {self.engine['model']}"):
                    subject = self._server()
                yield subject

    def _operators(self) -> Iterator[Subject]:
        device = choose_device(self.engine.get("device", "auto"))
        backend = choose_backend(self.engine.get("backend", "auto"), device)
        for rule in RULES:
            name = f"{backend.name}, {rule.name.lower()}"
            yield backend_subject(name, backend, device, rule, self.options.seed, alpha=self.alpha)

    def _engine(self, status: Status) -> Iterator[Subject]:
        with ExitStack() as stack:
            with status(f"Loading {self.engine['model']} and a reference of it"):
                from foretoken.llm import LLM

                llm = stack.enter_context(LLM(**self.engine))
                reference = reference_of(llm)
                draft = draft_reference(llm, reference)
            audit = EngineAudit(llm, self.params, reference, self.options.seed, draft, self.alpha)
            speculation = llm.config.speculative_config
            drafter = speculation.method if speculation else "no drafter"
            yield audit.subject(f"{Path(llm.config.model).name}, {drafter}")

    def _server(self) -> Subject:
        client = Client(str(self.options.url), self.options.api_key)
        model, revision = self.engine["model"], self.engine.get("revision")
        reference = Reference(model, revision)
        tokenizer = load_tokenizer(resolve_checkpoint(model, revision=revision))
        audit = ServerAudit(client, reference, tokenizer, self.params)
        return audit.subject(f"{client.server.model} at {client.server.url}")

    @property
    def alpha(self) -> float:
        """alpha of one subject: subjects share `options.alpha`, except in the gallery."""
        num_subjects = sum({"operators": len(RULES)}.get(part, 1) for part in self.parts)
        return self.options.alpha / (1 if self.options.gallery else num_subjects)


class Command:
    """One call of `foretoken audit`."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self.findings: list[Finding] = []
        self._num_shown = 0

    def run(self, scope: AuditScope) -> int:
        """Audit each subject and report, also after an exception; returns the exit code.

        Raises:
            ConfigError: a subject stopped giving outcomes, and no subject is refuted.
        """
        try:
            for subject in scope.subjects(self._reporter.status):
                self._audit(subject, scope)
        finally:
            if self.findings:
                self._finish(scope)
        stopped = [finding.stopped for finding in self.findings if finding.stopped]
        if stopped and not any(finding.refuted for finding in self.findings):
            bound = "a server that answers until the audit ends"
            remedy = f"The audit ended: {stopped[0]}. Read the server's log, or restart it."
            raise ConfigError("url", scope.options.url, bound, remedy)
        if scope.options.gallery:  # each bug must be named; lossless members must have no bug
            names = [(f.bug, f.subject.name) for f in self.findings]
            return int(any(bug != (None if name in LOSSLESS else name) for bug, name in names))
        if any(finding.refuted for finding in self.findings):
            return 1
        return 2 if any(f.verdict.startswith(INCONCLUSIVE) for f in self.findings) else 0

    def _audit(self, subject: Subject, scope: AuditScope) -> None:
        finding = Finding(subject, Evidence(subject.sources, scope.alpha * subject.draw_share))
        draws = scope.options.draws or subject.budget
        self.findings.append(finding)
        try:
            checks = "" if subject.exact is None else "checks without draws"
            with self._reporter.progress(draws, f"draws of `{subject.name}`", checks) as report:
                audit(subject, draws, lambda done: report(done, "" if done else checks), finding)
        except RequestError:  # the subject's output cannot be audited
            self.findings.pop()
            raise
        self._say(finding)

    def _say(self, finding: Finding) -> None:
        self._num_shown += 1
        style = "bold red" if finding.refuted else "bold"
        self._reporter.say(f"{finding.subject.name}: {finding.verdict}", style)
        for note in [*finding.exact, *finding.notes]:
            self._reporter.say(f"  {note}")

    def _finish(self, scope: AuditScope) -> None:
        """Show an interrupted audit's finding, then the table; write the files."""
        options = scope.options
        values = {name: getattr(options, name) for name in ("draws", "alpha", "seed")}
        shapes = {"of": ", ".join(scope.parts), **values}
        name = stem(options.output, "audit")
        record = results(self.findings, name, self._reporter.command_line, shapes)
        for finding in self.findings[self._num_shown :]:
            self._say(finding)
        tables = {"Evidence": table(self.findings)}
        self._reporter.show(tables, [])
        self._reporter.write(record, options.output, tables, sections(self.findings))

"""`foretoken audit`: what is audited, its progress, the table, the files, the exit code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretoken.engine.devices import choose_backend, choose_device
from foretoken.errors import ConfigError, RequestError
from foretoken.lab.audit.engine import EngineAudit, draft_reference
from foretoken.lab.audit.evidence import Evidence
from foretoken.lab.audit.gallery import BUGS, LOSSLESS, member
from foretoken.lab.audit.options import AuditOptions
from foretoken.lab.audit.reference import Reference
from foretoken.lab.audit.report import results, sections, table
from foretoken.lab.audit.server import Client, ServerAudit
from foretoken.lab.audit.subjects import Subject, bind, load, of_backend, of_callable
from foretoken.lab.audit.verdict import INCONCLUSIVE, Finding, audit
from foretoken.lab.desk import Desk
from foretoken.lab.results import stem
from foretoken.models.locate import resolve_checkpoint
from foretoken.models.tokenizer import load_tokenizer
from foretoken.ops import Rule
from foretoken.sampling.params import SamplingParams

Status = Callable[[str], AbstractContextManager[None]]
RULES = (Rule.STANDARD, Rule.BLOCK, Rule.COUPLED)


@dataclass(frozen=True)
class Plan:
    """What is audited.

    Attributes:
        parts: see `AuditOptions.parts`.
        engine: options of an `LLM`; of them operators read `backend` and `device`.
        params: of an engine's requests.
    """

    parts: tuple[str, ...]
    options: AuditOptions
    engine: Mapping[str, Any]
    params: SamplingParams

    def subjects(self, status: Status) -> Iterator[Subject]:
        """One after another, each made when it is its turn; `status` shows what takes long."""
        seed = self.options.seed
        for part in self.parts:
            if part == "callable":
                name = str(self.options.callable)
                yield of_callable(name, load(name), seed)
            elif part == "gallery":
                for name in (*LOSSLESS, *(bug.key for bug in BUGS)):
                    yield of_callable(name, bind(member(name)), seed)
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
            yield of_backend(name, backend, device, rule, self.options.seed, alpha=self.alpha)

    def _engine(self, status: Status) -> Iterator[Subject]:
        with ExitStack() as stack:
            with status(f"Loading {self.engine['model']}, and what it is compared with"):
                from foretoken.llm import LLM

                llm = stack.enter_context(LLM(**self.engine))
                reference = Reference(llm.config.model, llm.config.revision)
                drafted = draft_reference(llm, reference)
            audit = EngineAudit(llm, self.params, reference, self.options.seed, drafted, self.alpha)
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
        """Of each subject: together they are refuted without cause with `options.alpha` at most."""
        num = sum({"operators": len(RULES)}.get(part, 1) for part in self.parts)
        return self.options.alpha / (1 if self.options.gallery else num)


class Command:
    """One call of the command."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self.findings: list[Finding] = []
        self._said = 0

    def run(self, plan: Plan) -> int:
        """Audit each subject, report whatever there is, even if an exception ends it; exit code."""
        try:
            for subject in plan.subjects(self._desk.status):
                self._audit(subject, plan)
        finally:
            if self.findings:
                self._finish(plan)
        stopped = [finding.stopped for finding in self.findings if finding.stopped]
        if stopped and not any(finding.refuted for finding in self.findings):
            bound = "a server that answers to the end of the audit"
            raise ConfigError("url", plan.options.url, bound, f"It did not: {stopped[0]}.")
        if plan.options.gallery:
            return int(any(f.bug != expected(f.subject.name) for f in self.findings))
        if any(finding.refuted for finding in self.findings):
            return 1
        return 2 if any(f.verdict.startswith(INCONCLUSIVE) for f in self.findings) else 0

    def _audit(self, subject: Subject, plan: Plan) -> None:
        finding = Finding(subject, Evidence(subject.models, plan.alpha * subject.drawn))
        draws = plan.options.draws or subject.budget
        self.findings.append(finding)
        try:
            first = "" if subject.exact is None else "what is checked without draws"
            with self._desk.progress(draws, f"draws of `{subject.name}`", first) as report:
                audit(subject, draws, lambda done: report(done, "" if done else first), finding)
        except RequestError:  # what it emits is nothing that could be audited
            self.findings.pop()
            raise
        self._say(finding)

    def _say(self, finding: Finding) -> None:
        self._said += 1
        style = "bold red" if finding.refuted else "bold"
        self._desk.say(f"{finding.subject.name}: {finding.verdict}", style)
        for note in [*finding.exact, *finding.notes]:
            self._desk.say(f"  {note}")

    def _finish(self, plan: Plan) -> None:
        options = plan.options
        shapes = {
            "of": ", ".join(plan.parts),
            "draws": options.draws,
            "alpha": options.alpha,
            "seed": options.seed,
        }
        name = stem(options.output, "audit")
        found = results(self.findings, name, self._desk.typed, shapes)
        for finding in self.findings[self._said :]:
            self._say(finding)
        made = {"Evidence": table(self.findings)}
        self._desk.show(made, [])
        self._desk.write(found, options.output, made, sections(self.findings))


def expected(name: str) -> str | None:
    """The bug that a member of the gallery is."""
    return None if name in LOSSLESS else name

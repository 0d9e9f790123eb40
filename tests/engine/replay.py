"""The messages of an engine's steps: written down as they are sent, replayed in another process.

    python -m tests.engine.replay MESSAGES < {"on_host": true, "engine": {...}}

MESSAGES has one message a line, as `slots/step.py` writes them. A fresh runner of such an engine
reads them in order; what came of each step is printed, one line of JSON each.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from foretoken.config import EngineConfig
from foretoken.engine.build import EngineParts, build_engine
from foretoken.engine.engine import Engine
from foretoken.engine.runner import OpenStep, Runner
from foretoken.sampling.edits import PackedEdits
from foretoken.sampling.grammar import Grammar
from foretoken.slots.step import Outcome, StepPlan, StepResult, decode, encode


def build(asked: dict[str, Any]) -> Engine:
    """The engine of these options; `on_host`: as in `Runner`, whatever the device is."""
    parts = EngineParts(on_host=lambda device: bool(asked["on_host"]))
    return build_engine(EngineConfig.parse(**asked["engine"]), parts)


def read(engine: Engine, message: bytes) -> StepPlan | PackedEdits:
    """A message, with the engine's own grammars in it."""
    return decode(message, partial(grammar_of, engine))


def grammar_of(engine: Engine, asked: Any) -> Grammar | None:
    waiting = engine.grammars.wait([asked])  # kept until it is looked up
    found = engine.grammars.compiled(asked)
    del waiting
    return found


class Recorder:
    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.messages: list[bytes] = []
        self.outcomes: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def run(self, plan: StepPlan) -> StepResult:
        step = self.begin(plan)
        return StepResult() if step is None else self.finish(step)

    def begin(self, plan: StepPlan) -> OpenStep | None:
        self.messages.append(encode(plan))
        return self.runner.begin(plan)

    def finish(self, step: OpenStep, edits: PackedEdits | None = None) -> StepResult:
        if edits is not None:
            self.messages.append(encode(edits))
        result = self.runner.finish(step, edits)
        self.outcomes.append(written(result))
        return result


def replay(engine: Engine, messages: Iterable[bytes]) -> list[str]:
    runner, decoded = engine.runner, [read(engine, one) for one in messages]
    outcomes = []
    for message, following in zip(decoded, [*decoded[1:], None], strict=True):
        if isinstance(message, StepPlan) and (step := runner.begin(message)) is not None:
            edits = following if isinstance(following, PackedEdits) else None
            outcomes.append(written(runner.finish(step, edits)))
    return outcomes


def written(result: StepResult) -> str:
    """Outcomes by slot as JSON, floats to the bit."""
    return json.dumps({slot: _numbers(outcome) for slot, outcome in result.read().items()})


def _numbers(outcome: Outcome) -> list[Any]:
    count, evidence = outcome.num_drafts, outcome.evidence
    shown = []
    if evidence is not None:  # except entries of drafts that do not exist
        token_K, p_K1, q_K1, u_K, mass_K, is_real = evidence
        ends = (p_K1[-1:], q_K1[-1:], is_real)
        shown = [c[:count] for c in (token_K, p_K1, q_K1, u_K, mass_K)] + [*ends]
    rows = [*(outcome.logprobs or ()), *(outcome.prompt_logprobs or ())]
    return [
        *outcome[:5], repr(outcome.fault), outcome.drafter, [[_exact(c) for c in rows]],
        [_exact(c) for c in shown],
    ]  # fmt: skip


def _exact(column: Tensor) -> list[str]:
    return [float(number).hex() for number in column.flatten().tolist()]


if __name__ == "__main__":
    lines = Path(sys.argv[1]).read_bytes().splitlines()
    print(*replay(build(json.load(sys.stdin)), lines), sep="\n")

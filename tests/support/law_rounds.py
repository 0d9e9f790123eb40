"""The joint law of several rounds: six tokens of a small vocabulary, all of them together."""

from __future__ import annotations

from typing import Any

import torch

from foretoken.ops import Backend, Rule
from tests.support.law import TableDrafter, emit, law_p_value
from tests.support.law_cases import Finding, p_finding
from tests.support.law_model import Setting, random_chain

TRIALS = 32_768
LENGTH, NUM_DRAFTS, VOCABULARY = 6, 2, 4


def several_rounds(
    backend: Backend,
    device: torch.device,
    trials: int = TRIALS,
    rules: tuple[Rule, ...] = (Rule.BLOCK, Rule.STANDARD),
) -> list[Finding]:
    """Uniforms of positions that a round inspects but does not commit must not come again."""
    target, draft = random_chain(VOCABULARY, 4, 0.5)
    findings = []
    for rule in rules:
        for real_q in (True, False):
            setting = Setting(rule=rule)

            def make(params: Any, real_q: bool = real_q) -> TableDrafter:
                return TableDrafter(backend, draft.to(device), params, NUM_DRAFTS, real_q)

            outcome = emit(
                backend, target.to(device), make, setting, length=LENGTH, trials=trials, seed=9
            )
            case = f"{LENGTH}_tokens-{rule.name.lower()}-{'real' if real_q else 'one_hot'}"
            p = law_p_value(outcome.token_SL, setting.next_law(target))
            findings.append(p_finding(case, p, trials))
    return findings

"""The audit passes on the engine as it is, and fails on one whose verification is wrong."""

from __future__ import annotations

import pytest
import torch

from foretoken import LLM, SamplingParams
from foretoken.lab.audit import ALPHA, SampledAudit, greedy_audit, sampled_audit
from foretoken.lab.workloads import heldout
from foretoken.ops import rules

PROMPTS = [item.prompt for item in heldout(4)]


def accept_everything(x: rules.RuleInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """The mutant: every draft is kept, whatever the target thinks of it."""
    there = ~x.log_q_BK.isneginf()
    return there.long().cumprod(dim=1).sum(dim=1), torch.zeros(len(there), dtype=torch.float64)


def test_greedy(pair: LLM) -> None:
    seen: list[tuple[int, int]] = []
    audit = greedy_audit(
        pair, PROMPTS, max_tokens=24, report=lambda done, total: seen.append((done, total))
    )
    assert audit.passed
    assert audit.tokens == 4 * 24
    assert audit.accepted > 0
    assert seen[-1] == (4, 4)


def test_greedy_finds_the_mutant(pair: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rules.RULES, "standard", accept_everything)
    audit = greedy_audit(pair, PROMPTS, max_tokens=24)
    assert audit.differing
    assert not audit.passed


def sampled(pair: LLM) -> SampledAudit:
    params = SamplingParams(temperature=1.0)
    return sampled_audit(pair, "def __init__(self, name", samples=384, length=4, params=params)


def test_sampled(pair: LLM) -> None:
    audit = sampled(pair)
    assert audit.passed
    assert audit.test.degrees >= 10
    assert 0 < audit.metrics.num_accepted_tokens < audit.metrics.num_draft_tokens


def test_sampled_finds_the_mutant(pair: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rules.RULES, "standard", accept_everything)
    audit = sampled(pair)
    assert audit.test.p_value < ALPHA
    assert not audit.passed

"""The audit passes on the engine as it is, and fails on one whose verification is wrong."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch

from foretoken import LLM, SamplingParams
from foretoken.errors import ConfigError, StepError
from foretoken.lab.audit import ALPHA, GreedyAudit, SampledAudit, greedy_audit, sampled_audit
from foretoken.lab.chi_square import ChiSquare
from foretoken.lab.workloads import heldout
from foretoken.ops import Rule, get_backend, rules
from foretoken.outputs import RequestMetrics

PROMPTS = [item.prompt for item in heldout(4)]


def accept_everything(x: rules.RuleInputs) -> torch.Tensor:
    """The mutant: every draft is kept, whatever the target thinks of it."""
    return (~x.log_q_BK.isneginf()).cumprod(dim=1).bool()


def break_verification(pair: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """In stock operators, which read the rules where native kernels have their own."""
    monkeypatch.setitem(rules.RULES, Rule.STANDARD, accept_everything)
    monkeypatch.setattr(pair.engine.runner.sampler, "backend", get_backend("torch"))


def test_greedy(pair: LLM) -> None:
    seen: list[int] = []
    audit = greedy_audit(pair, PROMPTS, max_tokens=24, report=seen.append)
    assert audit.verdict == "equal"
    assert audit.tokens == 4 * 24
    assert 0 < audit.metrics.num_accepted_tokens < audit.metrics.num_draft_tokens
    assert seen == [0, 1, 2, 3, 4]


def test_greedy_finds_the_mutant(pair: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    break_verification(pair, monkeypatch)
    audit = greedy_audit(pair, PROMPTS, max_tokens=24)
    assert audit.differing
    assert audit.verdict == "different"


def sampled(pair: LLM) -> SampledAudit:
    params = SamplingParams(temperature=1.0)
    return sampled_audit(pair, "def __init__(self, name", samples=384, length=4, params=params)


def test_sampled(pair: LLM) -> None:
    audit = sampled(pair)
    assert audit.verdict == "equal"
    assert audit.test.degrees >= 10
    assert 0 < audit.metrics.num_accepted_tokens < audit.metrics.num_draft_tokens


def test_a_completion_that_failed_is_no_sample(pair: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    run, calls = pair.engine.runner.run, count()

    def broken(shares: Any) -> Any:
        if next(calls) == 2:
            raise ValueError("injected")
        return run(shares)

    monkeypatch.setattr(pair.engine.runner, "run", broken)
    with pytest.raises(StepError, match="injected"):
        sampled(pair)


def test_sampled_finds_the_mutant(pair: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    break_verification(pair, monkeypatch)
    audit = sampled(pair)
    assert audit.test.p_value < ALPHA
    assert audit.verdict == "different"


def counts(drafted: int, accepted: int) -> RequestMetrics:
    metrics = RequestMetrics()
    for i in range(drafted):
        metrics.observe(1, int(i < accepted))
    return metrics


@pytest.mark.parametrize(
    ("drafted", "accepted", "verdict"),
    [(0, 0, "inconclusive"), (4, 0, "inconclusive"), (4, 4, "inconclusive"), (4, 3, "equal")],
)
def test_three_verdicts(drafted: int, accepted: int, verdict: str) -> None:
    """A difference is one whatever was drafted; no difference says something if all was used."""
    metrics = counts(drafted, accepted)
    assert GreedyAudit(1, 9, 1, (), metrics).verdict == verdict
    assert GreedyAudit(1, 9, 0, (0,), metrics).verdict == "different"
    assert SampledAudit(9, 1, ChiSquare(1.0, 1, 0.3), metrics).verdict == verdict
    assert SampledAudit(9, 1, ChiSquare(99.0, 1, ALPHA / 2), metrics).verdict == "different"
    assert SampledAudit(9, 1, ChiSquare(0.0, 0, 1.0), metrics).verdict == "inconclusive"


def test_what_is_not_lossless_by_design_is_not_audited() -> None:
    speculation = {
        "method": "ngram",
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rate": 0.5,
    }
    with LLM("tiny-python", speculation) as llm:
        with pytest.raises(ConfigError, match="for an audit"):
            greedy_audit(llm, PROMPTS, max_tokens=4)
        with pytest.raises(ConfigError, match="for an audit"):
            sampled(llm)

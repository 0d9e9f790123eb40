"""A verification rule is a request's choice: mixed in a batch, with any drafter, and none.

Tokens are compared between engines, requests and batches at T > 0: a seed and a rule say which
noise decides each of them.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM, SamplingParams
from foretoken.errors import ConfigError, RequestError
from foretoken.outputs import RequestOutput
from foretoken.sampling.synthetic import joint_rates, rates_of

PROMPTS = ["def add(a, b):", "x", "import os\nimport sys\n" * 3, "for i in range(10): print(i)"]
BACKENDS = ["auto", "torch"]


def build(target: Path, speculation: dict[str, Any] | None = None, **options: Any) -> LLM:
    defaults = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    return LLM(str(target), speculation, **{**defaults, **options})


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    assert all(o.error is None for o in outputs)
    return [sample.token_ids for o in outputs for sample in o.outputs]


def seeded(**options: Any) -> list[SamplingParams]:
    given = {"temperature": 0.8, "max_tokens": 32, **options}
    return [SamplingParams(seed=40 + i, **given) for i in range(len(PROMPTS))]


def drafters(draft: Path) -> dict[str, dict[str, Any]]:
    return {
        "draft_model": {"model": str(draft)},
        "greedy": {"model": str(draft), "draft_sample_method": "greedy"},
        "ngram": {"method": "ngram", "prompt_lookup_min": 1},
    }


FILTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "filters": {"top_k": 30, "top_p": 0.9, "min_p": 0.01},
    "edits": {
        "repetition_penalty": 1.2, "frequency_penalty": 0.3, "logit_bias": {40: 2.0},
        "min_tokens": 20, "bad_words": ["a", "th"],
    },
    "greedy": {"temperature": 0.0},
}  # fmt: skip


@pytest.mark.parametrize(("kind", "backend"), [*product(FILTERS, ["auto"]), ("filters", "torch")])
def test_coupled_text_does_not_depend_on_drafter_or_number_of_drafts(
    target: Path, draft: Path, kind: str, backend: str
) -> None:
    params = seeded(rejection_sample_method="coupled", **FILTERS[kind])
    expected = tokens(build(target, backend=backend).generate(PROMPTS, params))
    accepted = {}
    for name, drafter in drafters(draft).items():
        for k in (1, 5) if name == "draft_model" else (3,):
            llm = build(target, {"num_speculative_tokens": k, **drafter}, backend=backend)
            assert tokens(llm.generate(PROMPTS, params)) == expected
            accepted[name, k] = llm.metrics.num_accepted_tokens
    opted_out = [replace(p, num_speculative_tokens=0) for p in params]
    assert tokens(llm.generate(PROMPTS, opted_out)) == expected
    assert accepted["draft_model", 5] > 0
    if kind == "plain":  # with the target's own noise it agrees more often than the likeliest does
        assert accepted["draft_model", 5] > accepted["greedy", 3]


def test_the_engines_rule_is_that_of_requests_that_name_none(target: Path, draft: Path) -> None:
    model = {"model": str(draft)}
    for rule in ("standard", "block", "coupled"):
        named = build(target, model).generate(PROMPTS, seeded(rejection_sample_method=rule))
        llm = build(target, {**model, "rejection_sample_method": rule})
        assert tokens(llm.generate(PROMPTS, seeded())) == tokens(named)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rules_mixed_in_a_batch_decide_as_they_do_alone(
    target: Path, draft: Path, backend: str
) -> None:
    speculation = {
        "model": str(draft), "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": 2.5,
    }  # fmt: skip
    rules = ("standard", "block", "coupled", "synthetic")
    params = [
        replace(p, rejection_sample_method=rule)
        for p, rule in zip(seeded(ignore_eos=True), rules, strict=True)
    ]
    llm = build(target, speculation, backend=backend)
    mixed = llm.generate(PROMPTS, params)
    for prompt, one, together in zip(PROMPTS, params, mixed, strict=True):
        alone = build(target, speculation, backend=backend).generate([prompt], [one])
        assert tokens(alone) == tokens([together])
        assert together.metrics.num_accepted_tokens == alone[0].metrics.num_accepted_tokens > 0
    backwards = build(target, speculation, backend=backend).generate(PROMPTS[::-1], params[::-1])
    assert tokens(backwards) == tokens(mixed)[::-1]
    labels = [o.synthetic_acceptance for o in mixed]
    assert labels == [False, False, False, True]
    assert [o.metrics.synthetic_acceptance for o in mixed] == labels
    assert 0 < llm.metrics.num_synthetic_drafts < llm.metrics.num_drafts


def synthetic(target: Path, **options: Any) -> LLM:
    """An engine in which requests of any temperature and K share wide batches."""
    speculation = {"rejection_sample_method": "synthetic", "num_speculative_tokens": 4, **options}
    wide = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "block_size": 16}
    return build(target, speculation, **wide)


@pytest.mark.parametrize(
    "rates",
    [
        {"synthetic_acceptance_rate": 0.6},
        {"synthetic_acceptance_rates": [0.9, 0.5, 0.5, 0.1]},
        {"synthetic_acceptance_length": 2.7},
    ],
)
@pytest.mark.parametrize("kind", ["draft_model", "ngram"])
def test_acceptance_is_what_was_set_at_any_temperature_and_k(
    target: Path, draft: Path, kind: str, rates: dict[str, Any]
) -> None:
    llm = synthetic(target, **drafters(draft)[kind], **rates)
    speculation = llm.config.speculative_config
    assert speculation is not None
    joint = joint_rates(rates_of(speculation))
    for temperature in (0.0, 0.8):
        asked = [
            SamplingParams(
                temperature=temperature, max_tokens=180, ignore_eos=True, seed=i,
                num_speculative_tokens=(None, None, 2, 3)[i % 4],
            )
            for i in range(64)
        ]  # fmt: skip
        outputs = llm.generate([PROMPTS[i % 3] for i in range(64)], asked)
        total = outputs[0].metrics
        for output in outputs[1:]:
            total.add(output.metrics)
        assert total.num_drafts == total.num_synthetic_drafts > 2000
        positions = zip(total.accepted_per_position, total.drafted_per_position, strict=True)
        observed = [accepted / drafted for accepted, drafted in positions]
        for share, rate, drafted in zip(observed, joint, total.drafted_per_position, strict=True):
            assert share == pytest.approx(rate, abs=4 * (rate * (1 - rate) / drafted) ** 0.5)
        assert sum(observed) / 4 == pytest.approx(sum(joint) / 4, abs=0.02)
        assert all(o.synthetic_acceptance for o in outputs)


def test_without_drafts_synthetic_is_plain_decoding(target: Path, draft: Path) -> None:
    llm = synthetic(target, model=str(draft), synthetic_acceptance_rate=0.5)
    expected = build(target).generate(PROMPTS, seeded())
    for rule in (None, "synthetic"):
        params = seeded(num_speculative_tokens=0, rejection_sample_method=rule)
        outputs = llm.generate(PROMPTS, params)
        assert tokens(outputs) == tokens(expected)
        assert not any(o.synthetic_acceptance for o in outputs)
    assert not llm.metrics.synthetic_acceptance


def test_synthetic_is_refused_where_it_is_not_configured(target: Path, draft: Path) -> None:
    asked = SamplingParams(rejection_sample_method="synthetic")
    for speculation in (None, {"model": str(draft), "rejection_sample_method": "block"}):
        llm = build(target, speculation)
        with pytest.raises(RequestError, match="this engine does not allow `synthetic`"):
            llm.generate("abc", asked)


def test_an_engine_says_that_it_is_synthetic(
    target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    synthetic(target, method="ngram", synthetic_acceptance_length=2.5)
    assert "1, 0.5, 0, 0 (mean acceptance length 2.500)" in caplog.text
    assert "meaningless by design" in caplog.text


def test_rates_are_checked_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="synthetic_acceptance_rate"):
        LLM("nowhere", {"method": "ngram", "rejection_sample_method": "synthetic"})


def test_log_probabilities_are_the_targets_own_under_any_rule(target: Path, draft: Path) -> None:
    llm = synthetic(target, model=str(draft), synthetic_acceptance_rate=0.7)
    (output,) = llm.generate([PROMPTS[0]], seeded(logprobs=3)[:1])
    sample = output.outputs[0]
    assert sample.logprobs is not None
    (scored,) = build(target).generate(
        [[*output.prompt_token_ids, *sample.token_ids]],
        SamplingParams(max_tokens=1, prompt_logprobs=0),
    )
    assert scored.prompt_logprobs is not None
    of_output = scored.prompt_logprobs[len(output.prompt_token_ids) :]
    for token, row, want in zip(sample.token_ids, sample.logprobs, of_output, strict=True):
        assert want is not None
        assert row[token].logprob == pytest.approx(want[token].logprob, abs=1e-4)

"""A pool too small for all: requests give way and come back, and no token changes."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM, SamplingParams
from foretoken.engine.boundary import build_output
from foretoken.errors import OverloadedError
from foretoken.outputs import RequestOutput
from tests.engine.predictions import with_predictions
from tests.support.steps import OneLate

SHARED = list(b"def shared(prefix, of, many):\n    ")
EDITS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.2, "presence_penalty": 0.3},
    {"bad_words": ["a", "th"], "logit_bias": {40: 2.0}},
    {"min_tokens": 20, "stop_token_ids": list(range(0, 256, 11))},
    {"logprobs": 1, "prompt_logprobs": 1},
    {"structured_outputs": {"regex": "([a-h]{2,5} ?)*\\."}},
]


def build(target: Path, speculation: dict[str, Any] | None, **options: Any) -> LLM:
    defaults: dict[str, Any] = {
        "block_size": 4,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 40,
        "max_model_len": 128,
    }
    return LLM(str(target), speculation, **{**defaults, **options})


def workload(num_requests: int, most_drafts: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts that share prefixes; temperatures, lengths, K, n and edits mixed."""
    items = []
    for i in range(num_requests):
        prompt = SHARED[: 3 + (7 * i) % 30] + [97 + i] * (i % 9)
        params = SamplingParams(
            temperature=(0.0, 0.9, 1.3)[i % 3],
            seed=1000 + i,
            max_tokens=12 + (11 * i) % 36,
            n=1 + (i % 4 == 1),
            ignore_eos=True,
            priority=i % 3 - 1,
            num_speculative_tokens=i % (most_drafts + 1) if most_drafts else None,
            **EDITS[i % len(EDITS)],
        )
        items.append((prompt, params))
    return items


def speculations(draft: Path) -> dict[str, dict[str, Any] | None]:
    return {
        "plain": None,
        "draft_model": {"model": str(draft), "num_speculative_tokens": 4},
        "greedy": {
            "model": str(draft),
            "draft_sample_method": "greedy",
            "num_speculative_tokens": 4,
        },
        "ngram": {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 4},
        # Alone: a request's steps depend on what others put out, though its tokens do not.
        "suffix": {"method": "suffix", "suffix_decoding_max_cached_requests": 0},
        "prediction": {"method": "prediction"},
    }


def check_after_every_step(llm: LLM) -> None:
    step = llm.engine.step

    def checked() -> Any:
        changed = step()
        llm.engine.check_integrity()
        return changed

    llm.engine.step = checked  # type: ignore[method-assign]


def check_equal(crowded: RequestOutput, alone: RequestOutput) -> None:
    assert crowded.error is None
    for got, expected in zip(crowded.outputs, alone.outputs, strict=True):
        assert got.token_ids == expected.token_ids
        assert got.origins == expected.origins
        assert (got.text, got.finish_reason) == (expected.text, expected.finish_reason)
        assert got.logprobs is None or len(got.logprobs) == len(got.token_ids)
    assert crowded.metrics.num_steps == alone.metrics.num_steps
    assert crowded.metrics.accepted_per_position == alone.metrics.accepted_per_position
    got_rows, expected_rows = crowded.prompt_logprobs, alone.prompt_logprobs
    assert (got_rows is None) == (expected_rows is None)
    for row, want in zip(got_rows or [], expected_rows or [], strict=True):
        assert (row is None) == (want is None)
        for token, entry in (row or {}).items():
            assert entry.logprob == pytest.approx((want or {})[token].logprob, abs=1e-4)


@pytest.mark.parametrize(
    ("kind", "caching", "backend"),
    [
        *product(["plain", "draft_model", "greedy", "ngram"], [True, False], ["auto"]),
        *product(["suffix", "prediction"], [True, False], ["auto"]),
        ("plain", False, "torch"),
        ("draft_model", True, "torch"),
    ],
)
def test_preemption_changes_no_token(
    target: Path, draft: Path, kind: str, caching: bool, backend: str
) -> None:
    speculation = speculations(draft)[kind]
    items = workload(20, most_drafts=4 if speculation else 0)
    prompts, params = [p for p, _ in items], [q for _, q in items]
    if kind == "prediction":
        params = with_predictions(build(target, None), prompts, params)
    llm = build(target, speculation, num_blocks=30, enable_prefix_caching=caching, backend=backend)
    check_after_every_step(llm)
    crowded = llm.generate(prompts, params)
    single = build(
        target, speculation, max_num_seqs=2, enable_prefix_caching=False, backend=backend
    )
    for output, prompt, param in zip(crowded, prompts, params, strict=True):
        check_equal(output, single.generate([prompt], [param])[0])
    assert sum(o.metrics.num_preemptions for o in crowded) >= 5
    assert all(o.metrics.num_cached_tokens == 0 or caching for o in crowded)
    pool = llm.engine.scheduler.pool
    assert pool.num_free == pool.num_blocks


def test_a_full_queue_refuses_more_and_generate_feeds_it_as_room_appears(target: Path) -> None:
    llm = build(target, None, max_num_seqs=2, max_num_waiting=3, num_blocks=20)
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    prompts = [[i, 1, 2] for i in range(12)]
    longest = 0
    step = llm.engine.step

    def observed() -> Any:
        nonlocal longest
        longest = max(longest, len(llm.engine.scheduler.waiting))
        return step()

    llm.engine.step = observed  # type: ignore[method-assign]
    outputs = llm.generate(prompts, params)
    assert longest == 3
    assert [o.prompt_token_ids for o in outputs] == prompts
    assert all(len(o.outputs[0].token_ids) == 9 for o in outputs)
    engine = llm.engine
    for i in range(3):
        assert engine.has_room
        engine.add(str(i), [1], params)
    assert not engine.has_room
    with pytest.raises(OverloadedError, match="`max_num_waiting` is 3: must be less than 3"):
        engine.add("one too many", [1], params)
    engine.step()
    engine.add("after a step", [1], params)
    engine.abort_all()
    engine.check_integrity()


@pytest.mark.parametrize(
    ("caching", "backend", "late"),
    [
        (True, "auto", False),
        (False, "auto", False),
        (True, "torch", False),
        (True, "auto", True),
        (False, "auto", True),
    ],
)
def test_a_request_may_be_preempted_at_any_moment(
    target: Path, draft: Path, caching: bool, backend: str, late: bool
) -> None:
    """In its prompt, whose logprobs must come once each; between a draft and its verdict; often."""
    params = SamplingParams(
        temperature=1, seed=3, max_tokens=24, prompt_logprobs=1, repetition_penalty=1.1
    )
    speculation = speculations(draft)["draft_model"]
    small = {"max_num_batched_tokens": 30, "num_blocks": 32}
    llm = build(target, speculation, enable_prefix_caching=caching, backend=backend, **small)
    [expected] = llm.generate([SHARED * 2], [params])
    engine = llm.engine
    steps = OneLate(engine) if late else engine
    moment = 0
    while True:
        group = engine.add(str(moment), SHARED * 2, params)
        request = group.samples[0]
        for _ in range(moment):
            steps.step()
        if group.finished:
            break
        for _ in range(2):
            if request in engine.scheduler.running:
                engine.scheduler.preempt(request)
            steps.step()
            engine.check_integrity()
        while not group.finished:
            steps.step()
            engine.check_integrity()
        assert group.metrics.num_preemptions >= min(moment, 1)
        check_equal(build_output(engine, group), expected)
        moment += 1
    assert moment > 8

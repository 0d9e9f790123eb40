"""A pool too small for all: requests give way and come back, and no token changes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM, SamplingParams
from foretoken.engine.boundary import build_output
from foretoken.engine.scheduler import Schedule
from foretoken.errors import OverloadedError
from foretoken.outputs import RequestOutput
from tests.engine.doubles import double
from tests.engine.predictions import with_predictions
from tests.engine.same import check_same
from tests.engine.workload import SHARED, mixed, prompt_of


def build(target: Path, speculation: dict[str, Any] | None, **options: Any) -> LLM:
    defaults: dict[str, Any] = {
        "block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 40, "max_model_len": 128,
    }  # fmt: skip
    return LLM(str(target), speculation, **{**defaults, **options})


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


def check_equal(crowded: RequestOutput, alone: RequestOutput) -> None:
    check_same(crowded, alone)
    assert crowded.metrics.num_steps == alone.metrics.num_steps


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
    prompts = [prompt_of(i) for i in range(20)]
    params = [
        SamplingParams(ignore_eos=True, priority=i % 3 - 1, **mixed(i, drafts=bool(speculation)))
        for i in range(20)
    ]
    if kind == "prediction":
        params = with_predictions(build(target, None), prompts, params)
    llm = build(target, speculation, num_blocks=30, enable_prefix_caching=caching, backend=backend)
    llm.engine.on_step = lambda trace: llm.engine.check_integrity()
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
    waiting = list[int]()

    def observed(schedule: Callable[[], Schedule]) -> Schedule:
        waiting.append(len(llm.engine.scheduler.waiting))
        return schedule()

    with double(llm.engine, "scheduler", schedule=observed):
        outputs = llm.generate(prompts, params)
    assert max(waiting) == 3
    assert [o.prompt_token_ids for o in outputs] == prompts
    assert all(len(o.outputs[0].token_ids) == 9 for o in outputs)
    engine = llm.engine
    for i in range(3):
        assert engine.has_room
        engine.add(str(i), [1], params)
    assert not engine.has_room
    with pytest.raises(OverloadedError, match="`max_num_waiting` is 3: must be more than 3"):
        engine.add("one too many", [1], params)
    engine.step()
    engine.add("after a step", [1], params)
    engine.abort_all()
    engine.check_integrity()


@pytest.mark.parametrize(
    ("caching", "backend", "ahead"),
    [
        (True, "auto", False),
        (False, "auto", False),
        (True, "torch", False),
        (True, "auto", True),
        (False, "auto", True),
    ],
)
def test_a_request_may_be_preempted_at_any_moment(
    target: Path, draft: Path, caching: bool, backend: str, ahead: bool
) -> None:
    """In its prompt, where each row of log-probabilities comes once; between draft and verdict."""
    params = SamplingParams(
        temperature=1, seed=3, max_tokens=24, prompt_logprobs=1, repetition_penalty=1.1
    )
    speculation = speculations(draft)["draft_model"]
    small = {"max_num_batched_tokens": 30, "num_blocks": 32}
    llm = build(
        target, speculation, enable_prefix_caching=caching, backend=backend,
        async_scheduling=ahead, **small,
    )  # fmt: skip
    [expected] = llm.generate([SHARED * 2], [params])
    engine = llm.engine
    moment = 0
    while True:
        group = engine.add(str(moment), SHARED * 2, params)
        request = group.samples[0]
        for _ in range(moment):
            engine.step()
        if group.finished:
            break
        for _ in range(2):
            if request in engine.scheduler.running:
                engine.scheduler.preempt(request)
            engine.step()
            engine.check_integrity()
        while not group.finished:
            engine.step()
            engine.check_integrity()
        assert group.metrics.num_preemptions >= min(moment, 1)
        check_equal(build_output(engine, group), expected)
        moment += 1
    assert moment > 8

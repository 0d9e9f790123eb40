"""Speculation changes no token at T=0, and noise follows the seed alone at T>0."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM, SamplingParams
from foretoken.ops import unavailable
from foretoken.outputs import RequestOutput
from tests.engine.predictions import edited
from tests.engine.same import check_rows

# The native decoder's logits do not depend on what is verified with them, not by a bit.
TOLERANCE = {"auto": 1e-4 if unavailable("native") else 0.0, "torch": 1e-4}
PROMPTS = ["def add(a, b):", "x", "import os\nimport sys\n" * 4, "for i in range(10): print(i)"]


def build(target: Path, speculation: dict[str, Any] | None = None, **options: Any) -> LLM:
    defaults = {"block_size": 4, "max_num_seqs": 3, "max_num_batched_tokens": 32}
    return LLM(str(target), speculation, **{**defaults, **options})


def run(llm: LLM, prompts: list[Any], params: Any) -> list[RequestOutput]:
    llm.engine.on_step = lambda trace: llm.engine.check_integrity()
    outputs = llm.generate(prompts, params)
    pool = llm.engine.scheduler.pool
    assert pool.num_free == pool.num_blocks
    return outputs


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    assert all(o.error is None for o in outputs)
    return [sample.token_ids for o in outputs for sample in o.outputs]


def speculations(draft: Path) -> dict[str, dict[str, Any]]:
    return {
        "draft_model": {"model": str(draft), "num_speculative_tokens": 3},
        "greedy": {"model": str(draft), "draft_sample_method": "greedy"},
        "ngram": {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 5},
        "suffix": {"method": "suffix", "num_speculative_tokens": 5},
        "prediction": {"method": "prediction"},
        "draft_text": {"method": "draft_text", "model": str(draft)},
    }


EDITS = {
    "plain": {},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": -0.3},
    "bad words": {"bad_words": ["a", "th", "re"], "logit_bias": {40: 3.0, 120: -5.0}},
    "allowed": {"allowed_token_ids": list(range(60, 100)), "min_tokens": 30},
    "stop": {"stop_token_ids": list(range(0, 256, 13)), "min_tokens": 3},
}


def asked(edits: str) -> SamplingParams:
    told = {"logprobs": 2, "prompt_logprobs": 1}
    return SamplingParams(temperature=0, max_tokens=40, **told, **EDITS[edits])


@functools.cache
def run_plain(target: Path, backend: str, edits: str) -> list[RequestOutput]:
    return run(build(target, backend=backend), PROMPTS, asked(edits))


@pytest.mark.parametrize(
    ("kind", "edits", "backend"),
    [
        *product(["draft_model", "greedy", "ngram", "suffix", "prediction"], EDITS, ["auto"]),
        *product(["draft_text"], EDITS, ["auto"]),
        *product(["draft_model"], EDITS, ["torch"]),
        ("greedy", "plain", "torch"),
        ("ngram", "penalties", "torch"),
    ],
)
def test_greedy_tokens_equal_plain_decoding(
    target: Path, draft: Path, kind: str, edits: str, backend: str
) -> None:
    params: Any = asked(edits)
    plain = run_plain(target, backend, edits)
    if kind == "prediction":
        params = [replace(params, prediction=edited(o.outputs[0].token_ids)) for o in plain]
    llm = build(target, speculations(draft)[kind], backend=backend)
    speculative = run(llm, PROMPTS, params)
    assert tokens(speculative) == tokens(plain)
    assert [o.outputs[0].text for o in speculative] == [o.outputs[0].text for o in plain]
    assert llm.metrics.num_draft_tokens > 0
    if kind not in ("ngram", "suffix", "draft_text") and edits == "plain":
        assert 0 < llm.metrics.num_accepted_tokens < llm.metrics.num_draft_tokens
    for fast, slow in zip(speculative, plain, strict=True):
        (sample,), (expected,) = fast.outputs, slow.outputs
        assert len(sample.logprobs or ()) == len(sample.token_ids)
        assert len(fast.prompt_logprobs or ()) == len(fast.prompt_token_ids)
        check_rows(sample.logprobs, expected.logprobs, TOLERANCE[backend])
        check_rows(fast.prompt_logprobs, slow.prompt_logprobs, TOLERANCE[backend])


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_the_same_seed_gives_the_same_tokens_in_any_batch(
    target: Path, draft: Path, backend: str
) -> None:
    wider = {"max_num_seqs": 64, "max_num_batched_tokens": 512}
    params = [
        SamplingParams(temperature=0.9, max_tokens=24, seed=100 + i, top_p=0.9 if i % 2 else 1.0)
        for i in range(len(PROMPTS))
    ]
    for speculation in (None, speculations(draft)["draft_model"]):
        expected = tokens(run(build(target, speculation, backend=backend), PROMPTS, params))
        backwards = tokens(
            run(build(target, speculation, backend=backend), PROMPTS[::-1], params[::-1])
        )
        assert backwards == expected[::-1]
        wide = build(target, speculation, backend=backend, **wider)
        assert tokens(run(wide, PROMPTS, params)) == expected
        one = build(target, speculation, backend=backend)
        assert [
            tokens(run(one, [p], [q]))[0] for p, q in zip(PROMPTS, params, strict=True)
        ] == expected


def test_samples_and_repeats_differ_and_each_is_reproduced_by_its_seed(target: Path) -> None:
    llm = build(target)
    params = SamplingParams(temperature=1, max_tokens=16, n=3)
    outputs = llm.generate([PROMPTS[0]] * 2, params) + llm.generate([PROMPTS[0]], params)
    samples = [sample for o in outputs for sample in o.outputs]
    assert len({tuple(s.token_ids) for s in samples}) == len(samples) == 9
    for sample in samples[::4]:
        again = llm.generate(
            PROMPTS[0], SamplingParams(temperature=1, max_tokens=16, seed=sample.seed)
        )
        assert again[0].outputs[0].token_ids == sample.token_ids
    fresh = build(target).generate([PROMPTS[0]] * 2, params)
    assert tokens(fresh) == tokens(outputs[:2]), "the engine's seed and the order of arrival decide"


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_drafts_from_the_target_itself_are_all_accepted(target: Path, backend: str) -> None:
    speculation = {"model": str(target), "num_speculative_tokens": 3}
    for temperature in (0.0, 0.7, 1.5):
        llm = build(target, speculation, backend=backend)
        run(llm, PROMPTS, SamplingParams(temperature=temperature, max_tokens=41, seed=3))
        assert llm.metrics.num_accepted_tokens == llm.metrics.num_draft_tokens > 0


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_requests_of_different_k_share_a_batch(target: Path, backend: str) -> None:
    """A drafter equal to the target never errs."""
    speculation = {"model": str(target), "num_speculative_tokens": 4}
    llm = build(target, speculation, backend=backend)
    params = [
        SamplingParams(temperature=1, max_tokens=30, seed=1, num_speculative_tokens=k)
        for k in (0, 1, None, 4)
    ]
    outputs = run(llm, PROMPTS, params)
    assert [len(o.metrics.drafted_per_position) for o in outputs] == [0, 1, 4, 4]
    assert llm.metrics.num_accepted_tokens == llm.metrics.num_draft_tokens > 0


def test_fp64_noise_and_the_reference_backend_serve_the_same_law(target: Path, draft: Path) -> None:
    params = SamplingParams(temperature=0.8, max_tokens=12, seed=9)
    fast = run(build(target, speculations(draft)["draft_model"]), PROMPTS[:2], params)
    oracle = build(target, speculations(draft)["draft_model"], backend="reference")
    assert tokens(run(oracle, PROMPTS[:2], params)) == tokens(fast)
    fp64 = build(target, speculations(draft)["draft_model"], use_fp64_gumbel=True)
    assert tokens(run(fp64, PROMPTS[:2], params)) != tokens(fast), "other noise, other tokens"

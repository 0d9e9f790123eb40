"""Prefix reuse: what is not computed again changes no token, and is reported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken import LLM, SamplingParams
from foretoken.engine.engine import Engine
from foretoken.engine.request import RequestGroup
from foretoken.errors import NonFiniteLogitsError, RequestError
from foretoken.ops import DraftBlock, ForwardOutput
from foretoken.ops.steps import DraftRequests
from tests.engine.doubles import Double, double

TEXT = list(b"class Shared:\n    def __init__(self, a, b):\n        self.a = a\n")


@pytest.fixture(params=["auto", "torch"])
def backend(request: pytest.FixtureRequest) -> str:
    """The native decoder, where there are kernels, and the Transformers module."""
    name: str = request.param
    return name


def build(target: Path, speculation: Any = None, **options: Any) -> LLM:
    defaults = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    return LLM(str(target), speculation, **{**defaults, **options})


def params(**given: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.9, "seed": 5, "max_tokens": 14, **given})


def tokens(output: Any) -> list[list[int]]:
    assert output.error is None
    return [sample.token_ids for sample in output.outputs]


def finish(engine: Engine, group: RequestGroup) -> list[int]:
    while not group.finished:
        engine.step()
        engine.check_integrity()
    return group.samples[0].token_ids


def count_target_tokens(llm: LLM) -> list[int]:
    """A list that grows by the tokens of every pass of the target."""
    runner, counts = llm.engine.runner, list[int]()
    forward = runner.model.forward

    def counted(batch: Any, kv: Any) -> Any:
        counts.append(len(batch.token_T))
        return forward(batch, kv)

    runner.model = Double(runner.model, forward=counted)  # type: ignore[assignment]
    return counts


@pytest.mark.parametrize("kind", ["plain", "draft_model", "ngram", "suffix", "prediction"])
def test_a_shared_prompt_is_computed_once_and_changes_no_token(
    target: Path, draft: Path, kind: str, backend: str
) -> None:
    speculation = {
        "plain": None,
        "draft_model": {"model": str(draft), "num_speculative_tokens": 3},
        "ngram": {"method": "ngram", "prompt_lookup_min": 1},
        "suffix": {"method": "suffix"},
        "prediction": {"method": "prediction"},
    }[kind]
    asked = params(prediction="abc" * 9 if kind == "prediction" else None)
    prompts = [TEXT, TEXT, TEXT[:40], [*TEXT[:30], 7, 7], [*TEXT, 9]]
    expected_cached = [0, 60, 36, 28, 60]
    llm = build(target, speculation, backend=backend)
    fresh = build(target, speculation, enable_prefix_caching=False, backend=backend)
    counts = count_target_tokens(llm)
    for prompt, cached in zip(prompts, expected_cached, strict=True):
        counts.clear()
        [output] = llm.generate([prompt], asked)
        [expected] = fresh.generate([prompt], asked)
        assert tokens(output) == tokens(expected)
        assert output.outputs[0].origins == expected.outputs[0].origins
        assert output.metrics.num_cached_tokens == cached
        assert counts[0] == len(prompt) - cached
        assert expected.metrics.num_cached_tokens == 0
        llm.engine.check_integrity()


SPECULATIONS: dict[str, Any] = {
    "plain": None,
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 3},
    "eagle3": {"method": "eagle3", "num_speculative_tokens": 3},
}


@pytest.mark.parametrize("kind", SPECULATIONS)
def test_prefixes_are_shared_within_a_salt_alone(kind: str) -> None:
    llm = LLM("tiny-python", SPECULATIONS[kind], threads=1)
    prompt, asked = (
        "def area(width, height):\n    return width * height\n" * 3,
        params(max_tokens=4),
    )
    (plain,) = llm.generate(prompt, asked)
    found = []
    for salt in (None, "a", "a", "b", "a", None):
        (output,) = llm.generate({"prompt": prompt, "cache_salt": salt}, asked)
        assert tokens(output) == tokens(plain)
        found.append(output.num_cached_tokens)
    most = found[0]
    assert most >= 16
    assert found == [most, 0, most, 0, most, most]
    assert llm.generate(prompt, params(max_tokens=4, cache_salt="b"))[0].num_cached_tokens == most
    assert llm.generate(prompt, params(max_tokens=4, cache_salt="c"))[0].num_cached_tokens == 0
    llm.engine.check_integrity()
    assert llm.reset_prefix_cache()
    assert llm.generate(prompt, params(max_tokens=4, cache_salt="b"))[0].num_cached_tokens == 0
    with pytest.raises(RequestError, match="`cache_salt` is 'b': must be left out of the prompt"):
        llm.generate({"prompt": prompt, "cache_salt": "b"}, params(cache_salt="a"))
    with pytest.raises(RequestError, match="1 to 1024"):
        llm.generate({"prompt": prompt, "cache_salt": ""}, asked)


def test_a_salt_is_kept_when_a_request_is_preempted(target: Path) -> None:
    """In a pool too small for both, each computes its tokens again, and finds its own alone."""
    llm = build(target, num_blocks=26)
    asked = [
        params(max_tokens=30, seed=seed, cache_salt=salt) for seed, salt in ((5, "a"), (6, "b"))
    ]
    outputs = llm.generate([TEXT[:40], TEXT[:40]], asked)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    fresh = build(target, enable_prefix_caching=False)
    plain = [params(max_tokens=30, seed=seed) for seed in (5, 6)]
    assert list(map(tokens, outputs)) == list(map(tokens, fresh.generate([TEXT[:40]] * 2, plain)))
    ids, pool = outputs[0].prompt_token_ids, llm.engine.scheduler.pool
    assert pool.match(ids, 99, "a")
    assert not pool.match(ids, 99)
    llm.engine.check_integrity()


def test_a_reset_leaves_running_requests_what_they_hold(target: Path) -> None:
    llm, fresh = build(target), build(target, enable_prefix_caching=False)
    stream = llm.stream(TEXT, params())  # type: ignore[arg-type]
    for _, output in zip(range(4), stream, strict=False):
        assert not output.finished
    assert llm.reset_prefix_cache()
    assert llm.generate([TEXT], params(max_tokens=1))[0].num_cached_tokens == 0
    assert tokens([*stream][-1]) == tokens(fresh.generate([TEXT], params())[0])
    llm.engine.check_integrity()


def test_a_conversation_goes_on_where_it_was(target: Path) -> None:
    """Generated tokens are cached, too, except the last, which was never computed."""
    llm, fresh = build(target), build(target, enable_prefix_caching=False)
    [first] = llm.generate([TEXT], params(max_tokens=21))
    longer = [*TEXT, *first.outputs[0].token_ids, 10, 11, 12]
    [second] = llm.generate([longer], params())
    assert second.metrics.num_cached_tokens == (len(TEXT) + 20) // 4 * 4
    assert tokens(second) == tokens(fresh.generate([longer], params())[0])


def test_samples_share_their_prompt(target: Path) -> None:
    llm = build(target)
    counts = count_target_tokens(llm)
    [output] = llm.generate([TEXT], params(n=4, max_tokens=5))
    rest = len(TEXT) - 60
    assert sum(counts) == len(TEXT) + 3 * rest + 4 * 4
    assert output.metrics.num_cached_tokens == 0
    fresh = build(target, enable_prefix_caching=False)
    assert tokens(output) == tokens(fresh.generate([TEXT], params(n=4, max_tokens=5))[0])


def test_a_prompt_has_all_log_probabilities_that_were_asked_for(target: Path) -> None:
    llm = build(target)
    wanted = params(prompt_logprobs=2, n=2)
    first, second = (llm.generate([TEXT], wanted)[0] for _ in range(2))
    assert second.metrics.num_cached_tokens == 0
    assert first.prompt_logprobs is not None
    assert second.prompt_logprobs is not None
    assert len(first.prompt_logprobs) == len(second.prompt_logprobs) == len(TEXT)
    assert tokens(first) == tokens(second)


@pytest.mark.parametrize("size", [16, 64])
def test_rows_of_a_prompt_are_computed_once_for_all_samples(target: Path, size: int) -> None:
    llm = build(target, max_num_batched_tokens=size)
    counts = count_target_tokens(llm)
    [output] = llm.generate([TEXT], params(prompt_logprobs=20, n=8, max_tokens=1))
    assert len(output.prompt_logprobs or ()) == len(TEXT)
    assert sum(counts) <= len(TEXT) + 7 * 4, "the others compute their last block"


def test_blocks_of_a_request_with_non_finite_logits_are_not_reused(
    target: Path, backend: str
) -> None:
    llm = build(target, backend=backend)
    expected = tokens(llm.generate([TEXT], params())[0])
    llm = build(target, backend=backend)

    def poisoned(forward: Callable[..., ForwardOutput], batch: Any, kv: Any) -> ForwardOutput:
        output = forward(batch, kv)
        for cache in (*kv.keys, *kv.values):
            cache.fill_(torch.nan)
        return output._replace(logits_NV=torch.full_like(output.logits_NV, torch.nan))

    with double(llm.engine.runner, "model", forward=poisoned):
        bad, _ = llm.generate([TEXT, [3]], params())
    assert isinstance(bad.error, NonFiniteLogitsError)
    [good] = llm.generate([TEXT], params())
    assert good.metrics.num_cached_tokens == 0
    assert tokens(good) == expected


# -- the draft model's half of shared blocks ------------------------------------------------------

SELF_K = 3


@pytest.fixture
def selfish(target: Path, backend: str) -> LLM:
    """The target drafts for itself: any stale or missing K/V of the draft shows as a rejection."""
    speculation = {"model": str(target), "num_speculative_tokens": SELF_K}
    return build(target, speculation, num_blocks=80, backend=backend)


def check_all_accepted(group: RequestGroup) -> None:
    metrics = group.metrics
    assert metrics.num_accepted_tokens == metrics.num_draft_tokens > 0


def draft_tokens_computed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Known tokens in each of the draft model's passes that compute some, as they come."""
    drafter: Any = llm.engine.runner.drafter
    counts, pack = list[int](), drafter._steps.pack

    def counted(*args: Any) -> Any:
        batch = pack(*args)
        counts.append(len(batch.token_T))
        return batch

    monkeypatch.setattr(drafter._steps, "pack", counted)
    return counts


def test_complete_blocks_are_skipped_and_drafts_and_q_are_those_of_a_fresh_engine(
    target: Path, draft: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token for token and number for number what a drafter that computed everything proposes."""

    def watched(caching: bool) -> tuple[LLM, list[Any]]:
        speculation = {"model": str(draft)}
        llm = build(target, speculation, enable_prefix_caching=caching, backend=backend)
        runner, seen = llm.engine.runner, []
        assert runner.drafter is not None
        propose = runner.drafter.propose

        def recorded(rows: DraftRequests) -> DraftBlock:
            block = propose(rows)
            assert block.cache is not None
            seen.append((block.token_BK.clone(), block.cache.logits_SKV[rows.slot_B].clone()))
            return block

        runner.drafter = Double(runner.drafter, propose=recorded)  # type: ignore[assignment]
        return llm, seen

    reused, seen = watched(caching=True)
    fresh, expected = watched(caching=False)
    counts = draft_tokens_computed(reused, monkeypatch)
    for i, prompt in enumerate((TEXT, [*TEXT, 9], TEXT[:50])):
        for log in (seen, expected, counts):
            log.clear()
        reused.generate([prompt], params(seed=i, ignore_eos=True))
        fresh.generate([prompt], params(seed=i, ignore_eos=True))
        assert len(seen) == len(expected) > 1
        for (token_BK, q_BKV), (want_BK, want_BKV) in zip(seen, expected, strict=True):
            k = token_BK.shape[1]
            assert torch.equal(token_BK, want_BK)
            torch.testing.assert_close(q_BKV[:, :k], want_BKV[:, :k], atol=1e-4, rtol=1e-4)
        first = counts[0]
        assert first == len(prompt) + 1 if i == 0 else first <= len(prompt) + 1 - 48


def test_the_half_that_a_request_without_drafts_left_empty_is_filled(
    selfish: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft model computes each token of a skipped stretch once."""
    engine, counts = selfish.engine, draft_tokens_computed(selfish, monkeypatch)
    finish(engine, engine.add("K=0", TEXT, params(num_speculative_tokens=0)))
    assert counts == []
    for seed, skipped in ((6, 0), (7, 60)):
        counts.clear()
        group = engine.add("K=3", TEXT, params(seed=seed))
        engine.step()
        assert counts == [], "drafts are made at the beginning of the step that verifies them"
        engine.step()
        assert sum(counts) == len(TEXT) - skipped + 1  # with its first token
        finish(engine, group)
        assert group.metrics.num_cached_tokens == 60
        check_all_accepted(group)

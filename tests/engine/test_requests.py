"""The life of requests: stopping, aborting, failing alone; and what bad input is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken import LLM, SamplingParams
from foretoken.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    NonFiniteLogitsError,
    RequestError,
    UsageError,
)
from foretoken.ops import ForwardOutput
from tests.engine.doubles import double, failing
from tests.support.checkpoints import END, ids_of, save_checkpoint


@pytest.fixture(scope="module", params=["auto", "torch"])
def llm(target: Path, request: pytest.FixtureRequest) -> LLM:
    """The target drafting for itself: blocks of five tokens, so that stops fall inside them.
    In the native decoder, where there are kernels, and through its Transformers module.
    """
    return build(target, request.param)


def build(target: Path, backend: str, **options: Any) -> LLM:
    sizes = {"block_size": 4, "max_num_seqs": 4, "num_blocks": 64}
    return LLM(str(target), {"model": str(target)}, backend=backend, **sizes, **options)


@pytest.fixture(scope="module")
def text(llm: LLM) -> list[int]:
    """Forty greedy tokens of the prompt the tests use."""
    return llm.generate("abc", SamplingParams(temperature=0, max_tokens=40))[0].outputs[0].token_ids


def complete(llm: LLM, **params: Any) -> Any:
    output = llm.generate("abc", SamplingParams(temperature=0, max_tokens=40, **params))[0]
    llm.engine.check_integrity()
    return output.outputs[0]


@pytest.mark.parametrize("reason", ["abort", "interrupted", "error"])
def test_bytes_that_waited_stop_nothing_that_was_ended_from_outside(llm: LLM, reason: str) -> None:
    """Half a character is shown as U+FFFD at the end: a stop string, if one ends on its own."""
    [lead] = ids_of(b"\xc3")
    params = SamplingParams(
        allowed_token_ids=[lead], stop=["\ufffd"], max_tokens=3, num_speculative_tokens=0
    )
    [whole] = llm.generate(["abc"], params)
    assert whole.outputs[0].finish_reason == "stop"
    group = llm.engine.add("ended", [1, 2, 3], params)
    for _ in range(2):
        llm.engine.step()
    llm.engine.abort(group, reason)
    (sample,) = group.samples
    assert (sample.finish_reason, sample.stop_reason) == (reason, None)
    assert "".join(sample.pieces) == "\ufffd\ufffd"


def test_end_of_text_stops_unless_ignored(llm: LLM) -> None:
    bias = {END: 100.0}
    done = complete(llm, logit_bias=bias)
    assert (done.token_ids, done.finish_reason, done.text) == ([END], "stop", "")
    assert complete(llm, logit_bias=bias, ignore_eos=True).token_ids == [END] * 40
    held = complete(llm, logit_bias=bias, min_tokens=5)
    assert held.token_ids.index(END) == len(held.token_ids) - 1 == 5


def test_prompt_logprobs_equal_those_of_transformers(llm: LLM, target: Path) -> None:
    from transformers import AutoModelForCausalLM

    prompt = list(b"hello world, this is a prompt")
    output = llm.generate([prompt], SamplingParams(max_tokens=2, prompt_logprobs=3))[0]
    model = AutoModelForCausalLM.from_pretrained(target)
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    rows = output.prompt_logprobs
    assert rows is not None
    assert rows[0] is None
    assert len(rows) == len(prompt)
    for i, row in enumerate(rows[1:]):
        assert row is not None
        assert row[prompt[i + 1]].logprob == pytest.approx(
            float(expected[i, prompt[i + 1]]), abs=1e-4
        )
        assert sum(entry.rank <= 3 for entry in row.values()) == 3


def test_a_stream_ends_with_all_tokens_and_aborts_when_closed(llm: LLM, text: list[int]) -> None:
    params = SamplingParams(temperature=0, max_tokens=40)
    *_, last = (output.outputs[0] for output in llm.stream("abc", params))
    assert (last.token_ids, last.finish_reason) == (text, "length")
    stream = llm.stream("abc", params)
    next(stream)
    stream.close()
    assert not llm.engine.has_work
    llm.engine.check_integrity()


@pytest.mark.parametrize("ahead", [False, True])
def test_non_finite_logits_end_one_request_alone(
    target: Path, llm: LLM, text: list[int], ahead: bool
) -> None:
    """Nor is anything computed for it in a step that was launched before its end is known."""

    def poisoned(forward: Callable[..., ForwardOutput], batch: Any, kv: Any) -> ForwardOutput:
        logits = forward(batch, kv).logits_NV.clone()
        logits[batch.token_T[batch.logit_row_N] == 251] = torch.nan
        return ForwardOutput(logits)

    llm = build(target, llm.config.backend, async_scheduling=ahead)
    with double(llm.engine.runner, "model", forward=poisoned):
        good, bad = llm.generate(["abc", [7, 251]], SamplingParams(temperature=0, max_tokens=40))
    assert isinstance(bad.error, NonFiniteLogitsError)
    assert bad.outputs[0].finish_reason == "error"
    assert bad.outputs[0].token_ids == []
    if 251 not in text:
        assert good.outputs[0].token_ids == text
    llm.engine.check_integrity()


def test_what_a_block_held_before_cannot_poison_its_next_owner(llm: LLM) -> None:
    """Requests of unlike lengths: the shorter are read to the longest one's length, masked.
    No prompt is longer than a block: none begins with cached blocks, which are not cleared.
    """
    prompts, params = ["abc", "a", "abcd"], SamplingParams(temperature=0, max_tokens=40)
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    for pool in (llm.engine.runner.kv, llm.engine.runner.drafter.kv):  # type: ignore[union-attr]
        for cache in (*pool.keys, *pool.values):
            cache.fill_(torch.nan)
    again = llm.generate(prompts, params)
    assert [output.error for output in again] == [None] * 3
    assert [output.outputs[0].token_ids for output in again] == expected
    for output in again:
        assert output.metrics.num_accepted_tokens == output.metrics.num_draft_tokens > 0


def test_parameters_that_ban_every_token_are_blamed_and_lose_nothing_else(
    llm: LLM, text: list[int]
) -> None:
    banned = SamplingParams(allowed_token_ids=[END], min_tokens=2, logprobs=1)
    fine = SamplingParams(temperature=0, max_tokens=40, logprobs=0)
    good, bad = llm.generate(["abc", "abd"], [fine, banned])
    assert isinstance(bad.error, RequestError)
    assert "`allowed_token_ids, min_tokens` is 'together they ban every token'" in str(bad.error)
    assert good.outputs[0].token_ids == text


def test_parameters_that_were_not_set_are_not_blamed(llm: LLM, text: list[int]) -> None:
    first = llm.tokenizer.decode(text[:1])
    params = {"allowed_token_ids": [text[0]], "temperature": 0, "max_tokens": 9}
    with pytest.raises(RequestError, match=r"^`allowed_token_ids, bad_words` is") as caught:
        llm.generate("abc", SamplingParams(**params, bad_words=[first]))
    assert "min_tokens" not in str(caught.value)


def test_a_nucleus_too_small_for_float32_is_the_likeliest_token(llm: LLM, text: list[int]) -> None:
    for top_p in (5e-324, 1e-46, 1e-40):
        output = llm.generate("abc", SamplingParams(top_p=top_p, max_tokens=40))[0]
        assert output.outputs[0].token_ids == text


def test_a_stream_ends_properly_when_another_call_finishes_it(llm: LLM) -> None:
    stream = llm.stream("abc", {"max_tokens": 4, "temperature": 0})
    next(stream)
    llm.generate("xyz", SamplingParams(max_tokens=30, ignore_eos=True))
    *_, last = stream
    assert (last.finished, len(last.outputs[0].token_ids)) == (True, 4)


def test_snapshots_do_not_change_after_they_were_given(llm: LLM) -> None:
    outputs = []
    for output in llm.stream("abc", {"max_tokens": 12, "num_speculative_tokens": 0}):
        outputs.append(output)
        assert output.prompt_token_ids == ids_of("abc")
        output.prompt_token_ids.clear()  # the caller's own copy
    assert [o.metrics.num_steps for o in outputs] == list(range(1, len(outputs) + 1))


def test_an_interrupted_call_leaves_no_orphans(target: Path) -> None:
    llm = LLM(str(target), max_num_seqs=2)
    interrupted = failing(KeyboardInterrupt(), lambda text: text == "c")
    with double(llm.engine, "tokenizer", encode=interrupted), pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c"])
    assert not llm.engine.has_work
    stream = llm.stream("a")
    next(stream)
    llm.close()
    with pytest.raises(UsageError, match="closed"):
        next(stream)
    with pytest.raises(UsageError, match="closed"):
        _ = llm.engine


def test_arrays_are_token_ids_and_dicts_are_parameters(llm: LLM, text: list[int]) -> None:
    ids = llm.tokenizer.encode("abc")  # type: ignore[union-attr]
    params = {"temperature": 0, "max_tokens": 5, "top_k": 2**63}
    for prompt in (torch.tensor(ids), torch.tensor([ids])):
        assert llm.generate(prompt, params)[0].outputs[0].token_ids == text[:5]
    with pytest.raises(RequestError, match="Did you mean `max_tokens`"):
        llm.generate("abc", {"max_token": 3})
    with pytest.raises(RequestError, match="a dict of its fields"):
        llm.generate(["abc"], [3])  # type: ignore[list-item]


@pytest.fixture(scope="module")
def small(target: Path) -> LLM:
    return LLM(str(target), {"model": str(target)}, max_num_seqs=2, num_blocks=15)


BAD_PROMPTS: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    ("", {}, RequestError, "at least one token"),
    ([], {}, RequestError, "at least one token"),
    ([5, 260], {}, RequestError, r"\[0, 260\)"),
    ([5, -1], {}, RequestError, r"\[0, 260\)"),
    ([1] * 256, {}, CapacityError, "context of 256"),
    ([1] * 200, {"max_tokens": 100}, CapacityError, "at most 56"),
    ("abc", {"max_tokens": 253}, CapacityError, "num_blocks"),
    ("abc", {"stop_token_ids": [999]}, RequestError, "stop_token_ids"),
    ("abc", {"logit_bias": {300: 1.0}}, RequestError, "logit_bias"),
    ("abc", {"num_speculative_tokens": 9}, RequestError, "engine's 4"),
    *((given, {}, RequestError, "list of token ids") for given in (3.5, None, b"abc", {1, 2})),
    ({}, {}, RequestError, "`prompt` is None: must be a text"),
    ({"promt": "abc"}, {}, RequestError, "Did you mean `prompt`"),
    ({"prompt": 3}, {}, RequestError, "`prompt` is 3: must be a text"),
    ({"prompt_token_ids": "abc"}, {}, RequestError, "is 'abc': must be a list of token ids"),
    ({"prompt_token_ids": [1.5]}, {}, RequestError, "token ids in"),
    ({"prompt": "a", "multi_modal_data": {"image": 1}}, {}, RequestError, "takes text alone"),
    ({"prompt_embeds": torch.zeros(2)}, {}, RequestError, "Pass `prompt` or `prompt_token_ids`"),
    ("abc\udcff", {}, RequestError, r"lone surrogate '\\udcff' at index 3"),
    ({"prompt": "\ud83d"}, {}, RequestError, r"lone surrogate '\\ud83d' at index 0"),
]


@pytest.mark.parametrize(("prompt", "params", "error", "message"), BAD_PROMPTS)
def test_a_bad_request_is_refused_alone(
    small: LLM, text: list[int], prompt: Any, params: Any, error: Any, message: str
) -> None:
    fine = SamplingParams(temperature=0, max_tokens=8)
    bad = SamplingParams(**{"max_tokens": 8, **params})
    first, refused, last = small.generate(
        ["abc", prompt, "abc"], [fine, bad, fine], on_error="return"
    )
    assert isinstance(refused.error, error)
    assert refused.outputs == []
    assert [o.outputs[0].token_ids for o in (first, last)] == [text[:8]] * 2
    small.engine.check_integrity()
    with pytest.raises(error, match=message):
        small.generate([prompt] if prompt == [] else prompt, bad)


def test_as_many_parameters_as_prompts(llm: LLM) -> None:
    assert llm.generate([]) == []
    with pytest.raises(RequestError, match="sampling_params"):
        llm.generate(["a", "b"], [SamplingParams()])


@pytest.mark.parametrize(
    ("speculation", "message"),
    [
        ({"method": "ngrams"}, "draft_model, draft_text, eagle3, forced, ngram, prediction, suff"),
        ({"num_speculative_tokens": 0, "method": "ngram"}, "speculative_config=None"),
        ({"method": "ngram", "num_speculative_token": 3}, "Did you mean `num_speculative_tokens`"),
        ({"model": "x", "draft_sample_method": "gumbel"}, "is called `probabilistic`"),
        ({"method": "ngram", "model": "x"}, "takes prompt_lookup_max, prompt_lookup_min"),
        ({"method": "ngram", "draft_sample_method": "greedy"}, "left out with method `ngram`"),
        ({"model": "x", "prompt_lookup_min": 2}, "left out with method `draft_model`"),
        ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 3}, "prompt_lookup_min"),
        ({"method": "draft_model"}, "shares the target's tokenizer"),
        ({}, "Use `draft_model`"),
        ({"model": ""}, "`speculative_config.model` is '': must be a model name"),
        ({"method": "draft_model", "model": ""}, "Leave it out for the draft model that comes"),
        ({"method": "", "model": "x"}, "`speculative_config.method` is ''"),
        ({"model": "x", "draft_sample_method": ""}, "probabilistic, greedy"),
        ({"model": "x", "rejection_sample_method": ""}, "standard, block, coupled"),
        ("", "JSON"),
        ("{not json", "JSON"),
        ([1], "a dict"),
        ({"method": "ngram", "disable_by_batch_size": 4}, "`auto`"),
    ],
)
def test_bad_speculative_options_are_named(target: Path, speculation: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(str(target), speculation)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seq": 3}, "Did you mean `max_num_seqs`"),
        ({"device": "tpu"}, "auto, cpu"),
        ({"dtype": "int8"}, "float32"),
        ({"dtype": torch.int8}, "one of auto, float32"),
        ({"tensor_parallel_size": True}, "one process"),
        ({"tensor_parallel_sizes": 1}, "engine option.tensor_parallel_sizes"),
        ({"dtype": ""}, "auto, float32"),
        ({"device": ""}, "auto, cpu"),
        ({"backend": ""}, "reference, torch"),
        ({"load_format": ""}, "auto, dummy"),
        ({"backend": "triton9"}, "torch"),
        ({"max_num_batched_tokens": 2, "max_num_seqs": 4}, "at least max_num_seqs x"),
        ({"kv_cache_gib": 1e-9}, "one block"),
        ({"kv_cache_gib": "1"}, "finite number"),
        ({"kv_cache_gib": float("inf")}, "finite number"),
        ({"seed": -1}, "integer in"),
        ({"max_model_len": 10**6}, "max_model_len"),
    ],
)
def test_bad_engine_options_are_named(target: Path, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(str(target), **options)


def test_a_draft_with_another_vocabulary_is_refused(target: Path, tmp_path: Path) -> None:
    other = save_checkpoint(tmp_path / "other", vocabulary=300, tokenizer=False)
    with pytest.raises(ConfigError, match="300 logits, the target has 260"):
        LLM(str(target), {"model": str(other)})
    with pytest.raises(CheckpointError, match="nowhere"):
        LLM(str(target), {"model": "nowhere"})


def test_a_checkpoint_without_a_tokenizer_serves_token_ids(tmp_path: Path) -> None:
    bare = save_checkpoint(tmp_path / "bare", tokenizer=False)
    llm = LLM(str(bare), {"method": "ngram"})
    done = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4))[0].outputs[0]
    assert (len(done.token_ids), done.text) == (4, "")
    with pytest.raises(RequestError, match="no tokenizer"):
        llm.generate("text")
    with pytest.raises(RequestError, match="no tokenizer"):
        llm.generate([1, 2], SamplingParams(stop="x"))
    llm.close()
    with pytest.raises(UsageError, match="closed"):
        llm.generate([1, 2])

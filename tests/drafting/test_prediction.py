"""Predicted and forced tokens: alignment after an edit, refusals, and what is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from foretoken import LLM, SamplingParams
from foretoken.config import SpeculativeConfig
from foretoken.drafting.forced import FORCING, Alignment, Continuation
from foretoken.drafting.registry import find_drafter
from foretoken.engine.boundary import encode_prediction
from foretoken.errors import CapacityError, ConfigError, ProcessingError, RequestError
from tests.engine.predictions import edited
from tests.support.checkpoints import VOCABULARY, ids_of, save_checkpoint

OPTIONS: dict[str, Any] = {"block_size": 4, "max_num_seqs": 4, "num_blocks": 64}
FEW = st.lists(st.integers(0, 3), max_size=30)
CODE = [*range(100, 140)]


def array(tokens: list[int]) -> Any:
    return np.array(tokens, dtype=np.int32)


def after(prediction: list[int], output: list[int]) -> list[int]:
    return Alignment(prediction)(array(output)).tolist()


@given(prediction=FEW, output=FEW, cuts=st.lists(st.integers(0, 30), max_size=5))
def test_it_depends_on_the_texts_alone(
    prediction: list[int], output: list[int], cuts: list[int]
) -> None:
    """Not on where rounds end. The result is always the rest of the prediction."""
    alignment = Alignment(prediction)
    for cut in sorted(cuts):
        said = alignment(array(output[:cut])).tolist()
        assert said == prediction[len(prediction) - len(said) :]
    assert alignment(array(output)).tolist() == after(prediction, output)


@given(
    parts=st.lists(st.tuples(st.integers(0, 90), st.integers(3, 20), FEW), min_size=1, max_size=6)
)
def test_three_tokens_in_a_row_are_enough_anywhere(parts: list[tuple[int, int, list[int]]]) -> None:
    """Whatever was moved, left out or inserted before them, if they occur only once."""
    prediction, output = [*range(100, 200)], list[int]()
    for start, count, new in parts:
        copied = prediction[start : start + count]
        for i in range(len(copied)):
            if i >= 3:
                assert after(prediction, [*output, *copied[:i]])[:1] == copied[i : i + 1]
        output += [*copied, *new]


@pytest.mark.parametrize(
    ("output", "follows"),
    [
        ([], 100),
        (CODE[:9], 109),
        ([*CODE[:9], 7], 110),  # a token for another
        ([*CODE[:9], 7, 8], None),
        ([*CODE[:9], 7, 8, 111], 112),  # two for two
        ([*CODE[:9], 7, 109], 110),  # one inserted
        ([*CODE[:9], 5, 6, 7, 8, 109], 110),  # four
        ([*CODE[:9], *[7] * 20, 109, 110, 111], 112),
        ([*CODE[:9], 112], 113),  # three left out
        ([*CODE[:9], 130, 131], None),
        ([*CODE[:9], 130, 131, 132], 133),
        ([*CODE[:20], 103, 104, 105], 106),  # once more
        ([9, 100], 101),  # a space that the tokenizer puts before a text
        ([*CODE, 9, 9], None),
    ],
)
def test_the_alignment_after_an_edit(output: list[int], follows: int | None) -> None:
    said = after(CODE, output)
    assert said[:1] == ([] if follows is None else [follows])


def test_of_equal_lines_the_nearest_one_is_followed() -> None:
    lines = [[1, 2, 3, 50 + i] for i in range(20)]
    flat = [token for line in lines for token in line]
    assert after(flat, [*flat[:22], 9, 3])[:1] == [55]
    assert after(flat, [*flat[:20], 1, 2, 3, 9, 1, 2, 3])[:1] == [56], "another line, as it seems"
    assert after(flat, [*flat[:20], 1, 2, 3, 9, 1, 2, 3, 55])[:4] == [1, 2, 3, 56], "a new one"


def build(target: Path, method: str = "prediction", **options: Any) -> LLM:
    return LLM(str(target), {"method": method}, **{**OPTIONS, **options})


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_an_edited_text_is_mostly_drafted(target: Path, temperature: float) -> None:
    asked: dict[str, Any] = {
        "temperature": temperature, "seed": 3, "max_tokens": 90, "ignore_eos": True,
        "rejection_sample_method": "coupled",
    }  # fmt: skip
    llm = build(target)
    [plain] = llm.generate(["def f(x):"], SamplingParams(**asked))
    assert plain.metrics.num_draft_tokens == 0
    tokens = plain.outputs[0].token_ids
    for prediction, least in ((tokens, 4.9), (edited(tokens), 2.5), (tokens[30:], 3.5)):
        [output] = llm.generate(["def f(x):"], SamplingParams(**asked, prediction=prediction))
        assert output.outputs[0].token_ids == tokens
        assert output.metrics.mean_acceptance_length > least
    text = plain.outputs[0].text
    if "\ufffd" not in text:
        [output] = llm.generate(["def f(x):"], SamplingParams(**asked, prediction=text))
        assert output.metrics.mean_acceptance_length > 4.9
    llm.engine.check_integrity()


def test_each_sample_is_aligned_by_itself(target: Path) -> None:
    llm = build(target)
    asked: dict[str, Any] = {"seed": 4, "max_tokens": 40, "rejection_sample_method": "coupled"}
    [both] = llm.generate(["abc"], SamplingParams(n=2, **asked))
    first, second = (sample.token_ids for sample in both.outputs)
    mixed = SamplingParams(n=2, prediction=[*first, *second], **asked)
    [output] = llm.generate(["abc"], mixed)
    assert [sample.token_ids for sample in output.outputs] == [first, second]
    assert output.metrics.acceptance_rate > 0.6


@pytest.mark.parametrize(
    ("prediction", "error", "message"),
    [
        ("a\ud800", RequestError, r"text, without the lone surrogate '\\ud800' at index 1"),
        (b"abc", RequestError, "a text or a list of token ids"),
        ({1, 2}, RequestError, "a text or a list of token ids"),
        (7, RequestError, "a list of token ids"),
        ([1, "a"], RequestError, "is 'a': must be a list of token ids"),
        ([4, -1], RequestError, "is -1: must be a list of token ids >= 0"),
        ([4, VOCABULARY], RequestError, r"is 260: must be made of token ids in \[0, 260\)"),
        ([4] * 257, CapacityError, "'257 tokens': must be at most as long as the context, 256"),
        ("x" * 300, CapacityError, "'300 tokens': must be at most as long as the context, 256"),
    ],
)
def test_values_that_are_no_prediction_are_refused(
    target: Path, prediction: Any, error: type[RequestError], message: str
) -> None:
    llm = build(target)
    with pytest.raises(error, match=message):
        llm.generate("abc", SamplingParams(prediction=prediction))


def test_a_prediction_that_no_drafter_reads_is_refused(target: Path) -> None:
    for speculation in (None, {"method": "ngram"}, {"method": "forced"}):
        llm = LLM(str(target), speculation, **OPTIONS)
        with pytest.raises(RequestError, match=r'left out: .*"method": "prediction"'):
            llm.generate("abc", SamplingParams(prediction="abc"))


def test_a_text_needs_a_tokenizer_and_ids_do_not(tmp_path: Path) -> None:
    llm = build(save_checkpoint(tmp_path / "bare", tokenizer=False))
    with pytest.raises(RequestError, match="`prediction` is 'abc': must be token ids"):
        llm.generate([1, 2], SamplingParams(prediction="abc"))
    [output] = llm.generate([[1, 2]], SamplingParams(prediction=[1, 2], max_tokens=4))
    assert output.metrics.num_draft_tokens > 0


def metaspace() -> PreTrainedTokenizerFast:
    """Begins every text with a space, as Llama 2 does, and merges `foo`, `foo(`."""
    symbols = ["▁", "f", "o", "(", "x", "fo", "foo", "▁foo", "foo(", "▁x"]
    merges = [("f", "o"), ("fo", "o"), ("foo", "("), ("▁", "foo"), ("▁", "x")]
    bpe = models.BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=merges)
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize(
    ("prompt", "prediction", "expected"),
    [
        ("x", "x", ["x"]),
        ("x", " foo", ["▁foo"]),
        ("x foo", "(x", ["▁", "(", "x"]),  # `foo(` would be one: the prompt's token stays whole
    ],
)
def test_a_text_is_encoded_as_it_follows_the_prompt(
    prompt: str, prediction: str, expected: list[str]
) -> None:
    tokenizer = metaspace()
    ids = encode_prediction(tokenizer, tokenizer.encode(prompt), prediction)
    assert tokenizer.convert_ids_to_tokens(ids) == expected


def test_what_is_kept_is_in_the_plan_and_leaves_with_the_request(target: Path) -> None:
    llm = build(target)
    plan, drafter = llm.memory_plan, llm.engine.runner.drafter
    assert plan is not None
    assert plan.parts["drafts of slots"] == 5 * 4 * 256, "with the spare slot's"
    group = llm.engine.add("one", ids_of("abc"), SamplingParams(prediction=CODE, max_tokens=9))
    held = []
    while not group.finished:
        llm.engine.step()
        held.append(list(drafter.held_slots()))  # type: ignore[union-attr]
    assert held == [[], [0]] + [[0]] * (len(held) - 3) + [[]]


@pytest.mark.parametrize("method", ["prediction", "forced"])
def test_on_a_gpu_both_are_refused_by_name(method: str) -> None:
    with pytest.raises(ConfigError, match=f"`{method}` reads tokens on the host, too late"):
        find_drafter(SpeculativeConfig(method=method), on_host=False)


@contextmanager
def forcing(make: Callable[[SamplingParams], Continuation | None]) -> Iterator[None]:
    """Inside, one more kind of parameter forces tokens."""
    FORCING.append(make)
    try:
        yield
    finally:
        FORCING.remove(make)


@pytest.fixture
def template() -> Iterator[list[int]]:
    """The tokens that are forced where a word is banned: two at a time, after every other token."""
    known: list[int] = []

    def force(params: SamplingParams) -> Continuation | None:
        if not params.bad_words:
            return None
        return lambda output: known[len(output) :][:2] if len(output) % 2 else []

    with forcing(force):
        yield known


@pytest.mark.parametrize("method", ["prediction", "forced"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_registered_source_is_drafted_first(
    target: Path, template: list[int], method: str, temperature: float
) -> None:
    asked: dict[str, Any] = {
        "temperature": temperature, "seed": 2, "max_tokens": 40, "ignore_eos": True,
        "rejection_sample_method": "coupled",
    }  # fmt: skip
    bans = SamplingParams(**asked, bad_words=["~"])
    [plain] = LLM(str(target), **OPTIONS).generate(["xyz"], bans)
    expected = plain.outputs[0].token_ids
    template += expected
    llm = build(target, method)
    if method == "prediction":
        bans = replace(bans, prediction=expected)
    forced, free = llm.generate(["xyz", "xyz"], [bans, SamplingParams(**asked)])
    assert forced.outputs[0].token_ids == expected
    assert free.metrics.num_draft_tokens == 0
    counts = forced.metrics.accepted_per_position
    assert counts == forced.metrics.drafted_per_position
    assert len(counts) == (4 if method == "prediction" else 2), "the prediction fills in"
    assert counts[0] == counts[1] > counts[-1] - (method == "forced")
    template[:] = [token - 1 for token in template]
    [wrong] = llm.generate(["xyz"], [bans])
    assert wrong.outputs[0].token_ids == expected
    assert wrong.metrics.num_accepted_tokens < wrong.metrics.num_draft_tokens


def test_one_allowed_token_is_forced(target: Path) -> None:
    llm = build(target, "forced")
    params = [
        SamplingParams(allowed_token_ids=ids, max_tokens=26, seed=1) for ids in ([7, 7], [7, 8])
    ]
    only, two = llm.generate(["a", "a"], params)
    assert only.outputs[0].token_ids == [7] * 26
    assert only.metrics.accepted_per_position == [5] * 4, "the first token comes with the prompt"
    assert two.metrics.num_draft_tokens == 0


@pytest.mark.parametrize("late", [False, True])
def test_a_source_that_raises_ends_its_own_request(target: Path, late: bool) -> None:
    def fail(output: Any) -> list[int]:
        if len(output) > 3:
            output[0] = 0  # the array is read-only
        return []

    def force(params: SamplingParams) -> Continuation | None:
        return fail if params.seed == 7 else None

    llm = LLM(str(target), {"method": "forced"}, async_scheduling=late, **OPTIONS)
    params = [SamplingParams(seed=seed, max_tokens=12, ignore_eos=True) for seed in (1, 7, 2)]
    with forcing(force):
        first, failed, last = llm.generate(["a"] * 3, params)
    assert isinstance(failed.error, ProcessingError)
    assert "read-only" in str(failed.error)
    assert first.error is last.error is None
    assert len(first.outputs[0].token_ids) == len(last.outputs[0].token_ids) == 12
    llm.engine.check_integrity()

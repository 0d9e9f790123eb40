"""With several tokens per step, what is emitted, shown and counted is what one per step gives.

Every test compares a request that drafts with the same request that opted out, in one engine, or
with a reading of the same tokens by `naive`, which knows nothing of steps, blocks or windows.
"""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from foretoken import LLM, SamplingParams
from foretoken.outputs import CompletionOutput, RequestOutput
from tests.support.checkpoints import END, VOCABULARY, ids_of

K = 4
LETTERS = ids_of("abcdefghijklmnopqrstuvwxyz")
ALPHABET = [*ids_of("abcé€"), *ids_of(b"\xff"), END]
FEW = ALPHABET[:5]


def narrow(source: Path, folder: Path, ids: list[int]) -> Path:
    """A checkpoint that says little else than these tokens: all other logits are 0."""
    shutil.copytree(source, folder)
    weights = load_file(folder / "model.safetensors")
    keep = torch.zeros(VOCABULARY, 1)
    keep[ids] = 1
    weights["lm_head.weight"] *= keep
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def sure(target: Path, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """A model of letters drafts for itself: every draft is accepted, steps emit K + 1 tokens."""
    folder = str(narrow(target, tmp_path_factory.mktemp("sure") / "letters", LETTERS))
    return build(folder, {"model": folder})


@pytest.fixture(scope="module")
def unstopped(sure: LLM) -> RequestOutput:
    """Letters of which the first twelve are all different where the tests cut them."""
    for first in range(26):
        output = complete(sure, [LETTERS[first]])
        if len({output.outputs[0].text[i : i + 2] for i in range(12)}) == 12:
            assert output.outputs[0].origins[:11] == ["plain", *([*["accepted"] * 4, "bonus"] * 2)]
            return output
    raise AssertionError("every letter leads into a repetition")


@pytest.fixture(scope="module")
def prompt(unstopped: RequestOutput) -> list[int]:
    return unstopped.prompt_token_ids


@pytest.fixture(scope="module")
def whole(unstopped: RequestOutput) -> CompletionOutput:
    return unstopped.outputs[0]


@pytest.fixture(scope="module")
def drafting(target: Path, draft: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, LLM]:
    """Drafters that are sometimes right, for a target of few tokens."""
    folder = tmp_path_factory.mktemp("drafting")
    few = str(narrow(target, folder / "target", ALPHABET))
    model = str(narrow(draft, folder / "draft", ALPHABET))
    return {
        "draft_model": build(few, {"model": model}),
        "ngram": build(few, {"method": "ngram", "prompt_lookup_min": 1}),
        "suffix": build(few, {"method": "suffix", "suffix_decoding_max_spec_factor": 4}),
    }


def build(target: str, speculation: dict[str, Any]) -> LLM:
    options = {"block_size": 4, "max_num_seqs": 4}
    return LLM(target, {"num_speculative_tokens": K, **speculation}, **options)


def complete(llm: LLM, prompt: Any = "abc", **params: Any) -> RequestOutput:
    given = {"temperature": 0, "max_tokens": 24, **params}
    (output,) = llm.generate([prompt], SamplingParams(**given))
    llm.engine.check_integrity()
    assert output.error is None
    return output


def said(sample: CompletionOutput) -> tuple[Any, ...]:
    return sample.token_ids, sample.text, sample.finish_reason, sample.stop_reason


# Where a block ends: one token of the prefill, then four accepted drafts and a bonus token.
INSIDE, ONTO_BONUS, ACROSS_STEPS = (2, 5), (4, 6), (5, 8)


@pytest.mark.parametrize("span", [INSIDE, ONTO_BONUS, ACROSS_STEPS])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_across_the_borders_of_a_block(
    sure: LLM, prompt: list[int], whole: CompletionOutput, span: tuple[int, int], include: bool
) -> None:
    start, end = span
    stop = whole.text[start:end]
    params = {"stop": ["no!", stop], "include_stop_str_in_output": include}
    done = complete(sure, prompt, **params).outputs[0]
    text = whole.text[: end if include else start]
    assert said(done) == (whole.token_ids[:end], text, "stop", stop)
    assert done.origins == whole.origins[:end]


@pytest.mark.parametrize("max_tokens", range(1, 13))
def test_max_tokens_anywhere_in_a_block(
    sure: LLM, prompt: list[int], whole: CompletionOutput, max_tokens: int
) -> None:
    output = complete(sure, prompt, max_tokens=max_tokens)
    assert output.outputs[0].token_ids == whole.token_ids[:max_tokens]
    assert output.outputs[0].finish_reason == "length"
    metrics = output.metrics
    assert metrics.num_steps + metrics.num_accepted_tokens == max_tokens
    assert Counter(output.outputs[0].origins)["accepted"] == metrics.num_accepted_tokens


EDITS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.4},
    "frequency": {"frequency_penalty": 0.7},
    "presence": {"presence_penalty": 1.1},
    "negative frequency": {"frequency_penalty": -0.4},
    "bad words": {"bad_words": ["ab", "c", "é", "bb"]},
    "bias": {"logit_bias": dict(zip(FEW, [4.0, 4.5, -50.0, 5.0, 5.0], strict=True))},
    "allowed": {"allowed_token_ids": LETTERS[:5]},
    "min_tokens": {"min_tokens": 7, "logit_bias": {END: 9.0}},
    "all": {
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.2,
        "allowed_token_ids": FEW,
        "bad_words": ["ab", "ba", "cc"],
        "logit_bias": {FEW[0]: 3.0, FEW[1]: 3.0},
    },
}


@pytest.mark.parametrize("method", ["draft_model", "ngram", "suffix"])
@pytest.mark.parametrize("edits", EDITS)
def test_edits_count_the_drafts_before_them(
    drafting: dict[str, LLM], method: str, edits: str
) -> None:
    llm, prompt = drafting[method], "abcabcabababc"
    params = {"max_tokens": 48}
    drafted = complete(llm, prompt, **{**params, **EDITS[edits]})
    plain = complete(llm, prompt, **{**params, **EDITS[edits], "num_speculative_tokens": 0})
    assert said(drafted.outputs[0]) == said(plain.outputs[0])
    unedited = complete(llm, prompt, num_speculative_tokens=0, **params)
    assert unedited.outputs[0].token_ids != plain.outputs[0].token_ids
    assert drafted.metrics.num_draft_tokens > 0


def test_logprobs_stop_with_the_tokens(
    sure: LLM, prompt: list[int], whole: CompletionOutput
) -> None:
    params = {"stop": whole.text[2:4], "logprobs": 0, "prompt_logprobs": 0}
    done = complete(sure, [*LETTERS[3:9], *prompt], **params).outputs[0]
    assert done.logprobs is not None
    assert [list(row) for row in done.logprobs] == [[token] for token in done.token_ids]
    assert {entry.rank for row in done.logprobs for entry in row.values()} == {1}, "it is greedy"


@pytest.mark.parametrize(("min_tokens", "stops"), [(0, True), (6, True), (7, False)])
def test_a_stop_string_counts_from_the_last_of_min_tokens_on(
    sure: LLM, prompt: list[int], whole: CompletionOutput, min_tokens: int, stops: bool
) -> None:
    params = {"stop": whole.text[4:6], "min_tokens": min_tokens, "max_tokens": 12}
    done = complete(sure, prompt, **params).outputs[0]
    assert done.token_ids == whole.token_ids[: 6 if stops else 12]
    assert done.text == whole.text[: 4 if stops else 12], "what came too early stays"


@pytest.mark.parametrize("method", ["draft_model", "ngram", "suffix"])
def test_samples_stream_in_order(drafting: dict[str, LLM], method: str) -> None:
    params = {
        "n": 3, "seed": 11, "temperature": 0.7, "max_tokens": 30, "stop": ["€"], "logprobs": 0,
        "allowed_token_ids": ids_of("aé€"),
    }  # fmt: skip
    llm = drafting[method]
    shown = ["", "", ""]
    for output in llm.stream("abc", params):
        assert [s.index for s in output.outputs] == [0, 1, 2]
        for sample in output.outputs:
            assert sample.text.startswith(shown[sample.index])
            shown[sample.index] = sample.text
            assert len(sample.token_ids) == len(sample.origins) == len(sample.logprobs or [])
    (whole,) = llm.generate(["abc"], params)
    assert shown == [s.text for s in whole.outputs]
    assert len({s.text for s in whole.outputs}) == 3


PIECES = st.text(st.sampled_from("abcé€"), min_size=1, max_size=3)


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """A request over few tokens, so that stops, repeats and broken characters are common."""
    bias = st.floats(-2, 2, width=16)
    max_tokens = draw(st.integers(1, 20))
    return {
        "max_tokens": max_tokens,
        "min_tokens": draw(st.one_of(st.just(0), st.integers(0, max_tokens))),
        "stop": draw(st.lists(PIECES, max_size=2)),
        "stop_token_ids": draw(st.lists(st.sampled_from(ALPHABET), max_size=1)),
        "include_stop_str_in_output": draw(st.booleans()),
        "ignore_eos": draw(st.booleans()),
        "allowed_token_ids": draw(st.sampled_from([None, ALPHABET])),
        "logit_bias": {token: draw(bias) for token in ALPHABET},
        "frequency_penalty": draw(st.sampled_from([0.0, 0.0, 1.0])),
    }


@pytest.mark.parametrize("method", ["draft_model", "ngram", "suffix"])
@settings(max_examples=150)
@given(prompt=st.lists(st.sampled_from(ALPHABET), min_size=1, max_size=6), params=requests(),
       k=st.integers(1, K))  # fmt: skip
def test_any_request_ends_as_it_does_without_speculation(
    drafting: dict[str, LLM], method: str, prompt: list[int], params: dict[str, Any], k: int
) -> None:
    llm = drafting[method]
    plain = complete(llm, prompt, num_speculative_tokens=0, **params).outputs[0]
    params["num_speculative_tokens"] = k
    shown = ""
    for output in llm.stream(prompt, {"temperature": 0, **params}):
        text = output.outputs[0].text
        assert text.startswith(shown), "what was shown is never taken back"
        shown = text
    assert said(output.outputs[0]) == said(plain)
    bans = params["min_tokens"] and (params["stop_token_ids"] or not params["ignore_eos"])
    if not bans:  # then nothing but the stops decides where the unstopped text ends
        endless = {**params, "stop": [], "stop_token_ids": [], "min_tokens": 0, "ignore_eos": True}
        tokens = complete(llm, prompt, **endless).outputs[0].token_ids
        assert said(plain) == naive(llm, prompt, tokens, SamplingParams(**params))


def naive(llm: LLM, prompt: list[int], tokens: list[int], params: SamplingParams) -> Any:
    """How a text that would be `tokens` ends, decoded from its beginning for every token."""
    context = decode(llm, prompt[-5:])

    def text_of(count: int) -> str:
        whole = decode(llm, prompt[-5:] + tokens[:count])
        same = next((i for i, (a, b) in enumerate(zip(context, whole, strict=False)) if a != b),
                    min(len(context), len(whole)))  # fmt: skip
        return whole[same:]

    stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else (END,))}
    complete_before = 0
    for count in range(1, len(tokens) + 1):
        token, text = tokens[count - 1], text_of(count)
        if token in stop_ids:
            kept = text if params.include_stop_str_in_output else text_of(count - 1)
            reason = token if token in params.stop_token_ids else None
            return tokens[:count], kept, "stop", reason
        if count >= params.min_tokens and not text.endswith("\ufffd"):
            found = sorted(
                (at, stop)
                for stop in params.stop or ()
                if (at := text.find(stop, max(0, complete_before - len(stop) + 1))) >= 0
            )
            if found:
                at, stop = found[0]
                end = at + len(stop) if params.include_stop_str_in_output else at
                return tokens[:count], text[:end], "stop", stop
        if not text.endswith("\ufffd"):
            complete_before = len(text)
    return tokens, text_of(len(tokens)), "length", None


def decode(llm: LLM, ids: list[int]) -> str:
    return str(llm.tokenizer.decode(ids, skip_special_tokens=True))  # type: ignore[union-attr]

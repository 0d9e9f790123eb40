"""What users give to a call: forms of prompts, what None means, and what a bad prompt does."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foretoken import LLM, SamplingParams
from foretoken.errors import CapacityError, CheckpointError, ConfigError, RequestError
from foretoken.progress import progress_bar
from tests.engine.doubles import double, failing
from tests.support.checkpoints import END, ids_of, save_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def llm(target: Path) -> LLM:
    return LLM(str(target), num_blocks=40)


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_ids_in_any_container(llm: LLM, kind: Any) -> None:
    ids = ids_of("abc")
    (expected,) = llm.generate("abc", GREEDY)
    for prompt in (kind(ids), {"prompt_token_ids": kind(ids)}, [np.int64(i) for i in ids]):
        (output,) = llm.generate(prompt, GREEDY)
        assert output.prompt_token_ids == ids
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    both = llm.generate([kind(ids), {"prompt": "abc"}], GREEDY)
    assert [output.prompt for output in both] == [None, "abc"]


def test_ids_may_bring_their_text(llm: LLM) -> None:
    (output,) = llm.generate({"prompt_token_ids": ids_of("ab"), "prompt": "shown"}, GREEDY)
    assert (output.prompt, output.prompt_token_ids) == ("shown", ids_of("ab"))


def test_a_bad_prompt_raises_before_anything_runs(llm: LLM) -> None:
    good = llm.generate(["abc"], GREEDY)[0].outputs[0].token_ids
    with double(llm.engine, "scheduler", schedule=failing(AssertionError("a step was made"))):
        for bad, error in (("", RequestError), ([999], RequestError), ([1] * 250, CapacityError)):
            with pytest.raises(error) as caught:
                llm.generate(["abc", "abd", bad], GREEDY)
            assert caught.value.__notes__ == ["Prompt 2 (from 0); on_error='return' runs the rest."]
            assert not llm.engine.has_work
    kept, bad_output = llm.generate(["abc", ""], GREEDY, on_error="return")
    assert kept.outputs[0].token_ids == good
    assert isinstance(bad_output.error, RequestError)
    (alone,) = llm.generate("", GREEDY, on_error="return")
    assert isinstance(alone.error, RequestError)
    with pytest.raises(RequestError, match="on_error"):
        llm.generate("abc", GREEDY, on_error="ignore")  # type: ignore[arg-type]


def test_no_bound_is_the_context_or_the_cache(llm: LLM, target: Path) -> None:
    unbounded = SamplingParams(max_tokens=None, ignore_eos=True)
    (sample,) = llm.generate("abc", unbounded)[0].outputs
    assert (len(sample.token_ids), sample.finish_reason) == (253, "length")
    (sample,) = LLM(str(target), num_blocks=4).generate("abc", unbounded)[0].outputs
    assert (len(sample.token_ids), sample.finish_reason) == (4 * 16 - 3, "length")
    with pytest.raises(CapacityError, match="shorter than the context"):
        llm.generate([1] * 256, unbounded)
    with pytest.raises(CapacityError, match="num_blocks"):
        LLM(str(target), num_blocks=4).generate([[1], [1] * 64], unbounded)
    with pytest.raises(RequestError, match="min_tokens"):
        llm.generate("abc", SamplingParams(max_tokens=None, min_tokens=254))


def test_parameters_are_copied_when_they_are_taken(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6)
    stream = llm.stream("abc", params)
    next(stream)
    params.max_tokens = 1
    assert len([*stream][-1].outputs[0].token_ids) == 6
    params.max_tokens = 0
    with pytest.raises(RequestError, match="max_tokens"):
        llm.generate("abc", params)


def test_special_tokens_are_text_if_asked_for(llm: LLM) -> None:
    params = {"logit_bias": {END: 100.0}, "max_tokens": 2, "ignore_eos": True, "temperature": 0}
    (plain,) = llm.generate("abc", params)[0].outputs
    (shown,) = llm.generate("abc", {**params, "skip_special_tokens": False})[0].outputs
    assert plain.token_ids == shown.token_ids == [END, END]
    assert (plain.text, shown.text) == ("", "<|end|><|end|>")


def test_a_stop_tokens_text_is_cut(llm: LLM) -> None:
    (whole,) = llm.generate("abc", GREEDY)[0].outputs
    stop = SamplingParams(temperature=0, max_tokens=8, stop_token_ids=[whole.token_ids[3]])
    (cut,) = llm.generate("abc", stop)[0].outputs
    assert cut.token_ids[-1] == whole.token_ids[3]
    assert cut.text == llm.tokenizer.decode(cut.token_ids[:-1])  # type: ignore[union-attr]


def with_defaults(folder: Path, **defaults: Any) -> Path:
    save_checkpoint(folder, seed=1)
    path = folder / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": END, **defaults}))
    return folder


def test_defaults_of_the_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = with_defaults(tmp_path, temperature=0.0, repetition_penalty=1.3, max_new_tokens=9)
    llm = LLM(str(folder), num_blocks=40)
    own = SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=9)
    assert llm.get_default_sampling_params() == own
    with caplog.at_level(logging.WARNING, logger="foretoken"):
        (given,) = llm.generate("abc", own)
        assert caplog.messages == []
        chosen = [llm.generate("abc")[0], llm.generate(["abc"])[0], [*llm.stream("abc")][-1]]
    assert [o.outputs[0].token_ids for o in chosen] == [given.outputs[0].token_ids] * 3
    (message,) = caplog.messages
    assert "temperature=0.0, max_tokens=9, repetition_penalty=1.3" in message
    (late,) = llm.generate([1] * 250)
    assert len(late.outputs[0].token_ids) <= 6, "as many as fit: nine were not asked for"
    plain = LLM(str(folder), num_blocks=40, generation_config="vllm")
    assert plain.get_default_sampling_params() == SamplingParams()


def test_defaults_that_are_out_of_bounds(tmp_path: Path) -> None:
    folder = with_defaults(tmp_path, top_p=1.5)
    with pytest.raises(CheckpointError, match=r"generation_config.json: `top_p` is 1.5"):
        LLM(str(folder), num_blocks=40)
    assert LLM(str(folder), num_blocks=40, generation_config="vllm").generate("abc")
    with pytest.raises(ConfigError, match="generation_config"):
        LLM(str(folder), generation_config="elsewhere")


def test_a_prompt_is_cut_to_what_leaves_room(llm: LLM) -> None:
    most = llm.engine.limits.max_model_len
    long = [i % 200 + 1 for i in range(most + 40)]
    for max_tokens, given, kept in ((9, -1, most - 9), (most - 1, -1, 1), (2, 7, 7)):
        asked = SamplingParams(max_tokens=max_tokens, truncate_prompt_tokens=given, temperature=0)
        (output,) = llm.generate(long, asked)
        assert output.prompt_token_ids == long[-kept:]
    with pytest.raises(CapacityError):
        llm.generate(long, SamplingParams(max_tokens=2))
    for max_tokens in (most, most + 5):
        asked = SamplingParams(max_tokens=max_tokens, truncate_prompt_tokens=-1)
        with pytest.raises(CapacityError, match=f"less than the context of {most} tokens"):
            llm.generate(long, asked)


def test_without_text_nothing_is_decoded(llm: LLM) -> None:
    asked = SamplingParams(temperature=0, max_tokens=6, logprobs=2, prompt_logprobs=1, trace=True)
    (told,) = llm.generate("abc", asked)
    asked.detokenize = False
    with double(llm.engine, "tokenizer", decode=failing(AssertionError("a text was made"))):
        (silent,) = llm.generate("abc", asked)
        *_, last = llm.stream("abc", asked)
    for output in (silent, last):
        (sample,), (expected,) = output.outputs, told.outputs
        assert (sample.text, sample.token_ids) == ("", expected.token_ids)
        rows = [*(sample.logprobs or ()), *(output.prompt_logprobs or ())[1:]]
        texts = [entry.decoded_token for row in rows for entry in (row or {}).values()]
        texts += [record.decoded_token for record in sample.trace or ()]
        assert set(texts) == {None}
    assert {record.decoded_token for record in told.outputs[0].trace or ()} != {None}


@pytest.mark.parametrize(
    ("given", "means"),
    [("half", "float16"), ("float", "float32"), (torch.bfloat16, "bfloat16"), ("auto", "auto")],
)
def test_names_of_dtypes(target: Path, given: Any, means: str) -> None:
    llm = LLM(str(target), dtype=given, num_blocks=np.int64(20), seed=None)
    assert (llm.config.dtype, llm.config.num_blocks, llm.config.seed) == (means, 20, 0)
    dtype = torch.float32 if means == "auto" else getattr(torch, means)
    assert llm.engine.runner.model.embedding.values.dtype is dtype
    stock = LLM(str(target), dtype=given, num_blocks=20, backend="torch")
    assert stock.engine.runner.model.dtype is dtype


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "total", "patience", "wanted", "shown"),
    [
        (Terminal, 3, 0.0, True, True),
        (Terminal, 3, 0.0, False, False),
        (Terminal, 3, 60.0, True, False),
        (Terminal, 1, 0.0, True, False),
        (io.StringIO, 3, 0.0, True, False),
    ],
)
def test_the_bar_is_for_terminals_and_long_calls(
    monkeypatch: pytest.MonkeyPatch,
    stream: type[io.StringIO],
    total: int,
    patience: float,
    wanted: bool,
    shown: bool,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = stream()
    with progress_bar(lambda: 2, total, wanted, terminal, patience) as update:
        update()
        update()
    assert ("2/3" in terminal.getvalue()) == shown


def test_bad_words_of_several_prompts_are_encoded_once(llm: LLM) -> None:
    encoded = []

    def watched(encode: Any, text: str, **options: Any) -> Any:
        encoded.append(text)
        return encode(text, **options)

    with double(llm.engine, "tokenizer", encode=watched):
        for words in (["ab", "c"], ["c"]):
            params = SamplingParams(max_tokens=2, bad_words=words)
            llm.generate(["abc", "abd", "x"], params)
            llm.generate("abc", SamplingParams(max_tokens=2))
            llm.generate("abc", params)
    assert [sum(text.strip() == word for text in encoded) for word in ("ab", "c")] == [2, 4]

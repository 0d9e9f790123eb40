"""A step's messages, written as bytes and read again: equal to the bit."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

import numpy as np
import pytest

from foretoken.ops import Rule
from foretoken.sampling.edits import PackedEdits, pack_edits
from foretoken.sampling.grammar import Grammar
from foretoken.sampling.history import EditHistory
from foretoken.sampling.params import SamplingParams
from foretoken.slots.step import NONE, Admission, StepInput, StepPlan, decode, encode

NO_STATE: Any = None
GRAMMAR = Grammar({"regex": 'a+"é\\d'}, NO_STATE, NO_STATE, num_tokens=9)
PARAMS = [
    SamplingParams(),
    SamplingParams(
        temperature=0.1 + 0.2, top_p=1 / 3, top_k=7, min_p=5e-324, max_tokens=None, min_tokens=3,
        n=2, seed=2**64 - 1, stop=["\n", "é\u2028\0"], stop_token_ids=[4, 2**31],
        include_stop_str_in_output=True, skip_special_tokens=False, ignore_eos=True, logprobs=3,
        prompt_logprobs=0, presence_penalty=-0.1, frequency_penalty=1.7, repetition_penalty=1.1,
        logit_bias={3: 1, 0: -100.0, 2**40: 1 / 3}, bad_words=["x", " y"], allowed_token_ids=[5, 1],
        structured_outputs=GRAMMAR, num_speculative_tokens="auto", drafter="hybrid",
        rejection_sample_method="block", prediction=[7, 8, 7], truncate_prompt_tokens=5,
        cache_salt="salt", priority=-(2**63), trace=True,
    ),
    SamplingParams(detokenize=False, num_speculative_tokens=2, logit_bias={}),
]  # fmt: skip
PLAN = StepPlan(
    released=[5, 2],
    admissions=[
        Admission(i, 2**64 - 1 - i, params, rule, [9, 2**31 - 1, 0], 2, 40, i, drafter=i)
        for i, (params, rule) in enumerate(zip(PARAMS, Rule, strict=False))
    ],
    new_blocks=[(0, 0, [7, 8]), (1, 3, [2**40])],
    fresh_blocks=[7],
    step=StepInput(
        [0, 1], [3, 1], [0, 4], [True, False], [NONE, 20], [0, NONE], [False, True]
    ),
    timed=True,
)  # fmt: skip


def compiled(asked: Any) -> Grammar | None:
    assert asked in (None, GRAMMAR.source)
    return GRAMMAR if asked else None


def read_again(message: Any) -> Any:
    return decode(encode(message), compiled)


def test_a_plan_is_read_as_it_was_written() -> None:
    """Whatever its requests ask for; of an empty `logit_bias` there is nothing to say."""
    read = read_again(PLAN)
    last = PLAN.admissions[2]
    bare = last._replace(params=SamplingParams(detokenize=False, num_speculative_tokens=2))
    expected = PLAN._replace(admissions=[*PLAN.admissions[:2], bare])
    assert read._replace(new_blocks=[tuple(entry) for entry in read.new_blocks]) == expected
    assert [type(admission.rule) for admission in read.admissions] == [Rule] * 3
    assert read.admissions[1].params.grammar is GRAMMAR
    assert list(read.admissions[1].params.logit_bias) == [3, 0, 2**40]
    assert encode(read) == encode(expected)


def test_a_plan_that_brings_nothing() -> None:
    read = read_again(StepPlan())
    assert encode(read) == encode(StepPlan())
    assert not any(read.step)


def test_no_parameter_is_left_out_here() -> None:
    for field in fields(SamplingParams):
        assert field.default is not MISSING
        assert any(getattr(params, field.name) != field.default for params in PARAMS), field.name


def check_arrays(edits: PackedEdits) -> None:
    for name, mine, theirs in zip(edits._fields, edits, read_again(edits), strict=True):
        if mine is None:
            assert theirs is None
            continue
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape), name
        assert mine.tobytes() == theirs.tobytes(), name
        assert theirs.flags.writeable, "torch takes no other"


@pytest.mark.parametrize("masked", [False, True])
def test_edits_are_read_as_they_were_written(masked: bool) -> None:
    params = [
        SamplingParams(bad_words=["x"], repetition_penalty=1.1, logit_bias={3: 1 / 3}),
        SamplingParams(allowed_token_ids=[31, 32, 4]) if masked else SamplingParams(min_tokens=2),
    ]
    histories = {
        d: EditHistory(one, [3, 5], stop_ids=[0], bad_word_ids=[[7]])
        for d, one in enumerate(params)
    }
    edits, faults = pack_edits(histories, {0: [3, 9], 1: []}, 40)
    assert edits is not None
    assert not faults
    assert (edits.mask_RW is not None) == masked
    assert np.isneginf(edits.bias_M).any()
    check_arrays(edits)


def test_any_bits_are_kept() -> None:
    numbers = np.array([-np.inf, -0.0, np.nan, 1e-45, 0.1], dtype=np.float32)
    rows = np.arange(16).reshape(4, 4)[:, ::2]
    nothing = numbers[:0]
    check_arrays(PackedEdits(rows, None, np.arange(5), numbers, -numbers, numbers[::-1]))
    mask = np.array([[-1, 2**31 - 1]], dtype=np.int32)
    check_arrays(PackedEdits(rows, mask, np.arange(0), nothing, nothing, nothing))

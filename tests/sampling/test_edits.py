"""Logit edits see the drafts before their row, and nothing after it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretoken.ops import Edits
from foretoken.sampling.edits import pack_edits
from foretoken.sampling.history import EditHistory, HistoryRows
from foretoken.sampling.params import SamplingParams

VOCABULARY = 40
BAN = -math.inf


def history_of(
    params: SamplingParams, prompt: list[int], output: list[int], **kwargs: Any
) -> EditHistory:
    history = EditHistory(params, prompt, **kwargs)
    for token in output:
        history.append([token])
    return history


def edits_of_batch(
    batch: Sequence[tuple[EditHistory | None, list[int]]], vocab_size: int = VOCABULARY
) -> tuple[Edits | None, dict[int, Exception]]:
    """The packed edits of requests, some with a history, and faults."""
    histories = {d: history for d, (history, _) in enumerate(batch) if history}
    packed, faults = pack_edits(histories, {d: batch[d][1] for d in histories}, vocab_size)
    num_D = torch.tensor([len(drafts) for _, drafts in batch])
    return packed and packed.unpack(num_D, int(num_D.max())), faults


def edits_of(history: EditHistory, drafts: list[int], vocab_size: int = VOCABULARY) -> Edits:
    edits, faults = edits_of_batch([(history, drafts)], vocab_size)
    assert edits is not None
    assert not faults
    return edits


def changes(edits: Edits) -> list[dict[int, tuple[float, float, float]]]:
    """Per row, token -> (bias, repetition, subtract) of the entries that change something."""
    start, token = edits.start_N1.tolist(), edits.token_M.tolist()
    columns = (edits.bias_M, edits.repetition_M, edits.subtract_M)
    values = list(zip(*(column.tolist() for column in columns), strict=True))
    assert start[0] == 0
    assert start[-1] == len(token) == len(values)
    rows = []
    for first, end in pairwise(start):
        assert token[first:end] == sorted(set(token[first:end])), "tokens rise within a row"
        entries = zip(token[first:end], values[first:end], strict=True)
        rows.append({t: v for t, v in entries if v != (0.0, 1.0, 0.0)})
    return rows


def test_requests_without_edits_build_none() -> None:
    assert edits_of_batch([(None, [5]), (None, [])]) == (None, {})


def test_rejected_drafts_leave_no_trace() -> None:
    params = SamplingParams(frequency_penalty=0.5)
    history = history_of(params, [], [4])
    edits_of(history, [5, 6, 4])
    history.append([7])
    assert changes(edits_of(history, [])) == [{4: (0, 1, 0.5), 7: (0, 1, 0.5)}]


def test_min_tokens_holds_back_stops_until_enough_tokens() -> None:
    params = SamplingParams(min_tokens=3)
    history = history_of(params, [1], [2], stop_ids=[9, 0])
    ban = {0: (BAN, 1.0, 0.0), 9: (BAN, 1.0, 0.0)}
    assert changes(edits_of(history, [3, 3, 3])) == [ban, ban, {}, {}]
    history.append([3, 3])
    nothing = edits_of_batch([(history, [3])])
    assert nothing == (None, {}), "nothing is left to edit"


def bits(edits: Edits, row: int) -> set[int] | None:
    if edits.mask_RW is None or edits.mask_N is None:
        return None
    mask = int(edits.mask_N[row])
    if mask < 0:
        return None
    assert edits.mask_RW.dtype is torch.int32
    words = edits.mask_RW[mask].tolist()
    return {v for v in range(32 * len(words)) if words[v // 32] >> (v % 32) & 1}


@pytest.mark.parametrize("vocab_size", [20, 32, 33, 64, 100])
def test_allowed_tokens_are_a_mask_of_bits(vocab_size: int) -> None:
    allowed = [0, 3, 4, 19, 31, 32, 63, 99]
    history = history_of(SamplingParams(allowed_token_ids=allowed), [1], [])
    edits = edits_of(history, [3], vocab_size)
    assert edits.mask_RW is not None
    assert edits.mask_RW.shape == (1, -(-vocab_size // 32))
    expected = {token for token in allowed if token < vocab_size}
    assert [bits(edits, row) for row in range(2)] == [expected, expected]
    assert changes(edits) == [{}, {}]


def test_each_request_has_its_own_rows_entries_and_mask() -> None:
    biased = history_of(SamplingParams(logit_bias={3: 1.5, 90: 2.0}), [1], [])
    masked = history_of(SamplingParams(allowed_token_ids=[7]), [1], [])
    other = history_of(SamplingParams(allowed_token_ids=[8], logit_bias={8: 1.0}), [1], [])
    batch = [(biased, [2]), (None, [1, 1]), (masked, []), (other, [8])]
    edits, _ = edits_of_batch(batch)
    assert edits is not None
    three, eight = {3: (1.5, 1, 0)}, {8: (1.0, 1, 0)}
    assert changes(edits) == [three, three, {}, {}, {}, {}, eight, eight]
    masks = [bits(edits, row) for row in range(8)]
    assert masks == [None, None, None, None, None, {7}, {8}, {8}]


def test_placeholders_and_ids_past_the_vocabulary_are_left_out() -> None:
    params = SamplingParams(frequency_penalty=1.0, logit_bias={39: 1.0, 40: 1.0})
    edits = edits_of(history_of(params, [1], [2]), [-1, 3])
    tail = {2: (0, 1, 1), 39: (1.0, 1, 0)}
    assert changes(edits) == [tail, tail, {**tail, 3: (0, 1, 1)}]


class Unreadable(EditHistory):
    def rows(self, drafts: Sequence[int], vocab_size: int) -> HistoryRows:
        raise ZeroDivisionError("injected")


def test_a_history_that_cannot_be_read_names_its_request_and_edits_none_of_its_rows() -> None:
    good = history_of(SamplingParams(logit_bias={3: 1.5}), [1], [])
    bad = Unreadable(SamplingParams(frequency_penalty=1.0, allowed_token_ids=[3]), [1])
    batch = [(good, []), (None, []), (bad, [2]), (good, [4])]
    edits, faults = edits_of_batch(batch)
    assert [(index, type(error)) for index, error in faults.items()] == [(2, ZeroDivisionError)]
    assert edits is not None
    three = {3: (1.5, 1, 0)}
    assert changes(edits) == [three, {}, {}, {}, three, three]
    assert [bits(edits, row) for row in range(6)] == [None] * 6
    assert edits_of_batch([(bad, [])])[0] is None


TOKENS = st.lists(st.integers(0, 11), max_size=8)


@given(
    prompt=TOKENS,
    output=TOKENS,
    drafts=st.lists(st.integers(-1, 11), max_size=4),
    bias=st.dictionaries(st.integers(0, 11), st.sampled_from([-2.0, 0.5, 3.0]), max_size=3),
    strengths=st.tuples(
        *[st.sampled_from([1.0, 0.5, 2.0])] + [st.sampled_from([0.0, 0.75, -0.5])] * 2
    ),
    min_tokens=st.integers(0, 12),
    words=st.lists(st.lists(st.integers(0, 11), min_size=1, max_size=3), max_size=3),
)
def test_equals_the_definition_as_a_sequence(
    prompt: list[int],
    output: list[int],
    drafts: list[int],
    bias: dict[int, float],
    strengths: tuple[float, float, float],
    min_tokens: int,
    words: list[list[int]],
) -> None:
    """Entry by entry, in the order of the definition."""
    repetition, frequency, presence = strengths
    params = SamplingParams(
        max_tokens=16, min_tokens=min_tokens, logit_bias=bias, repetition_penalty=repetition,
        frequency_penalty=frequency, presence_penalty=presence,
    )  # fmt: skip
    history = history_of(params, prompt, output, stop_ids=[0, 5], bad_word_ids=words)
    edits, faults = edits_of_batch([(history, drafts)])
    assert not faults
    found = changes(edits) if edits is not None else [{}] * (len(drafts) + 1)
    for j, row in enumerate(found):
        before = output + drafts[:j]
        if -1 in before:
            continue  # never accepted: nothing is decided there
        for token in range(12):
            added = bias.get(token, 0.0)
            if len(before) < min_tokens and token in (0, 5):
                added = BAN
            if any(w[-1] == token and before[len(before) - len(w) + 1 :] == w[:-1]
                   for w in words if len(w) <= len(before) + 1):  # fmt: skip
                added = BAN
            count = before.count(token)
            divided = repetition if count or token in prompt else 1.0
            expected = (added, divided, frequency * count + presence * (count > 0))
            assert row.get(token, (0.0, 1.0, 0.0)) == expected

"""Logit edits see the drafts before their row, and nothing after it."""

from __future__ import annotations

import torch

from foretoken.sampling.edits import build_edits
from foretoken.sampling.params import SamplingParams
from foretoken.sampling.slots import SlotTable

CPU = torch.device("cpu")


def table_with(params: SamplingParams, prompt: list[int], output: list[int], **kwargs) -> SlotTable:
    table = SlotTable(4, CPU)
    table.admit(2, 11, params, prompt, **kwargs)
    table.append(2, output)
    return table


def rows_of(row: torch.Tensor, *columns: torch.Tensor) -> set[tuple[float, ...]]:
    return set(zip(row.tolist(), *(c.tolist() for c in columns), strict=True))


def test_requests_without_edits_build_none() -> None:
    table = table_with(SamplingParams(), [1], [2])
    assert build_edits([(0, table.histories.get(2), [5])], 10, CPU) is None


def test_penalties_count_the_drafts_before_the_row() -> None:
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=0.5)
    table = table_with(params, prompt=[1, 4], output=[4, 5])
    edits = build_edits([(3, table.histories[2], [5, 6])], 10, CPU)
    assert edits is not None
    got = rows_of(edits.penalty_row_M, edits.penalty_token_M, edits.penalty_count_M)
    assert got == {
        *[(3, 4, 1), (3, 5, 1), (3, 1, 0)],
        *[(4, 4, 1), (4, 5, 2), (4, 1, 0)],
        *[(5, 4, 1), (5, 5, 2), (5, 6, 1), (5, 1, 0)],
    }


def test_bad_words_are_banned_exactly_where_their_beginning_stands() -> None:
    params = SamplingParams(bad_words=["x"])
    words = [(7,), (5, 8), (5, 6, 9), (4, 5, 6, 6)]
    table = table_with(params, [5, 5], [4], bad_word_ids=words)
    edits = build_edits([(0, table.histories[2], [5, 6])], 10, CPU)
    assert edits is not None
    assert rows_of(edits.ban_late_row_M, edits.ban_late_token_M) == {
        *[(0, 7)],
        *[(1, 7), (1, 8)],
        *[(2, 7), (2, 9), (2, 6)],
    }


def test_min_tokens_holds_back_stops_until_enough_tokens() -> None:
    params = SamplingParams(min_tokens=3)
    table = table_with(params, [1], [2], stop_ids=[0, 9])
    edits = build_edits([(0, table.histories[2], [3, 3, 3])], 10, CPU)
    assert edits is not None
    assert rows_of(edits.ban_early_row_M, edits.ban_early_token_M) == {
        *[(0, 0), (0, 9), (1, 0), (1, 9)],
    }


def test_bias_and_allowed_tokens_cover_every_row_and_stay_in_the_vocabulary() -> None:
    params = SamplingParams(logit_bias={3: 1.5, 12: 1.0}, allowed_token_ids=[3, 4])
    table = table_with(params, [1], [])
    edits = build_edits([(1, table.histories[2], [3])], 10, CPU)
    assert edits is not None
    assert rows_of(edits.bias_row_M, edits.bias_token_M, edits.bias_value_M) == {
        (1, 3, 1.5),
        (2, 3, 1.5),
    }
    assert rows_of(edits.allow_row_M, edits.allow_token_M) == {(1, 3), (1, 4), (2, 3), (2, 4)}


def test_a_released_slot_forgets() -> None:
    table = table_with(SamplingParams(min_tokens=2), [1], [2])
    table.release(2)
    assert not table.histories
    table.admit(2, 1, SamplingParams(), [1])
    assert not table.histories

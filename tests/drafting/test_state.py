"""A proposal's q follows its request by slot, whatever the order of the next batch."""

from __future__ import annotations

import pytest
import torch

from foretoken.drafting.state import DraftState
from foretoken.ops import DraftBlock

CPU = torch.device("cpu")


def block_of(drafts: list[list[int]], real: list[bool]) -> DraftBlock:
    widest = max(len(d) for d in drafts)
    return DraftBlock(
        token_BK=torch.tensor([d + [-1] * (widest - len(d)) for d in drafts]),
        num_B=torch.tensor([len(d) for d in drafts]),
        logits_SKV=torch.randn(8, 3, 5),
        real_q_B=torch.tensor(real),
    )


def test_cached_c_a_b_is_reordered_to_batch_a_b_c() -> None:
    state = DraftState(CPU)
    a, b, c = 4, 0, 6
    block = block_of([[1, 2, 3], [4, 4], [2]], [True, False, True])
    assert state.put([c, a, b], block) == [[1, 2, 3], [4, 4], [2]]
    taken = state.take([a, b, c], [[4, 4], [], [1]])
    assert taken.num_B.tolist() == [2, 0, 1]
    assert taken.token_BK.tolist() == [[4, 4], [-1, -1], [1, -1]]
    assert taken.real_q_B.tolist() == [False, False, True]
    assert taken.logits_SKV is block.logits_SKV


def test_a_missing_q_falls_back_to_one_hot_alone_with_a_warning() -> None:
    state = DraftState(CPU)
    state.put([1], block_of([[3]], [True]))
    with pytest.warns(RuntimeWarning, match="slot 2 has drafts but no q"):
        taken = state.take([1, 2], [[3], [4]])
    assert taken.real_q_B.tolist() == [True, False]


def test_each_round_replaces_the_last_and_an_ended_request_is_forgotten() -> None:
    state = DraftState(CPU)
    state.put([1, 2], block_of([[3], [3]], [True, True]))
    state.put([2], block_of([[4]], [True]))
    with pytest.warns(RuntimeWarning, match="slot 1"):
        assert state.take([1], [[3]]).real_q_B.tolist() == [False]
    state.drop(2)
    with pytest.warns(RuntimeWarning, match="slot 2"):
        state.take([2], [[4]])


def test_no_drafts_need_no_q() -> None:
    taken = DraftState(CPU).take([5, 6], [[], []])
    assert taken.token_BK.shape == (2, 0)
    assert taken.logits_SKV is None

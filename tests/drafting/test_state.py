"""A proposal's q follows its request by slot, whatever the order of the next batch."""

from __future__ import annotations

import pytest
import torch
from foretoken.drafting.state import DraftState

from foretoken.ops import DraftBlock, DraftCache

CPU = torch.device("cpu")


def block_of(drafts: list[list[int]], real: list[bool]) -> DraftBlock:
    widest = max(len(d) for d in drafts)
    return DraftBlock(
        token_BK=torch.tensor([d + [-1] * (widest - len(d)) for d in drafts]),
        num_B=torch.tensor([len(d) for d in drafts]),
        cache=DraftCache.empty(8, 3, 5, torch.bfloat16, CPU),
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
    assert taken.cache is block.cache


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
    assert taken.cache is None


def test_the_batch_that_was_proposed_for_gets_the_block_itself_and_only_that() -> None:
    state = DraftState(CPU)
    block = block_of([[1, 2], [4]], [True, False])
    drafts = state.put([5, 3], block)
    assert state.take([5, 3], drafts) is block
    for slots, others in (([3, 5], drafts[::-1]), ([5, 3], [[1], [4]]), ([5], drafts[:1])):
        assert state.take(slots, others) is not block
    drafts[0].pop()  # the caller's own copy
    assert state.take([5, 3], [[1, 2], [4]]) is block
    state.drop(3)
    with pytest.warns(RuntimeWarning, match="slot 3"):
        state.take([5, 3], [[1, 2], [4]])

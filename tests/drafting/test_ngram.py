"""Prompt lookup against a naive search."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from foretoken.config import EngineConfig, SpeculativeConfig
from foretoken.drafting.base import DrafterSetup
from foretoken.drafting.ngram import NGram
from foretoken.ops import get_backend, unavailable
from tests.support.cases import make_params
from tests.support.slots import GivenSlots

CPU = torch.device("cpu")


BACKEND = get_backend("torch" if unavailable("native") else "native")


def make_drafter(shortest: int, longest: int) -> NGram:
    speculation = SpeculativeConfig(
        method="ngram", prompt_lookup_min=shortest, prompt_lookup_max=longest
    )
    config = EngineConfig(model="none", speculative_config=speculation)
    drafter = NGram(DrafterSetup(config, speculation, BACKEND, CPU, 400, 4096))
    sizes = {"max_tokens": 60, "max_drafts": 6, "blocks": 0}
    drafter.allocate(GivenSlots(make_params(4), **sizes, backend=BACKEND), 0)
    return drafter


def propose(drafter: NGram, tokens: list[int], k: int, slot: int = 0) -> list[int]:
    drafter.slots.put(slot, tokens)  # type: ignore[attr-defined]
    block = drafter.propose(drafter.slots.asking([slot], [k]))
    assert block.cache is None
    assert not block.real_q_B.any()
    return block.token_BK[0, : int(block.num_B[0])].tolist()


def naive(tokens: list[int], k: int, shortest: int, longest: int) -> list[int]:
    for size in range(longest, shortest - 1, -1):
        found = [
            tokens[start + size : start + size + k]
            for start in range(len(tokens) - size - 1, -1, -1)
            if tokens[start : start + size] == tokens[len(tokens) - size :]
        ]
        if found:
            return next((f for f in found if len(f) == k), found[-1])
    return []


@given(
    tokens=st.lists(st.sampled_from([0, 1, 256, 65536]), min_size=1, max_size=40),
    grown=st.lists(st.sampled_from([0, 1, 256]), max_size=10),
    k=st.integers(1, 6),
    shortest=st.integers(1, 3),
    more=st.integers(0, 3),
)
def test_equals_a_naive_search_also_as_the_text_grows(
    tokens: list[int], grown: list[int], k: int, shortest: int, more: int
) -> None:
    """Some ids overlap as bytes: 1 before 256 contains the words of 65536 at an odd offset."""
    drafter = make_drafter(shortest, shortest + more)
    for end in range(len(tokens), len(tokens) + len(grown) + 1):
        text = (tokens + grown)[:end]
        assert propose(drafter, text, k) == naive(text, k, shortest, shortest + more)


def test_each_request_is_looked_up_in_its_own_slot_in_any_order() -> None:
    drafter = make_drafter(1, 2)
    texts = {3: [5, 6, 5], 0: [7, 8, 9], 2: [1, 1], 1: [4, 3, 4]}
    for slot, text in texts.items():
        drafter.slots.put(slot, text)  # type: ignore[attr-defined]
    block = drafter.propose(drafter.slots.asking([*texts], [2, 2, 1, 0]))
    assert block.token_BK.tolist() == [[6, 5], [-1, -1], [1, -1], [-1, -1]]
    assert block.num_B.tolist() == [2, 0, 1, 0]
    assert list(drafter.held_slots()) == []


def test_a_slot_that_changes_hands_is_looked_up_afresh() -> None:
    drafter = make_drafter(1, 2)
    assert propose(drafter, [5, 6, 5], 2) == [6, 5]
    drafter.release(0)
    assert propose(drafter, [7, 8, 9], 2) == []

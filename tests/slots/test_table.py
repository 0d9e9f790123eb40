"""The slot table: what a request brings, what a step adds, and what is left when it ends."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from foretoken.slots.parameters import SlotRequest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from foretoken.errors import IntegrityError
from foretoken.ops import Rule
from foretoken.sampling.params import SamplingParams
from foretoken.slots.step import Outcome
from foretoken.slots.table import NO_TOKEN, SlotTable

CPU = torch.device("cpu")


def make_table(num_slots: int = 3, max_tokens: int = 12, num_drafts: int = 3) -> SlotTable:
    return SlotTable(num_slots, CPU, max_tokens=max_tokens, max_drafts=num_drafts, blocks=4)


def admit(
    table: SlotTable, slot: int, prompt: Iterable[int] = (1,), output: Iterable[int] = (),
    *, key: int = 1, rule: Rule = Rule.STANDARD, limit: int = 12, num_computed: int = 0,
    **params: Any,
) -> None:  # fmt: skip
    asked = SamplingParams(**params)
    known = ([*prompt], [*output])
    table.admit(slot, SlotRequest(key, asked, rule, known[0], limit, known[1], num_computed))


def test_a_request_is_written_into_its_slot() -> None:
    table = make_table()
    params = {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.25}
    admit(table, 1, [4, 5], [6], key=2**64 - 1, rule=Rule.COUPLED, num_computed=2, **params)
    written = table.params
    assert written.key_S.tolist() == [0, -1, 0]
    assert written.temperature_S.tolist() == [1.0, 0.5, 1.0]
    assert written.top_k_S.tolist() == [0, 7, 0]
    assert written.min_p_S.tolist() == [0, 0.25, 0]
    assert written.rule_S.tolist() == [Rule.STANDARD, Rule.COUPLED, Rule.STANDARD]
    assert (table.prompt_S[1], table.length_S[1]) == (2, 3)
    assert (table.computed_S[1], table.limit_S[1]) == (2, 12)
    assert table.token_SL[1].tolist() == [4, 5, 6, *[NO_TOKEN] * 12]
    assert (table.token_SL[[0, 2]] == NO_TOKEN).all()
    assert table.requests[1].params.temperature == 0.5


def test_filters_are_promised_off_only_while_every_used_slot_has_none() -> None:
    table = make_table()
    assert not table.params.has_filters
    admit(table, 0, top_k=-1, top_p=1.0)
    assert not table.params.has_filters
    for slot, params in enumerate(({"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.1})):
        admit(table, slot, **params)
        assert table.params.has_filters
        table.release(slot)
        assert not table.params.has_filters
    admit(table, 0, top_k=5)
    admit(table, 1, top_k=5)
    table.release(0)
    assert table.params.has_filters
    admit(table, 1)  # another request, the same tensors
    assert not table.params.has_filters
    assert table.params.top_k_S.tolist()[1] == 0


def test_the_promised_rules_are_those_of_the_slots_in_use() -> None:
    table = make_table()
    assert table.params.rules == frozenset()
    admit(table, 0, rule=Rule.BLOCK)
    admit(table, 2)
    promised = table.params
    assert promised.rules == {Rule.BLOCK, Rule.STANDARD}
    assert table.params is promised  # nothing came or went
    table.release(0)
    assert table.params.rules == {Rule.STANDARD}
    admit(table, 2, rule=Rule.COUPLED)
    assert table.params.rules == {Rule.COUPLED}
    assert table.params.rule_S is promised.rule_S


def test_a_released_slot_forgets() -> None:
    table = make_table()
    admit(table, 2, [3], [4], key=11, min_tokens=2)
    assert table.histories[2].output_ids == [4]
    table.advance(2, Outcome([5]))
    assert table.histories[2].output_ids == [4, 5]
    table.release(2)
    table.check_integrity(set())
    assert not table.histories
    admit(table, 2, [7])
    assert not table.histories
    assert table.token_SL[2].tolist() == [7, *[NO_TOKEN] * 14]


def test_a_decision_keeps_accepted_drafts_and_takes_the_others_back() -> None:
    table = make_table()
    for slot in range(3):
        admit(table, slot, [9, slot], num_computed=1)
    table.put_drafts([2, 0], np.array([[5, 6, 7], [8, NO_TOKEN, NO_TOKEN]]))
    assert table.known(2, 0, 5) == [9, 2, 5, 6, 7]
    assert table.known(0, 1, 2) == [0, 8]
    with pytest.raises(IntegrityError, match=r"slot 0: a placeholder in tokens 1 \+ 3"):
        table.known(0, 1, 3)
    for slot in (2, 0):
        table.computed_S[slot] += 1
    table.advance(2, Outcome([5, 4], num_drafts=3, num_accepted=1))
    table.advance(0, Outcome([8, 1], num_drafts=1, num_accepted=1))
    assert table.token_SL[2].tolist() == [9, 2, 5, 4, *[NO_TOKEN] * 11]
    assert table.token_SL[0].tolist() == [9, 0, 8, 1, *[NO_TOKEN] * 11]
    assert table.token_SL[1].tolist() == [9, 1, *[NO_TOKEN] * 13]
    assert table.length_S == [4, 2, 4]
    assert table.computed_S == [3, 1, 3], "the token that was drawn last is not computed yet"


def test_a_decision_without_a_token_after_its_drafts_leaves_those_it_accepted() -> None:
    table = make_table()
    admit(table, 1, [9])
    table.put_drafts([1], np.array([[5, 6]]))
    table.advance(1, Outcome([5], num_drafts=2, num_accepted=1, is_finite=False))
    assert table.token_SL[1].tolist() == [9, 5, *[NO_TOKEN] * 13]
    assert table.length_S[1] == 2


def test_drafts_leave_room_for_the_token_after_them_and_none_follow_a_stop() -> None:
    table = make_table()
    admit(table, 0, [1] * 4, limit=8)
    assert [table.num_drafts(0, most) for most in (0, 2, 3, 5)] == [0, 2, 3, 3]
    admit(table, 1, [1] * 7, limit=8)
    assert table.num_drafts(1, 5) == 0
    assert table.unfinished([1, 0]) == [0, 1]
    table.advance(1, Outcome([3]))
    assert table.unfinished([1, 0]) == [1]
    table.stop(0)
    assert table.unfinished([1, 0]) == []
    assert table.num_drafts(0, 5) == 0


def test_what_follows_in_a_prompt() -> None:
    table = make_table()
    admit(table, 0, [4, 5, 6, 7], [8], num_computed=1)
    assert table.following(0, 1, 2) == [6, 7]
    assert table.following(0, 1, 3) == [6, 7], "the output is no part of it"
    assert table.following(0, 3, 1) == []


def test_blocks_are_written_in_order_the_last_word_counts() -> None:
    table = make_table()
    table.write_blocks([(1, 0, [7, 8]), (2, 2, [5]), (1, 1, [9, 3])])
    assert table.block_SL.tolist() == [[0] * 4, [7, 9, 3, 0], [0, 0, 5, 0]]


class Keeper:
    """Keeps something by slot, and may fail to let go."""

    def __init__(self) -> None:
        self.kept: set[int] = set()

    def release(self, slot: int) -> None:
        self.kept.discard(slot)

    def held_slots(self) -> Iterable[int]:
        return self.kept


def test_whoever_registers_is_released_and_checked() -> None:
    table, keeper, other = make_table(), Keeper(), Keeper()
    table.register("probabilities", keeper)
    table.register("drafts", other)
    admit(table, 0)
    keeper.kept = other.kept = {0, 1}
    with pytest.raises(IntegrityError, match=r"probabilities of slots that no request has: \[1\]"):
        table.check_integrity({0})
    table.release(1)
    table.check_integrity({0})
    admit(table, 0)  # whoever was there before is forgotten by all
    assert not keeper.kept
    keeper.kept = {2}
    with pytest.raises(IntegrityError, match=r"probabilities of slots that no request has: \[2\]"):
        table.check_integrity({0})


@pytest.mark.parametrize(
    ("params", "name"), [({}, "parameters"), ({"top_k": 3}, "parameters|filters"),
                         ({"logit_bias": {1: 1.0}}, "parameters|histories")],
)  # fmt: skip
def test_what_the_table_keeps_for_nobody_is_found(params: dict[str, Any], name: str) -> None:
    table = make_table()
    admit(table, 1, **params)
    with pytest.raises(IntegrityError, match=rf"({name}) of slots that no request has: \[1\]"):
        table.check_integrity({0, 2})
    table.release(1)
    table.check_integrity(set())


class TableMachine(RuleBasedStateMachine):
    """Requests as lists of tokens beside the table that holds them."""

    @initialize()
    def start(self) -> None:
        self.table = make_table(4, max_tokens=30)
        self.texts: dict[int, list[int]] = {}
        self.keeper = Keeper()
        self.table.register("keeper", self.keeper)

    @rule(
        slot=st.integers(0, 3),
        prompt=st.lists(st.integers(0, 9), min_size=1, max_size=8),
        output=st.lists(st.integers(0, 9), max_size=4),
        limit=st.integers(13, 30),
        edits=st.booleans(),
    )
    def come(
        self, slot: int, prompt: list[int], output: list[int], limit: int, edits: bool
    ) -> None:
        params = {"frequency_penalty": 0.5} if edits else {}
        admit(self.table, slot, prompt, output, limit=limit, **params)
        self.texts[slot] = prompt + output
        self.keeper.kept.add(slot)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        order = data.draw(st.permutations(sorted(self.texts)))
        order = [order[i] for i in self.table.unfinished(order)]
        most = [self.table.num_drafts(slot, data.draw(st.integers(0, 3))) for slot in order]
        drafts = [[data.draw(st.integers(0, 9)) for _ in range(num)] for num in most]
        widest = max(most, default=0)
        padded = [[*row, *[NO_TOKEN] * (widest - len(row))] for row in drafts]
        self.table.put_drafts(order, np.array(padded).reshape(len(order), widest))
        for slot, row in zip(order, drafts, strict=True):
            accepted = data.draw(st.integers(0, len(row)))
            tokens = [*row[:accepted], data.draw(st.integers(0, 9))]
            self.table.advance(slot, Outcome(tokens, len(row), accepted))
            self.texts[slot] += tokens

    @precondition(lambda self: self.texts)
    @rule(pick=st.integers(0, 3))
    def go(self, pick: int) -> None:
        slot = sorted(self.texts)[pick % len(self.texts)]
        self.table.release(slot)
        del self.texts[slot]

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "table"):
            return
        self.table.check_integrity(set(self.texts))
        for slot, text in self.texts.items():
            known = self.table.length_S[slot]
            assert self.table.token_SL[slot, :known].tolist() == text
            assert (self.table.token_SL[slot, known:] == NO_TOKEN).all()
            assert known <= self.table.limit_S[slot]
            if history := self.table.histories.get(slot):
                assert history.output_ids == text[self.table.prompt_S[slot] :]


TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=100, stateful_step_count=20)

"""The slot table: what a request asks for, by slot, and what is left when it ends."""

from __future__ import annotations

import torch
from foretoken.sampling.slots import SlotTable

from foretoken.ops import Rule
from foretoken.sampling.params import SamplingParams

CPU = torch.device("cpu")


def test_a_request_is_written_into_its_slot() -> None:
    table = SlotTable(3, CPU)
    params = SamplingParams(temperature=0.5, top_k=7, top_p=0.9, min_p=0.25)
    table.admit(1, 2**64 - 1, params, [1], rule=Rule.COUPLED)
    written = table.params
    assert written.key_S.tolist() == [0, -1, 0]
    assert written.temperature_S.tolist() == [1.0, 0.5, 1.0]
    assert written.top_k_S.tolist() == [0, 7, 0]
    assert written.min_p_S.tolist() == [0, 0.25, 0]
    assert written.rule_S.tolist() == [Rule.STANDARD, Rule.COUPLED, Rule.STANDARD]


def test_filters_are_promised_off_only_while_every_used_slot_has_none() -> None:
    table = SlotTable(3, CPU)
    assert not table.params.has_filters
    table.admit(0, 1, SamplingParams(top_k=-1, top_p=1.0), [1])
    assert not table.params.has_filters
    for slot, params in enumerate(({"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.1})):
        table.admit(slot, 1, SamplingParams(**params), [1])  # type: ignore[arg-type]
        assert table.params.has_filters
        table.release(slot)
        assert not table.params.has_filters
    table.admit(0, 1, SamplingParams(top_k=5), [1])
    table.admit(1, 1, SamplingParams(top_k=5), [1])
    table.release(0)
    assert table.params.has_filters
    table.admit(1, 1, SamplingParams(), [1])  # another request, the same tensors
    assert not table.params.has_filters
    assert table.params.top_k_S.tolist()[1] == 0


def test_the_promised_rules_are_those_of_the_slots_in_use() -> None:
    table = SlotTable(3, CPU)
    assert table.params.rules == frozenset()
    table.admit(0, 1, SamplingParams(), [1], rule=Rule.BLOCK)
    table.admit(2, 1, SamplingParams(), [1])
    promised = table.params
    assert promised.rules == {Rule.BLOCK, Rule.STANDARD}
    assert table.params is promised  # nothing came or went
    table.release(0)
    assert table.params.rules == {Rule.STANDARD}
    table.admit(2, 1, SamplingParams(), [1], rule=Rule.COUPLED)
    assert table.params.rules == {Rule.COUPLED}
    assert table.params.rule_S is promised.rule_S


def test_a_released_slot_forgets() -> None:
    table = SlotTable(4, CPU)
    table.admit(2, 11, SamplingParams(min_tokens=2), [1])
    table.append(2, [5])
    table.append(3, [5])
    assert table.histories[2].output_ids == [5]
    table.release(2)
    assert not table.histories
    table.admit(2, 1, SamplingParams(), [1])
    assert not table.histories

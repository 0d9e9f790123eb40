"""The slot table: what a request brings, what a step adds, and what is left when it ends.

In a step it is asked by way of each backend's `Steps`; on a GPU see `tests/ops/test_steps.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from foretoken.drafting.base import one_hot_block
from foretoken.errors import IntegrityError
from foretoken.ops import DraftBlock, Rule, Verdict, get_backend, unavailable
from foretoken.ops.checks import check_attention_batch
from foretoken.ops.passes import write_index
from foretoken.ops.pinned import ToHost
from foretoken.ops.steps import ForwardBatch, StepTokens
from foretoken.sampling.params import SamplingParams
from foretoken.slots.step import (
    NONE,
    Admission,
    Outcome,
    StepInput,
    StepPlan,
    StepRequests,
    StepResult,
    StepShape,
)
from foretoken.slots.table import SlotSizes, SlotTable

CPU = torch.device("cpu")
SPARE_BLOCK, BLOCK_SIZE = 99, 4
BACKENDS = [name for name in ("torch", "native") if not unavailable(name)]


def make_table(
    backend: str = "torch", *, num_slots: int = 3, max_tokens: int = 12, blocks: int = 4
) -> SlotTable:
    sizes = SlotSizes(
        num_slots, max_tokens, max_drafts=3, num_blocks=blocks, spare_block=SPARE_BLOCK
    )
    return SlotTable(sizes, CPU, get_backend(backend).steps, on_host=True)


@pytest.fixture(params=BACKENDS)
def table(request: pytest.FixtureRequest) -> SlotTable:
    return make_table(request.param)


def admit(
    table: SlotTable, slot: int, prompt: Iterable[int] = (1,), output: Iterable[int] = (),
    *, key: int = 1, rule: Rule = Rule.STANDARD, limit: int = 12, num_computed: int = 0,
    drafter: int = 0, **params: Any,
) -> None:  # fmt: skip
    asked, known, num_prompt = SamplingParams(**params), [*prompt, *output], len([*prompt])
    admission = Admission(slot, key, asked, rule, known, num_prompt, limit, num_computed, drafter)
    table.apply(StepPlan(admissions=[admission]))


def release(table: SlotTable, slot: int) -> None:
    table.apply(StepPlan(released=[slot]))


class Part(NamedTuple):
    """What a step is to compute of a request, and what the verdict on its drafts will be."""

    slot: int
    drafts: Sequence[int] = ()
    accepted: int = 0
    token: int | None = 0  # after the accepted drafts; None: its row was not finite
    count: int = 1
    decides: bool = True
    prompt_logprobs: int = NONE


def begin(table: SlotTable, parts: Sequence[Part]) -> tuple[StepRequests, DraftBlock]:
    """Drafts written; no request has more than it may have."""
    columns = [
        (p.slot, p.count, len(p.drafts), p.decides, NONE, p.prompt_logprobs, False) for p in parts
    ]
    requests = table.begin(StepInput(*zip(*columns, strict=True)))
    asked = table.count_drafts(requests)
    drafted = [p.drafts for p in parts if p.decides]
    nums = asked.num_B.tolist()
    drafts = one_hot_block([row[:n] for row, n in zip(drafted, nums, strict=True)], CPU)
    if asked.most:
        table.write_drafts(asked, drafts, last_id=99)
    return requests, drafts


def tokens_of(requests: StepRequests, drafts: DraftBlock) -> StepTokens:
    return StepTokens(requests.slot_B, requests.num_tokens_B, requests.decider_B, drafts.num_B)


def pack(
    table: SlotTable, requests: StepRequests, drafts: DraftBlock, block_size: int = BLOCK_SIZE
) -> ForwardBatch:
    most = drafts.token_BK.shape[1]
    return table.pack(requests, tokens_of(requests, drafts), most, block_size)


def step(table: SlotTable, *parts: Part) -> dict[int, Outcome]:
    """A step with these verdicts: what is decided, by slot."""
    requests, drafts = begin(table, parts)
    deciding = [p for p in parts if p.decides]
    most = drafts.token_BK.shape[1]
    accepted = [min(p.accepted, n) for p, n in zip(deciding, drafts.num_B.tolist(), strict=True)]
    tokens = [
        [*p.drafts[:n], -1 if p.token is None else p.token, *[-1] * most][: most + 1]
        for p, n in zip(deciding, accepted, strict=True)
    ]
    finite = torch.tensor([p.token is not None for p in deciding], dtype=torch.bool)
    shape = (len(deciding), most + 1)
    verdict = Verdict(
        torch.tensor(tokens, dtype=torch.int64).view(shape),
        torch.tensor(accepted, dtype=torch.int64),
        finite,
    )
    packet = table.advance(tokens_of(requests, drafts), verdict)
    return StepResult(requests.step, ToHost([packet])).decisions


def texts(table: SlotTable) -> list[list[int]]:
    return [table.text(slot).tolist() for slot in range(table.num_slots)]


def test_a_request_is_written_into_its_slot() -> None:
    table = make_table()
    params = {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.25}
    admit(table, 1, [4, 5], [6], key=2**64 - 1, rule=Rule.COUPLED, num_computed=2, **params)
    written = table.params  # and the spare's
    assert written.key_S.tolist() == [0, -1, 0, 0]
    assert written.temperature_S.tolist() == [1.0, 0.5, 1.0, 1.0]
    assert written.top_k_S.tolist() == [0, 7, 0, 0]
    assert written.min_p_S.tolist() == [0, 0.25, 0, 0]
    assert written.rule_S.tolist() == [Rule.STANDARD, Rule.COUPLED, Rule.STANDARD, Rule.STANDARD]
    assert table.length_S.tolist() == [1, 3, 1, 1]
    assert table.computed_S.tolist() == [0, 2, 0, 0]
    assert table.state.limit_S.tolist() == [1, 12, 1, 1]
    assert (table.text(1).tolist(), table.text(1, 2).tolist()) == ([4, 5, 6], [6])
    assert table.admitted[1].params.temperature == 0.5
    assert not table.token_SL[[0, 2, 3]].any()


def test_several_requests_are_written_at_once_after_releases() -> None:
    table = make_table()
    admit(table, 0, [1, 2, 3], drafter=1, temperature=0)
    one = table.admitted[0]
    table.apply(
        StepPlan(
            released=[0],
            admissions=[one._replace(slot=2), one._replace(slot=1, token_ids=[7] * 9, drafter=0)],
            new_blocks=[(1, 0, [5, 6, 7])],
        )
    )
    assert table.admitted.keys() == {1, 2}
    assert texts(table)[1:] == [[7] * 9, [1, 2, 3]]
    assert (table.drafters, table.drafter_S.tolist()) == ({0, 1}, [1, 0, 1, 0])
    assert not table.draws_at_random([1, 2])


def test_filters_are_promised_off_only_while_every_used_slot_has_none() -> None:
    table = make_table()
    assert not table.params.has_filters
    admit(table, 0, top_k=-1, top_p=1.0)
    assert not table.params.has_filters
    for slot, params in enumerate(({"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.1})):
        admit(table, slot, **params)
        assert table.params.has_filters
        release(table, slot)
        assert not table.params.has_filters
    admit(table, 0, top_k=5)
    admit(table, 1, top_k=5)
    release(table, 0)
    assert table.params.has_filters
    admit(table, 1)  # another request, the same tensors
    assert not table.params.has_filters
    assert table.params.top_k_S.tolist()[1] == 0


def test_the_promised_rules_and_drafters_are_those_of_the_slots_in_use() -> None:
    table = make_table()
    assert table.params.rules == table.drafters == frozenset()
    admit(table, 0, rule=Rule.BLOCK, drafter=2)
    admit(table, 2)
    promised = table.params
    assert (promised.rules, table.drafters) == ({Rule.BLOCK, Rule.STANDARD}, {0, 2})
    assert table.params is promised  # nothing came or went
    release(table, 0)
    assert table.drafters == {0}
    assert table.params.rules == {Rule.STANDARD}
    admit(table, 2, rule=Rule.COUPLED)
    assert table.params.rules == {Rule.COUPLED}
    assert table.params.rule_S is promised.rule_S


def test_a_released_slot_forgets(table: SlotTable) -> None:
    admit(table, 2, [3], [4], num_computed=1, top_k=3)
    step(table, Part(2, token=5))
    assert table.text(2).tolist() == [3, 4, 5]
    with pytest.raises(IntegrityError, match=r"`requests` has state of slots that are free: \[2\]"):
        table.check_integrity({0, 1})
    release(table, 2)
    table.check_integrity(set())
    admit(table, 2, [7])
    assert table.text(2).tolist() == [7]
    assert (table.length_S[2], table.computed_S[2]) == (1, 0)


def test_drafts_leave_room_for_the_token_after_them_and_none_follow_a_stop(
    table: SlotTable,
) -> None:
    """Of a request that may have no more tokens the spare is computed instead."""
    admit(table, 0, [1] * 4, limit=8, num_computed=3)
    admit(table, 1, [1] * 7, limit=8, num_computed=6)
    for most, counts in ((0, [0, 0]), (2, [2, 0]), (3, [3, 0])):
        requests, drafts = begin(table, [Part(slot, [5] * most) for slot in range(2)])
        assert drafts.num_B.tolist() == counts
        assert table.count_drafts(requests).position_B.tolist() == [4, 7]
    step(table, Part(1, token=3), Part(0, token=2))
    requests, drafts = begin(table, [Part(0, [6]), Part(1, [7])])
    batch = pack(table, requests, drafts)
    assert batch.token_T.tolist() == [2, 6, 0]
    assert batch.position_T.tolist() == [4, 5, 0]
    assert batch.attention.block_BL[1].tolist() == [SPARE_BLOCK] * 2
    step(table, Part(1, token=4))
    assert table.text(1).tolist() == [*[1] * 7, 3]


def test_ids_past_the_last_one_are_written_as_the_last(table: SlotTable) -> None:
    admit(table, 0, [4], num_computed=0)
    requests, drafts = begin(table, [Part(0, [200, 7])])
    assert pack(table, requests, drafts).token_T.tolist() == [4, 99, 7]


def test_blocks_are_written_in_order_the_last_word_counts() -> None:
    table, none = make_table(), SPARE_BLOCK
    table.apply(StepPlan(new_blocks=[(1, 0, [7, 8]), (2, 2, [5]), (1, 1, [9, 3])]))
    assert table.block_SL.tolist() == [
        [none] * 4, [7, 9, 3, none], [none, none, 5, none], [none] * 4
    ]  # fmt: skip


def test_a_captured_step_is_padded_with_the_spare_and_promises_its_shape() -> None:
    """Its numbers are always read in the same place."""
    table = make_table()
    admit(table, 1, temperature=0, drafter=1)
    shape = StepShape(3, 2, True, frozenset(Rule), samples=True, drafters=frozenset({0, 1}))
    asked = StepInput([1], [1], [2], [True], [NONE], [NONE], [False])
    requests, again = table.begin(asked, shape), table.begin(asked, shape)
    assert requests.slot_B.tolist() == requests.slot_D.tolist() == [1, 3, 3]
    assert requests.num_tokens_B.tolist() == [1, 1, 1]
    assert requests.max_drafts_D.tolist() == [2, 0, 0]
    assert requests.slot_B.data_ptr() == again.slot_B.data_ptr()
    assert (requests.samples, requests.drafters) == (True, {0, 1})
    assert (requests.params.has_filters, requests.params.rules) == (True, frozenset(Rule))
    exact = table.begin(asked)
    assert (exact.samples, exact.drafters, exact.params.rules) == (False, {1}, {Rule.STANDARD})


def test_rows_that_decide_come_first_then_those_of_prompts(table: SlotTable) -> None:
    """As many rows as tokens would mean all tokens in order: then there is one more row, unread."""
    admit(table, 0, range(1, 7))
    admit(table, 1, [5], num_computed=0)
    admit(table, 2, range(20, 24), num_computed=1)
    parts = [
        Part(0, count=3, decides=False, prompt_logprobs=1),
        Part(1, [7, 8]),
        Part(2, count=3, prompt_logprobs=0),
    ]
    batch = pack(table, *begin(table, parts))
    assert batch.token_T.tolist() == [1, 2, 3, 5, 7, 8, 21, 22, 23]
    assert batch.num_deciding == 4
    assert batch.logit_row_N.tolist() == [3, 4, 5, 8, 0, 1, 2, 6, 7, 8]
    batch = pack(table, *begin(table, parts[:2]))
    assert len(batch.token_T) == 6
    assert batch.logit_row_N.tolist() == [3, 4, 5, 0, 1, 2, 3]
    assert batch.deciding(torch.arange(7)).tolist() == [0, 1, 2]
    plain = pack(table, *begin(table, [Part(1)]))
    assert (plain.num_deciding, plain.logit_row_N.tolist()) == (None, [0])


@st.composite
def packings(draw: st.DrawFn) -> tuple[str, int, list[tuple[Part, list[int], int, list[int]]]]:
    """A backend, a block size, and parts of a step with their text, computed tokens and blocks."""
    block_size = draw(st.integers(1, 5))
    parts = []
    for slot in draw(st.permutations(range(6)))[: draw(st.integers(1, 6))]:
        text = draw(st.lists(st.integers(0, 99), min_size=1, max_size=18))
        start = draw(st.integers(0, len(text) - 1))
        decides = draw(st.booleans())
        count = len(text) - start if decides else draw(st.integers(1, len(text) - start))
        drafts = draw(st.lists(st.integers(0, 99), max_size=3)) if decides else []
        num_blocks = -(-(len(text) + len(drafts)) // block_size) + draw(st.integers(0, 2))
        ids = draw(st.permutations(range(100 * slot + 100, 100 * slot + 100 + num_blocks)))
        parts.append((Part(slot, drafts, count=count, decides=decides), text, start, list(ids)))
    return draw(st.sampled_from(BACKENDS)), block_size, parts


@given(packings())
def test_a_batch_is_the_next_tokens_of_its_slots(
    case: tuple[str, int, list[tuple[Part, list[int], int, list[int]]]],
) -> None:
    """Block tables and lengths are the requests', writes follow them, rows are the last ones."""
    backend, block_size, given_parts = case
    table = make_table(backend, num_slots=6, max_tokens=24, blocks=30)
    tokens, positions, places, rows, lengths, starts = [], [], [], [], [], [0]
    for (slot, drafts, *_, count, decides, _), text, start, ids in given_parts:
        admit(table, slot, text, num_computed=start, limit=99)
        table.apply(StepPlan(new_blocks=[(slot, 0, ids)]))
        end = start + count + len(drafts)
        tokens += [*text, *drafts][start:end]
        positions += range(start, end)
        places += [ids[i // block_size] * block_size + i % block_size for i in range(start, end)]
        rows += range(len(tokens) - (1 + len(drafts)) * decides, len(tokens))
        lengths.append(end)
        starts.append(len(tokens))
    batch = pack(table, *begin(table, [p for p, *_ in given_parts]), block_size)
    assert batch.token_T.tolist() == tokens
    assert batch.position_T.tolist() == positions
    assert batch.logit_row_N.tolist() == rows
    assert {t.dtype for t in (batch.token_T, batch.position_T, batch.logit_row_N)} == {torch.int64}
    attention = batch.attention
    assert write_index(attention, len(tokens), 1).tolist() == places
    assert attention.query_start_B1.tolist() == starts
    assert attention.length_B.tolist() == lengths
    columns = -(-max(lengths) // block_size)
    assert attention.block_BL.shape == (len(given_parts), columns)
    for row, (_, _, _, ids) in zip(attention.block_BL.tolist(), given_parts, strict=True):
        own = ids[:columns]
        assert row[: len(own)] == own
    looked_at = replace(attention, values_fit=False)
    check_attention_batch(looked_at, len(tokens), torch.empty(1000, block_size, 1, 1))


class Keeper:
    """Keeps something by slot, and may fail to let go."""

    def __init__(self) -> None:
        self.kept: set[int] = set()

    def release(self, slot: int) -> None:
        self.kept.discard(slot)

    def held_slots(self) -> Iterable[int]:
        return self.kept


def test_every_registered_owner_is_released_and_checked() -> None:
    table, keeper, other = make_table(), Keeper(), Keeper()
    table.register("probabilities", keeper)
    table.register("drafts", other)
    admit(table, 0)
    keeper.kept = other.kept = {0, 1}
    with pytest.raises(IntegrityError, match=r"`probabilities` has state .* are free: \[1\]"):
        table.check_integrity({0})
    release(table, 1)
    table.check_integrity({0})
    admit(table, 0)  # all owners forget the request before
    assert not keeper.kept
    keeper.kept = {2}
    with pytest.raises(IntegrityError, match=r"`probabilities` has state .* are free: \[2\]"):
        table.check_integrity({0})


class TableMachine(RuleBasedStateMachine):
    """The table next to requests as lists of tokens."""

    @initialize(backend=st.sampled_from(BACKENDS))
    def start(self, backend: str) -> None:
        self.table = make_table(backend, num_slots=4, max_tokens=30)
        self.texts: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.limit: dict[int, int] = {}
        self.keeper = Keeper()
        self.table.register("keeper", self.keeper)

    @rule(
        slot=st.integers(0, 3),
        prompt=st.lists(st.integers(0, 9), min_size=1, max_size=8),
        output=st.lists(st.integers(0, 9), max_size=4),
        limit=st.integers(13, 30),
        computed=st.integers(0, 11),
    )
    def come(
        self, slot: int, prompt: list[int], output: list[int], limit: int, computed: int
    ) -> None:
        self.texts[slot], self.limit[slot] = prompt + output, limit
        self.computed[slot] = min(computed, len(prompt + output) - 1)
        admit(self.table, slot, prompt, output, limit=limit, num_computed=self.computed[slot])
        self.keeper.kept.add(slot)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        parts = []
        for slot in data.draw(st.permutations(sorted(self.texts))):
            left = max(len(self.texts[slot]) - self.computed[slot], 1)  # 0 of one that stopped
            count = data.draw(st.sampled_from([left, data.draw(st.integers(1, left))]))
            drafts = data.draw(st.lists(st.integers(0, 9), max_size=3)) if count == left else []
            token = data.draw(st.sampled_from([*range(10), None]))
            accepted = data.draw(st.integers(0, len(drafts)))
            parts.append(Part(slot, drafts, accepted, token, count, count == left))
        decided = step(self.table, *parts)
        for slot, drafts, accepted, token, count, decides, _ in parts:
            text, limit = self.texts[slot], self.limit[slot]
            assert (slot in decided) == decides
            if len(text) >= limit:
                continue  # nothing of it is kept
            self.computed[slot] += count
            if decides:
                num = min(len(drafts), limit - len(text) - 1)
                kept = min(accepted, num)
                tokens = [*drafts[:kept], *([] if token is None else [token])]
                assert decided[slot] == Outcome(tokens, num, kept, token is not None)
                self.computed[slot] += kept
                text += tokens
                if token is None:
                    self.limit[slot] = len(text)

    @precondition(lambda self: self.texts)
    @rule(pick=st.integers(0, 3))
    def go(self, pick: int) -> None:
        slot = sorted(self.texts)[pick % len(self.texts)]
        release(self.table, slot)
        del self.texts[slot]

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "table"):
            return
        self.table.check_integrity(set(self.texts))
        for slot, text in self.texts.items():
            assert self.table.text(slot).tolist() == text
            assert self.table.computed_S[slot] == self.computed[slot]
            assert len(text) <= self.table.state.limit_S[slot] == self.limit[slot]
        spare = [column[-1].tolist() for column in self.table.state[1:]]
        assert spare == [[SPARE_BLOCK] * 4, 1, 0, 1]


TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=50, stateful_step_count=20)

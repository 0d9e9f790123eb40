"""Packing: block tables and lengths are the spans', writes follow them, rows are the last ones."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch
from foretoken.cache.batch import gather_batch
from hypothesis import given
from hypothesis import strategies as st

from foretoken.cache.kv_pool import write_index
from foretoken.errors import IntegrityError
from foretoken.ops.pass_checks import check_attention_batch
from foretoken.ops.steps import SlotSpan
from foretoken.slots.table import NO_TOKEN
from tests.models.batches import Span, build_batch
from tests.support.cases import make_params
from tests.support.slots import GivenSlots

CPU = torch.device("cpu")


@st.composite
def span_lists(draw: st.DrawFn) -> tuple[list[Span], int]:
    block_size = draw(st.integers(1, 5))
    spans = []
    for i in range(draw(st.integers(1, 6))):
        start, count = draw(st.integers(0, 12)), draw(st.integers(1, 6))
        blocks = -(-(start + count) // block_size) + draw(st.integers(0, 2))
        tokens = draw(st.lists(st.integers(0, 99), min_size=count, max_size=count))
        ids = draw(st.permutations(range(100 * i, 100 * i + blocks)))
        spans.append(Span(ids, start, tokens, draw(st.integers(0, count))))
    return spans, block_size


@given(span_lists())
def test_batch_says_what_the_spans_say(case: tuple[list[Span], int]) -> None:
    spans, block_size = case
    batch = build_batch(spans, block_size, CPU)
    tokens, positions, slots, rows = [], [], [], []
    for span in spans:
        for i, token in enumerate(span.tokens):
            position = span.start + i
            if i >= len(span.tokens) - span.num_logits:
                rows.append(len(tokens))
            tokens.append(token)
            positions.append(position)
            block = span.block_ids[position // block_size]
            slots.append(block * block_size + position % block_size)
    assert batch.token_T.tolist() == tokens
    assert batch.position_T.tolist() == positions
    assert batch.logit_row_N.tolist() == rows
    assert write_index(batch.attention, len(tokens), 1).tolist() == slots
    assert {t.dtype for t in (batch.token_T, batch.position_T, batch.logit_row_N)} == {torch.int64}


@given(span_lists())
def test_attention_reads_the_requests_blocks(case: tuple[list[Span], int]) -> None:
    spans, block_size = case
    batch = build_batch(spans, block_size, CPU).attention
    counts = [len(span.tokens) for span in spans]
    assert batch.query_start_B1.tolist() == [sum(counts[:b]) for b in range(len(spans) + 1)]
    lengths = [span.start + count for span, count in zip(spans, counts, strict=True)]
    assert batch.length_B.tolist() == lengths
    columns = -(-max(lengths) // block_size)
    assert batch.block_BL.shape == (len(spans), columns)
    for row, span in zip(batch.block_BL.tolist(), spans, strict=True):
        own = list(span.block_ids)[:columns]
        assert row == own + [0] * (columns - len(own))
    check_attention_batch(batch, sum(counts), torch.empty(1000, block_size, 1, 1))


@given(span_lists(), st.integers(0, 9), st.randoms(use_true_random=False))
def test_a_batch_gathered_from_slots_is_the_one_of_their_spans(
    case: tuple[list[Span], int], ahead: int, random: Random
) -> None:
    """Whatever stands before and behind the tokens; blocks reach over `ahead` positions more."""
    spans, block_size = case
    order = random.sample(range(8), len(spans))
    longest = max(span.start + len(span.tokens) for span in spans)
    columns = -(-(longest + ahead) // block_size)
    slots = GivenSlots(make_params(8), max_tokens=99, max_drafts=0, blocks=columns + 3)
    for slot, span in zip(order, spans, strict=True):
        before = [random.randrange(99) for _ in range(span.start)]
        slots.put(slot, [*before, *span.tokens], span.block_ids[: columns + 3])
    asked = [
        SlotSpan(slot, span.start, len(span.tokens), span.num_logits)
        for slot, span in zip(order, spans, strict=True)
    ]
    gathered = gather_batch(slots, asked, block_size, ahead=ahead)
    expected = build_batch(spans, block_size, CPU)
    for name in ("token_T", "position_T", "logit_row_N"):
        assert getattr(gathered, name).tolist() == getattr(expected, name).tolist()
    for name in ("query_start_B1", "length_B"):
        mine, theirs = getattr(gathered.attention, name), getattr(expected.attention, name)
        assert mine.tolist() == theirs.tolist()
    assert gathered.attention.block_BL.shape == (len(spans), columns)
    for row, span in zip(gathered.attention.block_BL.tolist(), spans, strict=True):
        own = list(span.block_ids)[:columns]
        assert row[: len(own)] == own
    check_attention_batch(
        gathered.attention, len(gathered.token_T), torch.empty(1000, block_size, 1, 1)
    )


@pytest.mark.parametrize(("start", "count"), [(0, 5), (3, 2), (4, 1), (7, 1)])
def test_a_placeholder_is_never_gathered(start: int, count: int) -> None:
    slots = GivenSlots(make_params(3), max_tokens=8, max_drafts=2, blocks=3)
    for slot in range(3):
        slots.put(slot, [5, 6, 7, 8], [slot, 3 + slot])
    fine, wrong = SlotSpan(0, 0, 4, 1), SlotSpan(1, start, count, 1)
    with pytest.raises(IntegrityError, match=f"slot 1: a placeholder in tokens {start} "):
        gather_batch(slots, [fine, wrong], 4)
    slots.put_drafts([1], np.array([[9, NO_TOKEN]]))
    assert gather_batch(slots, [fine, SlotSpan(1, 3, 2, 2)], 4).token_T.tolist()[-2:] == [8, 9]
    with pytest.raises(IntegrityError, match="placeholder"):
        gather_batch(slots, [fine, SlotSpan(1, 3, 3, 3)], 4)


def test_no_logits_wanted() -> None:
    batch = build_batch([Span([3], 0, [5, 6], 0)], 4, CPU)
    assert batch.logit_row_N.tolist() == []


@pytest.mark.parametrize(("blocks", "start", "count"), [([1], 3, 2), ([1, 2], 0, 9), ([], 0, 1)])
def test_tokens_without_a_block_are_our_bug(blocks: list[int], start: int, count: int) -> None:
    """They would be written into block 0, whoever has it."""
    slots = GivenSlots(make_params(3), max_tokens=12, max_drafts=0, blocks=3)
    for slot in range(3):
        slots.put(slot, [7] * 12, [3, 4, 5] if slot else blocks)
    message = f"slot 0: {len(blocks)} blocks of 4 for {start + count} tokens"
    with pytest.raises(IntegrityError, match=message):
        gather_batch(slots, [SlotSpan(1, 0, 12, 1), SlotSpan(0, start, count, 1)], 4)
    assert len(gather_batch(slots, [SlotSpan(2, start, count, 1)], 4).token_T) == count


@pytest.mark.parametrize(("count", "rows"), [(0, 0), (0, 1), (2, 3)])
def test_a_row_has_a_token_of_its_own_request(count: int, rows: int) -> None:
    """Else it would be the row before: another request's, or memory that is nobody's."""
    slots = GivenSlots(make_params(2), max_tokens=8, max_drafts=0, blocks=2)
    for slot in range(2):
        slots.put(slot, [5, 6, 7, 8], [slot])
    with pytest.raises(IntegrityError, match=f"slot 1: {rows} rows of {count} tokens"):
        gather_batch(slots, [SlotSpan(0, 0, 4, 1), SlotSpan(1, 2, count, rows)], 4)

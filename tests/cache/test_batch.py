"""Packing: groups partition the tokens, slots follow the block tables, rows are the last ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretoken.cache.batch import ForwardBatch, Span, build_batch
from foretoken.errors import IntegrityError

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
    assert batch.attention.slot_T.tolist() == slots
    assert {t.dtype for t in (batch.token_T, batch.position_T, batch.logit_row_N)} == {torch.int64}


@given(span_lists())
def test_groups_partition_the_tokens(case: tuple[list[Span], int]) -> None:
    spans, block_size = case
    batch = build_batch(spans, block_size, CPU)
    everything = torch.arange(len(batch.token_T))
    seen = [everything[g.token_index] for g in batch.attention.groups]
    assert sorted(torch.cat(seen).tolist()) == everything.tolist()
    lengths = [g.num_queries for g in batch.attention.groups]
    assert len(set(lengths)) == len(lengths)
    first = {}
    for span, last in zip(
        spans, torch.tensor([len(s.tokens) for s in spans]).cumsum(0), strict=True
    ):
        first[int(last) - len(span.tokens)] = span
    for group, index in zip(batch.attention.groups, seen, strict=True):
        longest = int(group.length_b.max())
        assert group.block_bL.shape == (group.num_requests, -(-longest // block_size))
        for b, request in enumerate(index.view(group.num_requests, group.num_queries)):
            span = first[int(request[0])]
            assert torch.equal(request, request[0] + torch.arange(group.num_queries))
            assert torch.equal(group.position_bQ[b], batch.position_T[request])
            assert int(group.length_b[b]) == span.start + len(span.tokens)
            needed = -(-int(group.length_b[b]) // block_size)
            assert group.block_bL[b, :needed].tolist() == list(span.block_ids[:needed])
            assert not group.block_bL[b, needed:].any()


def test_adjacent_requests_of_one_length_are_a_slice() -> None:
    spans = [Span([i], 2, [7], 1) for i in range(3)] + [Span([9], 0, [1, 2], 0)]
    one, two = build_batch(spans, 4, CPU).attention.groups
    assert (one.token_index, two.token_index) == (slice(0, 3), slice(3, 5))


def test_no_logits_wanted() -> None:
    batch = build_batch([Span([3], 0, [5, 6], 0)], 4, CPU)
    assert isinstance(batch, ForwardBatch)
    assert batch.logit_row_N.tolist() == []


@pytest.mark.parametrize(
    "span",
    [
        Span([1], 0, [], 0),
        Span([1], 0, [5], 2),
        Span([1], 0, [5], -1),
        Span([1], -1, [5], 1),
        Span([1], 3, [5, 6], 1),
    ],
    ids=["empty", "too many logits", "negative logits", "negative start", "block missing"],
)
def test_impossible_spans_are_our_bug(span: Span) -> None:
    with pytest.raises(IntegrityError):
        build_batch([span], 4, CPU)

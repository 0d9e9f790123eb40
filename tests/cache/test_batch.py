"""Packing: block tables and lengths are the spans', writes follow them, rows are the last ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretoken.cache.batch import ForwardBatch, Span, build_batch
from foretoken.cache.kv_pool import write_index
from foretoken.errors import IntegrityError
from foretoken.ops.pass_checks import check_attention_batch

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
    assert write_index(batch.attention).tolist() == slots
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
        known = list(span.block_ids)[:columns]
        assert row == known + [0] * (columns - len(known))
    check_attention_batch(batch, sum(counts), torch.empty(1000, block_size, 1, 1))


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

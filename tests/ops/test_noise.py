"""Noise by name: the same bits on every backend, open intervals, the published known answers."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretoken.ops import Stream
from foretoken.ops.backends.reference import noise as reference
from foretoken.ops.backends.torch import noise as stock

ONES = 0xFFFFFFFF
KNOWN = [  # Random123: counter, key, words
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([ONES] * 4, [ONES] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]
Words = Callable[[list[int], list[int]], list[int]]


def reference_words(counter: list[int], key: list[int]) -> list[int]:
    arrays = ([np.array(word, np.uint64) for word in words] for words in (counter, key))
    return [int(word) for word in reference.philox4x32_10(*arrays)]


def stock_words(counter: list[int], key: list[int]) -> list[int]:
    group, position, draft, stream = (torch.tensor([word]) for word in counter)
    low, high = torch.tensor(key)
    words = stock.words(group[:, None], (low | high << 32)[None], position, draft, stream)
    return words.flatten().tolist()


BOTH = pytest.mark.parametrize("words", [reference_words, stock_words], ids=["reference", "torch"])


@BOTH
@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(
    words: Words, counter: list[int], key: list[int], expected: list[int]
) -> None:
    assert words(counter, key) == expected


WORD = st.integers(0, ONES)


@given(st.lists(WORD, min_size=4, max_size=4), st.lists(WORD, min_size=2, max_size=2))
def test_words_are_equal_on_both_backends(counter: list[int], key: list[int]) -> None:
    assert reference_words(counter, key) == stock_words(counter, key)


@given(
    st.integers(0, 2**20),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 64),
    st.sampled_from(list(Stream)),
    st.booleans(),
)
def test_uniforms_are_equal_on_both_backends(
    group: int, key: int, position: int, draft: int, stream: Stream, fp64: bool
) -> None:
    """Draw i is word i mod 4 of group i div 4; FP64: pair i mod 2 of group i div 2."""
    per_group = 2 if fp64 else 4
    name = (torch.tensor([number]) for number in (key, position, draft, int(stream)))
    ours = stock.to_uniform(stock.words(torch.tensor([[group]]), *name), fp64)[0]
    index = group * per_group + np.arange(per_group)
    theirs = reference.uniforms(index, key, position, draft, stream, fp64)
    assert ours.numpy().dtype == theirs.dtype == (np.float64 if fp64 else np.float32)
    assert ours.tolist() == theirs.tolist()
    assert bool(((ours > 0) & (ours < 1)).all())


@pytest.mark.parametrize("fp64", [False, True])
def test_uniforms_are_made_of_words(fp64: bool) -> None:
    key, position, draft, stream = -5, 123_456, 3, int(Stream.DRAFT_TOKEN)
    halves = [key & ONES, (key >> 32) & ONES]
    for i in range(9):
        group, place = divmod(i, 2 if fp64 else 4)
        words = reference_words([group, position, draft, stream], halves)
        u = reference.uniform_of(i, key, position, draft, stream, fp64)
        if fp64:
            h = (words[2 * place] << 32 | words[2 * place + 1]) >> 11
            assert u == (h + 0.5) * 2.0**-53
        else:
            assert u == np.float32((words[place] + 0.5) * 2.0**-32)


def as_words(*values: int) -> torch.Tensor:
    return torch.tensor(values).view(1, -1, 4)


def test_the_interval_is_open_at_both_ends() -> None:
    u = stock.to_uniform(as_words(0, 1, ONES - 1, ONES), fp64=False)[0]
    assert u.dtype == torch.float32
    assert u[0] == 2.0**-33
    assert u[2] == u[3] == 1 - 2.0**-24
    u = stock.to_uniform(as_words(0, 0, ONES, ONES), fp64=True)[0]
    assert u.tolist() == [2.0**-54, 1 - 2.0**-53]


@pytest.mark.parametrize("fp64", [False, True])
def test_gumbel_noise_reaches_far_and_is_finite(fp64: bool) -> None:
    """-log(-log u) would stop at 16.6 in FP32; a token 20 logits down could never be drawn."""
    g = stock.to_gumbel(stock.to_uniform(as_words(0, 0, ONES, ONES), fp64))
    assert g.isfinite().all()
    assert g.max() > (37 if fp64 else 22)


def test_gumbel_tail_has_its_probability() -> None:
    """P(G > 18) = 1 - exp(-exp(-18)) = 65.4 * 2^-32: exactly the 65 smallest words pass 18."""
    few = stock.to_gumbel(stock.to_uniform(as_words(*range(128)), fp64=False))[0]
    assert int((few > 18).sum()) == round(-math.expm1(-math.exp(-18)) * 2**32)
    assert (few.diff() < 0).all()


def test_position_key_draft_index_and_stream_each_change_the_draw() -> None:
    rows = [[11, 7, 0], [12, 7, 0], [11 + 2**32, 7, 0], [11, 8, 0], [11, 7, 1]]
    name = torch.tensor(rows).unbind(1)
    draws = [stock.first_uniform(*name, stream, fp64=False) for stream in Stream]
    assert len(set(torch.cat(draws).tolist())) == len(rows) * len(Stream)

"""Paged attention of every backend against the fp64 definition."""

from __future__ import annotations

import pytest
import torch

from foretoken.cache.batch import Span, build_batch
from foretoken.ops import AttentionBatch, get_backend
from tests.support.cases import fast_backends, host_backends

FAST = fast_backends()
BLOCK = 4

# Ragged batches: (tokens already in the cache, new tokens) per request.
BATCHES = {
    "decode": [(9, 1)],
    "first token": [(0, 1)],
    "decode, equal lengths": [(9, 1), (9, 1), (9, 1)],
    "decode, ragged": [(9, 1), (0, 1), (30, 1), (3, 1)],
    "decode, long and short": [(9, 1), (300, 1), (0, 1), (30, 1), (290, 1), (3, 1)],
    "verify": [(13, 5)],
    "verify, ragged": [(13, 5), (2, 5), (40, 5)],
    "prefill": [(0, 11)],
    "prefills": [(0, 11), (0, 6), (0, 11)],
    "chunked prefill": [(8, 11)],
    "mixed": [(13, 5), (9, 1), (0, 11), (2, 5), (7, 1), (20, 3)],
}
SHAPES = {"equal": (4, 4, 8, 8), "gqa": (4, 2, 8, 8), "mqa, wide values": (6, 1, 8, 12)}
FEATURES = {
    "plain": {},
    "window": {"sliding_window": 6},
    "window of one": {"sliding_window": 1},
    "wide window": {"sliding_window": 100},
    "soft cap": {"softcap": 0.7},
    "sinks": {"sinks": True},
    "all": {"sliding_window": 5, "softcap": 0.7, "sinks": True},
}


def make_case(
    requests: list[tuple[int, int]],
    shape: tuple[int, int, int, int],
    *,
    contiguous: bool = False,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionBatch]:
    """Random queries, a random pool, and a batch whose requests own shuffled blocks."""
    heads, kv_heads, key_size, value_size = shape
    generator = torch.Generator().manual_seed(0)
    needed = [-(-(start + new) // BLOCK) for start, new in requests]
    num_blocks = sum(needed) + 3
    ids = list(range(1, num_blocks))
    if not contiguous:
        ids = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    spans, first = [], 0
    for (start, new), count in zip(requests, needed, strict=True):
        spans.append(Span(ids[first : first + count], start, [0] * new, new))
        first += count
    batch = build_batch(spans, BLOCK, torch.device("cpu")).attention
    tokens = sum(new for _, new in requests)
    pool = (num_blocks, BLOCK, kv_heads)
    query = torch.randn(tokens, heads, key_size, generator=generator).to(dtype)
    key = torch.randn(*pool, key_size, generator=generator).to(dtype)
    value = torch.randn(*pool, value_size, generator=generator).to(dtype)
    return query, key, value, batch


def options(features: dict, heads: int) -> dict:
    features = dict(features)
    if features.pop("sinks", False):
        features["sinks_H"] = torch.linspace(-2, 3, heads)
    return {"scale": 0.4, **features}


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("requests", BATCHES.values(), ids=BATCHES)
def test_equals_reference(backend: str, requests: list, shape: tuple, features: dict) -> None:
    kwargs = options(features, shape[0])
    for contiguous in (False, True):
        case = make_case(requests, shape, contiguous=contiguous)
        expected = get_backend("reference").attention(*case, **kwargs)
        torch.testing.assert_close(
            get_backend(backend).attention(*case, **kwargs), expected, atol=2e-6, rtol=1e-5
        )


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_half_precision(backend: str, features: dict) -> None:
    case = make_case(BATCHES["mixed"], SHAPES["gqa"], dtype=torch.bfloat16)
    kwargs = options(features, 4)
    expected = get_backend("reference").attention(*case, **kwargs)
    actual = get_backend(backend).attention(*case, **kwargs)
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual, expected, atol=0.03, rtol=0.03)


@pytest.mark.parametrize("backend", FAST)
def test_layers_of_one_batch_may_differ(backend: str) -> None:
    """Plans are shared by the layers of a batch: another window must not take an old mask."""
    query, key, value, batch = make_case(BATCHES["mixed"], SHAPES["gqa"])
    for window in (None, 5, 2, None, 5):
        kwargs = {"scale": 0.4, "sliding_window": window}
        torch.testing.assert_close(
            get_backend(backend).attention(query, key, value, batch, **kwargs),
            get_backend("reference").attention(query, key, value, batch, **kwargs),
            atol=2e-6,
            rtol=1e-5,
        )


@pytest.mark.parametrize("backend", host_backends())
def test_keys_outside_the_request_do_not_matter(backend: str) -> None:
    """Whatever other requests hold, NaN and padding block 0 included, the output is the same."""
    query, key, value, batch = make_case(BATCHES["mixed"], SHAPES["gqa"])
    expected = get_backend(backend).attention(query, key, value, batch, scale=0.4)
    owned = torch.zeros(len(key), dtype=torch.bool)
    for group in batch.groups:
        for blocks, length in zip(group.block_bL.tolist(), group.length_b.tolist(), strict=True):
            owned[blocks[: -(-length // BLOCK)]] = True
    key, value = key.clone(), value.clone()
    key[~owned], value[~owned] = torch.nan, torch.nan
    actual = get_backend(backend).attention(query, key, value, batch, scale=0.4)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("backend", FAST)
def test_strided_queries(backend: str) -> None:
    """Modules hand over [1, H, T, D] views; no layout may be assumed."""
    query, key, value, batch = make_case(BATCHES["mixed"], SHAPES["gqa"])
    strided = query.transpose(0, 1).contiguous().transpose(0, 1)
    assert not strided.is_contiguous()
    torch.testing.assert_close(
        get_backend(backend).attention(strided, key, value, batch, scale=0.4),
        get_backend(backend).attention(query, key, value, batch, scale=0.4),
    )

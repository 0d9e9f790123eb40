"""Paged attention of every backend against the fp64 definition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from foretoken.errors import ConfigError
from foretoken.ops import AttentionBatch, AttentionOptions, get_backend
from tests.support.cases import fast_backends, host_backends

FAST = fast_backends()
BLOCK = 4
PLAIN = AttentionOptions(0.4)

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
    """Random queries, a random pool, and a batch of requests with shuffled blocks."""
    heads, kv_heads, key_size, value_size = shape
    generator = torch.Generator().manual_seed(0)
    needed = [-(-(start + new) // BLOCK) for start, new in requests]
    num_blocks = sum(needed) + 3
    ids = list(range(1, num_blocks))
    if not contiguous:
        ids = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    table, first = torch.zeros(len(requests), max(needed) + 1, dtype=torch.int64), 0
    for row, count in zip(table, needed, strict=True):
        row[:count] = torch.tensor(ids[first : first + count])
        first += count
    starts = torch.tensor([0, *(new for _, new in requests)]).cumsum(0)
    lengths = torch.tensor([start + new for start, new in requests])
    batch, tokens = AttentionBatch(starts, lengths, table, BLOCK), int(starts[-1])
    pool = (num_blocks, BLOCK, kv_heads)
    query = torch.randn(tokens, heads, key_size, generator=generator).to(dtype)
    key = torch.randn(*pool, key_size, generator=generator).to(dtype)
    value = torch.randn(*pool, value_size, generator=generator).to(dtype)
    return query, key, value, batch


def make_options(features: dict, heads: int) -> AttentionOptions:
    features = dict(features)
    if features.pop("sinks", False):
        features["sinks_H"] = torch.linspace(-2, 3, heads)
    return AttentionOptions(0.4, **features)


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("requests", BATCHES.values(), ids=BATCHES)
def test_equals_reference(backend: str, requests: list, shape: tuple, features: dict) -> None:
    options = make_options(features, shape[0])
    for contiguous in (False, True):
        case = make_case(requests, shape, contiguous=contiguous)
        expected = get_backend("reference").attention(*case, options)
        torch.testing.assert_close(
            get_backend(backend).attention(*case, options), expected, atol=2e-6, rtol=1e-5
        )


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_half_precision(backend: str, features: dict) -> None:
    case = make_case(BATCHES["mixed"], SHAPES["gqa"], dtype=torch.bfloat16)
    options = make_options(features, 4)
    expected = get_backend("reference").attention(*case, options)
    actual = get_backend(backend).attention(*case, options)
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual, expected, atol=0.03, rtol=0.03)


@pytest.mark.parametrize("backend", FAST)
def test_layers_of_one_batch_may_differ(backend: str) -> None:
    """The layers of a batch share plans; a layer with another window needs another mask."""
    query, key, value, batch = make_case(BATCHES["mixed"], SHAPES["gqa"])
    for window in (None, 5, 2, None, 5):
        options = AttentionOptions(0.4, window)
        torch.testing.assert_close(
            get_backend(backend).attention(query, key, value, batch, options),
            get_backend("reference").attention(query, key, value, batch, options),
            atol=2e-6,
            rtol=1e-5,
        )


@pytest.mark.parametrize("backend", host_backends())
def test_keys_outside_the_request_do_not_matter(backend: str) -> None:
    """Whatever other requests hold, NaN and padding block 0 included, the output is the same."""
    query, key, value, batch = make_case(BATCHES["mixed"], SHAPES["gqa"])
    expected = get_backend(backend).attention(query, key, value, batch, PLAIN)
    owned = torch.zeros(len(key), dtype=torch.bool)
    for blocks, length in zip(batch.block_BL.tolist(), batch.length_B.tolist(), strict=True):
        owned[blocks[: -(-length // BLOCK)]] = True
    key, value = key.clone(), value.clone()
    key[~owned], value[~owned] = torch.nan, torch.nan
    actual = get_backend(backend).attention(query, key, value, batch, PLAIN)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("backend", FAST)
def test_strided_queries(backend: str) -> None:
    """Modules pass [1, H, T, D] views; no layout may be assumed."""
    query, key, value, batch = make_case(BATCHES["mixed"], SHAPES["gqa"])
    strided = query.transpose(0, 1).contiguous().transpose(0, 1)
    assert not strided.is_contiguous()
    torch.testing.assert_close(
        get_backend(backend).attention(strided, key, value, batch, PLAIN),
        get_backend(backend).attention(query, key, value, batch, PLAIN),
    )


def other(field: str, value: Any) -> Any:
    return lambda case: (*case[:3], replace(case[3], **{field: torch.tensor(value)}), case[4])


def with_options(**changes: Any) -> Any:
    return lambda case: (*case[:4], case[4]._replace(**changes))


# The batch is two requests: a verify of 5 tokens over 18, a decode over 10, in blocks of 4.
TABLE = [[1, 2, 3, 4, 5], [6, 7, 8, 0, 0]]
WRONG = {
    "heads": (lambda c: (c[0][:, :3], *c[1:]), r"`key_cache.shape` .* H_kv a divisor of 3"),
    "head size": (lambda c: (c[0][..., :7], *c[1:]), "`key_cache.shape` .* H_kv, 7]"),
    "dtype": (lambda c: (c[0].bfloat16(), *c[1:]), "`key_cache.dtype` .* bfloat16"),
    "values": (lambda c: (*c[:2], c[2][1:], *c[3:]), r"`value_cache.shape` .* \[10, 4, 2, D_v]"),
    "strided cache": (
        lambda c: (c[0], c[1].flip(0).transpose(0, 1).contiguous().transpose(0, 1), *c[2:]),
        "`key_cache.stride` .* contiguous",
    ),
    "block size": (
        lambda c: (*c[:3], replace(c[3], block_size=5), c[4]),
        "`batch.block_size` is 5: must be 4",
    ),
    "no batch": (lambda c: (*c[:3], None, c[4]), "`batch` is None: must be a `AttentionBatch`"),
    "int32": (
        lambda c: (*c[:3], replace(c[3], length_B=c[3].length_B.int()), c[4]),
        "`batch.length_B.dtype` .* int64",
    ),
    "starts": (other("query_start_B1", [0, 6]), r"`batch.query_start_B1.shape` .* \[3]"),
    "too few tokens": (other("query_start_B1", [0, 4, 5]), "`batch.query_start_B1` .* from 0 to 6"),
    "not from 0": (other("query_start_B1", [1, 5, 6]), "`batch.query_start_B1` .* from 0 to 6"),
    "an empty request": (other("query_start_B1", [0, 6, 6]), "`batch.query_start_B1` .* rising"),
    "falling": (other("query_start_B1", [0, 7, 6]), "`batch.query_start_B1` .* rising"),
    "shorter than its tokens": (other("length_B", [4, 10]), r"`batch.length_B` is 4: .* 5\.\.20"),
    "blocks missing": (other("length_B", [18, 21]), r"`batch.length_B` is 21: .* 1\.\.20"),
    "one table": (other("block_BL", TABLE[:1]), r"`batch.block_BL.shape` .* \[2, L]"),
    "strided table": (
        lambda c: (*c[:3], replace(c[3], block_BL=torch.tensor(TABLE).T.contiguous().T), c[4]),
        "`batch.block_BL.stride` .* contiguous",
    ),
    "no such block": (
        other("block_BL", [TABLE[0], [6, 7, 10, 0, 0]]),
        r"`batch.block_BL` is 10: must be in 0\.\.9",
    ),
    "a block below 0": (other("block_BL", [TABLE[0], [6, -1, 8, 0, 0]]), "`batch.block_BL` is -1"),
    "window": (with_options(sliding_window=0), "`options.sliding_window` is 0: .* >= 1"),
    "soft cap": (with_options(softcap=0.0), "`options.softcap` is 0.0: .* > 0"),
    "sinks": (with_options(sinks_H=torch.zeros(3)), r"`options.sinks_H.shape` .* \[4]"),
}


@pytest.mark.parametrize("backend", host_backends())
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_arguments_are_named(backend: str, wrong: str) -> None:
    change, message = WRONG[wrong]
    query, key, value, batch = make_case([(13, 5), (9, 1)], SHAPES["gqa"])
    batch = replace(batch, block_BL=torch.tensor(TABLE))
    key, value = key[:10].contiguous(), value[:10].contiguous()
    case = (query, key, value, batch, PLAIN)
    get_backend(backend).attention(*case)
    with pytest.raises(ConfigError, match=message):
        get_backend(backend).attention(*change(case))


def test_a_batch_is_checked_again_for_other_tokens() -> None:
    """All layers of a pass share a batch and its check; another pass does not."""
    query, key, value, batch = make_case(BATCHES["mixed"], SHAPES["gqa"])
    attention = get_backend("torch").attention
    attention(query, key, value, batch, PLAIN)
    with pytest.raises(ConfigError, match="query_start_B1"):
        attention(query[1:], key, value, batch, PLAIN)
    with pytest.raises(ConfigError, match="block_BL"):
        attention(query, key[:5], value[:5], batch, PLAIN)

"""The pool's shapes, its size in bytes, and where writes go."""

from __future__ import annotations

import pytest
import torch

from foretoken.cache.kv_pool import KVPool
from foretoken.ops.passes import write_kv

SHAPES = [(2, 8, 8), (1, 16, 12)]
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_what_was_announced(dtype: torch.dtype) -> None:
    pool = KVPool(SHAPES, 5, 4, dtype=dtype, device=CPU)
    held = sum(t.numel() * t.element_size() for t in (*pool.keys, *pool.values))
    assert held == 5 * KVPool.bytes_per_block(SHAPES, 4, dtype)


def test_layers_may_differ() -> None:
    pool = KVPool(SHAPES, 5, 4, dtype=torch.float32, device=CPU)
    assert [tuple(k.shape) for k in pool.keys] == [(5, 4, 2, 8), (5, 4, 1, 16)]
    assert [tuple(v.shape) for v in pool.values] == [(5, 4, 2, 8), (5, 4, 1, 12)]


def test_write_goes_to_block_and_offset() -> None:
    pool = KVPool(SHAPES, 5, 4, dtype=torch.float32, device=CPU)
    key, value = torch.randn(2, 1, 16), torch.randn(2, 1, 12)
    caches = pool.keys[1], pool.values[1]
    write_kv(caches, torch.tensor([2 * 4 + 3, 4 * 4]), key, value)
    assert torch.equal(pool.keys[1][2, 3], key[0])
    assert torch.equal(pool.values[1][4, 0], value[1])
    assert int(pool.keys[1].count_nonzero()) == key.numel()
    assert not pool.keys[0].any()


def test_fresh_memory_is_finite() -> None:
    pool = KVPool(SHAPES, 5, 4, dtype=torch.float32, device=CPU)
    assert all(bool(t.isfinite().all()) for t in (*pool.keys, *pool.values))


def test_clear_leaves_other_blocks_alone() -> None:
    pool = KVPool(SHAPES, 5, 4, dtype=torch.float32, device=CPU)
    for cache in (*pool.keys, *pool.values):
        cache.fill_(torch.nan)
    pool.clear([3, 1])
    for cache in (*pool.keys, *pool.values):
        finite = [bool(block.isfinite().all()) for block in cache]
        assert finite == [False, True, False, True, False]

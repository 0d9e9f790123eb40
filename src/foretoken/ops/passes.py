"""Parts of every pass: a hook that runs before it, and the writing of new keys and values to the
paged cache in stock operators.

Shape suffixes: T packed tokens, H heads, D head size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from foretoken.ops.types import AttentionBatch


class _Hook(threading.local):
    call: Callable[[], None] | None = None


_hook = _Hook()


def before_passes(call: Callable[[], None]) -> None:
    """Call `call`, which must not raise, whenever this thread begins a pass or a round of drafting.

    A pass releases the GIL for long. A thread that is woken while this thread runs Python gets the
    GIL only during short native calls, and soon loses it again: an event loop that was woken at the
    end of each step slept 4.7 times per delta. Woken when a pass begins, it slept 1.1 to 1.9 times.
    """
    _hook.call = call


def pass_begins() -> None:
    """Run this thread's hook, if any."""
    if _hook.call is not None:
        _hook.call()


def write_kv(
    caches: tuple[Tensor, Tensor], index_T: Tensor, key_THD: Tensor, value_THD: Tensor
) -> None:
    """Store a layer's new keys and values at `index_T` (`write_index`) of its two caches,
    [num_blocks, block_size, H, D] each."""
    for cache, new_THD in zip(caches, (key_THD, value_THD), strict=True):
        cache.flatten(0, 1).index_copy_(0, index_T, new_THD)


def write_index(batch: AttentionBatch, num_tokens: int, num_blocks: int) -> Tensor:
    """The place in a layer's cache of each new token: int64 [T], block * block_size + offset; for
    padding after the last request's tokens, a place in the pool's last block. On a CPU this is
    plain Python: with operators, this function took 40 us for one token instead of 9."""
    size, padding_place = batch.block_size, (num_blocks - 1) * batch.block_size
    if batch.length_B.device.type == "cpu":
        index_T: list[int] = []
        starts = batch.query_start_B1.tolist()
        columns = (pairwise(starts), batch.length_B.tolist(), batch.block_BL.tolist())
        for (start, end), length, blocks in zip(*columns, strict=True):
            index_T += [
                blocks[i // size] * size + i % size for i in range(length - end + start, length)
            ]
        return torch.tensor(index_T + [padding_place] * (num_tokens - len(index_T)))
    token_T = torch.arange(num_tokens, device=batch.length_B.device)
    end_B = batch.query_start_B1[1:]
    request_T = torch.searchsorted(end_B, token_T, right=True)
    is_real_T, request_T = request_T < len(end_B), request_T.clamp(max=len(end_B) - 1)
    position_T = torch.where(is_real_T, token_T + (batch.length_B - end_B)[request_T], 0)
    block_T = batch.block_BL[request_T, position_T // size]
    return torch.where(is_real_T, block_T * size + position_T % size, padding_place)

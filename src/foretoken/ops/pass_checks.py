"""Checks of what a forward pass reads, in the manner of `ops/checks.py`: attention, a decoder.

Shapes as in `ops/types.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import ref

import torch
from torch import Tensor

from foretoken.errors import ConfigError
from foretoken.ops.checks import (
    FLOATS,
    INT64,
    B,
    Letter,
    check_between,
    check_cache,
    check_kind,
    check_params,
    check_tensor,
)
from foretoken.ops.decoder import DraftRound
from foretoken.ops.types import AttentionBatch, AttentionOptions

L, D_V, QUERY = Letter("L"), Letter("D_v"), tuple(map(Letter, "THD"))
POOL = tuple(map(Letter, ("num_blocks", "block_size", "H_kv")))
_latest: tuple[ref[AttentionBatch], object] | None = None
"""The last batch that was validated, and the rest that was validated with it. A pass attends once
per layer: without this, checks were 2 to 4 % of a decode step through 20 layers of modules."""


def check_attention(
    query_THD: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: AttentionBatch,
    options: AttentionOptions,
) -> None:
    """All arguments of `Backend.attention`; the layers of a pass differ in addresses alone."""
    global _latest
    check_kind("options", options, AttentionOptions)
    rest = (_looks(query_THD), _looks(key_cache), _looks(value_cache), options[:3])
    known = _latest
    if known is None or known[0]() is not batch or known[1] != rest:
        _check_caches(query_THD, key_cache, value_cache)
        check_attention_batch(batch, query_THD.shape[0], key_cache)
        if options.sliding_window is not None and options.sliding_window < 1:
            raise ConfigError("options.sliding_window", options.sliding_window, "None or >= 1")
        if options.softcap is not None and not options.softcap > 0:
            raise ConfigError("options.softcap", options.softcap, "None or > 0")
        _latest = (ref(batch), rest)
    sinks_H = options.sinks_H
    if sinks_H is not None:
        heads, device = query_THD.shape[1:2], query_THD.device
        check_tensor("options.sinks_H", sinks_H, heads, FLOATS, device, grad=True)


def _looks(value: object) -> object:
    if not isinstance(value, Tensor):
        return None
    return value.shape, value.dtype, value.device, value.is_contiguous()


def _check_caches(query_THD: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
    check_tensor("query_THD", query_THD, QUERY, FLOATS)
    _, heads, size = query_THD.shape
    dtype, device = (query_THD.dtype,), query_THD.device
    check_tensor("key_cache", key_cache, (*POOL, size), dtype, device, contiguous=True)
    pool = key_cache.shape[:3]
    if pool[2] == 0 or heads % pool[2]:
        wanted = f"[num_blocks, block_size, H_kv, {size}], H_kv a divisor of {heads}"
        raise ConfigError("key_cache.shape", tuple(key_cache.shape), wanted)
    check_tensor("value_cache", value_cache, (*pool, D_V), dtype, device, contiguous=True)


def check_attention_batch(batch: AttentionBatch, tokens: int, key_cache: Tensor) -> None:
    """The batch is about so many tokens, the blocks of this cache, on its device.

    On the host also that requests have tokens, lengths cover them, and blocks exist.
    """
    check_kind("batch", batch, AttentionBatch)
    if batch.values_fit:
        return
    (blocks, block_size), device = key_cache.shape[:2], key_cache.device
    if batch.block_size != block_size:
        raise ConfigError("batch.block_size", batch.block_size, f"{block_size}, that of the cache")
    check_tensor("batch.length_B", batch.length_B, (B,), INT64, device, contiguous=True)
    requests = batch.length_B.shape[0]
    start_B1, shape = batch.query_start_B1, (requests + 1,)
    check_tensor("batch.query_start_B1", start_B1, shape, INT64, device, contiguous=True)
    check_tensor("batch.block_BL", batch.block_BL, (requests, L), INT64, device, contiguous=True)
    if device.type == "cpu":
        _check_values(batch, tokens, blocks)


def check_block_table(block_SL: Tensor, slots: int) -> None:
    """A row for every slot, on the host."""
    check_tensor("block_SL", block_SL, (slots, block_SL.shape[1]), INT64, contiguous=True)


def check_draft_round(
    drafting: DraftRound, length_B: Tensor, room: int, vocabulary: int, least: int = 1
) -> list[int]:
    """Slots exist, a block table of so much room and the cache reach over the drafts.

    All tensors are on the host. Returns the numbers of drafts.
    """
    slot_B, num_B, cache = drafting.slot_B, drafting.num_B, drafting.cache
    check_tensor("drafting.slot_B", slot_B, length_B.shape, INT64, contiguous=True)
    check_tensor("drafting.num_B", num_B, length_B.shape, INT64, contiguous=True)
    check_params(drafting.params, slot_B.device)
    last, nums = drafting.params.key_S.shape[0] - 1, num_B.tolist()
    for slot in slot_B.tolist():
        if not 0 <= slot <= last:
            raise ConfigError("drafting.slot_B", slot, f"in 0..{last}, the slots of `params`")
    for num, length in zip(nums, length_B.tolist(), strict=True):
        end = room - length + 1
        if not least <= num <= end:
            wanted = f"in {least}..{end}: the block table reaches over all drafts but the last"
            raise ConfigError("drafting.num_B", num, wanted)
    if cache is not None:
        check_cache("drafting.cache", cache, drafting.params, slot_B.device)
        dtype, (_, most, width) = cache.logits_SKV.dtype, cache.logits_SKV.shape
        if dtype is not torch.float32 or most < max(nums) or width != vocabulary:
            shape = (dtype, *cache.logits_SKV.shape)
            wanted = f"float32 [S, K >= {max(nums)}, {vocabulary}]"
            raise ConfigError("drafting.cache.logits_SKV", shape, wanted)
    return nums


def _check_values(batch: AttentionBatch, tokens: int, blocks: int) -> None:
    start_B1, length_B = batch.query_start_B1.tolist(), batch.length_B.tolist()
    room = batch.block_BL.shape[1] * batch.block_size
    if not length_B or start_B1[0] != 0 or start_B1[-1] != tokens:
        wanted = f"from 0 to {tokens}, the number of tokens, with at least one request"
        raise ConfigError("batch.query_start_B1", start_B1, wanted)
    for start, end, length in zip(start_B1[:-1], start_B1[1:], length_B, strict=True):
        if start >= end:
            wanted = "rising: no request is without a token"
            raise ConfigError("batch.query_start_B1", start_B1, wanted)
        if not end - start <= length <= room:
            wanted = f"in {end - start}..{room}: its new tokens, what its row of `block_BL` holds"
            raise ConfigError("batch.length_B", length, wanted)
    wanted = f"in 0..{blocks - 1}, the blocks of the cache"
    check_between("batch.block_BL", batch.block_BL.flatten().numpy(), 0, blocks - 1, wanted)


def check_hidden(hidden_SC: Tensor, slots: int, size: int) -> None:
    """What a head keeps by slot, see `RoundHead`."""
    check_tensor("hidden_SC", hidden_SC, (slots, size), (torch.float32,), contiguous=True)


def check_aux(aux: Sequence[Tensor], tokens: int, numbers: int) -> None:
    """Hidden states that a head reads, of so many numbers for each token, all together."""
    for i, state_TH in enumerate(aux):
        shape = (tokens, numbers // len(aux))
        check_tensor(f"aux[{i}]", state_TH, shape, (torch.float32,), contiguous=True)

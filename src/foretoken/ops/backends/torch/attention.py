"""Paged attention with stock PyTorch operators, tuned for few rows on a CPU.

At batch 1 a layer's attention is mostly operator overhead, so everything that depends only on the
batch (block lists, masks, contiguous runs) is planned once and shared by all layers.

Shape suffixes: T packed tokens, H heads, D head size, b requests of a call, Q queries of each
request, L keys of each request, C block-table columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.ops.types import AttentionBatch, AttentionOptions


@dataclass(frozen=True, slots=True)
class _Call:
    """One SDPA call: b requests with Q queries and L = `length` keys each.

    tokens:    where the b*Q tokens are in the packed axis T: a slice if adjacent, else indices
    first_key: index of the first key in the cache if the keys are adjacent there, else None
    block_ids: int64 [b * columns], read if `first_key` is None
    skip:      keys to drop at the front of the gathered blocks, outside the sliding window
    mask:      [b, 1, Q, L] of 0 and -inf; None with `causal`, or if every query sees every key
    causal:    whether SDPA's own causal mask is right: queries and keys start at the same position
    """

    tokens: Tensor | slice
    num_requests: int
    num_queries: int
    first_key: int | None
    block_ids: Tensor
    skip: int
    length: int
    mask: Tensor | None
    causal: bool


_Plans = dict[tuple[int | None, torch.dtype], list[_Call]]

# The latest batch, which all layers of a pass share, kept alive so that no other object can have
# its identity; and its plans by window and dtype. Two threads may each plan the same batch.
_latest: tuple[AttentionBatch | None, _Plans] = (None, {})


def attention(
    query_THD: Tensor, key_cache: Tensor, value_cache: Tensor, batch: AttentionBatch,
    options: AttentionOptions,
) -> Tensor:  # fmt: skip
    """See `Backend.attention`: causal attention of ragged queries over paged K/V, [T, H, D_v]."""
    calls = _plan(batch, options.sliding_window, query_THD.dtype)
    caches = key_cache, value_cache
    if len(calls) == 1 and calls[0].num_requests * calls[0].num_queries == len(query_THD):
        return _run(calls[0], query_THD, caches, options)
    out_THD = query_THD.new_zeros(*query_THD.shape[:2], value_cache.shape[-1])  # padding stays 0
    for call in calls:
        out_THD[call.tokens] = _run(call, query_THD[call.tokens], caches, options)
    return out_THD


def _run(
    call: _Call, query_THD: Tensor, caches: tuple[Tensor, Tensor], options: AttentionOptions
) -> Tensor:
    tokens, heads, size = query_THD.shape
    query = query_THD.view(call.num_requests, call.num_queries, heads, size).transpose(1, 2)
    key, value = (_read(call, cache) for cache in caches)
    if options.softcap is None and options.sinks_H is None:
        # On a CPU `enable_gqa` is 3.5 times faster than repeating the K/V heads.
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=call.mask, is_causal=call.causal, scale=options.scale,
            enable_gqa=True,
        )  # fmt: skip
    else:
        out = _attend_in_steps(call, query, key, value, options)
    return out.transpose(1, 2).reshape(tokens, heads, -1)


def _read(call: _Call, cache: Tensor) -> Tensor:
    """Keys or values of the call as [b, H_kv, L, D]: a view if contiguous, else a copy."""
    heads, size = cache.shape[2:]
    if call.first_key is not None:
        flat = cache.view(1, -1, heads, size)
        return flat.narrow(1, call.first_key, call.length).transpose(1, 2)
    # Gathering token by token instead of whole blocks took half of a step at batch 16.
    gathered = cache.index_select(0, call.block_ids).view(call.num_requests, -1, heads, size)
    return gathered.narrow(1, call.skip, call.length).transpose(1, 2)


def _attend_in_steps(
    call: _Call, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
) -> Tensor:
    """Attention with a soft cap or sinks, which SDPA lacks; softmax in float32: [b, H, Q, D_v]."""
    b, heads, queries, size = query.shape
    kv_heads, per_kv = key.shape[1], heads // key.shape[1]
    grouped = query.reshape(b, kv_heads, per_kv * queries, size)
    score = (grouped @ key.transpose(2, 3)).float() * options.scale
    if options.softcap is not None:
        score = torch.tanh(score / options.softcap) * options.softcap
    score = score.view(b, heads, queries, -1)
    if call.mask is not None:
        score = score + call.mask
    elif call.causal:
        score = score.masked_fill(torch.ones_like(score, dtype=torch.bool).triu(1), -torch.inf)
    if options.sinks_H is None:
        weight = score.softmax(-1)
    else:
        sink = options.sinks_H.float().view(1, heads, 1, 1).expand(b, heads, queries, 1)
        weight = torch.cat([score, sink], -1).softmax(-1)[..., :-1]
    weight = weight.to(value.dtype).reshape(b, kv_heads, per_kv * queries, -1)
    return (weight @ value).view(b, heads, queries, -1)


def _plan(batch: AttentionBatch, window: int | None, dtype: torch.dtype) -> list[_Call]:
    """The calls of a layer; planned once per batch, window and dtype."""
    global _latest
    latest, plans = _latest
    if latest is not batch:
        plans = {}
        _latest = (batch, plans)
    calls = plans.get((window, dtype))
    if calls is None:
        start_B1, length_B = batch.query_start_B1.tolist(), batch.length_B.tolist()
        calls = [
            _plan_call(batch, group, start_B1, length_B, window, dtype)
            for group in _groups(start_B1, length_B)
        ]
        plans[window, dtype] = calls
    return calls


def _groups(start_B1: list[int], length_B: list[int]) -> Iterator[list[int]]:
    """The requests, grouped by number of queries. A group that would have more padding than keys is
    split at the lengths 128, 256, 512, ..."""
    by_queries: dict[int, list[int]] = {}
    for b, (start, end) in enumerate(pairwise(start_B1)):
        by_queries.setdefault(end - start, []).append(b)
    for group in by_queries.values():
        lengths = [length_B[b] for b in group]
        parts = {0: group}
        if len(group) * max(lengths) > 2 * sum(lengths):
            parts = {}
            for b, length in zip(group, lengths, strict=True):
                parts.setdefault((length // 128).bit_length(), []).append(b)
        yield from parts.values()


def _indices(group: list[int], start_B1: list[int], device: torch.device) -> tuple[Any, Any]:
    """Where the group's tokens are in T and its requests in B: slices if adjacent, else indices."""
    first, last = group[0], group[-1]
    if last - first == len(group) - 1:
        return slice(start_B1[first], start_B1[last + 1]), slice(first, last + 1)
    start_b1 = torch.tensor([[start_B1[b]] for b in group], device=device)
    offset_Q = torch.arange(start_B1[first + 1] - start_B1[first], device=device)
    return (start_b1 + offset_Q).flatten(), group


def _plan_call(
    batch: AttentionBatch, group: list[int], start_B1: list[int], length_B: list[int],
    window: int | None, dtype: torch.dtype,
) -> _Call:  # fmt: skip
    """Plan the call of a group: which keys it reads, as a view if possible, and which mask."""
    requests, queries = len(group), start_B1[group[0] + 1] - start_B1[group[0]]
    block_size, device = batch.block_size, batch.block_BL.device
    tokens, request_index = _indices(group, start_B1, device)
    table_bC, lengths = batch.block_BL[request_index], [length_B[b] for b in group]
    shortest, longest = min(lengths), max(lengths)
    # All keys before this one are outside the window of every query.
    skip = 0 if window is None else max(0, shortest - queries - window + 1)
    first_column, columns = skip // block_size, -(-longest // block_size)
    block_bC = table_bC[:, first_column:columns]
    if shortest < longest:
        # Pad the table with the request's own first block. The block of another request might hold
        # a NaN, which would spread to this request's results even from a masked key.
        used_b1 = torch.tensor([[-(-length // block_size)] for length in lengths], device=device)
        column_C = torch.arange(first_column, columns, device=device)
        block_bC = torch.where(column_C < used_b1, block_bC, table_bC[:, :1])
    first_key = None
    if requests == 1:
        ids = block_bC[0].tolist()
        if ids == list(range(ids[0], ids[0] + len(ids))):
            first_key = ids[0] * block_size + skip % block_size
    windowed = window is not None and window < longest
    causal = requests == 1 and queries == longest > 1 and not windowed
    sees_all = queries == 1 and shortest == longest and (window is None or longest - skip <= window)
    mask = None
    if not (causal or sees_all):
        # Positions of queries and keys.
        length_b11 = torch.tensor(lengths, device=device)[:, None, None]
        query_bQ1 = length_b11 - torch.arange(queries, 0, -1, device=device)[:, None]
        key_L = torch.arange(skip, longest, device=device)
        hidden = key_L > query_bQ1
        if window is not None:
            hidden |= key_L <= query_bQ1 - window
        # Floats: SDPA would convert a boolean mask in every call, once per layer.
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
        mask = mask.masked_fill_(hidden, -torch.inf).unsqueeze(1)
    return _Call(
        tokens=tokens, num_requests=requests, num_queries=queries,
        first_key=first_key, block_ids=block_bC.reshape(-1), skip=skip % block_size,
        length=longest - skip, mask=mask, causal=causal,
    )  # fmt: skip

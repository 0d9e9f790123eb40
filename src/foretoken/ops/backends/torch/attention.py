"""Paged attention with stock PyTorch operators, tuned for few rows on a CPU.

Belongs here: `attention` of the backend contract. Does not: writing K/V, building batches.

At batch 1 a layer's attention is mostly operator overhead, so everything that depends on the
batch alone (block lists, masks, contiguous runs) is planned once and shared by all layers.

Shape suffixes: T packed tokens, H heads, D head size, b requests of a call, Q queries of each,
L keys of each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.ops.types import AttentionBatch, AttentionGroup

__all__ = ["attention"]


@dataclass(frozen=True, slots=True)
class _Call:
    """One SDPA call: b requests of Q queries over L keys each.

    tokens:    packed tokens of the call
    whole:     these are all tokens of the batch, in order: no need to gather or scatter
    first:     flat cache index of the first key if the keys are contiguous in the pool, else None
    block_ids: int64 [b * columns], read if `first` is None
    skip:      keys to drop at the front of the gathered blocks (sliding window)
    length:    L
    mask:      [b, 1, Q, L] of 0 and -inf, or None if every query sees every key (or `causal`)
    causal:    queries and keys start together: SDPA's own causal mask is right
    """

    tokens: Tensor | slice
    whole: bool
    num_requests: int
    num_queries: int
    first: int | None
    block_ids: Tensor
    skip: int
    length: int
    mask: Tensor | None
    causal: bool


_Plans = dict[tuple[int | None, torch.dtype], list[_Call]]

# The last batch and its plans. All layers of a forward share one batch; holding a reference to it
# makes the identity test sound. One tuple, swapped at once: threads can only make it miss.
_last: tuple[AttentionBatch | None, _Plans] = (None, {})


def attention(
    query_THD: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """See `Backend.attention`: causal attention of ragged queries over paged K/V, [T, H, D_v]."""
    calls = _plan(batch, sliding_window, query_THD.dtype)
    if calls[0].whole:
        return _run(calls[0], query_THD, key_cache, value_cache, scale, softcap, sinks_H)
    out_THD = query_THD.new_empty(*query_THD.shape[:2], value_cache.shape[-1])
    for call in calls:
        out_THD[call.tokens] = _run(
            call, query_THD[call.tokens], key_cache, value_cache, scale, softcap, sinks_H
        )
    return out_THD


def _run(
    call: _Call,
    query_THD: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    tokens, heads, size = query_THD.shape
    query = query_THD.view(call.num_requests, call.num_queries, heads, size).transpose(1, 2)
    key, value = _read(call, key_cache), _read(call, value_cache)
    if softcap is None and sinks_H is None:
        # enable_gqa: 3.5x faster than repeating the K/V heads on a CPU.
        out = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=call.mask,
            is_causal=call.causal,
            scale=scale,
            enable_gqa=True,
        )
    else:
        out = _explicit(call, query, key, value, scale, softcap, sinks_H)
    return out.transpose(1, 2).reshape(tokens, heads, -1)


def _read(call: _Call, cache: Tensor) -> Tensor:
    """Keys or values of the call as [b, H_kv, L, D]: a view if contiguous, else whole blocks."""
    heads, size = cache.shape[2:]
    if call.first is not None:
        flat = cache.view(1, -1, heads, size)
        return flat.narrow(1, call.first, call.length).transpose(1, 2)
    # By whole blocks: gathering token by token took half the step at batch 16.
    gathered = cache.index_select(0, call.block_ids).view(call.num_requests, -1, heads, size)
    return gathered.narrow(1, call.skip, call.length).transpose(1, 2)


def _explicit(
    call: _Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """Softmax written out, in float32: SDPA has neither soft cap nor sinks. [b, H, Q, D_v]."""
    b, heads, queries, size = query.shape
    kv_heads, per_kv = key.shape[1], heads // key.shape[1]
    grouped = query.reshape(b, kv_heads, per_kv * queries, size)
    score = (grouped @ key.transpose(2, 3)).float() * scale
    if softcap is not None:
        score = torch.tanh(score / softcap) * softcap
    score = score.view(b, heads, queries, -1)
    if call.mask is not None:
        score = score + call.mask
    elif call.causal:
        score = score.masked_fill(torch.ones_like(score, dtype=torch.bool).triu(1), -torch.inf)
    if sinks_H is None:
        weight = score.softmax(-1)
    else:
        sink = sinks_H.float().view(1, heads, 1, 1).expand(b, heads, queries, 1)
        weight = torch.cat([score, sink], -1).softmax(-1)[..., :-1]
    weight = weight.to(value.dtype).reshape(b, kv_heads, per_kv * queries, -1)
    return (weight @ value).view(b, heads, queries, -1)


def _plan(batch: AttentionBatch, window: int | None, dtype: torch.dtype) -> list[_Call]:
    global _last
    last, plans = _last
    if last is not batch:
        plans = {}
        _last = (batch, plans)
    calls = plans.get((window, dtype))
    if calls is None:
        parts = [part for group in batch.groups for part in _split(group)]
        whole = len(parts) == 1 and isinstance(parts[0].token_index, slice)
        calls = [_plan_call(part, batch.block_size, window, dtype, whole) for part in parts]
        plans[window, dtype] = calls
    return calls


def _split(group: AttentionGroup) -> list[AttentionGroup]:
    """Cut a group whose padding would cost more than its keys, so that in each part the longest
    request is at most twice the shortest (or short anyway)."""
    lengths = group.length_b.tolist()
    if len(lengths) * max(lengths) <= 2 * sum(lengths):
        return [group]
    members: dict[int, list[int]] = {}
    for b, length in enumerate(lengths):
        members.setdefault((length // 128).bit_length(), []).append(b)
    if len(members) == 1:
        return [group]
    tokens: Tensor | slice = group.token_index
    if isinstance(tokens, slice):
        tokens = torch.arange(tokens.start, tokens.stop, device=group.length_b.device)
    token_bQ = tokens.view(group.num_requests, group.num_queries)
    return [
        AttentionGroup(
            token_index=token_bQ[part].flatten(),
            num_requests=len(part),
            num_queries=group.num_queries,
            block_bL=group.block_bL[part],
            length_b=group.length_b[part],
            position_bQ=group.position_bQ[part],
        )
        for part in members.values()
    ]


def _plan_call(
    group: AttentionGroup, block_size: int, window: int | None, dtype: torch.dtype, whole: bool
) -> _Call:
    """Decide what keys to read, as a view if possible, and the smallest mask that is right."""
    queries, lengths = group.num_queries, group.length_b.tolist()
    shortest, longest = min(lengths), max(lengths)
    # The earliest key that the earliest query of any request still sees.
    skip = 0 if window is None else max(0, shortest - queries - window + 1)
    first_column, columns = skip // block_size, -(-longest // block_size)
    block_bL = group.block_bL[:, first_column:columns]
    if shortest < longest:
        # Read the request's own first block instead of the padding's: a masked key that another
        # request left as NaN would still make this one NaN.
        used_b1 = (group.length_b.unsqueeze(1) + block_size - 1) // block_size
        column_L = torch.arange(first_column, columns, device=block_bL.device)
        block_bL = torch.where(column_L < used_b1, block_bL, group.block_bL[:, :1])
    first = None
    if group.num_requests == 1:
        ids = block_bL[0].tolist()
        if ids == list(range(ids[0], ids[0] + len(ids))):
            first = ids[0] * block_size + skip % block_size
    windowed = window is not None and window < longest
    causal = group.num_requests == 1 and queries == longest > 1 and not windowed
    visible = queries == 1 and shortest == longest and (window is None or longest - skip <= window)
    return _Call(
        tokens=group.token_index,
        whole=whole,
        num_requests=group.num_requests,
        num_queries=queries,
        first=first,
        block_ids=block_bL.reshape(-1),
        skip=skip % block_size,
        length=longest - skip,
        mask=None if causal or visible else _mask(group, skip, longest, window, dtype),
        causal=causal,
    )


def _mask(
    group: AttentionGroup, skip: int, longest: int, window: int | None, dtype: torch.dtype
) -> Tensor:
    """Additive mask [b, 1, Q, L]. Floats: SDPA converts a boolean mask in every call, once per
    layer."""
    key_L = torch.arange(skip, longest, device=group.length_b.device)
    query_bQ1 = group.position_bQ.unsqueeze(2)
    hidden = key_L > query_bQ1
    if window is not None:
        hidden |= key_L <= query_bQ1 - window
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return mask.masked_fill_(hidden, -torch.inf).unsqueeze(1)

"""Paged attention as it is defined: one query, one head at a time, in float64. The oracle."""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.ops.types import AttentionBatch

__all__ = ["attention"]


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
    """See `Backend.attention`. Computed in float64, returned in the dtype of the query.

    For query i and head h, over the keys j it may see:
        s_j = q . k_j * scale;  s_j = c * tanh(s_j / c) if capped;  out = sum_j softmax(s)_j v_j
    and a sink adds exp(sink_h) to the softmax's denominator.
    """
    T, H, _ = query_THD.shape
    H_kv, D_v = value_cache.shape[2:]
    out_THD = torch.empty(T, H, D_v, dtype=torch.float64, device=query_THD.device)
    token_T = torch.arange(T, device=query_THD.device)
    for group in batch.groups:
        token_bQ = token_T[group.token_index].view(group.num_requests, group.num_queries)
        for b in range(group.num_requests):
            for q in range(group.num_queries):
                i = int(group.position_bQ[b, q])
                j_first = 0 if sliding_window is None else max(0, i - sliding_window + 1)
                j = torch.arange(j_first, i + 1, device=query_THD.device)
                block = group.block_bL[b, j // batch.block_size]
                key_jHD = key_cache[block, j % batch.block_size].double()
                value_jHD = value_cache[block, j % batch.block_size].double()
                token = int(token_bQ[b, q])
                for h in range(H):
                    h_kv = h * H_kv // H
                    s_j = key_jHD[:, h_kv] @ query_THD[token, h].double() * scale
                    if softcap is not None:
                        s_j = softcap * torch.tanh(s_j / softcap)
                    if sinks_H is not None:
                        s_j = torch.cat([s_j, sinks_H[h : h + 1].double()])
                    weight_j = torch.softmax(s_j, 0)[: len(j)]
                    out_THD[token, h] = weight_j @ value_jHD[:, h_kv]
    return out_THD.to(query_THD.dtype)

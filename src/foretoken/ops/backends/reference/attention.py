"""Paged attention as it is defined: one query and one head at a time, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.ops.types import AttentionBatch, AttentionOptions


def attention(
    query_THD: Tensor, key_cache: Tensor, value_cache: Tensor, batch: AttentionBatch,
    options: AttentionOptions,
) -> Tensor:  # fmt: skip
    """See `Backend.attention`. Computed in float64, returned in the dtype of the query."""
    T, H, _ = query_THD.shape
    out_THD = torch.empty(T, H, value_cache.shape[3], dtype=torch.float64, device=query_THD.device)
    start_B1, window = batch.query_start_B1.tolist(), options.sliding_window
    for b, length in enumerate(batch.length_B.tolist()):
        for t in range(start_B1[b], start_B1[b + 1]):
            i = length - (start_B1[b + 1] - t)
            j_first = 0 if window is None else max(0, i - window + 1)
            j = torch.arange(j_first, i + 1, device=query_THD.device)
            block_j, offset_j = batch.block_BL[b, j // batch.block_size], j % batch.block_size
            key_jHD = key_cache[block_j, offset_j].double()
            value_jHD = value_cache[block_j, offset_j].double()
            for h in range(H):
                h_kv = h * key_cache.shape[2] // H
                weight_j = _weights(query_THD[t, h].double(), key_jHD[:, h_kv], h, options)
                out_THD[t, h] = weight_j @ value_jHD[:, h_kv]
    return out_THD.to(query_THD.dtype)


def _weights(query_D: Tensor, key_jD: Tensor, h: int, options: AttentionOptions) -> Tensor:
    """softmax(s)_j with s_j = q . k_j * scale; a soft cap c makes it c * tanh(s_j / c); a sink of
    head h adds exp(sink_h) to the denominator."""
    s_j = key_jD @ query_D * options.scale
    if options.softcap is not None:
        s_j = options.softcap * torch.tanh(s_j / options.softcap)
    if options.sinks_H is not None:
        s_j = torch.cat([s_j, options.sinks_H[h : h + 1].double()])
    return torch.softmax(s_j, 0)[: len(key_jD)]

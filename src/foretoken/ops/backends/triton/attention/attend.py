"""Host side of paged attention: makes the plan of a batch, and launches the kernels on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import triton
from torch import Tensor

from foretoken.errors import ConfigError
from foretoken.ops.backends.torch.attention import attention as torch_attention
from foretoken.ops.backends.triton.attention import configs, kernels, records
from foretoken.ops.backends.triton.attention.configs import Decoding, Prefilling

from foretoken.ops.backends.triton.attention.plan import (  # isort: skip
    FEW, FIELDS, MERGE_FIELDS, most_pieces, plan_kernel,
)  # fmt: skip
from foretoken.ops.backends.triton.attention.records import HeadInputs, HeadShape
from foretoken.ops.backends.triton.attention.rows import write_new_kernel
from foretoken.ops.backends.triton.compiled import launch
from foretoken.ops.backends.triton.launch import at_most_registers, check_device, dependent
from foretoken.ops.types import AttentionBatch, AttentionOptions

MOST_NEW: int = FEW.value  # the most new tokens of a request in `attend_new`


@dataclass(frozen=True, slots=True)
class _Plan:
    """The work of a batch on the device, and upper bounds of this work, which the host knows.

    prefill:    None if no request has many queries
    new_tokens: upper bound of the queries of a request with few queries; a power of 2
    items, tiles, merge_rows: upper bounds for `decode_kernel`, `prefill_kernel`, `merge_kernel`
    """

    work: records.Work
    partials: records.Partials
    decode: Decoding
    tile: records.Tile
    prefill: Prefilling | None
    new_tokens: int
    items: int
    tiles: int
    merge_rows: int


_plans: WeakKeyDictionary[AttentionBatch, dict[Any, _Plan]] = WeakKeyDictionary()


def attention(
    query_THD: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: AttentionBatch,
    options: AttentionOptions,
) -> Tensor:
    """See `Backend.attention`: causal attention of ragged queries over paged K/V, [T, H, D_v].

    Rows that belong to no request are not written. The first call makes the plan of a batch on the
    device and keeps it for later calls: under graph capture the batch must be an object made inside
    the capture. Heads wider than 256 are computed by `torch`, which reads the batch on the host.
    """
    check_device(query_THD, "query_THD")
    if max(query_THD.shape[2], value_cache.shape[3]) > configs.LARGEST_HEAD:
        return torch_attention(query_THD, key_cache, value_cache, batch, options)
    if query_THD.stride(2) != 1:
        query_THD = query_THD.contiguous()
    tokens, heads, _ = query_THD.shape
    shape = _shape(heads, key_cache, value_cache, options)
    out_THD = query_THD.new_empty(tokens, heads, shape.D_V)
    if not tokens:
        return out_THD
    plan = _plan(batch, tokens, shape)
    rows = records.TokenRows(query_THD, query_THD.stride(0), query_THD.stride(1))
    caches = _cache(key_cache, value_cache, batch)
    scores = _scores(options)
    if plan.prefill is not None:
        rows_of_tile, keys, stages, warps = plan.prefill
        launch(
            kernels.prefill_kernel, (plan.tiles * shape.H_KV,),
            rows, caches, plan.work, scores, out_THD, SHAPE=shape, R=rows_of_tile, KEYS=keys,
            STAGES=stages, num_warps=warps,
        )  # fmt: skip
    _decode(rows, None, caches, plan, shape, scores, out_THD)
    return out_THD


def attend_new(
    qkv_TW: Tensor,
    heads: HeadInputs,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: AttentionBatch,
    options: AttentionOptions,
    out_TC: Tensor,
    overlap: bool = False,
) -> None:
    """Norms, rotary, K/V write and attention of a decode step, in one kernel and a merge.

    While T <= 16 a row's bits depend only on its own context, not on any other row.

    Args:
        qkv_TW: [T, (H + H_kv) * D + H_kv * D_v], unit stride along W: query heads, key heads, value
            heads of each new token, biases added. Not changed. `ConfigError` for another width.
        heads: the norms and the rotary embedding of q and k.
        key_cache, value_cache: as in `attention`; new tokens are written at their positions.
        batch: with 1 <= most_queries <= MOST_NEW, else `ConfigError`.
        out_TC: receives the attended values, [T, H * D_v], contiguous, in the dtype of the cache.
            Rows that belong to no request are not written.
        overlap: launch the kernels dependently (PDL). Each kernel lets the next start at once
            and waits before it reads `qkv_TW`. The plan, the block table and the K/V of earlier
            tokens are read before that wait: they must exist when the plan is made (see `prepare`),
            and the first kernel after the plan must wait before it lets others start.
    """
    if not 1 <= batch.most_queries <= MOST_NEW:
        remedy = "For more new tokens call `write_new`, then `attention`."
        raise ConfigError("batch.most_queries", batch.most_queries, f"in 1..{MOST_NEW}", remedy)
    shape = _shape(_query_heads(qkv_TW, key_cache, value_cache), key_cache, value_cache, options)
    plan = _plan(batch, qkv_TW.shape[0], shape)
    rows = records.TokenRows(qkv_TW, qkv_TW.stride(0), shape.D)
    caches = _cache(key_cache, value_cache, batch)
    _decode(rows, heads, caches, plan, shape, _scores(options), out_TC, overlap)


def write_new(
    qkv_TW: Tensor,
    heads: HeadInputs,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: AttentionBatch,
    overlap: bool = False,
) -> Tensor:
    """Norms, rotary and K/V write of any number of new tokens, in one kernel.

    Arguments as in `attend_new`, with any `batch.most_queries`. The query heads in `qkv_TW` are
    replaced by the queries that `attention` takes. Returns these as a strided view [T, H, D].
    """
    query_heads = _query_heads(qkv_TW, key_cache, value_cache)
    shape = _shape(query_heads, key_cache, value_cache, AttentionOptions(1.0))
    tokens, requests = qkv_TW.shape[0], batch.length_B.shape[0]
    rows_per_program = 4 if tokens <= 256 else 16
    launch(
        write_new_kernel, (triton.cdiv(tokens, rows_per_program), shape.H_KV),
        records.TokenRows(qkv_TW, qkv_TW.stride(0), shape.D), heads,
        _cache(key_cache, value_cache, batch), batch.query_start_B1, batch.length_B, requests,
        SHAPE=shape, ROTARY=2 * heads.cos_PR.shape[1], ROWS=rows_per_program,
        CHUNK=16 if requests <= 16 else 128, OVERLAP=overlap, num_warps=4, **dependent(overlap),
    )  # fmt: skip
    return qkv_TW[:, : query_heads * shape.D].view(-1, query_heads, shape.D)


def prepare(
    batch: AttentionBatch,
    tokens: int,
    query_heads: int,
    key_cache: Tensor,
    value_cache: Tensor,
    options: AttentionOptions,
    decoding: Callable[..., Decoding] = configs.decoding,
) -> None:
    """Make the plan of a batch of `tokens` rows before kernels that overlap. Without this call, the
    first layer of this shape makes the plan. decoding: chooses how `decode_kernel` is set up."""
    _plan(batch, tokens, _shape(query_heads, key_cache, value_cache, options), decoding)


def _decode(
    rows: records.TokenRows,
    heads: HeadInputs | None,
    caches: records.Cache,
    plan: _Plan,
    shape: HeadShape,
    scores: records.Scores,
    out: Tensor,
    overlap: bool = False,
) -> None:
    """Attend with the requests that have few queries, then merge the pieces of their contexts."""
    config, multiprocessors = plan.decode, _multiprocessors(out.device)
    programs_per_head = max(1, config.programs * multiprocessors // shape.H_KV)
    grid = shape.H_KV, min(plan.items, programs_per_head)
    launch(
        kernels.decode_kernel, grid,
        rows, heads, caches, plan.work, plan.partials, scores, out,
        SHAPE=shape, TILE=plan.tile, ROTARY=0 if heads is None else 2 * heads.cos_PR.shape[1],
        STAGES=config.stages, NEW=plan.new_tokens if heads else 1, AHEAD=config.ahead,
        OVERLAP=overlap, num_warps=config.warps,
        # A score must be rounded before the largest score is subtracted. In tiles without a mask
        # between the two steps the compiler would fuse them, with different results.
        enable_fp_fusion=False, **at_most_registers(config.registers), **dependent(overlap),
    )  # fmt: skip
    if plan.partials.pieces > 1:
        heads_per_program = min(config.merged_heads, shape.H & -shape.H)
        head_groups = shape.H // heads_per_program
        # All groups together have about 8 programs for each multiprocessor.
        programs_per_group = max(1, 8 * multiprocessors // head_groups)
        launch(
            kernels.merge_kernel, (head_groups, min(plan.merge_rows, programs_per_group)),
            plan.work, plan.partials, scores, out, H=shape.H, D_V=shape.D_V, WIDTH_V=shape.WIDTH_V,
            HEADS=heads_per_program, PIECES=config.merged_pieces, OVERLAP=overlap,
            num_warps=config.merged_warps, **dependent(overlap),
        )  # fmt: skip


def _plan(
    batch: AttentionBatch,
    tokens: int,
    shape: HeadShape,
    decoding: Callable[..., Decoding] = configs.decoding,
) -> _Plan:
    # A captured graph must make its own plan: at a replay a plan made before would be out of date.
    capturing = batch.length_B.is_cuda and torch.cuda.is_current_stream_capturing()
    plans = _plans.setdefault(batch, {})
    plan = plans.get((tokens, shape, capturing))
    if plan is None:
        plan = plans[tokens, shape, capturing] = _new_plan(batch, tokens, shape, decoding)
    return plan


def _new_plan(
    batch: AttentionBatch, tokens: int, shape: HeadShape, decoding: Callable[..., Decoding]
) -> _Plan:
    """Size a plan by upper bounds known to the host, and launch the kernel that fills it."""
    requests, columns = batch.block_BL.shape
    max_queries, longest = batch.most_queries or tokens, columns * shape.PAGE
    few_queries = min(max_queries, FEW.value)
    rows, tile_rows = min(tokens, requests * few_queries), few_queries * shape.G
    widest = max(shape.D, shape.D_V)
    decode = decoding(tokens, requests, shape.H_KV, tile_rows, widest, shape.dtype)
    prefill = configs.prefilling(widest, shape.dtype) if max_queries > FEW.value else None
    pieces = most_pieces(decode.size, decode.count, longest, shape.WINDOW)
    segments = 2 if few_queries > 1 and longest > decode.size * decode.count else 1
    items = requests * (triton.cdiv(tile_rows, decode.rows) + segments - 1) * pieces
    many_rows = 1 if prefill is None else prefill.rows
    tiles = 0 if prefill is None else triton.cdiv(tokens * shape.G, many_rows) + requests

    def empty(count: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(count, dtype=dtype, device=batch.length_B.device)

    fields, results = FIELDS.value, rows * shape.H * pieces
    few_I, merge_F = empty(items * fields), empty(rows * MERGE_FIELDS.value)
    work = records.Work(few_I, merge_F, empty(max(tiles, 1) * fields), empty(4))
    acc_FHN = empty(results * shape.D_V, torch.float32)
    top_FHN, sum_FHN = empty(results, torch.float32), empty(results, torch.float32)
    partials = records.Partials(acc_FHN, top_FHN, sum_FHN, pieces)
    piece_limits = decode.size, decode.count, decode.groups * decode.keys
    cut = records.Cut(shape.G, shape.WINDOW, *piece_limits, decode.rows, many_rows)
    launch(
        plan_kernel, (requests + 1,), batch.query_start_B1, batch.length_B, work, requests,
        CUT=cut, CHUNK=128, num_warps=4,
    )  # fmt: skip
    live_rows = decode.rows
    if decode.groups * decode.sets == 1:
        live_rows = min(live_rows, triton.next_power_of_2(tile_rows))
    tile = records.Tile(decode.rows, live_rows, decode.sets, decode.groups, decode.keys)
    new_tokens = triton.next_power_of_2(few_queries)
    return _Plan(work, partials, decode, tile, prefill, new_tokens, items, tiles, rows)


def _shape(
    heads: int, key_cache: Tensor, value_cache: Tensor, options: AttentionOptions
) -> HeadShape:
    _, page, kv_heads, size = key_cache.shape
    window = options.sliding_window or 0
    return HeadShape(heads, kv_heads, size, value_cache.shape[3], page, window, key_cache.dtype)


def _query_heads(qkv_TW: Tensor, key_cache: Tensor, value_cache: Tensor) -> int:
    """How many query heads a row of qkv has; `ConfigError` if no number of heads fits its width."""
    kv_heads, size = key_cache.shape[2:]
    query_width = qkv_TW.shape[1] - kv_heads * (size + value_cache.shape[3])
    if query_width <= 0 or query_width % (kv_heads * size):
        width = f"H * {size} + {kv_heads} * ({size} + {value_cache.shape[3]})"
        expected = f"[T, {width}], H a multiple of {kv_heads}"
        raise ConfigError("qkv_TW.shape", tuple(qkv_TW.shape), expected)
    return query_width // size


def _cache(key_cache: Tensor, value_cache: Tensor, batch: AttentionBatch) -> records.Cache:
    return records.Cache(key_cache, value_cache, batch.block_BL, batch.block_BL.shape[1])


def _scores(options: AttentionOptions) -> records.Scores:
    sink_H = None if options.sinks_H is None else options.sinks_H.contiguous()
    return records.Scores(options.scale, options.softcap, sink_H)


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # the interpreter runs programs one by one
    return int(torch.cuda.get_device_properties(device).multi_processor_count)

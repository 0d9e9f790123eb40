"""Host side of paged attention: which kernels, in which configuration, on which plan.

Letters of shapes: see `__init__.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import triton
from torch import Tensor

from foretoken.errors import ConfigError
from foretoken.ops.backends.torch.attention import attention as torch_attention
from foretoken.ops.backends.triton.attention import configs, records
from foretoken.ops.backends.triton.attention.configs import Decoding, Prefilling
from foretoken.ops.backends.triton.attention.decode import decode_kernel, merge_kernel
from foretoken.ops.backends.triton.attention.plan import (
    FEW,
    FIELDS,
    MERGE_FIELDS,
    most_pieces,
    plan_kernel,
)
from foretoken.ops.backends.triton.attention.prefill import prefill_kernel
from foretoken.ops.backends.triton.attention.records import HeadInputs
from foretoken.ops.backends.triton.attention.rows import write_new_kernel
from foretoken.ops.backends.triton.compiled import launch
from foretoken.ops.backends.triton.launch import at_most_registers, check_device, dependent
from foretoken.ops.types import AttentionBatch, AttentionOptions

MOST_NEW: int = FEW.value  # new tokens of a request that `attend_new` takes
_MERGES = 8  # programs of a merge per multiprocessor


@dataclass(frozen=True, slots=True)
class _Shape:
    """What kernels of a layer are compiled for, and its plan depends on."""

    heads: int
    kv_heads: int
    size: int
    value_size: int
    page: int
    window: int
    dtype: torch.dtype

    @property
    def per_kv(self) -> int:
        return self.heads // self.kv_heads

    @property
    def constants(self) -> dict[str, Any]:
        """Of all kernels, by their names."""
        return {
            "H": self.heads,
            "H_KV": self.kv_heads,
            "D": self.size,
            "D_V": self.value_size,
            "WIDTH": _width(self.size),
            "WIDTH_V": _width(self.value_size),
            "PAGE": self.page,
        }

    @property
    def precision(self) -> str:
        """Of products: float32 in full, not in TF32."""
        return "ieee" if self.dtype == torch.float32 else "tf32"


@dataclass(frozen=True, slots=True)
class _Plan:
    """Work on the device, and what the host knows of it.

    prefill: None if no request has many queries
    new: of a request at most, a power of 2, if they are few
    live: rows of a tile that these fill, a power of 2
    items, tiles, merges: no more than these
    """

    work: records.Work
    partials: records.Partials
    decode: Decoding
    prefill: Prefilling | None
    new: int
    live: int
    items: int
    tiles: int
    merges: int


_plans: WeakKeyDictionary[AttentionBatch, dict[Any, _Plan]] = WeakKeyDictionary()


def attention(
    query_THD: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: AttentionBatch,
    options: AttentionOptions,
) -> Tensor:
    """See `Backend.attention`: causal attention of ragged queries over paged K/V, [T, H, D_v].

    Queries may be strided, with unit stride along D. Rows of no request are not written. The plan
    of a batch is made on the device by its first call and kept for the others: under graph
    capture the batch must be an object made inside the capture. Heads wider than 256 are left to
    `torch`, which reads the batch on the host.
    """
    check_device(query_THD, "query_THD")
    if max(query_THD.shape[2], value_cache.shape[3]) > configs.LARGEST_HEAD:
        return torch_attention(query_THD, key_cache, value_cache, batch, options)
    if query_THD.stride(2) != 1:
        query_THD = query_THD.contiguous()
    tokens, heads, _ = query_THD.shape
    shape = _shape(heads, key_cache, value_cache, options)
    out_THD = query_THD.new_empty(tokens, heads, shape.value_size)
    if not tokens:
        return out_THD
    plan = _plan(batch, tokens, shape)
    rows = records.Rows(query_THD, query_THD.stride(0), query_THD.stride(1))
    caches = _cache(key_cache, value_cache, batch)
    scores = _scores(options)
    if plan.prefill is not None:
        rows_of_tile, keys, stages, warps = plan.prefill
        launch(
            prefill_kernel, (plan.tiles * shape.kv_heads,),
            rows, caches, plan.work, scores, out_THD, WINDOW=shape.window, R=rows_of_tile,
            KEYS=keys, STAGES=stages, PRECISION=shape.precision, **shape.constants,
            num_warps=warps,
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

    Args:
        qkv_TW: [T, (H + H_kv) * D + H_kv * D_v], unit stride along W: query heads, key heads, value
            heads of each new token, biases added. Not changed.
        heads: what is done to q and k.
        key_cache, value_cache: as in `attention`; new tokens are written at their positions.
        batch: with 1 <= most_queries <= MOST_NEW.
        out_TC: gets the attended values, [T, H * D_v], contiguous, in the dtype of the cache.
            Rows of no request are not written.
        overlap: launch the kernels dependently (PDL). Each lets the next kernel start at once
            and waits before it reads `qkv_TW`. The plan, the block table and the K/V of earlier
            tokens are read before that: they must be there when the plan is made (see `prepare`),
            and whichever kernel comes first after it must wait before it lets others start.

    A row's bits depend on its own context alone while T <= 16: not on other requests, nor on the
    rows next to it in its request.

    Raises:
        ConfigError: `batch.most_queries` is out of bounds.
    """
    if not 1 <= batch.most_queries <= MOST_NEW:
        raise ConfigError(
            "batch.most_queries", batch.most_queries, f"in 1..{MOST_NEW}",
            "Call `write_new`, then `attention`.",
        )  # fmt: skip
    shape = _shape(_query_heads(qkv_TW, key_cache, value_cache), key_cache, value_cache, options)
    plan = _plan(batch, qkv_TW.shape[0], shape)
    rows = records.Rows(qkv_TW, qkv_TW.stride(0), shape.size)
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

    The query heads in `qkv_TW` are replaced by what `attention` takes. Arguments as in
    `attend_new`; `batch.most_queries` does not matter.

    Returns:
        The view [T, H, D] of them, strided.
    """
    number = _query_heads(qkv_TW, key_cache, value_cache)
    shape = _shape(number, key_cache, value_cache, AttentionOptions(1.0))
    tokens, requests = qkv_TW.shape[0], batch.length_B.shape[0]
    block, at_once = (4 if tokens <= 256 else 16), 16 if requests <= 16 else 128
    launch(
        write_new_kernel, (triton.cdiv(tokens, block), shape.kv_heads),
        records.Rows(qkv_TW, qkv_TW.stride(0), shape.size), heads,
        _cache(key_cache, value_cache, batch), batch.query_start_B1, batch.length_B, requests,
        ROTARY=2 * heads.cos_PR.shape[1], ROWS=block, AT_ONCE=at_once, OVERLAP=overlap,
        **shape.constants, num_warps=4, **dependent(overlap),
    )  # fmt: skip
    return qkv_TW[:, : number * shape.size].view(-1, number, shape.size)


def prepare(
    batch: AttentionBatch,
    tokens: int,
    query_heads: int,
    key_cache: Tensor,
    value_cache: Tensor,
    options: AttentionOptions,
) -> None:
    """Make the plan of a batch of so many token rows now, ahead of a chain that overlaps.

    Without it the first layer of this shape makes it. It is launched as an ordinary kernel.
    """
    _plan(batch, tokens, _shape(query_heads, key_cache, value_cache, options))


def _decode(
    rows: records.Rows,
    heads: HeadInputs | None,
    caches: records.Cache,
    plan: _Plan,
    shape: _Shape,
    scores: records.Scores,
    out: Tensor,
    overlap: bool = False,
) -> None:
    """Attend the items of requests with few queries, and merge."""
    config = plan.decode
    programs = config.programs * _multiprocessors(out.device)
    grid = shape.kv_heads, min(plan.items, max(1, programs // shape.kv_heads))
    launch(
        decode_kernel, grid,
        rows, heads, caches, plan.work, plan.partials, scores, out,
        ROTARY=0 if heads is None else 2 * heads.cos_PR.shape[1], WINDOW=shape.window,
        R=config.rows, LIVE=plan.live, SETS=config.sets, GROUPS=config.groups, KEYS=config.keys,
        STAGES=config.stages, NEW=plan.new if heads else 1, AHEAD=config.ahead,
        PRECISION=shape.precision, OVERLAP=overlap, **shape.constants, num_warps=config.warps,
        # A score is rounded before the largest is taken off, in tiles with a mask and in those
        # without: fused, only these would differ.
        enable_fp_fusion=False, **at_most_registers(config.registers), **dependent(overlap),
    )  # fmt: skip
    if plan.partials.pieces > 1:
        together = min(config.merged_heads, shape.heads & -shape.heads)
        parts = shape.heads // together
        rows_at_once = max(1, _MERGES * _multiprocessors(out.device) // parts)
        launch(
            merge_kernel, (parts, min(plan.merges, rows_at_once)),
            plan.work, plan.partials, scores, out, H=shape.heads, D_V=shape.value_size,
            WIDTH_V=_width(shape.value_size), HEADS=together, PIECES=config.merged_pieces,
            OVERLAP=overlap, num_warps=config.merged_warps, **dependent(overlap),
        )  # fmt: skip


def _plan(batch: AttentionBatch, tokens: int, shape: _Shape) -> _Plan:
    """The plan of this batch for layers of this shape: the one there is, or a new one."""
    # What was planned outside of a graph's capture is not what its replays need.
    capturing = batch.length_B.is_cuda and torch.cuda.is_current_stream_capturing()
    of_batch = _plans.setdefault(batch, {})
    plan = of_batch.get((tokens, shape, capturing))
    if plan is None:
        plan = of_batch[tokens, shape, capturing] = _new_plan(batch, tokens, shape)
    return plan


def _new_plan(batch: AttentionBatch, tokens: int, shape: _Shape) -> _Plan:
    requests, columns = batch.block_BL.shape
    most, longest = batch.most_queries or tokens, columns * shape.page
    few = min(most, FEW.value)
    rows = min(tokens, requests * few)
    widest = max(shape.size, shape.value_size)
    decode = configs.decoding(
        tokens, requests, shape.kv_heads, few * shape.per_kv, widest, shape.dtype
    )
    prefill = configs.prefilling(widest, shape.dtype) if most > FEW.value else None
    number = most_pieces(decode.size, decode.count, longest, shape.window)
    segments = 2 if few > 1 and longest > decode.size * decode.count else 1
    items = requests * (triton.cdiv(few * shape.per_kv, decode.rows) + segments - 1) * number
    tiles = 0
    if prefill is not None:
        tiles = triton.cdiv(tokens * shape.per_kv, prefill.rows) + requests

    def new(count: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(count, dtype=dtype, device=batch.length_B.device)

    fields, partial = FIELDS.value, rows * shape.heads * number
    work = records.Work(
        new(items * fields), new(rows * MERGE_FIELDS.value), new(max(tiles, 1) * fields), new(4)
    )
    partials = records.Partials(
        new(partial * shape.value_size, torch.float32), new(partial, torch.float32),
        new(partial, torch.float32), number,
    )  # fmt: skip
    launch(
        plan_kernel, (requests + 1,),
        batch.query_start_B1, batch.length_B, work, requests, G=shape.per_kv,
        WINDOW=shape.window, SIZE=decode.size, COUNT=decode.count, STEP=decode.groups * decode.keys,
        FEW_ROWS=decode.rows, MANY_ROWS=1 if prefill is None else prefill.rows,
        AT_ONCE=128, num_warps=4,
    )  # fmt: skip
    live = decode.rows
    if decode.groups * decode.sets == 1:
        live = min(live, triton.next_power_of_2(few * shape.per_kv))
    new_tokens = triton.next_power_of_2(few)
    return _Plan(work, partials, decode, prefill, new_tokens, live, items, tiles, rows)


def _shape(heads: int, key_cache: Tensor, value_cache: Tensor, options: AttentionOptions) -> _Shape:
    _, page, kv_heads, size = key_cache.shape
    window = options.sliding_window or 0
    return _Shape(heads, kv_heads, size, value_cache.shape[3], page, window, key_cache.dtype)


def _query_heads(qkv_TW: Tensor, key_cache: Tensor, value_cache: Tensor) -> int:
    """How many query heads a row of qkv has.

    Raises:
        ConfigError: it is not made of whole heads.
    """
    kv_heads, size = key_cache.shape[2:]
    query = qkv_TW.shape[1] - kv_heads * (size + value_cache.shape[3])
    if query <= 0 or query % (kv_heads * size):
        wanted = f"[T, H * {size} + {kv_heads} * ({size} + {value_cache.shape[3]})]"
        raise ConfigError("qkv_TW.shape", tuple(qkv_TW.shape), wanted)
    return query // size


def _cache(key_cache: Tensor, value_cache: Tensor, batch: AttentionBatch) -> records.Cache:
    return records.Cache(key_cache, value_cache, batch.block_BL, batch.block_BL.shape[1])


def _scores(options: AttentionOptions) -> records.Scores:
    sink_H = None if options.sinks_H is None else options.sinks_H.contiguous()
    return records.Scores(options.scale, options.softcap, sink_H)


def _width(size: int) -> int:
    """A head's size as kernels compute with it."""
    return max(16, int(triton.next_power_of_2(size)))


@cache
def _multiprocessors(device: torch.device) -> int:
    """How many the device has; of a CPU, which interprets programs one by one, one."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)

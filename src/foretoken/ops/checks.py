"""Checks of the arguments of ops and forward passes, for all backends, before any work.

They cover the shape, dtype, device and strides of every tensor, and values of tensors on the host.
Nothing here waits for a device: values of a CUDA tensor are never read. Each function raises
`ConfigError` for an argument that does not fit. Shapes as in `ops/types.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any
from weakref import WeakSet, ref

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foretoken.errors import ConfigError
from foretoken.ops.stack import KV, DraftRound, Features, Stack
from foretoken.ops.steps import ForwardBatch

from foretoken.ops.types import (  # isort: skip
    DRAFT, RESIDUAL, TARGET, AttentionBatch, AttentionOptions, DraftBlock, DraftCache, Edits, Noise,
    Rows, Rule, SlotParams, Verdict, VerifyBatch,
)  # fmt: skip

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
BOOL, INT32, INT64 = (torch.bool,), (torch.int32,), (torch.int64,)
FLOAT32, FLOAT64 = (torch.float32,), (torch.float64,)
IDS = (torch.int64, torch.int32)
RULES = frozenset(int(rule) for rule in Rule)
STREAM_PAIRS = (TARGET, RESIDUAL, DRAFT)
"""With one stream for tokens and blocks, draws from rows longer than a block would be biased."""
_CHECKED: WeakSet[SlotParams | DraftCache] = WeakSet()
"""Objects that were checked: they are not checked again, so `verify` takes 14 us of the host's time
instead of 27."""
_latest_rates: ref[Tensor] | None = None
"""The rates that were checked last; an engine has only one tensor of rates. A check takes 0.4 us, a
hundredth of the verification of one greedy request."""
_latest_batch: tuple[ref[AttentionBatch], object] | None = None
"""The batch that was checked last, and the other arguments checked with it. Checks in every layer
were 2 to 4 % of a decode step through 20 layers of modules."""
MAX_TOP = 64
MIN_TEMPERATURE = 9.99e-6
"""Just below 1e-5 in float32. At lower temperatures logits would overflow or round to ties."""
LOOP_LIMIT = 64
"""Up to this many values are compared in a Python loop: one value takes 1 us, with numpy 3 us."""


class Letter(str):
    """A dimension of an expected shape that may have any size: it equals every number."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return True


B, K, L, M, N, R, S, V = map(Letter, "BKLMNRSV")
D_V, QUERY = Letter("D_v"), tuple(map(Letter, "THD"))
POOL = tuple(map(Letter, ("num_blocks", "block_size", "H_kv")))


def check_tensor(
    name: str,
    value: Tensor,
    shape: tuple[int | Letter, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device | None = None,
    *,
    grad: bool = False,
    contiguous: bool = False,
) -> None:
    """Raise `ConfigError` unless `value` is a dense tensor of this shape, dtype and device (None:
    any device). `grad`: it may require a gradient, which will not be computed."""
    if not isinstance(value, Tensor):
        raise ConfigError(name, value, "a tensor")
    if value.dtype not in dtypes:
        bound = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise ConfigError(f"{name}.dtype", value.dtype, bound)
    if value.shape != shape:
        raise ConfigError(f"{name}.shape", tuple(value.shape), f"[{', '.join(map(str, shape))}]")
    if device is not None and value.device != device:
        raise ConfigError(f"{name}.device", value.device, f"{device}, as the other arguments")
    if value.layout is not torch.strided:
        raise ConfigError(f"{name}.layout", value.layout, "torch.strided", "Call `.to_dense()`.")
    if value.requires_grad and not grad:
        raise ConfigError(f"{name}.requires_grad", True, "False", "Call `.detach()`.")
    if contiguous and not value.is_contiguous():
        raise ConfigError(f"{name}.stride", value.stride(), "contiguous")


def check_kind(name: str, value: object, kind: type) -> None:
    """Raise `ConfigError` unless `value` is an instance of `kind`."""
    if not isinstance(value, kind):
        raise ConfigError(name, value, f"a `{kind.__name__}`")


def check_logits(name: str, logits: Tensor, shape: tuple[int | Letter, ...] = (N, V)) -> None:
    """Check that rows are not empty, and that the logits of a row are adjacent in memory."""
    check_tensor(name, logits, shape, FLOATS, grad=True)
    vocabulary = logits.shape[-1]
    if vocabulary == 0:
        raise ConfigError(f"{name}.shape", tuple(logits.shape), "at least one token wide")
    if vocabulary > 1 and logits.stride(-1) != 1:
        raise ConfigError(f"{name}.stride", logits.stride(), "1 along V", "Call `.contiguous()`.")


def check_rows(rows: Rows) -> None:
    """Check rows of logits, their slots, the parameters of these slots, and the edits."""
    check_kind("rows", rows, Rows)
    logits_NV, params, slot_N, edits = rows
    check_logits("logits_NV", logits_NV)
    _check_slots("slot_N", slot_N, params, logits_NV, logits_NV.shape[:1])
    if edits is not None:
        check_edits(edits, logits_NV)


def check_params(params: SlotParams, device: torch.device) -> None:
    """Check that the tensors by slot have the right dtypes, equal lengths, and this device."""
    if params in _CHECKED and params.key_S.device == device:
        return
    check_kind("params", params, SlotParams)
    check_kind("params.rules", params.rules, AbstractSet)
    check_tensor("params.key_S", params.key_S, (S,), INT64, device)
    shape = params.key_S.shape
    dtypes = {"temperature": FLOAT32, "top_k": INT64, "top_p": FLOAT32, "min_p": FLOAT32}
    for name, dtype in {**dtypes, "rule": INT64}.items():
        check_tensor(f"params.{name}_S", getattr(params, f"{name}_S"), shape, dtype, device)
    _CHECKED.add(params)


def check_sample(rows: Rows, noise: Noise) -> None:
    """Check all arguments of `Backend.sample`."""
    check_rows(rows)
    check_kind("noise", noise, Noise)
    position_N, draft_index_N, streams, fp64 = noise
    slot_N = rows.slot_N
    check_tensor("position_N", position_N, slot_N.shape, INT64, slot_N.device)
    check_tensor("draft_index_N", draft_index_N, slot_N.shape, INT64, slot_N.device)
    if streams not in STREAM_PAIRS:
        raise ConfigError("streams", streams, "`TARGET`, `RESIDUAL` or `DRAFT`")
    check_kind("fp64", fp64, bool)


def check_draft(rows: Rows, noise: Noise, cache: DraftCache | None) -> None:
    """Check all arguments of `Backend.draft`; on the host also that no q is written twice."""
    check_sample(rows, noise)
    if noise.streams != DRAFT:
        raise ConfigError("streams", noise.streams, "`DRAFT`")
    if rows.edits is not None:
        raise ConfigError("edits", "given", "None: q is kept without edits")
    if cache is None:
        return
    logits_NV, index_N = rows.logits_NV, noise.draft_index_N
    shape = (S, K, logits_NV.shape[1])
    check_cache("cache", cache, rows.params, logits_NV.device)
    check_tensor("cache.logits_SKV", cache.logits_SKV, shape, (logits_NV.dtype,))
    if index_N.is_cpu:
        index, last = index_N.tolist(), cache.lse_SK.shape[1] - 1
        check_between("draft_index_N", index, 0, last, f"in 0..{last}, the cache's drafts")
        slots, spare = rows.slot_N.tolist(), rows.params.key_S.shape[0] - 1
        entries = [(slot, i) for slot, i in zip(slots, index, strict=True) if slot != spare]
        if len(set(entries)) < len(entries):
            raise ConfigError("slot_N", slots, "one row per slot and draft index")


def check_draft_cache(logits_BKV: Tensor, params: SlotParams, slot_B: Tensor) -> None:
    """Check all arguments of `draft_cache` except the backend."""
    check_logits("logits_BKV", logits_BKV, (B, K, V))
    _check_slots("slot_B", slot_B, params, logits_BKV, logits_BKV.shape[:1])
    if slot_B.is_cpu and len(set(slot_B.tolist())) < len(slot_B):
        raise ConfigError("slot_B", slot_B.tolist(), "one row per slot")


def check_cache(name: str, cache: DraftCache, params: SlotParams, device: torch.device) -> None:
    """Check that the cache's three tensors fit each other and have a row for every slot."""
    slots = params.key_S.shape[0]
    if cache in _CHECKED:
        logits_SKV = cache.logits_SKV
        if logits_SKV.device == device and logits_SKV.shape[0] >= slots:
            return
    check_kind(name, cache, DraftCache)
    logits_SKV, threshold_SK, lse_SK = cache.logits_SKV, cache.threshold_SK, cache.lse_SK
    check_tensor(f"{name}.logits_SKV", logits_SKV, (S, K, V), FLOATS, device, contiguous=True)
    shape = logits_SKV.shape
    if shape[0] < slots or shape[2] == 0:
        raise ConfigError(f"{name}.logits_SKV.shape", tuple(shape), f"[S >= {slots}, K, V > 0]")
    check_tensor(f"{name}.threshold_SK", threshold_SK, shape[:2], FLOAT32, device, contiguous=True)
    check_tensor(f"{name}.lse_SK", lse_SK, shape[:2], FLOAT64, device, contiguous=True)
    _CHECKED.add(cache)


def check_drafts(drafts: DraftBlock, params: SlotParams, slot_B: Tensor) -> None:
    """Check that there is a row for each request, and a cache if q is needed, of enough columns."""
    check_kind("drafts", drafts, DraftBlock)
    device, shape_B = slot_B.device, slot_B.shape
    check_tensor("drafts.token_BK", drafts.token_BK, (*shape_B, K), IDS, device)
    check_tensor("drafts.num_B", drafts.num_B, shape_B, INT64, device)
    check_tensor("drafts.real_q_B", drafts.real_q_B, shape_B, BOOL, device)
    columns = drafts.token_BK.shape[1]
    if drafts.cache is not None:
        check_cache("drafts.cache", drafts.cache, params, device)
        shape = drafts.cache.logits_SKV.shape
        if shape[1] < columns:
            raise ConfigError("drafts.cache.logits_SKV.shape", tuple(shape), f"K >= {columns}")
    if not drafts.num_B.is_cpu:
        return
    bound = f"in 0..{columns}, the width of `token_BK`"
    check_between("drafts.num_B", drafts.num_B.tolist(), 0, columns, bound)
    if drafts.cache is None and any(drafts.real_q_B.tolist()):
        raise ConfigError("drafts.cache", None, "given, since `real_q_B` is True for a request")


def check_verify(batch: VerifyBatch) -> None:
    """Check that all inputs of `Backend.verify` fit together."""
    check_kind("batch", batch, VerifyBatch)
    if batch.values_fit:
        return
    logits_NV, params, slot_B, position_B, drafts, edits, synthetic_rate_K, fp64_noise, _ = batch
    check_kind("fp64_noise", fp64_noise, bool)
    check_logits("logits_NV", logits_NV)
    device = logits_NV.device
    rules = _check_slots("slot_B", slot_B, params, logits_NV, (B,))
    check_tensor("position_B", position_B, slot_B.shape, INT64, device)
    check_drafts(drafts, params, slot_B)
    rows, requests, columns = logits_NV.shape[0], slot_B.shape[0], drafts.token_BK.shape[1]
    if drafts.num_B.is_cpu:
        if rows != sum(drafts.num_B.tolist()) + requests:
            raise ConfigError("logits_NV.shape", tuple(logits_NV.shape), "sum(num_B + 1) rows")
    elif not requests <= rows <= requests * (columns + 1):
        bound = f"{requests} to {requests * (columns + 1)} rows, K_b + 1 of each request"
        raise ConfigError("logits_NV.shape", tuple(logits_NV.shape), bound)
    if edits is not None:
        check_edits(edits, logits_NV)
    if synthetic_rate_K is not None:
        check_rates(synthetic_rate_K, columns, device)
    elif Rule.SYNTHETIC in rules:
        raise ConfigError("synthetic_rate_K", None, "given, since a slot has the rule SYNTHETIC")


def check_evidence(batch: VerifyBatch, verdict: Verdict, request_R: Tensor) -> None:
    """Check that all arguments of `Backend.evidence` fit together."""
    check_verify(batch)
    check_kind("verdict", verdict, Verdict)
    requests, columns = batch.drafts.token_BK.shape
    device = batch.logits_NV.device
    check_tensor("verdict.token_BK1", verdict.token_BK1, (requests, columns + 1), IDS, device)
    check_tensor("verdict.n_accept_B", verdict.n_accept_B, (requests,), INT64, device)
    check_tensor("request_R", request_R, (R,), INT64, device)
    if request_R.is_cpu:
        bound = f"in 0..{requests - 1}, the batch's requests"
        check_between("request_R", request_R.tolist(), 0, requests - 1, bound)


def check_rates(synthetic_rate_K: Tensor, columns: int, device: torch.device) -> None:
    """Check that there is a rate for each of `columns` drafts, and that rates are in [0, 1]."""
    global _latest_rates
    was_checked = _latest_rates and _latest_rates() is synthetic_rate_K
    if not was_checked or synthetic_rate_K.device != device:
        check_tensor("synthetic_rate_K", synthetic_rate_K, (K,), FLOAT64, device)
        _latest_rates = ref(synthetic_rate_K)
    rates = synthetic_rate_K.tolist() if synthetic_rate_K.is_cpu else []
    if (len(rates) or synthetic_rate_K.shape[0]) < columns:
        bound = f"[K >= {columns}], one per draft"
        raise ConfigError("synthetic_rate_K.shape", tuple(synthetic_rate_K.shape), bound)
    check_between("synthetic_rate_K", rates, 0.0, 1.0, "in [0, 1]")


def check_edits(edits: Edits, logits_NV: Tensor) -> None:
    """Check masks and entries; on the host also their values and the order of token ids."""
    check_kind("edits", edits, Edits)
    device, (num_rows, vocabulary) = logits_NV.device, logits_NV.shape
    if (edits.mask_RW is None) != (edits.mask_N is None):
        raise ConfigError("edits.mask_N", edits.mask_N, "None if `mask_RW` is, else given")
    if edits.mask_RW is not None and edits.mask_N is not None:
        check_tensor("edits.mask_RW", edits.mask_RW, (R, -(-vocabulary // 32)), INT32, device)
        check_tensor("edits.mask_N", edits.mask_N, (num_rows,), INT64, device)
        if edits.mask_N.is_cpu:
            last = edits.mask_RW.shape[0] - 1
            bound = f"in -1..{last}, rows of `mask_RW`"
            check_between("edits.mask_N", edits.mask_N.numpy(), -1, last, bound)
    check_tensor("edits.start_N1", edits.start_N1, (num_rows + 1,), INT64, device)
    check_tensor("edits.token_M", edits.token_M, (M,), INT64, device)
    if edits.token_M.is_cpu:
        _check_ids(edits, vocabulary)
    # Within these bounds the logit of a banned token stays -inf after its bias of -inf.
    for field, low in (("bias_M", -np.inf), ("repetition_M", 1e-30), ("subtract_M", -3e38)):
        name, value = f"edits.{field}", getattr(edits, field)
        check_tensor(name, value, edits.token_M.shape, FLOAT32, device)
        if value.is_cpu:
            check_between(name, value.numpy(), low, 3.4e38, f"in [{low:g}, 3.4e38]")


def _check_ids(edits: Edits, vocabulary: int) -> None:
    """Check that `start_N1` divides the entries into rows, and that ids rise within each row."""
    start_N1, token_M = edits.start_N1.numpy(), edits.token_M.numpy()
    if start_N1[0] != 0 or start_N1[-1] != len(token_M) or (np.diff(start_N1) < 0).any():
        bound = f"rising from 0 to {len(token_M)}, the number of entries"
        raise ConfigError("edits.start_N1", start_N1.tolist(), bound)
    if len(token_M) == 0:
        return
    check_between("edits.token_M", token_M, 0, vocabulary - 1, f"in 0..{vocabulary - 1}")
    rises_M = np.append(token_M[1:] > token_M[:-1], True)  # from each entry to the next
    rises_M[start_N1[1:] - 1] = True  # from a row's last entry to the next row
    if not rises_M.all():
        raise ConfigError("edits.token_M", token_M.tolist(), "rising within each row")


def check_logprobs(rows: Rows | Tensor, token_N: Tensor, num_top: int) -> None:
    """Check all arguments of `Backend.logprobs`."""
    if isinstance(rows, Rows):
        check_rows(rows)
        logits_NV = rows.logits_NV
    else:
        logits_NV = rows
        check_logits("rows", logits_NV)
    vocabulary = logits_NV.shape[1]
    check_tensor("token_N", token_N, logits_NV.shape[:1], IDS, logits_NV.device)
    if token_N.is_cpu:
        check_between("token_N", token_N.numpy(), 0, vocabulary - 1, f"in 0..{vocabulary - 1}")
    if type(num_top) is not int or not 0 <= num_top <= min(MAX_TOP, vocabulary):
        raise ConfigError("num_top", num_top, f"in 0..{min(MAX_TOP, vocabulary)}")


def _check_slots(
    name: str, slot_N: Tensor, params: SlotParams, logits: Tensor, shape: tuple[int | Letter, ...]
) -> AbstractSet[int]:
    """Check slots and parameters, on the host also their values, and return the rules that these
    slots may have; no rules on a device, where values are not read."""
    check_tensor(name, slot_N, shape, INT64, logits.device)
    check_params(params, logits.device)
    if not slot_N.is_cpu or slot_N.shape[0] == 0:
        return set()
    slot, last = slot_N.numpy(), params.key_S.shape[0] - 1
    check_between(name, slot, 0, last, f"in 0..{last}, the slots of `params`")
    if params.values_fit:
        return params.rules

    columns = params.temperature_S, params.top_p_S, params.min_p_S, params.rule_S
    distinct = ([*dict.fromkeys(column.numpy()[slot].tolist())] for column in columns)
    temperature, top_p, min_p, rules = distinct  # usually one value each
    for rule in rules:
        if rule not in RULES:
            known = ", ".join(f"{r.value} ({r.name})" for r in Rule)
            raise ConfigError("params.rule_S", rule, f"one of {known}")
        if rule not in params.rules:
            promised = ", ".join(sorted(r.name for r in params.rules))
            raise ConfigError(
                "params.rules", promised, f"a set with {Rule(rule).name}, a slot's rule"
            )
    not_zero, bound = [value for value in temperature if value != 0], "0, or >= 1e-5 and finite"
    check_between("params.temperature_S", not_zero, MIN_TEMPERATURE, 3.4e38, bound)
    check_between("params.top_p_S", top_p, 1e-45, 1, "in (0, 1]")
    check_between("params.min_p_S", min_p, 0, 1, "in [0, 1]")
    if not params.has_filters:
        top_k = params.top_k_S.numpy()[slot]
        if ((top_k > 0) & (top_k < logits.shape[-1])).any() or min(top_p) < 1 or max(min_p) > 0:
            raise ConfigError("params.has_filters", False, "True, since a slot filters tokens")
    return set(rules)


def check_between(
    name: str, values: npt.NDArray[Any] | list[float], low: float, high: float, bound: str
) -> None:
    """Raise `ConfigError` unless low <= value <= high for every value; NaN raises it too."""
    if not isinstance(values, list):
        if len(values) > LOOP_LIMIT:
            values = values[~((values >= low) & (values <= high))]
        values = values.tolist()
    for value in values:
        if not low <= value <= high:
            raise ConfigError(name, value, bound)


def check_attention(
    query_THD: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: AttentionBatch,
    options: AttentionOptions,
) -> None:
    """Check all arguments of `Backend.attention`. A layer with the previous layer's batch, tensor
    layouts, scale, window and softcap has only its sinks checked."""
    global _latest_batch
    check_kind("options", options, AttentionOptions)
    scalars = options.scale, options.sliding_window, options.softcap
    layouts = (_layout(query_THD), _layout(key_cache), _layout(value_cache), scalars)
    latest = _latest_batch
    if latest is None or latest[0]() is not batch or latest[1] != layouts:
        _check_caches(query_THD, key_cache, value_cache)
        check_attention_batch(batch, query_THD.shape[0], key_cache)
        if options.sliding_window is not None and options.sliding_window < 1:
            raise ConfigError("options.sliding_window", options.sliding_window, "None or >= 1")
        if options.softcap is not None and not options.softcap > 0:
            raise ConfigError("options.softcap", options.softcap, "None or > 0")
        _latest_batch = (ref(batch), layouts)
    sinks_H = options.sinks_H
    if sinks_H is not None:
        heads, device = query_THD.shape[1:2], query_THD.device
        check_tensor("options.sinks_H", sinks_H, heads, FLOATS, device, grad=True)


def _layout(value: object) -> object:
    if not isinstance(value, Tensor):
        return None
    return value.shape, value.dtype, value.device, value.is_contiguous()


def _check_caches(query_THD: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
    """Check the shapes of queries, keys and values, and that dtype and device are equal."""
    check_tensor("query_THD", query_THD, QUERY, FLOATS)
    _, heads, size = query_THD.shape
    dtype, device = (query_THD.dtype,), query_THD.device
    check_tensor("key_cache", key_cache, (*POOL, size), dtype, device, contiguous=True)
    pool = key_cache.shape[:3]
    if pool[2] == 0 or heads % pool[2]:
        bound = f"[num_blocks, block_size, H_kv, {size}], H_kv a divisor of {heads}"
        raise ConfigError("key_cache.shape", tuple(key_cache.shape), bound)
    check_tensor("value_cache", value_cache, (*pool, D_V), dtype, device, contiguous=True)


def check_attention_batch(batch: AttentionBatch, tokens: int, key_cache: Tensor) -> None:
    """Check that the batch has the block size and device of the cache; on the host also that it has
    `tokens` tokens, at least one per request, and that lengths and blocks fit."""
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
        _check_batch_values(batch, tokens, blocks)


def check_draft_round(
    drafting: DraftRound, length_B: Tensor, room: int, vocabulary: int, min_drafts: int = 1
) -> list[int]:
    """Check a `DraftRound` on the host; returns the number of drafts of each request.

    room: number of tokens that a row of the block table covers
    min_drafts: smallest allowed number of drafts of a request
    """
    slot_B, num_B, cache = drafting.slot_B, drafting.num_B, drafting.cache
    check_tensor("drafting.slot_B", slot_B, length_B.shape, INT64, contiguous=True)
    check_tensor("drafting.num_B", num_B, length_B.shape, INT64, contiguous=True)
    check_params(drafting.params, slot_B.device)
    last, num_drafts = drafting.params.key_S.shape[0] - 1, num_B.tolist()
    bound = f"in 0..{last}, the slots of `params`"
    check_between("drafting.slot_B", slot_B.tolist(), 0, last, bound)
    for num, length in zip(num_drafts, length_B.tolist(), strict=True):
        end = room - length + 1
        if not min_drafts <= num <= end:
            bound = f"in {min_drafts}..{end}: the block table covers all drafts but the last"
            raise ConfigError("drafting.num_B", num, bound)
    if cache is not None:
        check_cache("drafting.cache", cache, drafting.params, slot_B.device)
        dtype, (_, columns, width) = cache.logits_SKV.dtype, cache.logits_SKV.shape
        if dtype is not torch.float32 or columns < max(num_drafts) or width != vocabulary:
            given = (dtype, *cache.logits_SKV.shape)
            bound = f"float32 [S, K >= {max(num_drafts)}, {vocabulary}]"
            raise ConfigError("drafting.cache.logits_SKV", given, bound)
    return num_drafts


def _check_batch_values(batch: AttentionBatch, tokens: int, blocks: int) -> None:
    start_B1, length_B = batch.query_start_B1.tolist(), batch.length_B.tolist()
    room = batch.block_BL.shape[1] * batch.block_size
    if not length_B or start_B1[0] != 0 or start_B1[-1] != tokens:
        bound = f"from 0 to {tokens}, the number of tokens, with at least one request"
        raise ConfigError("batch.query_start_B1", start_B1, bound)
    for start, end, length in zip(start_B1[:-1], start_B1[1:], length_B, strict=True):
        if start >= end:
            bound = "rising, since every request has a token"
            raise ConfigError("batch.query_start_B1", start_B1, bound)
        if not end - start <= length <= room:
            bound = f"in {end - start}..{room}, from its new tokens to the room in its blocks"
            raise ConfigError("batch.length_B", length, bound)
    bound = f"in 0..{blocks - 1}, the blocks of the cache"
    check_between("batch.block_BL", batch.block_BL.flatten().numpy(), 0, blocks - 1, bound)


def check_hidden(hidden_SC: Tensor, slots: int, size: int) -> None:
    """Check outputs of a drafting stack: `size` float32 numbers of each slot, or each row."""
    check_tensor("hidden_SC", hidden_SC, (slots, size), FLOAT32, contiguous=True)


def check_stack(stack: Stack) -> None:
    """Check that each output of the head is a token; native code does not check this."""
    outputs, ids = stack.head.weight.shape[0], stack.target_ids
    if ids is None:
        if outputs != stack.vocab_size:
            bound = f"{outputs}, the number of outputs of `head`, if `target_ids` is None"
            raise ConfigError("stack.vocab_size", stack.vocab_size, bound)
        return
    check_tensor("stack.target_ids", ids, (outputs,), INT64)
    last = stack.vocab_size - 1
    check_between("stack.target_ids", ids.cpu().numpy(), 0, last, f"in 0..{last}")


def check_pass(stack: Stack, batch: ForwardBatch, kv: KV, features: Features | None) -> None:
    """Check that the batch fits the cache, and that cache and features fit the stack."""
    check_attention_batch(batch.attention, len(batch.token_T), kv.keys[0])
    if not len(kv.keys) == len(kv.values) == len(stack.layers):
        raise ConfigError("kv.keys", len(kv.keys), f"tensors of {len(stack.layers)} layers")
    check_features(stack.features is not None, features)


def check_features(has_rule: bool, features: Features | None) -> None:
    """Check that there are features if, and only if, the stack has a `FeatureRule`."""
    if has_rule != (features is not None):
        bound = "hidden states" if has_rule else "None without a `FeatureRule`"
        raise ConfigError("features", type(features).__name__, bound)


def check_aux(aux: Sequence[Tensor], tokens: int, size: int) -> None:
    """Check the hidden states that a drafting stack reads, together `size` numbers per token."""
    for i, state_TH in enumerate(aux):
        shape = (tokens, size // len(aux))
        check_tensor(f"aux[{i}]", state_TH, shape, FLOAT32, contiguous=True)

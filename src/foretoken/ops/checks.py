"""Checks of the arguments of ops and forward passes, for all backends, before any work.

They cover shapes, dtypes, devices and strides of every tensor, and cheap checks of the values of
tensors on the host. Nothing here waits for a device: values of a CUDA tensor are never read.

Shapes as in `ops/types.py`.
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
STRIDED = torch.strided
RULES = frozenset(int(rule) for rule in Rule)
STREAM_PAIRS = (TARGET, RESIDUAL, DRAFT)
"""One stream for both noises would bias the distribution of rows longer than a block."""
_FITTING: WeakSet[SlotParams | DraftCache] = WeakSet()
"""Objects already validated; skipping them saves most of `verify`'s host time (27 to 14 us)."""
_latest_rates: ref[Tensor] | None = None
"""Rates already validated in shape and dtype: an engine has one tensor of them, and a new check
takes 0.4 us, a hundredth of one greedy request; SYNTHETIC must take the time of STANDARD."""
_latest_batch: tuple[ref[AttentionBatch], object] | None = None
"""The last validated batch, and the other arguments validated with it. A pass attends once per
layer: without this, checks were 2 to 4 % of a decode step through 20 layers of modules."""
MOST_TOP = 64
COLDEST = 9.99e-6
"""Just below 1e-5 in float32. At lower temperatures logits would overflow or round to ties."""
FEW = 64
"""Up to so many values a Python loop is cheaper than numpy: 1 us against 3 for one value."""

Host = npt.NDArray[Any]


class Letter(str):
    """A size that may be any number: it equals them all."""

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
    """Raise `ConfigError` unless `value` is a dense tensor of this shape, dtype, and device.

    device: None: any
    grad: whether it may require a gradient; gradients are not computed here
    """
    if not isinstance(value, Tensor):
        raise ConfigError(name, value, "a tensor")
    if value.dtype not in dtypes:
        wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise ConfigError(f"{name}.dtype", value.dtype, wanted)
    if value.shape != shape:
        raise ConfigError(f"{name}.shape", tuple(value.shape), f"[{', '.join(map(str, shape))}]")
    if device is not None and value.device != device:
        raise ConfigError(f"{name}.device", value.device, f"{device}, as the other arguments")
    if value.layout is not STRIDED:
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
    """The vocabulary has at least one token, and its logits are adjacent in memory."""
    check_tensor(name, logits, shape, FLOATS, grad=True)
    vocabulary = logits.shape[-1]
    if vocabulary == 0:
        raise ConfigError(f"{name}.shape", tuple(logits.shape), "at least one token wide")
    if vocabulary > 1 and logits.stride(-1) != 1:
        raise ConfigError(f"{name}.stride", logits.stride(), "1 along V", "Call `.contiguous()`.")


def check_rows(rows: Rows) -> None:
    """Logits of N rows, their slots, the parameters of these slots, and edits."""
    check_kind("rows", rows, Rows)
    logits_NV, params, slot_N, edits = rows
    check_logits("logits_NV", logits_NV)
    _check_slots("slot_N", slot_N, params, logits_NV, logits_NV.shape[:1])
    if edits is not None:
        check_edits(edits, logits_NV)


def check_params(params: SlotParams, device: torch.device) -> None:
    """The per-slot fields have their dtypes, one length and this device."""
    if params in _FITTING and params.key_S.device == device:
        return
    check_kind("params", params, SlotParams)
    check_kind("params.rules", params.rules, AbstractSet)
    check_tensor("params.key_S", params.key_S, (S,), INT64, device)
    shape = params.key_S.shape
    dtypes = {"temperature": FLOAT32, "top_k": INT64, "top_p": FLOAT32, "min_p": FLOAT32}
    for name, dtype in {**dtypes, "rule": INT64}.items():
        check_tensor(f"params.{name}_S", getattr(params, f"{name}_S"), shape, dtype, device)
    _FITTING.add(params)


def check_sample(rows: Rows, noise: Noise) -> None:
    """All arguments of `Backend.sample`."""
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
    """All arguments of `Backend.draft`; on the host also that no row is written twice."""
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
        slot, spare = rows.slot_N.tolist(), rows.params.key_S.shape[0] - 1
        named = [place for place in zip(slot, index, strict=True) if place[0] != spare]
        if len(set(named)) < len(named):
            raise ConfigError("slot_N", slot, "one row per slot and draft index")


def check_draft_cache(logits_BKV: Tensor, params: SlotParams, slot_B: Tensor) -> None:
    """All arguments of `draft_cache` except the backend."""
    check_logits("logits_BKV", logits_BKV, (B, K, V))
    _check_slots("slot_B", slot_B, params, logits_BKV, logits_BKV.shape[:1])
    if slot_B.is_cpu and len(set(slot_B.tolist())) < len(slot_B):
        raise ConfigError("slot_B", slot_B.tolist(), "one row per slot")


def check_cache(name: str, cache: DraftCache, params: SlotParams, device: torch.device) -> None:
    """The cache's three tensors fit each other and have a row for every slot."""
    slots = params.key_S.shape[0]
    if cache in _FITTING and (at := cache.logits_SKV).device == device and at.shape[0] >= slots:
        return
    check_kind(name, cache, DraftCache)
    logits_SKV, threshold_SK, lse_SK = cache.logits_SKV, cache.threshold_SK, cache.lse_SK
    check_tensor(f"{name}.logits_SKV", logits_SKV, (S, K, V), FLOATS, device, contiguous=True)
    shape = logits_SKV.shape
    if shape[0] < slots or shape[2] == 0:
        raise ConfigError(f"{name}.logits_SKV.shape", tuple(shape), f"[S >= {slots}, K, V > 0]")
    check_tensor(f"{name}.threshold_SK", threshold_SK, shape[:2], FLOAT32, device, contiguous=True)
    check_tensor(f"{name}.lse_SK", lse_SK, shape[:2], FLOAT64, device, contiguous=True)
    _FITTING.add(cache)


def check_drafts(drafts: DraftBlock, params: SlotParams, slot_B: Tensor) -> None:
    """The draft block belongs to these requests, is wide enough, and has the q it asks for."""
    check_kind("drafts", drafts, DraftBlock)
    device, shape_B = slot_B.device, slot_B.shape
    check_tensor("drafts.token_BK", drafts.token_BK, (*shape_B, K), IDS, device)
    check_tensor("drafts.num_B", drafts.num_B, shape_B, INT64, device)
    check_tensor("drafts.real_q_B", drafts.real_q_B, shape_B, BOOL, device)
    most = drafts.token_BK.shape[1]
    if drafts.cache is not None:
        check_cache("drafts.cache", drafts.cache, params, device)
        shape = drafts.cache.logits_SKV.shape
        if shape[1] < most:
            raise ConfigError("drafts.cache.logits_SKV.shape", tuple(shape), f"K >= {most}")
    if not drafts.num_B.is_cpu:
        return
    wanted = f"in 0..{most}, the width of `token_BK`"
    check_between("drafts.num_B", drafts.num_B.tolist(), 0, most, wanted)
    if drafts.cache is None and any(drafts.real_q_B.tolist()):
        raise ConfigError("drafts.cache", None, "given, since `real_q_B` asks for it")


def check_verify(batch: VerifyBatch) -> None:
    """All of `Backend.verify` against each other."""
    check_kind("batch", batch, VerifyBatch)
    logits_NV, params, slot_B, position_B, drafts, edits, synthetic_rate_K, fp64_noise, fits = batch
    if fits:
        return
    check_kind("fp64_noise", fp64_noise, bool)
    check_logits("logits_NV", logits_NV)
    device = logits_NV.device
    rules = _check_slots("slot_B", slot_B, params, logits_NV, (B,))
    check_tensor("position_B", position_B, slot_B.shape, INT64, device)
    check_drafts(drafts, params, slot_B)
    rows, requests, most = logits_NV.shape[0], slot_B.shape[0], drafts.token_BK.shape[1]
    if drafts.num_B.is_cpu:
        if rows != sum(drafts.num_B.tolist()) + requests:
            raise ConfigError("logits_NV.shape", tuple(logits_NV.shape), "sum(num_B + 1) rows")
    elif not requests <= rows <= requests * (most + 1):
        wanted = f"{requests} to {requests * (most + 1)} rows, K_b + 1 of each request"
        raise ConfigError("logits_NV.shape", tuple(logits_NV.shape), wanted)
    if edits is not None:
        check_edits(edits, logits_NV)
    if synthetic_rate_K is not None:
        check_rates(synthetic_rate_K, most, device)
    elif Rule.SYNTHETIC in rules:
        raise ConfigError("synthetic_rate_K", None, "given, since a slot is under SYNTHETIC")


def check_evidence(batch: VerifyBatch, verdict: Verdict, request_R: Tensor) -> None:
    """All of `Backend.evidence` against each other."""
    check_verify(batch)
    check_kind("verdict", verdict, Verdict)
    requests, most = batch.drafts.token_BK.shape
    device = batch.logits_NV.device
    check_tensor("verdict.token_BK1", verdict.token_BK1, (requests, most + 1), IDS, device)
    check_tensor("verdict.n_accept_B", verdict.n_accept_B, (requests,), INT64, device)
    check_tensor("request_R", request_R, (R,), INT64, device)
    if request_R.is_cpu:
        wanted = f"in 0..{requests - 1}, the batch's requests"
        check_between("request_R", request_R.tolist(), 0, requests - 1, wanted)


def check_rates(synthetic_rate_K: Tensor, most: int, device: torch.device) -> None:
    """One rate in [0, 1] for every column of `token_BK`, or more."""
    global _latest_rates
    known = _latest_rates and _latest_rates() is synthetic_rate_K
    if not known or synthetic_rate_K.device != device:
        check_tensor("synthetic_rate_K", synthetic_rate_K, (K,), FLOAT64, device)
        _latest_rates = ref(synthetic_rate_K)
    host = synthetic_rate_K.tolist() if synthetic_rate_K.is_cpu else []
    if (len(host) or synthetic_rate_K.shape[0]) < most:
        wanted = f"[K >= {most}], one per draft"
        raise ConfigError("synthetic_rate_K.shape", tuple(synthetic_rate_K.shape), wanted)
    check_between("synthetic_rate_K", host, 0.0, 1.0, "in [0, 1]")


def check_edits(edits: Edits, logits_NV: Tensor) -> None:
    """Masks and entries of the N rows; on the host also that rows and ids are in range and rise."""
    check_kind("edits", edits, Edits)
    device, (num_rows, vocabulary) = logits_NV.device, logits_NV.shape
    if (edits.mask_RW is None) != (edits.mask_N is None):
        raise ConfigError("edits.mask_N", edits.mask_N, "None exactly if `mask_RW` is")
    if edits.mask_RW is not None and edits.mask_N is not None:
        check_tensor("edits.mask_RW", edits.mask_RW, (R, -(-vocabulary // 32)), INT32, device)
        check_tensor("edits.mask_N", edits.mask_N, (num_rows,), INT64, device)
        if edits.mask_N.is_cpu:
            last = edits.mask_RW.shape[0] - 1
            wanted = f"in -1..{last}, rows of `mask_RW`"
            check_between("edits.mask_N", edits.mask_N.numpy(), -1, last, wanted)
    check_tensor("edits.start_N1", edits.start_N1, (num_rows + 1,), INT64, device)
    check_tensor("edits.token_M", edits.token_M, (M,), INT64, device)
    if edits.token_M.is_cpu:
        _check_ids(edits, vocabulary)
    # Within these bounds a ban, which is a bias of -inf, stays one whatever follows.
    for field, low in (("bias_M", -np.inf), ("repetition_M", 1e-30), ("subtract_M", -3e38)):
        name, value = f"edits.{field}", getattr(edits, field)
        check_tensor(name, value, edits.token_M.shape, FLOAT32, device)
        if value.is_cpu:
            check_between(name, value.numpy(), low, 3.4e38, f"in [{low:g}, 3.4e38]")


def _check_ids(edits: Edits, vocabulary: int) -> None:
    """`start_N1` divides the entries into rows, and ids rise within each row."""
    start_N1, token_M = edits.start_N1.numpy(), edits.token_M.numpy()
    if start_N1[0] != 0 or start_N1[-1] != len(token_M) or (np.diff(start_N1) < 0).any():
        wanted = f"rising from 0 to {len(token_M)}, the number of entries"
        raise ConfigError("edits.start_N1", start_N1.tolist(), wanted)
    if len(token_M) == 0:
        return
    check_between("edits.token_M", token_M, 0, vocabulary - 1, f"in 0..{vocabulary - 1}")
    fits_M1 = np.append(token_M[1:] > token_M[:-1], True)
    fits_M1[start_N1[1:] - 1] = True  # from a row's last entry to the next row's first
    if not fits_M1.all():
        raise ConfigError("edits.token_M", token_M.tolist(), "rising within each row")


def check_logprobs(rows: Rows | Tensor, token_N: Tensor, num_top: int) -> None:
    """All arguments of `Backend.logprobs`."""
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
    if type(num_top) is not int or not 0 <= num_top <= min(MOST_TOP, vocabulary):
        raise ConfigError("num_top", num_top, f"in 0..{min(MOST_TOP, vocabulary)}")


def _check_slots(
    name: str, slot_N: Tensor, params: SlotParams, logits: Tensor, shape: tuple[int | Letter, ...]
) -> AbstractSet[int]:
    """Slots and their parameters; on the host also their values, and returns the rules in use."""
    check_tensor(name, slot_N, shape, INT64, logits.device)
    check_params(params, logits.device)
    if not slot_N.is_cpu or slot_N.shape[0] == 0:
        return set()
    slot, last = slot_N.numpy(), params.key_S.shape[0] - 1
    check_between(name, slot, 0, last, f"in 0..{last}, the slots of `params`")
    if params.values_fit:
        return params.rules

    columns = params.temperature_S, params.top_p_S, params.min_p_S, params.rule_S
    # Distinct values: usually there is one.
    used = ([*dict.fromkeys(column.numpy()[slot].tolist())] for column in columns)
    temperature, top_p, min_p, rules = used
    for rule in rules:
        if rule not in RULES:
            known = ", ".join(f"{r.value} ({r.name})" for r in Rule)
            raise ConfigError("params.rule_S", rule, f"one of {known}")
        if rule not in params.rules:
            promised = ", ".join(sorted(r.name for r in params.rules))
            raise ConfigError("params.rules", promised, f"with {Rule(rule).name}, a slot's rule")
    sampling = [value for value in temperature if value != 0]
    check_between("params.temperature_S", sampling, COLDEST, 3.4e38, "0, or >= 1e-5 and finite")
    check_between("params.top_p_S", top_p, 1e-45, 1, "in (0, 1]")
    check_between("params.min_p_S", min_p, 0, 1, "in [0, 1]")
    if not params.has_filters:
        top_k = params.top_k_S.numpy()[slot]
        if ((top_k > 0) & (top_k < logits.shape[-1])).any() or min(top_p) < 1 or max(min_p) > 0:
            raise ConfigError("params.has_filters", False, "True, since a slot has a filter on")
    return set(rules)


def check_between(
    name: str, values: Host | list[float], low: float, high: float, wanted: str
) -> None:
    """Raise `ConfigError` unless low <= every value <= high; NaN is neither."""
    if not isinstance(values, list):
        if len(values) > FEW:
            values = values[~((values >= low) & (values <= high))]
        values = values.tolist()
    for value in values:
        if not low <= value <= high:
            raise ConfigError(name, value, wanted)


def check_attention(
    query_THD: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: AttentionBatch,
    options: AttentionOptions,
) -> None:
    """All arguments of `Backend.attention`; the layers of a pass differ only in addresses."""
    global _latest_batch
    check_kind("options", options, AttentionOptions)
    switches = options.scale, options.sliding_window, options.softcap
    rest = (_layout(query_THD), _layout(key_cache), _layout(value_cache), switches)
    known = _latest_batch
    if known is None or known[0]() is not batch or known[1] != rest:
        _check_caches(query_THD, key_cache, value_cache)
        check_attention_batch(batch, query_THD.shape[0], key_cache)
        if options.sliding_window is not None and options.sliding_window < 1:
            raise ConfigError("options.sliding_window", options.sliding_window, "None or >= 1")
        if options.softcap is not None and not options.softcap > 0:
            raise ConfigError("options.softcap", options.softcap, "None or > 0")
        _latest_batch = (ref(batch), rest)
    sinks_H = options.sinks_H
    if sinks_H is not None:
        heads, device = query_THD.shape[1:2], query_THD.device
        check_tensor("options.sinks_H", sinks_H, heads, FLOATS, device, grad=True)


def _layout(value: object) -> object:
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
    """The batch has so many tokens, and this cache's block size and device.

    On the host also: requests have tokens, lengths cover them, and blocks exist.
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


def check_draft_round(
    drafting: DraftRound, length_B: Tensor, room: int, vocabulary: int, least: int = 1
) -> list[int]:
    """Slots exist; the block table, with room for `room` tokens, and the cache cover all drafts.

    All tensors are on the host. Returns the number of drafts of each request.
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
    """Outputs of a drafting stack's rows, by slot: see `DraftRound.hidden_SC`."""
    check_tensor("hidden_SC", hidden_SC, (slots, size), (torch.float32,), contiguous=True)


def check_stack(stack: Stack) -> None:
    """The head's outputs are tokens; otherwise native code would write past its rows."""
    outputs, ids = stack.head.weight.shape[0], stack.target_ids
    if ids is None:
        if outputs != stack.vocab_size:
            bound = f"{outputs}, the outputs of `head`, without `target_ids`"
            raise ConfigError("stack.vocab_size", stack.vocab_size, bound)
        return
    check_tensor("stack.target_ids", ids, (outputs,), INT64)
    wanted = f"in 0..{stack.vocab_size - 1}"
    check_between("stack.target_ids", ids.cpu().numpy(), 0, stack.vocab_size - 1, wanted)


def check_pass(stack: Stack, batch: ForwardBatch, kv: KV, features: Features | None) -> None:
    """The batch fits the cache, the cache has the stack's layers, and features fit the stack."""
    check_attention_batch(batch.attention, len(batch.token_T), kv.keys[0])
    if not len(kv.keys) == len(kv.values) == len(stack.layers):
        raise ConfigError("kv.keys", len(kv.keys), f"tensors of {len(stack.layers)} layers")
    check_features(stack.features is not None, features)


def check_features(has_rule: bool, features: Features | None) -> None:
    """Features are given if, and only if, the stack has a `FeatureRule`."""
    if has_rule != (features is not None):
        must = "what rows begin with" if has_rule else "None without a `FeatureRule`"
        raise ConfigError("features", type(features).__name__, must)


def check_aux(aux: Sequence[Tensor], tokens: int, numbers: int) -> None:
    """Hidden states that a head reads: together so many numbers for each token."""
    for i, state_TH in enumerate(aux):
        shape = (tokens, numbers // len(aux))
        check_tensor(f"aux[{i}]", state_TH, shape, (torch.float32,), contiguous=True)

"""Tensors as the structs that the kernels read: their fields, of 8 bytes each, in C's order.

Belongs here: dtypes, strides, addresses. Does not: checks (`ops/checks.py`), what is computed.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor

from foretoken.ops.types import DraftCache, Edits, Noise, Rows, SlotParams, VerifyBatch

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # `csrc/rows.h: Dtype`


class Struct(array):  # type: ignore[type-arg]
    """The fields, kept together with what they point to. Passed by address, as `ctypes` has it."""

    __slots__ = ("_as_parameter_", "_kept")
    _as_parameter_: int
    _kept: object


def struct(tensors: Sequence[Tensor | None], *numbers: int, kept: object = None) -> Struct:
    """Addresses of tensors, made contiguous (None: a null pointer), then numbers.

    It keeps the tensors alive, and `kept`: what else its numbers are addresses of.
    """
    held = [None if tensor is None else tensor.contiguous() for tensor in tensors]
    fields = [0 if tensor is None else tensor.data_ptr() for tensor in held]
    fields += numbers
    made = Struct("q", fields)
    made._as_parameter_ = made.buffer_info()[0]
    made._kept = held, kept
    return made


address = attrgetter("_as_parameter_")
"""Where a struct is."""
_NULL = Struct("q")
_NULL._as_parameter_ = 0

_latest: tuple[SlotParams, Struct] | None = None  # an engine has one slot table


def native_params(params: SlotParams) -> Struct:
    """`Params`, the slot table's columns; made once for a table of contiguous ones."""
    global _latest
    latest = _latest
    if latest is not None and latest[0] is params:
        return latest[1]
    made = struct(params.columns)
    # Else these are copies of today's values.
    if all(map(Tensor.is_contiguous, params.columns)):
        _latest = (params, made)
    return made


def _as_native(logits: Tensor) -> Tensor:
    """The logits, or float32 ones in place of float64, which no kernel reads."""
    return logits if logits.dtype in _DTYPES else logits.float()


def _logits_fields(logits_NV: Tensor) -> tuple[int, int, int, int]:
    """`Logits`: rows of `_as_native` logits, at any distance from each other."""
    stride, vocabulary = logits_NV.stride(0), logits_NV.shape[1]
    return logits_NV.data_ptr(), _DTYPES[logits_NV.dtype], stride, vocabulary


def _native_edits(edits: Edits | None) -> Struct:
    """`Edits`, or a null pointer."""
    if edits is None:
        return _NULL
    tensors = (
        edits.mask_RW,
        edits.mask_N,
        edits.start_N1,
        edits.token_M,
        edits.bias_M,
        edits.repetition_M,
        edits.subtract_M,
    )
    return struct(tensors, 0 if edits.mask_RW is None else edits.mask_RW.shape[1])


def native_cache(cache: DraftCache | None) -> Struct:
    """`Cache`, or a null pointer; a float64 one as a copy (`sample.py` writes its logits)."""
    if cache is None:
        return _NULL
    logits_SKV = _as_native(cache.logits_SKV)
    _, drafts, vocabulary = logits_SKV.shape
    tensors = (logits_SKV, cache.threshold_SK, cache.lse_SK)
    return struct(tensors, _DTYPES[logits_SKV.dtype], drafts, vocabulary)


def native_rows(rows: Rows | Tensor) -> Struct:
    """`Rows`; of a tensor the raw logits alone."""
    if isinstance(rows, Rows):
        logits_NV, params, slot_N, edits = rows
        kept = native_params(params), _native_edits(edits)
    else:
        logits_NV, slot_N, kept = rows, None, (_NULL, _NULL)
    logits_NV = _as_native(logits_NV)
    numbers = (address(kept[0]), address(kept[1]), len(logits_NV))
    return struct((slot_N,), *_logits_fields(logits_NV), *numbers, kept=(logits_NV, kept))


def native_places(noise: Noise) -> Struct:
    """`Places`: where the noise of every row is."""
    return struct((noise.position_N, noise.draft_index_N), *noise.streams, noise.fp64)


def native_batch(batch: VerifyBatch) -> Struct:
    """`VerifyBatch`."""
    logits_NV, params, slot_B, position_B, drafts, edits, synthetic_rate_K, fp64_noise, _ = batch
    token_BK, logits_NV = drafts.token_BK, _as_native(logits_NV)
    kept = native_params(params), _native_edits(edits), native_cache(drafts.cache)
    return struct(
        (slot_B, position_B, drafts.num_B, token_BK.long(), drafts.real_q_B, synthetic_rate_K),
        *_logits_fields(logits_NV),
        *map(address, kept),
        *token_BK.shape,
        fp64_noise,
        kept=(logits_NV, kept),
    )

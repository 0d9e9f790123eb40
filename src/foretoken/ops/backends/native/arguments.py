"""Tensors as the structures that the kernels read.

Belongs here: dtypes, strides, addresses. Does not: checks (`ops/checks.py`), what is computed.

A structure holds addresses; the tensors they lie in are its attribute `kept`, as long as it lives.

Shapes: N rows, B requests, V vocabulary, S slots, K drafts.
"""

from __future__ import annotations

from ctypes import pointer
from typing import Any, TypeVar

import torch
from torch import Tensor

from foretoken.ops.backends.native import library
from foretoken.ops.types import DraftCache, Edits, Noise, Rows, SlotParams, VerifyBatch

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # `csrc/rows.h: Dtype`

_S = TypeVar("_S")


def _keeping(structure: type[_S], tensors: tuple[Tensor | None, ...], *numbers: int) -> _S:
    """A structure of the addresses of these tensors, made contiguous, then of numbers."""
    kept = [None if tensor is None else tensor.contiguous() for tensor in tensors]
    made: Any = structure(*[None if t is None else t.data_ptr() for t in kept], *numbers)
    made.kept = kept
    return made  # type: ignore[no-any-return]


_latest: tuple[SlotParams, library.Params] | None = None  # an engine has one slot table


def native_params(params: SlotParams) -> library.Params:
    """The slot table's columns; made once for a table of contiguous ones."""
    global _latest
    latest = _latest
    if latest is not None and latest[0] is params:
        return latest[1]
    columns = (
        params.key_S,
        params.temperature_S,
        params.top_k_S,
        params.top_p_S,
        params.min_p_S,
        params.rule_S,
    )
    made = _keeping(library.Params, columns)
    if all(column.is_contiguous() for column in columns):  # else these are copies of today's values
        _latest = (params, made)
    return made


def as_native(logits: Tensor) -> Tensor:
    """The logits, or float32 ones in place of float64, which no kernel reads."""
    return logits if logits.dtype in _DTYPES else logits.float()


def native_logits(logits_NV: Tensor) -> library.Logits:
    """Rows of `as_native` logits, at any distance from each other; the caller keeps them alive."""
    return library.Logits(
        logits_NV.data_ptr(), _DTYPES[logits_NV.dtype], logits_NV.stride(0), logits_NV.shape[1]
    )


def native_edits(edits: Edits | None) -> Any:
    """A pointer to the edits, or None."""
    if edits is None:
        return None
    tensors = (
        edits.mask_RW,
        edits.mask_N,
        edits.start_N1,
        edits.token_M,
        edits.bias_M,
        edits.repetition_M,
        edits.subtract_M,
    )
    words = 0 if edits.mask_RW is None else edits.mask_RW.shape[1]
    return pointer(_keeping(library.Edits, tensors, words))


def native_cache(cache: DraftCache | None) -> Any:
    """A pointer to the cache, whose tensors are contiguous and kept alive by the caller, or None.

    A float64 cache is read as a float32 copy; its logits are not written (`draft.py` does that).
    """
    if cache is None:
        return None
    logits_SKV = as_native(cache.logits_SKV)
    _, drafts, vocabulary = logits_SKV.shape
    made: Any = library.Cache(
        logits_SKV.data_ptr(),
        cache.threshold_SK.data_ptr(),
        cache.lse_SK.data_ptr(),
        _DTYPES[logits_SKV.dtype],
        drafts,
        vocabulary,
    )
    if logits_SKV is not cache.logits_SKV:
        made.kept = logits_SKV
    return pointer(made)


def native_rows(rows: Rows | Tensor) -> library.Rows:
    """Rows, which slots they belong to, and their edits; of a tensor the raw logits alone."""
    if isinstance(rows, Rows):
        logits_NV, _, slot_N, edits = rows
        slot_N = slot_N.contiguous()
    else:
        logits_NV, slot_N, edits = rows, None, None
    logits_NV = as_native(logits_NV)
    made = library.Rows(
        native_logits(logits_NV),
        native_edits(edits),
        None if slot_N is None else slot_N.data_ptr(),
        len(logits_NV),
    )
    made.kept = (logits_NV, slot_N)
    return made


def native_places(noise: Noise) -> library.Places:
    """Where the noise of every row is."""
    tensors = noise.position_N, noise.draft_index_N
    return _keeping(library.Places, tensors, *noise.streams, noise.fp64)


def native_batch(batch: VerifyBatch) -> library.VerifyBatch:
    """The argument of `Backend.verify`, its parameters apart."""
    logits_NV, _, slot_B, position_B, drafts, edits, synthetic_rate_K, fp64_noise = batch
    logits_NV, token_BK = as_native(logits_NV), drafts.token_BK.contiguous()
    slot_B, position_B = slot_B.contiguous(), position_B.contiguous()
    num_B, real_q_B = drafts.num_B.contiguous(), drafts.real_q_B.contiguous()
    rate_K = None if synthetic_rate_K is None else synthetic_rate_K.contiguous()
    made = library.VerifyBatch(
        native_logits(logits_NV),
        native_edits(edits),
        native_cache(drafts.cache),
        slot_B.data_ptr(),
        position_B.data_ptr(),
        num_B.data_ptr(),
        token_BK.data_ptr(),
        real_q_B.data_ptr(),
        None if rate_K is None else rate_K.data_ptr(),
        *token_BK.shape,
        token_BK.dtype is torch.int32,
        fp64_noise,
    )
    made.kept = (logits_NV, slot_B, position_B, num_B, token_BK, real_q_B, rate_K)
    return made

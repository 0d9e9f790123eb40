"""The C structs that the kernels read, made from checked tensors: fields of 8 bytes each."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor

from foretoken.ops.types import DraftCache, Edits, Noise, Rows, SlotParams, VerifyBatch

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # `csrc/rows.h: Dtype`


class Struct(array):  # type: ignore[type-arg]
    """The fields of a C struct; keeps alive what they point to. `ctypes` passes the address."""

    __slots__ = ("_as_parameter_", "_kept")
    _as_parameter_: int
    _kept: object


def addresses(tensors: Sequence[Tensor | None]) -> list[int]:
    """The addresses of tensors; 0, a null pointer, for None."""
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def struct(tensors: Sequence[Tensor | None], *numbers: int, kept: object = None) -> Struct:
    """A struct of the addresses of tensors, which are copied if not contiguous, and of `numbers`.

    The struct keeps alive the tensors and `kept`: the memory of addresses among `numbers`.
    """
    contiguous = [None if tensor is None else tensor.contiguous() for tensor in tensors]
    result = Struct("q", [*addresses(contiguous), *numbers])
    result._as_parameter_ = result.buffer_info()[0]
    result._kept = contiguous, kept
    return result


address = attrgetter("_as_parameter_")  # of a struct
_NULL = Struct("q")
_NULL._as_parameter_ = 0

# The latest slot parameters and their struct: an engine passes the same object in every call.
_latest_params: tuple[SlotParams, Struct] | None = None


def native_params(params: SlotParams) -> Struct:
    """The C struct `Params`."""
    global _latest_params
    latest = _latest_params
    if latest is not None and latest[0] is params:
        return latest[1]
    native = struct(params.columns)
    # A struct of columns that are not contiguous points to copies, which become outdated.
    if all(map(Tensor.is_contiguous, params.columns)):
        _latest_params = (params, native)
    return native


def _as_native(logits: Tensor) -> Tensor:
    """The logits in a dtype that kernels read: float64 becomes float32."""
    return logits if logits.dtype in _DTYPES else logits.float()


def _logits_fields(logits_NV: Tensor) -> tuple[int, int, int, int]:
    """The fields of the C struct `Logits`, for logits from `_as_native` with any row stride."""
    stride, vocabulary = logits_NV.stride(0), logits_NV.shape[1]
    return logits_NV.data_ptr(), _DTYPES[logits_NV.dtype], stride, vocabulary


def _native_edits(edits: Edits | None) -> Struct:
    """The C struct `Edits`, or a null pointer."""
    if edits is None:
        return _NULL
    entries = (edits.start_N1, edits.token_M, edits.bias_M, edits.repetition_M, edits.subtract_M)
    words = 0 if edits.mask_RW is None else edits.mask_RW.shape[1]
    return struct((edits.mask_RW, edits.mask_N, *entries), words)


def native_cache(cache: DraftCache | None) -> Struct:
    """The C struct `Cache`, or a null pointer; of float64 logits it holds a float32 copy."""
    if cache is None:
        return _NULL
    logits_SKV = _as_native(cache.logits_SKV)
    _, drafts, vocabulary = logits_SKV.shape
    tensors = (logits_SKV, cache.threshold_SK, cache.lse_SK)
    return struct(tensors, _DTYPES[logits_SKV.dtype], drafts, vocabulary)


def native_rows(rows: Rows | Tensor) -> Struct:
    """The C struct `Rows`; a tensor stands for raw logits without parameters and edits."""
    if isinstance(rows, Rows):
        logits_NV, params, slot_N, edits = rows
        kept = native_params(params), _native_edits(edits)
    else:
        logits_NV, slot_N, kept = rows, None, (_NULL, _NULL)
    logits_NV = _as_native(logits_NV)
    numbers = (*map(address, kept), len(logits_NV))
    return struct((slot_N,), *_logits_fields(logits_NV), *numbers, kept=(logits_NV, kept))


def native_noise(noise: Noise) -> Struct:
    """The C struct `NoiseNames`."""
    return struct((noise.position_N, noise.draft_index_N), *noise.streams, noise.fp64)


def native_batch(batch: VerifyBatch) -> Struct:
    """The C struct `VerifyBatch`."""
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

"""The compiled kernels as Python functions, and the structures they take.

Belongs here: choosing and loading a library, the C signatures. Does not: what the numbers mean
(the backend's other files).

Structures mirror those in `csrc/*.h` field for field. Pointers are addresses of contiguous arrays
that the caller keeps alive during the call; nothing is checked on the C side. Every call releases
the GIL.
"""

from __future__ import annotations

import ctypes
import platform
from ctypes import POINTER, Structure, c_double, c_float, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from foretoken.ops.backends.native import build

__all__ = [
    "FETCHES",
    "AttentionBatch",
    "Batch",
    "Cache",
    "DecoderShape",
    "DraftRound",
    "Edits",
    "LayerWeights",
    "Logits",
    "Outcome",
    "Params",
    "Places",
    "Rows",
    "TopLogprobs",
    "Tuning",
    "VerifyBatch",
    "load",
    "missing",
    "record_tuning",
    "set_num_threads",
    "tunings",
]

FETCHES = ("no hint", "cached", "past the caches")
"""`foretoken::Fetch` by number: how weights are fetched ahead of their use."""

_REMEDY = "run `python -m foretoken.ops.backends.native.build` (needs g++)"
_CPUINFO = Path("/proc/cpuinfo")
_NEEDS = {
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": {"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe"},
}

_Fields: TypeAlias = list[tuple[str, type]]


def _fields(pointers: str = "", ints: str = "", floats: str = "") -> _Fields:
    kinds = ((c_void_p, pointers), (c_int64, ints), (c_float, floats))
    return [(name, kind) for kind, names in kinds for name in names.split()]


class DecoderShape(Structure):
    """`foretoken::DecoderShape`."""

    _fields_: ClassVar[_Fields] = _fields(
        ints="layers hidden intermediate heads kv_heads head_size vocabulary rotary_size",
        floats="norm_epsilon attention_scale rotary_scale",
    )


class LayerWeights(Structure):
    """`foretoken::LayerWeights`: float32, row-major; null for what a model does not have."""

    _fields_: ClassVar[_Fields] = _fields(
        pointers="input_norm post_attention_norm q k v o q_bias k_bias v_bias o_bias "
        "q_norm k_norm gate up down gate_bias up_bias down_bias",
        ints="window",
    )


class AttentionBatch(Structure):
    """`foretoken::AttentionBatch`: an `ops.AttentionBatch`."""

    _fields_: ClassVar[_Fields] = _fields(
        "query_start_B1 length_B block_BL", "requests columns block_size"
    )


class Batch(Structure):
    """`foretoken::Batch`: the packed tokens of a pass."""

    _fields_: ClassVar[_Fields] = [
        *_fields("token_T row_N", "num_tokens num_rows"),
        ("attention", AttentionBatch),
    ]


class Cache(Structure):
    """`foretoken::Cache`: an `ops.DraftCache`."""

    _fields_: ClassVar[_Fields] = _fields(
        "logits_SKV threshold_SK lse_SK", "dtype drafts vocabulary"
    )


class DraftRound(Structure):
    """`foretoken::DraftRound`."""

    _fields_: ClassVar[_Fields] = [
        *_fields("slot_B num_drafts_B", "most"),
        ("cache", POINTER(Cache)),
        *_fields(ints="fp64_noise"),
        *_fields("token_BK"),
    ]


class Params(Structure):
    """`foretoken::Params`: an `ops.SlotParams`."""

    _fields_: ClassVar[_Fields] = _fields("key_S temperature_S top_k_S top_p_S min_p_S rule_S")


class Logits(Structure):
    """`foretoken::Logits`: raw logits [N, V] with adjacent tokens; `stride` in numbers."""

    _fields_: ClassVar[_Fields] = _fields("data", "dtype stride vocabulary")


class Edits(Structure):
    """`foretoken::Edits`: an `ops.Edits`."""

    _fields_: ClassVar[_Fields] = _fields(
        "mask_RW mask_N start_N1 token_M bias_M repetition_M subtract_M", "words"
    )


class Rows(Structure):
    """`foretoken::Rows`: logits, what edits them and the slots whose parameters they have."""

    _fields_: ClassVar[_Fields] = [
        ("logits", Logits),
        ("edits", POINTER(Edits)),
        *_fields("slot_N", "count"),
    ]


class Places(Structure):
    """`foretoken::Places`: an `ops.Noise`: where that of every row is."""

    _fields_: ClassVar[_Fields] = _fields(
        "position_N draft_index_N", "token_stream block_stream fp64_noise"
    )


class TopLogprobs(Structure):
    """`foretoken::TopLogprobs`: an `ops.Logprobs`, to be written."""

    _fields_: ClassVar[_Fields] = _fields("logprob_N rank_N top_logprob_NT top_token_NT", "top")


class VerifyBatch(Structure):
    """`foretoken::VerifyBatch`: an `ops.VerifyBatch`."""

    _fields_: ClassVar[_Fields] = [
        ("logits", Logits),
        ("edits", POINTER(Edits)),
        ("cache", POINTER(Cache)),
        *_fields(
            "slot_B position_B num_B token_BK real_q_B synthetic_rate_K",
            "requests drafts narrow fp64_noise",
        ),
    ]


class Outcome(Structure):
    """`foretoken::Outcome`: an `ops.Verdict`, to be written."""

    _fields_: ClassVar[_Fields] = _fields("token_BK1 n_accept_B finite_B")


class Tuning(Structure):
    """`foretoken::Tuning`: the fetches chosen for one row and for a few, best seconds of each."""

    _fields_: ClassVar[_Fields] = [
        *_fields(ints="one few"),
        ("one_seconds", c_double * len(FETCHES)),
        ("few_seconds", c_double * len(FETCHES)),
    ]

    def describe(self) -> dict[str, dict[str, float | str]]:
        """What was taken, and milliseconds of a pass over the weights with each, by rows."""
        return {
            rows: {"taken": FETCHES[taken]}
            | {name: float(f"{1000 * s:.3g}") for name, s in zip(FETCHES, seconds, strict=True)}
            for rows, taken, seconds in (
                ("1 row", self.one, self.one_seconds),
                ("6 rows", self.few, self.few_seconds),
            )
        }


_tunings: dict[str, dict[str, dict[str, float | str]]] = {}


def record_tuning(what: str, tuning: Tuning) -> None:
    """Remember a tuning for `tunings`, by what was tuned."""
    _tunings[what] = tuning.describe()


def tunings() -> dict[str, dict[str, dict[str, float | str]]]:
    """What this process measured and took: by weights, by rows; see `Tuning.describe`."""
    return dict(_tunings)


@cache
def _variant() -> tuple[str | None, str]:
    """The most capable variant that this processor runs and that was built, or None and why."""
    variants = build.VARIANTS.get(platform.machine())
    if variants is None:
        return None, f"there are none for `{platform.machine()}`"
    features = _cpu_features()
    fitting = [v for v in variants if _NEEDS.get(v, set()) <= features]
    if not fitting:
        return None, "this processor is older than x86-64-v3 (AVX2)"
    built = [v for v in fitting if build.library_path(v).exists()]
    if not built:
        return (
            None,
            "they were not built: run `python -m foretoken.ops.backends.native.build` (needs g++)",
        )
    return built[0], ""


def _cpu_features() -> set[str]:
    if not _CPUINFO.exists():
        return set()
    lines = _CPUINFO.read_text().splitlines()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return set(flags.partition(":")[2].split())


def missing() -> str | None:
    """Why there are no native kernels on this machine; None if there are."""
    variant, reason = _variant()
    if variant is None:
        return reason
    try:
        load()
    except OSError as error:  # damaged, or built elsewhere, against newer system libraries
        return f"they cannot be loaded ({error}): {_REMEDY}"
    return None


@cache
def load() -> ctypes.CDLL:
    """The library, its functions declared.

    Raises:
        OSError: it cannot be loaded, or `missing()` says why there is none.
    """
    variant, reason = _variant()
    if variant is None:
        raise OSError(f"there are no native kernels: {reason}")
    path = build.library_path(variant)
    if not build.is_whole(path):
        raise OSError(f"{path} is damaged: its digest is not that of its contents")
    library = ctypes.CDLL(str(path))
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, f"foretoken_{name}")
        function.argtypes, function.restype, function.errcheck = arguments, c_int, _check
    return library


_PARAMS, _ROWS, _PLACES = POINTER(Params), POINTER(Rows), POINTER(Places)
_ADDRESSES = [c_void_p] * 7
_SIGNATURES = {
    "set_num_threads": [c_int],
    "decoder_new": [POINTER(DecoderShape), POINTER(LayerWeights), *_ADDRESSES[:5]],
    "decoder_free": [c_void_p],
    "decoder_tune": [c_void_p, POINTER(Tuning)],
    "decoder_set_fetches": [c_void_p, c_int64, c_int64],
    "decoder_forward": [c_void_p, POINTER(Batch), *_ADDRESSES[:4]],
    "decoder_draft": [c_void_p, POINTER(Batch), *_ADDRESSES[:2], _PARAMS, POINTER(DraftRound)],
    "process": [_PARAMS, _ROWS, c_void_p],
    "sample": [_PARAMS, _ROWS, _PLACES, c_void_p],
    "draft": [_PARAMS, _ROWS, _PLACES, POINTER(Cache), c_void_p],
    "logprobs": [_PARAMS, _ROWS, c_void_p, POINTER(TopLogprobs)],
    "verify": [_PARAMS, POINTER(VerifyBatch), POINTER(Outcome)],
}


def _check(status: int, function: Any, arguments: Any) -> None:
    """Raise what kept a call from being done; `csrc/api.cpp` names the numbers."""
    if status == 1:
        raise NotImplementedError(f"native kernels: {function.__name__} lacks a rule of the batch")
    if status == 2:
        raise MemoryError(f"native kernels: {function.__name__} could not allocate memory")
    if status == 3:
        raise RuntimeError(f"native kernels: {function.__name__} failed")


def set_num_threads(count: int) -> None:
    """Threads that share one call's work, the calling one included; of the whole process."""
    load().foretoken_set_num_threads(count)

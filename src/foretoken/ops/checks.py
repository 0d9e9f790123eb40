"""Argument checks shared by the backends: shapes and dtypes only, so that no device is waited for.

A wrong argument is an engine's mistake, reported by name before any work is done. What the values
are (ids in range, a finite row) is the business of the op that reads them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.errors import ConfigError
from foretoken.ops.types import DraftBlock, SlotParams

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INT64 = (torch.int64,)
IDS = (torch.int64, torch.int32)


def check_tensor(
    name: str, value: Tensor, shape: tuple[int | None, ...], dtypes: tuple[torch.dtype, ...]
) -> None:
    """Raise `ConfigError` unless `value` is a tensor of this shape (None: any size) and dtype."""
    if not isinstance(value, Tensor):
        raise ConfigError(name, value, "a tensor")
    if value.dtype not in dtypes:
        wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise ConfigError(f"{name}.dtype", value.dtype, wanted)
    given = value.shape
    fits = len(given) == len(shape)
    for have, want in zip(given, shape, strict=False):
        fits = fits and want in (None, have)
    if not fits:
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise ConfigError(f"{name}.shape", tuple(given), f"[{wanted}]")


def check_rows(logits_NV: Tensor, slot_N: Tensor, params: SlotParams) -> None:
    """Logits of N rows with at least one token, their slots, and one value per slot."""
    check_tensor("logits_NV", logits_NV, (None, None), FLOATS)
    if logits_NV.shape[1] == 0:
        raise ConfigError("logits_NV.shape", tuple(logits_NV.shape), "at least one token wide")
    check_tensor("slot_N", slot_N, (logits_NV.shape[0],), INT64)
    check_params(params)


def check_params(params: SlotParams) -> None:
    """The five per-slot fields have their dtypes and one length."""
    check_tensor("params.key_S", params.key_S, (None,), INT64)
    shape = (params.key_S.shape[0],)
    check_tensor("params.temperature_S", params.temperature_S, shape, (torch.float32,))
    check_tensor("params.top_k_S", params.top_k_S, shape, INT64)
    check_tensor("params.top_p_S", params.top_p_S, shape, (torch.float32,))
    check_tensor("params.min_p_S", params.min_p_S, shape, (torch.float32,))


def check_drafts(drafts: DraftBlock, num_requests: int) -> None:
    """The draft block belongs to this many requests and is wide enough for its longest draft."""
    check_tensor("drafts.token_BK", drafts.token_BK, (num_requests, None), IDS)
    check_tensor("drafts.num_B", drafts.num_B, (num_requests,), INT64)
    check_tensor("drafts.real_q_B", drafts.real_q_B, (num_requests,), (torch.bool,))
    if drafts.logits_SKV is not None:
        check_tensor("drafts.logits_SKV", drafts.logits_SKV, (None, None, None), FLOATS)


def check_verify(
    logits_NV: Tensor, params: SlotParams, slot_B: Tensor, position_B: Tensor, drafts: DraftBlock
) -> None:
    """All arguments of `Backend.verify` against each other; of tensors on the host, values too."""
    check_tensor("logits_NV", logits_NV, (None, None), FLOATS)
    check_tensor("slot_B", slot_B, (None,), INT64)
    check_tensor("position_B", position_B, slot_B.shape, INT64)
    check_params(params)
    check_drafts(drafts, len(slot_B))
    num_B, most = drafts.num_B.tolist(), drafts.token_BK.shape[1]
    if num_B and not 0 <= min(num_B) <= max(num_B) <= most:
        raise ConfigError("drafts.num_B", num_B, f"in 0..{most}, the width of `token_BK`")
    if logits_NV.shape[0] != sum(num_B) + len(num_B):
        raise ConfigError("logits_NV.shape", tuple(logits_NV.shape), "sum(num_B + 1) rows")
    if drafts.logits_SKV is not None and drafts.logits_SKV.shape[1] < most:
        raise ConfigError("drafts.logits_SKV.shape", tuple(drafts.logits_SKV.shape), f"K >= {most}")
    if drafts.logits_SKV is None and bool(drafts.real_q_B.any()):
        raise ConfigError("drafts.logits_SKV", None, "given, since `real_q_B` asks for it")

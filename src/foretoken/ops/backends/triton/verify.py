"""Verification on the device: a scan of K + 1 rows, a decision per request, a residual pass.

Three launches without filters, five with them. Nothing here waits for the device.

Shapes: B requests, K most drafts, N rows, V vocabulary, S slots.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foretoken.ops.backends.triton.decide import decide_kernel, residual_kernel
from foretoken.ops.backends.triton.launch import (
    Scratch,
    Sizes,
    arrivals,
    edits_tuple,
    may_be_flat,
    params_tuple,
)
from foretoken.ops.backends.triton.sample import reduce_rows
from foretoken.ops.checks import check_verify
from foretoken.ops.types import DraftBlock, DraftCache, Edits, Rule, SlotParams, Stream, Verdict

_BLOCKS_PER_PROGRAM = 4  # of the residual pass; 12 in turn took 52 us where 4 took 39


def verify(
    logits_NV: Tensor,
    params: SlotParams,
    slot_B: Tensor,
    position_B: Tensor,
    drafts: DraftBlock,
    *,
    edits: Edits | None = None,
    synthetic_rate_K: Tensor | None = None,
    fp64_noise: bool = False,
) -> Verdict:
    """Accept a prefix of each request's drafts and draw one more token; see `Backend.verify`.

    The law of the output is exactly the target's (Leviathan et al. 2023, appendix A.1; Sun et al.
    2024, theorem 1; Daliri et al. 2024). A request whose deciding row is not finite gets -1.
    """
    check_verify(logits_NV, params, slot_B, position_B, drafts, edits, synthetic_rate_K)
    sizes, device = Sizes.of(logits_NV), logits_NV.device
    requests, most = drafts.token_BK.shape
    verdict = Verdict(
        torch.empty(requests, most + 1, dtype=drafts.token_BK.dtype, device=device),
        torch.empty(requests, dtype=torch.int64, device=device),
        torch.empty(requests, dtype=torch.bool, device=device),
    )
    if not requests:
        return verdict
    logits_NV = logits_NV if logits_NV.stride(1) == 1 else logits_NV.contiguous()
    slot_B, position_B = slot_B.contiguous(), position_B.contiguous()
    num_B = drafts.num_B.contiguous()
    pointers, packed = params_tuple(params), edits_tuple(edits, sizes, slot_B)
    filters, flat = params.has_filters, may_be_flat(params)
    scratch = Scratch.of(sizes, device, filters, flat)
    noise = (Stream.TARGET_TOKEN, Stream.TARGET_BLOCK, False)
    reduce_rows(
        logits_NV, num_B, slot_B, position_B, num_B, pointers, packed, scratch, sizes, most + 1,
        filters, flat, fp64_noise, noise, None,
    )  # fmt: skip
    rates = num_B if synthetic_rate_K is None else synthetic_rate_K
    request = (num_B, slot_B, position_B, drafts.token_BK.contiguous(), drafts.real_q_B, rates)
    q = _q_tuple(drafts.cache, logits_NV)
    work = _work(requests, most, device)
    shared = (
        logits_NV, logits_NV.stride(0), request, pointers, packed[0], q, scratch.out, scratch.found,
        work, tuple(verdict_fields(verdict)), sizes.vocabulary, sizes.blocks, most,
    )  # fmt: skip
    padded = max(2, 1 << most.bit_length())
    decide_kernel[(requests,)](
        *shared, most > 0, packed[1], packed[2], filters, drafts.cache is not None,
        synthetic_rate_K is not None, padded, sizes.blocks_padded, fp64_noise, num_warps=8,
    )  # fmt: skip
    blocks = Rule.BLOCK in params.rules
    if most and (drafts.cache is not None or blocks or filters):
        rows = most if blocks else 1
        parts = -(-sizes.blocks // _BLOCKS_PER_PROGRAM)
        residual_kernel[(requests * rows * parts,)](
            *shared, parts, rows, packed[1], packed[2], filters, drafts.cache is not None, padded,
            sizes.blocks_padded, fp64_noise, _BLOCKS_PER_PROGRAM, num_warps=4,
        )  # fmt: skip
    return verdict


def verdict_fields(verdict: Verdict) -> tuple[Tensor, Tensor, Tensor]:
    """The pointers of `decide.py: verdict`."""
    return verdict.token_BK1, verdict.n_accept_B, verdict.finite_B


def _q_tuple(cache: DraftCache | None, unused: Tensor) -> tuple[Any, ...]:
    if cache is None:
        return (unused, 0, 0, 0, unused, unused, 0)
    raw = cache.logits_SKV
    return (
        raw, raw.stride(0), raw.stride(1), raw.shape[2], cache.threshold_SK, cache.lse_SK,
        cache.lse_SK.stride(0),
    )  # fmt: skip


def _work(requests: int, most: int, device: torch.device) -> tuple[Tensor, ...]:
    """`decide.py: work`: what passes between its two kernels."""
    numbers = torch.empty(3, requests * (most + 1), dtype=torch.float32, device=device)
    pending_B = torch.empty(requests, dtype=torch.int32, device=device)
    plan = torch.empty(requests * most, 4, dtype=torch.int64, device=device)
    reals = torch.empty(requests * most, 6, dtype=torch.float32, device=device)
    return pending_B, arrivals(device), *numbers.unbind(), plan, reals

"""Verification on the device: a scan of K + 1 rows, a decision per request, a residual pass.

Three launches without filters (two for few requests), more with them, and one for edit entries.
Nothing here waits for the device.

Shapes: B requests, K most drafts, N rows, V vocabulary, S slots.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foretoken.ops.backends.triton.decide import decide_kernel
from foretoken.ops.backends.triton.launch import BLOCKS_AT_ONCE, Call, at_most_registers
from foretoken.ops.backends.triton.request import FRACTION, HEAD, WHOLE
from foretoken.ops.backends.triton.residual import residual_kernel
from foretoken.ops.backends.triton.sample import reduce_rows
from foretoken.ops.backends.triton.settle import FEW, settle_kernel
from foretoken.ops.types import DraftBlock, DraftCache, Rule, Stream, Verdict, VerifyBatch

_NOISE = (Stream.TARGET_TOKEN, Stream.TARGET_BLOCK)


def verify(batch: VerifyBatch) -> Verdict:
    """Accept a prefix of each request's drafts and draw one more token; see `Backend.verify`.

    The law of the output is exactly the target's (Leviathan et al. 2023, appendix A.1; Sun et al.
    2024, theorem 1; Daliri et al. 2024). A request whose deciding row is not finite gets -1.
    """
    logits_NV, params, slot_B, position_B, drafts, edits, synthetic_rate_K, fp64_noise = batch
    device, (requests, most) = logits_NV.device, drafts.token_BK.shape
    verdict = Verdict(
        torch.empty(requests, most + 1, dtype=drafts.token_BK.dtype, device=device),
        torch.empty_like(slot_B),
        torch.empty_like(slot_B, dtype=torch.bool),
    )
    if not requests:
        return verdict
    where = (drafts.num_B, slot_B, position_B, drafts.num_B)
    cache = drafts.cache
    dtypes = drafts.token_BK.dtype, None if cache is None else cache.logits_SKV.dtype
    call = Call.of(logits_NV, params, where, edits, fp64_noise, _NOISE, most + 1, dtypes)
    sizes, cached, block_rule = call.sizes, cache is not None, Rule.BLOCK in params.rules
    later = most > 0 and (cached or block_rule or call.filters)
    few = later and requests <= FEW.value and not block_rule
    work = _work(requests, most, sizes.blocks, few, device)
    request = _request_tuple(call, drafts, synthetic_rate_K)  # before the scan: read unwaited
    reduce_rows(call, counter_B=work[0] if few else None)
    given = (
        logits_NV, call.stride, request,
        call.state, call.edits, _q_tuple(cache, logits_NV), call.scratch.out,
        call.scratch.found, work, (verdict.token_BK1, verdict.n_accept_B, verdict.finite_B),
        sizes.vocabulary, sizes.blocks, most,
    )  # fmt: skip
    special = (call.masks, call.entries, call.filters, cached)
    widths = (max(2, 1 << most.bit_length()), sizes.blocks_padded, fp64_noise)
    rates = synthetic_rate_K is not None
    if few:
        call.launch(
            settle_kernel, requests * sizes.blocks, (given,), *special, rates, *widths, num_warps=4,
        )  # fmt: skip
        return verdict
    call.launch(
        decide_kernel, requests, (given,), most > 0, *special, rates, later, *widths, num_warps=4,
    )  # fmt: skip
    if later:
        rows, parts = most if block_rule else 1, -(-sizes.blocks // BLOCKS_AT_ONCE)
        call.launch(
            residual_kernel, requests * rows * parts, (given, parts, rows), *special, *widths,
            BLOCKS_AT_ONCE, num_warps=4, **at_most_registers(96),
        )  # fmt: skip
    return verdict


def _work(
    requests: int, most: int, blocks: int, few: bool, device: torch.device
) -> tuple[Tensor, Tensor]:
    """`work` of `settle.py` or of `request.py`."""
    if few:
        candidate = torch.empty(requests * blocks * 2, dtype=torch.float64, device=device)
        return torch.empty(requests, dtype=torch.int64, device=device), candidate
    numbers = requests * (HEAD.value + WHOLE.value * most)
    fractions = requests * (1 + (3 + FRACTION.value) * most)
    return (
        torch.empty(numbers, dtype=torch.int64, device=device),
        torch.empty(fractions, dtype=torch.float32, device=device),
    )


def _request_tuple(
    call: Call, drafts: DraftBlock, synthetic_rate_K: Tensor | None
) -> tuple[Tensor, ...]:
    """The pointers of `request.py: request`."""
    rates = call.num_B if synthetic_rate_K is None else synthetic_rate_K.contiguous()
    token_BK, real_q_B = drafts.token_BK.contiguous(), drafts.real_q_B.contiguous()
    return call.num_B, call.slot_B, call.position_B, token_BK, real_q_B, rates


def _q_tuple(cache: DraftCache | None, unused: Tensor) -> tuple[Any, ...]:
    if cache is None:
        return (unused, 0, 0, 0, unused, unused, 0)
    _, most, width = cache.logits_SKV.shape
    return (
        cache.logits_SKV, most * width, width, width, cache.threshold_SK, cache.lse_SK, most,
    )  # fmt: skip

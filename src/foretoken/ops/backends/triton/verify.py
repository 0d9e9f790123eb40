"""Verification on the device: a scan of K + 1 rows, a decision per request, a residual pass.

Three launches without filters (two for few requests), more with them, and one for edit entries.
Nothing here waits for the device.

Shapes: B requests, K most drafts, N rows, V vocabulary, S slots.
"""

from __future__ import annotations

import torch

from foretoken.ops.backends.triton.decide import decide_kernel
from foretoken.ops.backends.triton.launch import (
    BLOCKS_AT_ONCE,
    Call,
    at_most_registers,
    requests_of,
)
from foretoken.ops.backends.triton.plan import FLOATS, HEAD, INTEGERS
from foretoken.ops.backends.triton.records import Candidates, Drafts, Outcome, Plan
from foretoken.ops.backends.triton.residual import residual_kernel
from foretoken.ops.backends.triton.sample import reduce_rows
from foretoken.ops.backends.triton.settle import FEW, settle_kernel
from foretoken.ops.types import Rule, Stream, Verdict, VerifyBatch


def verify(batch: VerifyBatch) -> Verdict:
    """Accept a prefix of each request's drafts and draw one more token; see `Backend.verify`.

    The law of the output is exactly the target's (Leviathan et al. 2023, appendix A.1; Sun et al.
    2024, theorem 1; Daliri et al. 2024). A request whose deciding row is not finite gets -1.
    """
    logits_NV, params, slot_B, position_B, drafts, edits, synthetic_rate_K, fp64_noise = batch
    device, (number, most) = logits_NV.device, drafts.token_BK.shape
    verdict = Verdict(
        torch.empty(number, most + 1, dtype=drafts.token_BK.dtype, device=device),
        torch.empty_like(slot_B),
        torch.empty_like(slot_B, dtype=torch.bool),
    )
    if not number:
        return verdict
    cache, rates = drafts.cache, synthetic_rate_K is not None
    requests = requests_of(drafts.num_B, slot_B, position_B, drafts.num_B)
    block_rule = Rule.BLOCK in params.rules
    later = most > 0 and (cache is not None or block_rule or params.has_filters)
    few = later and number <= FEW.value and not block_rule
    call = Call.of(
        logits_NV, params, requests, edits, cache, fp64_noise, Stream.TARGET_TOKEN, most + 1,
        drafts.token_BK.dtype, rates, later, few,
    )  # fmt: skip
    blocks = call.batch.rows.NB
    drafted = Drafts(
        drafts.token_BK.contiguous(), drafts.real_q_B.contiguous(),
        None if synthetic_rate_K is None else synthetic_rate_K.contiguous(), most,
    )  # fmt: skip
    outcome = Outcome(verdict.token_BK1, verdict.n_accept_B, verdict.finite_B)
    widths = (max(2, 1 << most.bit_length()), call.blocks_padded, fp64_noise)
    if few:
        candidates = _candidates(number, blocks, device)
        reduce_rows(call, counter_B=candidates.arrived_B)
        given = (drafted, outcome, candidates)
        call.launch(settle_kernel, number * blocks, given, *widths, num_warps=4)
        return verdict
    plan = _plan(number, most, device) if later else None
    reduce_rows(call)
    planned = (drafted, outcome, plan)
    call.launch(decide_kernel, number, planned, most > 0, block_rule, *widths, num_warps=4)
    if later:
        places, parts = most if block_rule else 1, -(-blocks // BLOCKS_AT_ONCE)
        call.launch(
            residual_kernel, number * places * parts, (*planned, parts, places), *widths,
            BLOCKS_AT_ONCE, num_warps=4, **at_most_registers(96),
        )  # fmt: skip
    return verdict


def _candidates(number: int, blocks: int, device: torch.device) -> Candidates:
    return Candidates(
        torch.empty(number, dtype=torch.int64, device=device),
        torch.empty(number * blocks * 2, dtype=torch.float64, device=device),
    )


def _plan(number: int, most: int, device: torch.device) -> Plan:
    integers, floats = HEAD.value + INTEGERS.value * most, FLOATS.value * most
    return Plan(
        torch.empty(number * integers, dtype=torch.int64, device=device),
        torch.empty(number * floats, dtype=torch.float32, device=device),
    )

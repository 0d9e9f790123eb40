"""Verification on the device: a scan of K + 1 rows, a decision per request, a residual pass.

Three launches without filters (two for few requests), more with them, and one for edit entries.
Nothing here waits for the device.
"""

from __future__ import annotations

import torch

from foretoken.ops.backends.triton import launch
from foretoken.ops.backends.triton.decide import FLOATS, HEAD, INTEGERS, decide_kernel
from foretoken.ops.backends.triton.records import Agenda, Candidates, Drafts
from foretoken.ops.backends.triton.residual import FEW, residual_kernel, settle_kernel
from foretoken.ops.backends.triton.sample import reduce_rows
from foretoken.ops.types import Rule, Stream, Verdict, VerifyBatch


def verify(batch: VerifyBatch) -> Verdict:
    """Accept a prefix of each request's drafts and draw one more token; see `Backend.verify`.

    The output is distributed exactly as the target's (Leviathan et al. 2023, appendix A.1; Sun et
    al. 2024, theorem 1; Daliri et al. 2024). A request with a deciding row that is not finite
    gets -1.
    """
    logits_NV, params, slot_B, position_B, block, edits, rate_K, fp64_noise, _ = batch
    device, (number, most) = logits_NV.device, block.token_BK.shape
    verdict = Verdict(
        torch.empty(number, most + 1, dtype=block.token_BK.dtype, device=device),
        torch.empty_like(slot_B),
        torch.empty_like(slot_B, dtype=torch.bool),
    )
    if not number:
        return verdict
    requests = launch.requests_of(block.num_B, slot_B, position_B, block.num_B)
    block_rule = Rule.BLOCK in params.rules
    later = most > 0 and (block.cache is not None or block_rule or params.has_filters)
    few = later and number <= FEW.value and not block_rule
    call = launch.Call(
        logits_NV, params, requests, edits, block.cache, fp64_noise, Stream.TARGET_TOKEN, most + 1
    )  # fmt: skip
    blocks = call.batch.rows.NB
    drafts = Drafts(
        block.token_BK.contiguous(), block.real_q_B.contiguous(),
        None if rate_K is None else rate_K.contiguous(), most,
    )  # fmt: skip
    widths = (max(2, 1 << most.bit_length()), call.blocks_padded, fp64_noise)
    if few:
        candidates = Candidates(
            torch.empty(number, dtype=torch.int64, device=device),
            torch.empty(number * blocks * 2, dtype=torch.float64, device=device),
        )
        reduce_rows(call, counter_B=candidates.arrived_B)
        call.launch(settle_kernel, number * blocks, drafts, verdict, candidates, *widths)
        return verdict
    agenda = None
    if later:
        integers, floats = HEAD.value + INTEGERS.value * most, FLOATS.value * most
        agenda = Agenda(
            torch.empty(number * integers, dtype=torch.int64, device=device),
            torch.empty(number * floats, dtype=torch.float32, device=device),
        )
    reduce_rows(call)
    given = (drafts, verdict, agenda)
    call.launch(decide_kernel, number, *given, most > 0, block_rule, *widths)
    if later:
        lines, parts = most if block_rule else 1, -(-blocks // launch.BLOCKS_AT_ONCE)
        call.launch(
            residual_kernel, number * lines * parts, *given, parts, lines, *widths,
            launch.BLOCKS_AT_ONCE, **launch.at_most_registers(96),
        )  # fmt: skip
    return verdict

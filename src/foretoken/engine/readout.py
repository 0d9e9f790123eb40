"""What the host will ask of a step's logits, taken before the next pass overwrites them.

Charter: log-probabilities, the evidence of traced requests, and whether a request's own bans left
it no token. On a host they are read at once; on a device they are sent on their way with the rest
of the result (`pending.py`).

Shape suffixes: B requests, D those that decide, N rows of logits, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.engine.pending import PendingResult, ToHost
from foretoken.engine.sampler import Sampler
from foretoken.ops import Edits, ForwardOutput
from foretoken.ops.steps import DraftRequests, ForwardBatch
from foretoken.slots.device import DeviceSlotTable
from foretoken.slots.step import (
    NONE,
    StepInput,
    StepRequests,
    StepResult,
    evidence_by_slot,
    some_rows,
)
from foretoken.slots.table import SlotTable


def readout(
    sampler: Sampler,
    rows: StepRequests,
    asked: DraftRequests,
    batch: ForwardBatch,
    output: ForwardOutput,
    result: StepResult,
    edits: Edits | None,
) -> StepResult | PendingResult:
    """The result as the host reads it: as it is, or what was sent on its way."""
    evidence, traced_D = None, rows.step.traced_D
    if traced_D:
        logits_NV = batch.deciding(output.logits_NV)
        evidence = sampler.evidence(logits_NV, asked, result, edits, traced_D)
    if isinstance(sampler.slots, SlotTable):
        if not all(outcome.is_finite for outcome in result.decisions.values()):
            _mark_banned(result, batch.deciding(output.logits_NV))
        if rows.step.most_logprobs != NONE:
            _take_logprobs(sampler, sampler.slots, result, rows.step, output.logits_NV)
        if evidence is not None:
            result.evidence = evidence_by_slot(rows.step, evidence)
        return result
    pending = _send(sampler, sampler.slots, rows, batch, output, result, edits)
    pending.evidence = None if evidence is None else ToHost(evidence)
    return pending


def _mark_banned(result: StepResult, logits_NV: Tensor) -> None:
    """Mark requests whose own bans, not the target, left no token, while their logits are there."""
    first = 0
    for slot, outcome in result.decisions.items():
        if not outcome.is_finite:
            highest_N = logits_NV[first : first + outcome.num_accepted + 1].amax(dim=1)
            if bool(torch.isfinite(highest_N).all()):
                result.banned_all.add(slot)
        first += outcome.num_drafts + 1


def _take_logprobs(
    sampler: Sampler, slots: SlotTable, result: StepResult, step: StepInput, logits_NV: Tensor
) -> None:
    """Log-probabilities of prompts and of decisions."""
    rows: list[int] = []
    tokens: list[int] = []
    borders: dict[int, tuple[int, int, int]] = {}  # of the prompt's rows and the decision's
    end = 0
    for b, span in enumerate(result.spans):
        first, end, begin = end, end + span.num_logits, len(rows)
        if step.num_prompt_logprobs_B[b] != NONE:
            following = slots.following(span.slot, span.start, step.num_tokens_B[b])
            rows += range(first, first + len(following))
            tokens += following
        middle = len(rows)
        if step.num_logprobs_B[b] != NONE:
            outcome = result.decisions[span.slot]
            first = end - 1 - outcome.num_drafts
            rows += range(first, first + len(outcome.token_ids))
            tokens += outcome.token_ids
        borders[span.slot] = (begin, middle, len(rows))
    if rows:  # not of a prompt whose last token alone was computed
        num_top = min(step.most_logprobs, logits_NV.shape[1])
        wanted_NV, token_N = logits_NV[torch.tensor(rows)], torch.tensor(tokens)
        found = sampler.backend.logprobs(wanted_NV, token_N, num_top)
        for slot, (begin, middle, end) in borders.items():
            of_prompt = some_rows(found, begin, middle)
            result.logprobs[slot] = of_prompt, some_rows(found, middle, end)


def _send(
    sampler: Sampler,
    slots: DeviceSlotTable,
    rows: StepRequests,
    batch: ForwardBatch,
    output: ForwardOutput,
    result: StepResult,
    edits: Edits | None,
) -> PendingResult:
    """Everything in order behind the step; the host waits for nothing."""
    step, packet = rows.step, ToHost([result.packet])
    pending = PendingResult(step, packet, len(rows.slot_B), len(rows.slot_D), result.faults)
    if edits is not None:
        logits_NV = batch.deciding(output.logits_NV)
        first_D = (result.drafts.num_B + 1).cumsum(0) - result.drafts.num_B - 1
        pending.first_row_is_finite = ToHost([logits_NV[first_D].amax(dim=1).isfinite()])
        pending.edited = frozenset(slots.histories)
    if step.most_logprobs != NONE:
        logits_NV, token_N = output.logits_NV, _tokens_of_rows(slots, rows, batch, result)
        num_top = min(step.most_logprobs, logits_NV.shape[1])
        pending.logprobs = ToHost(sampler.backend.logprobs(logits_NV, token_N, num_top))
    return pending


def _tokens_of_rows(
    slots: DeviceSlotTable, rows: StepRequests, batch: ForwardBatch, result: StepResult
) -> Tensor:
    """The token behind each row: what was emitted there, or what follows in the prompt."""
    token_N = torch.zeros_like(batch.logit_row_N)
    stop = batch.decision_N.stop if isinstance(batch.decision_N, slice) else None
    if len(rows.slot_D):
        token_DK1, num_D = result.verdict.token_BK1, result.drafts.num_B
        end_D = (num_D + 1).cumsum(0)
        index_N = torch.arange(len(token_N[:stop]), device=slots.device)
        owner_N = torch.searchsorted(end_D, index_N, right=True).clamp(max=len(end_D) - 1)
        draft_N = (index_N - (end_D - num_D - 1)[owner_N]).clamp(0, token_DK1.shape[1] - 1)
        token_N[:stop] = token_DK1[owner_N, draft_N]
    if stop is not None:  # rows of prompts
        row_P, end_B = batch.logit_row_N[stop:], batch.attention.query_start_B1[1:]
        # Where kernels are only compiled ahead, all requests begin at 0.
        owner_P = torch.searchsorted(end_B, row_P, right=True).clamp(max=len(end_B) - 1)
        slot_P = rows.slot_B[owner_P]
        token_N[stop:] = slots.state.token_SL[slot_P, batch.position_T[row_P] + 1].to(torch.int64)
    return token_N.clamp(min=0)

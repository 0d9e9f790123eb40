"""A step's result on its way from the device to the host.

Charter: what crosses to the host, in one copy for the step and others for log-probabilities and
evidence, and how it is read there. Nobody waits but who reads. On a host there is nothing to wait
for, and a `StepResult` is read as it is.

Shape suffixes: B requests, D deciding requests, K drafts, N rows of logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from foretoken.ops import DraftBlock, Evidence, Logprobs, Verdict
from foretoken.ops.pinned import Staging
from foretoken.ops.steps import SlotSpan
from foretoken.slots.step import NONE, Outcome, StepInput, StepResult, evidence_by_slot, some_rows


class ToHost:
    """Tensors that are copied to the host behind everything that was launched before."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        self._staged = [Staging(tuple(t.shape), t.dtype, t.device) for t in tensors]
        self._host = [staging.host for staging in self._staged]
        for host, tensor in zip(self._host, tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        if tensors[0].is_cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> list[Tensor]:
        """The copies, once they are complete."""
        if self._event is not None:
            self._event.synchronize()
            self._host = [host.clone() for host in self._host]
            self._give_back()
        return self._host

    def _give_back(self) -> None:
        if self._event is not None:
            for staging in self._staged:
                staging.give_back(self._event)
            self._event = None

    __del__ = _give_back  # nobody reads the results of captures, say


@dataclass
class PendingResult:
    """A step's result, read when somebody asks; `faults` as in `StepResult`.

    Attributes:
        step: its requests.
        packet: of `Steps.advance`.
        size_B, size_D: requests in it, padding included.
        faults: by slot, what the part of one request alone raised.
        logprobs: of `Logprobs`, rows as in the step's batch; None if nobody wants any.
        first_row_is_finite: whether the first row of each deciding request was, before edits; None
            if nobody edits.
        evidence: of those that want it; None if nobody does.
        edited: slots whose requests edit logits; each has one row.
    """

    step: StepInput
    packet: ToHost
    size_B: int
    size_D: int
    faults: dict[int, Exception] = field(default_factory=dict)
    logprobs: ToHost | None = None
    first_row_is_finite: ToHost | None = None
    evidence: ToHost | None = None
    edited: frozenset[int] = frozenset()

    def resolve(self) -> StepResult:
        """The result, on the host; waits for the device."""
        return self._result

    def read(self) -> dict[int, Outcome]:
        """See `StepResult.read`."""
        return self._result.read()

    @cached_property
    def _result(self) -> StepResult:
        (packet,) = self.packet.wait()
        step = self.step
        start_B, of_D = packet[: self.size_B].tolist(), packet[self.size_B :]
        of_D = of_D.view(self.size_D, -1 if self.size_D else 4)  # none may decide
        slot_D = step.deciding_slots
        of_D = of_D[: len(slot_D)]  # no padding
        num_D, accepted_D, finite_D = of_D[:, :3].unbind(dim=1)
        verdict = Verdict(of_D[:, 3:], accepted_D, finite_D.to(torch.bool))
        none = torch.zeros(len(slot_D), dtype=torch.bool)
        drafts = DraftBlock(verdict.token_BK1[:, :-1], num_D, None, none)
        num_drafts = dict(zip(slot_D, num_D.tolist(), strict=True))
        spans = [
            SlotSpan(slot, start, num_tokens + num_drafts.get(slot, 0), 0)
            for slot, start, num_tokens in zip(
                step.slot_B, start_B[: len(step.slot_B)], step.num_tokens_B, strict=True
            )
        ]
        result = StepResult(spans, slot_D, drafts, verdict, self.faults)
        if self.first_row_is_finite is not None:
            (raw_D,) = self.first_row_is_finite.wait()
            of_slots = zip(slot_D, raw_D[: len(slot_D)].tolist(), strict=True)
            is_finite = {slot: outcome.is_finite for slot, outcome in result.decisions.items()}
            banned = {slot for slot, raw in of_slots if raw and not is_finite[slot]}
            result.banned_all |= banned & self.edited
        if self.logprobs is not None:
            self._read_logprobs(result, Logprobs(*self.logprobs.wait()))
        if self.evidence is not None:
            result.evidence = evidence_by_slot(step, Evidence(*self.evidence.wait()))
        return result

    def _read_logprobs(self, result: StepResult, found: Logprobs) -> None:
        """Rows of decisions come first, packed by true numbers of drafts; then those of prompts."""
        step, end = self.step, 0
        wanted = zip(step.num_tokens_B, step.num_prompt_logprobs_B, strict=True)
        prompt_end = len(found.rank_N) - sum(count for count, most in wanted if most != NONE)
        decided: dict[int, Logprobs | None] = {}
        for slot, outcome in result.decisions.items():
            decided[slot] = some_rows(found, end, end + len(outcome.token_ids))
            end += outcome.num_drafts + 1
        for b, slot in enumerate(step.slot_B):
            of_prompt, of_decision = None, None
            if step.num_prompt_logprobs_B[b] != NONE:
                begin, prompt_end = prompt_end, prompt_end + step.num_tokens_B[b]
                last = prompt_end - step.decides_B[b]  # what follows the prompt is no part of it
                of_prompt = some_rows(found, begin, last)
            if step.num_logprobs_B[b] != NONE:
                of_decision = decided[slot]
            result.logprobs[slot] = of_prompt, of_decision

"""One step on the device: draft, one pass of the target, verify; the only place where models run.

Charter: everything between a `StepInput` and its `StepResult`. What a step needs of a request it
reads from the slots, and what it finds it writes there, so that the next step can begin before the
host has seen this one's tokens. It decides nothing: not who runs (scheduler), not when a request
ends (engine).

Drafts are proposed at the beginning of the step that verifies them: nothing of a proposal outlives
a step, and no block is reserved for drafts that are not verified (decision 016).

Shape suffixes: B requests of the step, D those that decide, K drafts, N rows of logits, M rows with
log-probabilities, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from foretoken.cache.batch import gather_batch
from foretoken.cache.kv_pool import KVPool
from foretoken.drafting.base import Drafter, in_target_ids, one_hot_block
from foretoken.engine.sampler import Sampler
from foretoken.engine.step import PhaseClock
from foretoken.models import CausalLM
from foretoken.ops import DraftBlock
from foretoken.slots.step import NONE, LogprobRows, StepInput, StepResult
from foretoken.slots.table import Array, SlotTable


class Runner:
    """Owns the target, its K/V pool, the drafter and the sampler; all of them share the slots."""

    def __init__(
        self, model: CausalLM, kv: KVPool, sampler: Sampler, drafter: Drafter | None
    ) -> None:
        self.model = model
        self.kv = kv
        self.sampler = sampler
        self.drafter = drafter
        self.slots: SlotTable = sampler.slots
        self.clock = PhaseClock()
        self._no_drafts: dict[int, DraftBlock] = {}

    def clear(self, block_ids: Sequence[int]) -> None:
        """Tell who keeps something by block that these changed hands.

        If a model multiplies masked keys, theirs are zeroed: a NaN would poison the new owner.
        """
        if self.model.multiplies_masked_keys:
            self.kv.clear(block_ids)
        if self.drafter is not None:
            self.drafter.clear(block_ids)

    def run(self, step: StepInput) -> StepResult:
        """Compute a step's tokens and draw the next ones."""
        slots, mark = self.slots, self.clock.mark
        index_B = slots.unfinished(step.slot_B)
        if not len(index_B):
            return StepResult.empty()
        if len(index_B) < len(step.slot_B):
            step = step.at(index_B)
        deciding = step.decides_B.nonzero()[0]
        slot_D = step.slot_B[deciding]
        drafts = self._propose(slot_D, step.num_drafts_B[deciding])
        num_drafts_B = np.zeros_like(step.slot_B)
        num_drafts_B[deciding] = drafts.num_B.numpy()
        mark("draft")
        edits, faults = self.sampler.edits(slot_D, drafts, self.model.vocab_size)
        start_B = slots.computed_S[step.slot_B]
        count_B = step.num_tokens_B + num_drafts_B
        num_logits_B = step.num_logits(num_drafts_B)
        batch = gather_batch(slots, step.slot_B, start_B, count_B, num_logits_B, self.kv.block_size)
        mark("batch")
        output = self.model.forward(batch, self.kv)
        logits_NV = output.logits_NV
        mark("forward")
        rows_NV = _decision_rows(logits_NV, num_logits_B, num_drafts_B, deciding)
        verdict = self.sampler.verify(rows_NV, slot_D, drafts, edits)
        result = StepResult(index_B, deciding, start_B, count_B, drafts, verdict, faults)
        result.hidden = output.aux
        if not verdict.finite_B.all():
            result.blame(rows_NV)
        mark("verify")
        if step.wants_logprobs:
            self._take_logprobs(result, step, num_logits_B, logits_NV)
            mark("log-probabilities")
        self._advance(step, result)
        mark("advance")
        return result

    def _propose(self, slot_D: Array, most_D: Array) -> DraftBlock:
        """Drafts of the requests that decide, written behind their known tokens."""
        num_D = self.slots.num_drafts(slot_D, most_D)
        if self.drafter is None or not num_D.any():
            size = len(slot_D)
            if size not in self._no_drafts:
                self._no_drafts[size] = one_hot_block([[]] * size, self.slots.device)
            return self._no_drafts[size]
        drafts = self.drafter.propose(slot_D, num_D)
        if self.drafter.target_ids is not None:
            drafts = in_target_ids(drafts, self.drafter.target_ids)
        self.slots.put_drafts(slot_D, drafts.token_BK.numpy())
        return drafts

    def _advance(self, step: StepInput, result: StepResult) -> None:
        """Let slots and drafter have the outcome; a request that has failed does not go on."""
        slot_D = step.slot_B[result.deciding]
        self.slots.computed_S[step.slot_B] += step.num_tokens_B
        result.faults |= self.slots.advance(slot_D, result.verdict)
        for i in result.faults:
            self.slots.stop(slot_D[i])
        if self.drafter is not None:
            self.drafter.observe(step, result)

    def _take_logprobs(
        self, result: StepResult, step: StepInput, num_logits_B: Array, logits_NV: Tensor
    ) -> None:
        """Log-probabilities of prompts and of decisions, before the next pass takes the logits."""
        rows: list[int] = []
        tokens: list[int] = []
        token_DK1, end_B = result.verdict.token_BK1.clamp(min=0).tolist(), np.cumsum(num_logits_B)
        decision = {int(b): d for d, b in enumerate(result.deciding)}
        for b in ((step.top_B != NONE) | (step.prompt_top_B != NONE)).nonzero()[0].tolist():
            begin, end = len(rows), int(end_B[b])
            if step.prompt_top_B[b] != NONE:
                following = self.slots.following(step.slot_B[b], step.num_tokens_B[b])
                first = end - int(num_logits_B[b])
                rows += range(first, first + len(following))
                tokens += following
            middle = len(rows)
            if step.top_B[b] != NONE:
                d = decision[b]
                num = int(result.drafts.num_B[d]) + 1
                rows += range(end - num, end)
                tokens += token_DK1[d][:num]
            result.logprob_rows[int(result.index_B[b])] = LogprobRows(begin, middle, len(rows))
        if not rows:  # of a prompt whose last token alone was computed
            return
        result.logprobs = self.sampler.logprobs(
            logits_NV[torch.tensor(rows)],
            torch.tensor(tokens),
            int(max(step.top_B.max(), step.prompt_top_B.max())),
        )


def _decision_rows(
    logits_NV: Tensor, num_logits_B: Array, num_drafts_B: Array, deciding: Array
) -> Tensor:
    """The last K_b + 1 rows of every deciding request; the same tensor if those are all."""
    num_D = num_drafts_B[deciding] + 1
    if len(logits_NV) == num_D.sum():
        return logits_NV
    ends = zip(np.cumsum(num_logits_B)[deciding].tolist(), num_D.tolist(), strict=True)
    keep = [row for end, num in ends for row in range(end - num, end)]
    return logits_NV[torch.tensor(keep, dtype=torch.int64, device=logits_NV.device)]

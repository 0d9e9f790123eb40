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
from itertools import accumulate

import torch
from torch import Tensor

from foretoken.cache.batch import SlotSpan, gather_batch
from foretoken.cache.kv_pool import KVPool
from foretoken.drafting.base import Drafter, in_target_ids, one_hot_block
from foretoken.engine.sampler import Sampler
from foretoken.engine.step import PhaseClock
from foretoken.models import CausalLM
from foretoken.ops import DraftBlock
from foretoken.slots.step import NONE, LogprobRows, StepInput, StepResult
from foretoken.slots.table import SlotTable


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
        if len(index_B) < len(step.slot_B):  # launched before it was known that they had all tokens
            if not index_B:
                return StepResult.empty()
            step = step.at(index_B)
        deciding = [b for b, decides in enumerate(step.decides_B) if decides]
        slot_D = [step.slot_B[b] for b in deciding]
        drafts = self._propose(slot_D, [step.num_drafts_B[b] for b in deciding])
        mark("draft")
        edits, faults = self.sampler.edits(slot_D, drafts, self.model.vocab_size)
        parts = self._parts(step, deciding, drafts)
        batch = gather_batch(slots, parts, self.kv.block_size)
        mark("batch")
        output = self.model.forward(batch, self.kv)
        mark("forward")
        rows_NV = _decision_rows(output.logits_NV, parts, deciding, drafts)
        verdict = self.sampler.verify(rows_NV, slot_D, drafts, edits)
        result = StepResult(
            index_B,
            deciding,
            [part.start for part in parts],
            [part.num_tokens for part in parts],
            drafts,
            verdict,
            faults,
            hidden=output.aux,
        )
        result.blame(rows_NV)
        mark("verify")
        if step.most_logprobs != NONE:
            self._take_logprobs(result, step, parts, output.logits_NV)
            mark("log-probabilities")
        self._advance(step, result)
        mark("advance")
        return result

    def _propose(self, slot_D: Sequence[int], most_D: Sequence[int]) -> DraftBlock:
        """Drafts of the requests that decide, written behind their known tokens."""
        num_D = [
            self.slots.num_drafts(slot, most) for slot, most in zip(slot_D, most_D, strict=True)
        ]
        if self.drafter is None or not any(num_D):
            size = len(slot_D)
            if size not in self._no_drafts:
                self._no_drafts[size] = one_hot_block([[]] * size, self.slots.device)
            return self._no_drafts[size]
        drafts = self.drafter.propose(slot_D, num_D)
        if self.drafter.target_ids is not None:
            drafts = in_target_ids(drafts, self.drafter.target_ids)
        self.slots.put_drafts(slot_D, drafts.token_BK.numpy())
        return drafts

    def _parts(
        self, step: StepInput, deciding: Sequence[int], drafts: DraftBlock
    ) -> list[SlotSpan]:
        """Which tokens of each slot are computed, and the logits of how many are needed."""
        num_drafts = dict(zip(deciding, drafts.num_B.tolist(), strict=True))
        parts = []
        for b, (slot, num_tokens) in enumerate(zip(step.slot_B, step.num_tokens_B, strict=True)):
            count = num_tokens + num_drafts.get(b, 0)
            num_logits = 1 + num_drafts[b] if b in num_drafts else 0
            if step.prompt_top_B[b] != NONE:
                num_logits = count
            parts.append(SlotSpan(slot, self.slots.computed_S[slot], count, num_logits))
        return parts

    def _advance(self, step: StepInput, result: StepResult) -> None:
        """Let slots and drafter have the outcome; a request that has failed does not go on."""
        slots = self.slots
        for slot, num_tokens in zip(step.slot_B, step.num_tokens_B, strict=True):
            slots.computed_S[slot] += num_tokens
        num_drafts_D, num_accepted_D, finite_D, tokens_D = result.decisions
        for row, b in enumerate(result.deciding):
            slot = step.slot_B[b]
            slots.computed_S[slot] += num_accepted_D[row]
            try:
                slots.advance(slot, tokens_D[row], num_drafts_D[row])
            except Exception as error:
                result.faults[row] = error
            if not finite_D[row] or row in result.faults:
                slots.stop(slot)
        if self.drafter is not None:
            self.drafter.observe(step, result)

    def _take_logprobs(
        self, result: StepResult, step: StepInput, parts: Sequence[SlotSpan], logits_NV: Tensor
    ) -> None:
        """Log-probabilities of prompts and of decisions, before the next pass takes the logits."""
        rows: list[int] = []
        tokens: list[int] = []
        tokens_of = dict(zip(result.deciding, result.decisions.tokens, strict=True))
        num_drafts_of = dict(zip(result.deciding, result.decisions.num_drafts, strict=True))
        end = 0
        for b, part in enumerate(parts):
            first, end, begin = end, end + part.num_logits, len(rows)
            if step.prompt_top_B[b] != NONE:
                following = self.slots.following(part.slot, step.num_tokens_B[b])
                rows += range(first, first + len(following))
                tokens += following
            middle = len(rows)
            if step.top_B[b] != NONE:
                first = end - 1 - num_drafts_of[b]
                rows += range(first, first + len(tokens_of[b]))
                tokens += tokens_of[b]
            if len(rows) > begin:
                result.logprob_rows[result.index_B[b]] = LogprobRows(begin, middle, len(rows))
        if not rows:  # of a prompt whose last token alone was computed
            return
        result.logprobs = self.sampler.logprobs(
            logits_NV[torch.tensor(rows)], torch.tensor(tokens), step.most_logprobs
        )


def _decision_rows(
    logits_NV: Tensor, parts: Sequence[SlotSpan], deciding: Sequence[int], drafts: DraftBlock
) -> Tensor:
    """The last K_b + 1 rows of every deciding request; the same tensor if those are all."""
    num_D = [num_drafts + 1 for num_drafts in drafts.num_B.tolist()]
    if len(logits_NV) == sum(num_D):
        return logits_NV
    ends = list(accumulate(part.num_logits for part in parts))
    keep = [
        row for b, num in zip(deciding, num_D, strict=True) for row in range(ends[b] - num, ends[b])
    ]
    return logits_NV[torch.tensor(keep, dtype=torch.int64, device=logits_NV.device)]

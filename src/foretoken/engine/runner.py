"""One step on the device: draft, one pass of the target, verify; the only place where models run.

Charter: everything between a `StepInput` and its `StepResult`. What a step needs of a request it
reads from the slots, and what it finds it writes there, so that the next step can begin before the
host has seen this one's tokens. It decides nothing: not who runs (scheduler), not when a request
ends (engine).

Drafts are proposed at the beginning of the step that verifies them: nothing of a proposal outlives
a step, and no block is reserved for drafts that are not verified (decision 016).

Shape suffixes: B requests of the step, D those that decide, N rows of logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import gt

import numpy as np
import torch
from torch import Tensor

from foretoken.cache.batch import gather_batch
from foretoken.cache.kv_pool import KVPool
from foretoken.drafting.base import Drafter, in_target_ids, no_drafts
from foretoken.engine.sampler import Sampler
from foretoken.engine.trace import PhaseClock
from foretoken.errors import IntegrityError
from foretoken.models import CausalLM
from foretoken.ops import DraftBlock
from foretoken.slots.edits import build_edits
from foretoken.slots.step import NONE, SlotSpan, StepInput, StepResult, some_rows


class Runner:
    """Owns the target, its K/V pool, the drafter and the sampler; all of them share the slots."""

    def __init__(
        self, model: CausalLM, kv: KVPool, sampler: Sampler, drafter: Drafter | None
    ) -> None:
        self.model = model
        self.kv = kv
        self.sampler = sampler
        self.drafter = drafter
        self.slots = sampler.slots
        self.clock = PhaseClock()

    def clear(self, block_ids: Sequence[int]) -> None:
        """Forget what is kept for blocks that change hands.

        If the model multiplies masked keys, they are zeroed: a NaN would poison the new owner.
        """
        if self.model.multiplies_masked_keys:
            self.kv.clear(block_ids)
        if self.drafter is not None:
            self.drafter.clear(block_ids)

    def run(self, step: StepInput) -> StepResult:
        """Compute a step's tokens and draw the next ones."""
        mark = self.clock.mark
        live = self.slots.unfinished(step.slot_B)
        if len(live) < len(step.slot_B):  # launched before it was known that they had all tokens
            if not live:
                return StepResult.empty()
            step = step.at(live)
        deciding = [b for b, decides in enumerate(step.decides_B) if decides]
        slot_D = [step.slot_B[b] for b in deciding]
        drafts = self._propose(slot_D, [step.max_drafts_B[b] for b in deciding])
        mark("draft")
        histories, vocab_size = self.slots.histories, self.model.vocab_size
        edits, faults = build_edits(histories, slot_D, drafts, vocab_size)
        num_D = drafts.num_B.tolist()
        spans = self._spans(step, dict(zip(slot_D, num_D, strict=True)))
        batch = gather_batch(self.slots, spans, self.kv.block_size)
        mark("batch")
        output = self.model.forward(batch, self.kv)
        mark("forward")
        rows_NV = _decision_rows(output.logits_NV, spans, slot_D, num_D)
        verdict = self.sampler.verify(rows_NV, slot_D, drafts, edits)
        result = StepResult(spans, slot_D, drafts, verdict, faults, aux=output.aux)
        _mark_banned(result, rows_NV)
        mark("verify")
        if step.most_logprobs != NONE:
            self._take_logprobs(result, step, output.logits_NV)
            mark("log-probabilities")
        self._advance(step, result)
        mark("advance")
        return result

    def _propose(self, slot_D: Sequence[int], max_drafts_D: Sequence[int]) -> DraftBlock:
        """Drafts of the requests that decide, written behind their known tokens."""
        num_D = list(map(self.slots.num_drafts, slot_D, max_drafts_D))
        if self.drafter is None or not any(num_D):
            return no_drafts(len(slot_D), self.slots.device)
        drafts = self.drafter.propose(slot_D, num_D)
        if self.drafter.target_ids is not None:
            drafts = in_target_ids(drafts, self.drafter.target_ids)
        proposed = drafts.num_B.tolist()
        if len(proposed) != len(num_D) or any(map(gt, proposed, num_D)):
            raise IntegrityError(f"a drafter proposed {proposed} drafts, asked for {num_D}")
        # An id that the target lacks is rejected, but passes through it first: as its last one.
        ids = np.minimum(drafts.token_BK.numpy(), self.model.vocab_size - 1)
        self.slots.put_drafts(slot_D, ids)
        return drafts

    def _spans(self, step: StepInput, num_drafts: dict[int, int]) -> list[SlotSpan]:
        """Which tokens of each slot are computed, and the logits of how many are needed."""
        spans = []
        columns = (step.slot_B, step.num_tokens_B, step.num_prompt_logprobs_B)
        for slot, num_tokens, num_prompt_logprobs in zip(*columns, strict=True):
            count = num_tokens + num_drafts.get(slot, 0)
            num_logits = 1 + num_drafts[slot] if slot in num_drafts else 0
            if num_prompt_logprobs != NONE:
                num_logits = count
            spans.append(SlotSpan(slot, self.slots.computed_S[slot], count, num_logits))
        return spans

    def _advance(self, step: StepInput, result: StepResult) -> None:
        """Let slots and drafter have the outcome; a request that has failed does not go on."""
        slots = self.slots
        for slot, num_tokens in zip(step.slot_B, step.num_tokens_B, strict=True):
            slots.computed_S[slot] += num_tokens
        for slot, outcome in result.decisions.items():
            try:
                slots.advance(slot, outcome)
            except Exception as error:
                result.faults[slot] = error
            if not outcome.is_finite or slot in result.faults:
                slots.stop(slot)
        if self.drafter is not None:
            self.drafter.observe(step, result)

    def _take_logprobs(self, result: StepResult, step: StepInput, logits_NV: Tensor) -> None:
        """Log-probabilities of prompts and of decisions, before the next pass takes the logits."""
        rows: list[int] = []
        tokens: list[int] = []
        borders: dict[int, tuple[int, int, int]] = {}  # of the prompt's rows and the decision's
        end = 0
        for b, span in enumerate(result.spans):
            first, end, begin = end, end + span.num_logits, len(rows)
            if step.num_prompt_logprobs_B[b] != NONE:
                following = self.slots.following(span.slot, step.num_tokens_B[b])
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
            found = self.sampler.backend.logprobs(wanted_NV, token_N, num_top)
            for slot, (begin, middle, end) in borders.items():
                of_prompt = some_rows(found, begin, middle)
                result.logprobs[slot] = of_prompt, some_rows(found, middle, end)


def _decision_rows(
    logits_NV: Tensor, spans: Sequence[SlotSpan], slot_D: Sequence[int], num_D: Sequence[int]
) -> Tensor:
    """The last K_b + 1 rows of every deciding request; the same tensor if those are all."""
    if logits_NV.shape[0] == sum(num_D) + len(num_D):
        return logits_NV
    ends = dict(zip((s.slot for s in spans), accumulate(s.num_logits for s in spans), strict=True))
    decided = zip(slot_D, num_D, strict=True)
    keep = [row for slot, num in decided for row in range(ends[slot] - num - 1, ends[slot])]
    return logits_NV[torch.tensor(keep, dtype=torch.int64, device=logits_NV.device)]


def _mark_banned(result: StepResult, logits_NV: Tensor) -> None:
    """Mark requests whose own bans, not the target, left no token, while their logits are there."""
    first = 0
    for slot, outcome in result.decisions.items():
        if not outcome.is_finite:
            highest_N = logits_NV[first : first + outcome.num_accepted + 1].amax(dim=1)
            if bool(torch.isfinite(highest_N).all()):
                result.banned_all.add(slot)
        first += outcome.num_drafts + 1

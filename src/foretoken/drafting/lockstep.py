"""A small language model drafts on an asynchronous device.

The same drafts as `draft_model.py`'s, by other bookkeeping: on a device the host does not know how
far the draft model's cache reaches, and need not. It is kept in step with the target's: whatever
the target computes outside a round of drafting (prompts, steps without drafts), the draft model
computes in the same step. What this costs: a draft pass in steps that draft nothing.

After a step, the draft model's cache holds every token that the target's holds, except possibly
the last of them: the last draft of a round that was accepted whole was drawn, not computed. The
next step computes it, whatever that step is:
- a round of drafting begins with the last two known tokens;
- a step without drafts computes, of each request that decodes, the token before its last one, too:
  one token more in the pass that there is anyway.

A request that wants no more drafts takes part in the passes that are left, after its drafts. What
that leaves in its own blocks is what a rejected draft leaves: computed again before it counts.
Where these blocks end, the round's table leads to the spare's.

A block can be found by others once the target has computed two tokens past its end (`num_behind`):
only then is the draft's half of it complete. Two, because a request that reaches its limit in a
step of decoding alone takes no part in the draft pass of that step: the token that the step
computed is missing, and the last draft of the round before it may be.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.drafting.autoregressive import Autoregressive
from foretoken.drafting.base import DrafterSetup, q_flags
from foretoken.drafting.draft_model import load_draft
from foretoken.ops import DRAFT, DraftBlock, Noise, Rows
from foretoken.ops.steps import DraftRequests, ForwardBatch, PackSizes, StepTokens
from foretoken.slots.step import StepRequests, StepResult

_FIRST = 2  # known tokens that a round computes


class LockstepDraftModel(Autoregressive):
    """A draft model whose cache follows the target's."""

    num_behind = 2

    def __init__(self, setup: DrafterSetup) -> None:
        self.network = load_draft(setup)
        self.model = self.network.model
        super().__init__(setup, self.model, setup.vocab_size)

    def propose(self, asked: DraftRequests) -> DraftBlock:
        """See `Drafter.propose`; every request takes part in every pass, if only as padding."""
        max_len = self.model.max_model_len
        plan = self.slots.steps.begin_round(asked, _FIRST, max_len, self.block_size)
        cache = self.cache if asked.samples else None
        drafts: list[Tensor] = []
        for i in range(asked.most):
            batch = plan.batch(i, drafts[-1]) if i else plan.first
            logits_BV = self.network.forward(batch, self.kv)
            if cache is None:
                drafts.append(logits_BV.argmax(dim=-1))
                continue
            fp64 = self.config.use_fp64_gumbel
            noise = Noise(plan.length_KB[i], plan.index_KB[i], DRAFT, fp64)
            logits = Rows(logits_BV, asked.params, asked.slot_B)
            drafts.append(self.backend.draft(logits, noise, cache))
        token_BK = self.slots.steps.join_drafts(drafts, plan.num_B)
        # True is right at T=0 and under COUPLED, too: nothing of q is read there.
        real_q_B = q_flags(len(asked.slot_B), self.slots.device, real=cache is not None)
        return DraftBlock(token_BK, plan.num_B, cache, real_q_B)

    def observes(self, requests: StepRequests) -> bool:
        """Not where a round of drafting has computed all that the target has."""
        return requests.others or not (requests.most_drafts and _decodes(requests))

    def observe(self, requests: StepRequests, batch: ForwardBatch, result: StepResult) -> None:
        """Compute what the target computed, drafts of other drafters too.

        In a step without drafts, also the token before the last one of each request that decodes:
        no pass has computed it if it was the last draft of a round that was accepted whole.
        """
        if not requests.most_drafts:
            if _decodes(requests):
                batch = self._last_two(requests)
            elif 1 in requests.step.num_tokens_B:
                batch = self._with_prompts(requests)
        position_T = batch.position_T.clamp(max=self.model.max_model_len - 1)
        none_N = batch.logit_row_N[:0]
        self.network.forward(batch._replace(position_T=position_T, logit_row_N=none_N), self.kv)

    def _last_two(self, requests: StepRequests) -> ForwardBatch:
        """Of a step of decoding alone: the last two tokens that the target has computed."""
        max_len, length_S = self.model.max_model_len, self.slots.state.length_S
        end_B = (length_S[requests.slot_D] - 1).clamp(min=1)  # the last has no block yet
        known = DraftRequests(requests.slot_D, torch.zeros_like(end_B), end_B, 1, requests.params)
        return self.slots.steps.begin_round(known, _FIRST, max_len, self.block_size).first

    def _with_prompts(self, requests: StepRequests) -> ForwardBatch:
        """Of a step that also computes prompts: what the target computed, and one token before
        that of each request that decodes; of a chunk of a prompt nothing before it is missing.

        Such steps are not captured, and have no padding. The slots hold the outcome already, so
        `pack` is given them as they were. A request that has just reached its limit takes part: it
        may be a prompt of which one token was asked for. One that had reached it before computes
        its last tokens again.
        """
        state, num_tokens_B = self.slots.state, requests.num_tokens_B
        end_B = state.computed_S[requests.slot_B]
        start_B = (end_B - num_tokens_B - (num_tokens_B == 1).long()).clamp(min=0)
        before = state._replace(
            computed_S=state.computed_S.index_copy(0, requests.slot_B, start_B),
            limit_S=state.length_S + 1,
        )
        count_B, counts = end_B - start_B, requests.step.num_tokens_B
        tokens = StepTokens(requests.slot_B, count_B, None, torch.zeros_like(count_B))
        sizes = PackSizes(sum(counts) + counts.count(1), len(counts), max(*counts, _FIRST))
        return self.backend.steps(before).pack(tokens, sizes, self.block_size)

    def clear(self, block_ids: Sequence[int]) -> None:
        """Zero the K/V of blocks that change hands if the model multiplies masked keys."""
        if self.model.multiplies_masked_keys:
            self.kv.clear(block_ids)


def _decodes(requests: StepRequests) -> bool:
    """Whether all requests of a step decode."""
    return requests.of_B is None and max(requests.step.num_tokens_B, default=1) == 1

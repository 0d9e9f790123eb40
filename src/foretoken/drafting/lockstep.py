"""A small language model drafts on a device that nobody waits for.

The same drafts as `draft_model.py`'s, by other bookkeeping: on a device the host does not know how
far the draft model's cache reaches, and need not. It is kept in step with the target's: whatever
the target computes beside a round of drafting (prompts, steps without drafts), the draft model
computes in the same step, over the same packed tokens. Then at most one known token but the last is
missing when a round begins, the last draft of a round that was accepted whole, and every round
computes the last two known tokens. What this costs: a draft pass in steps that draft nothing.

A request that wants no more drafts takes part in the passes that are left, behind its drafts. What
that leaves in its own blocks is what a rejected draft leaves: computed again before it counts.
Where these blocks end, the round's table leads to one that belongs to nobody.

A block can be found by others once the target has computed two tokens past its end (`num_behind`):
only then is the draft's half of it complete. Two, because a request that ends in a step without
drafts may leave behind the last draft of its last round and the one token that this step computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.drafting.autoregressive import Autoregressive
from foretoken.drafting.base import DrafterSetup, q_flags
from foretoken.drafting.draft_model import load_draft
from foretoken.ops import DRAFT, DraftBlock, Noise, Rows
from foretoken.ops.steps import DraftRows, ForwardBatch
from foretoken.slots.device import DeviceSlotTable
from foretoken.slots.step import StepResult, StepRows

_FIRST = 2  # known tokens that a round computes


class LockstepDraftModel(Autoregressive):
    """A draft model over a `DeviceSlotTable`."""

    num_behind = 2
    slots: DeviceSlotTable

    def __init__(self, setup: DrafterSetup) -> None:
        self.network = load_draft(setup)
        self.model = self.network.model
        super().__init__(setup, self.model, setup.vocab_size)

    def propose(self, rows: DraftRows) -> DraftBlock:
        """See `Drafter.propose`; every request takes part in every pass, if only as padding."""
        table, max_len = self.slots, self.model.max_model_len
        plan = table.steps.begin_round(table.state, rows, _FIRST, max_len, self.block_size)
        cache = self.cache if rows.warm else None
        drafts: list[Tensor] = []
        for i in range(rows.most):
            batch = plan.batch(i, drafts[-1]) if i else plan.first
            logits_BV = self.network.forward(batch, self.kv)
            if cache is None:
                drafts.append(logits_BV.argmax(dim=-1))
                continue
            fp64 = self.config.use_fp64_gumbel
            noise = Noise(plan.length_KB[i], plan.index_KB[i], DRAFT, fp64)
            logits = Rows(logits_BV, table.params, rows.slot_B)
            drafts.append(self.backend.draft(logits, noise, cache))
        token_BK = table.steps.join_drafts(drafts, plan.num_B)
        # True is right at T=0 and under COUPLED, too: nothing of q is read there.
        real_q_B = q_flags(len(rows.slot_B), table.device, real=cache is not None)
        return DraftBlock(token_BK, plan.num_B, cache, real_q_B)

    def observes(self, rows: StepRows) -> bool:
        """Not where a round of drafting has computed all that the target has."""
        return rows.others or not (rows.most_drafts and _decodes(rows))

    def observe(self, rows: StepRows, batch: ForwardBatch, result: StepResult) -> None:
        """Compute what the target computed, drafts of other drafters too.

        In a step of decoding alone, one known token more: the last draft of the round before it,
        which no round has computed if all of that one was accepted.
        """
        if _decodes(rows) and not rows.most_drafts:
            state, max_len = self.slots.state, self.model.max_model_len
            behind_B = (state.length_S[rows.slot_D] - 1).clamp(min=1)  # the last has no block yet
            known = DraftRows(rows.slot_D, torch.zeros_like(behind_B), behind_B, most=1)
            plan = self.slots.steps.begin_round(state, known, _FIRST, max_len, self.block_size)
            self.network.forward(plan.first, self.kv)
            return
        position_T = batch.position_T.clamp(max=self.model.max_model_len - 1)
        none_N = batch.logit_row_N[:0]
        self.network.forward(batch._replace(position_T=position_T, logit_row_N=none_N), self.kv)

    def clear(self, block_ids: Sequence[int]) -> None:
        """Zero the K/V of blocks that change hands if the model multiplies masked keys."""
        if self.model.multiplies_masked_keys:
            self.kv.clear(block_ids)


def _decodes(rows: StepRows) -> bool:
    """Whether all requests of a step decode."""
    return rows.of_B is None and max(rows.step.num_tokens_B, default=1) == 1

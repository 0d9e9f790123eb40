"""A small language model drafts on a device that nobody waits for.

The same drafts as `draft_model.py`'s, by other bookkeeping: on a device the host does not know how
far the draft model's cache reaches, and need not. It is kept in step with the target's: whatever
the target computes beside a round of drafting (prompts, steps without drafts), the draft model
computes in the same step, over the same packed tokens. Then at most one known token but the last is
missing when a round begins, the last draft of a round that was accepted whole, and every round
computes the last two known tokens. What this costs: a draft pass in steps that draft nothing.

A block can be found by others once the target has computed past its end (`num_behind`): only then
is the draft's half of it complete.

Shape suffixes: B requests, K drafts, T packed tokens, N rows of logits, S slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from foretoken.cache.batch import ForwardBatch, PackSizes, pack_batch
from foretoken.cache.kv_pool import KVPool
from foretoken.drafting.draft_model import DraftModel
from foretoken.ops import DRAFT, AttentionBatch, DraftBlock, DraftCache, Noise, Rows, Rule
from foretoken.slots.device import DeviceSlotTable
from foretoken.slots.step import DraftRows, StepResult, StepRows

_FIRST = 2  # known tokens that a round computes


class LockstepDraftModel(DraftModel):
    """`DraftModel` over a `DeviceSlotTable`."""

    num_behind = 1

    def allocate(self, slots: DeviceSlotTable, num_blocks: int) -> None:  # type: ignore[override]
        """K/V tensors for as many blocks as the target has, and q for every slot, the spare too."""
        shapes, dtype, device = self.model.layer_shapes, self.model.dtype, self.model.device
        self.table = slots
        self._cache = None
        if self.probabilistic:
            self._cache = DraftCache.empty(slots.num_slots + 1, *self._cache_shape, device)
        self.kv = KVPool(shapes, num_blocks, self.block_size, dtype=dtype, device=device)

    def propose(self, rows: DraftRows) -> DraftBlock:
        """See `Drafter.propose`; every request takes part in every pass, if only as padding."""
        table, end = self.table, self.model.max_model_len + 1  # the last draft is not computed
        num_B = torch.minimum(rows.num_B, (end - rows.position_B).clamp(min=0))
        fits_B = rows.position_B < end
        slot_B = torch.where(fits_B, rows.slot_B, table.spare)
        position_B = torch.where(fits_B, rows.position_B, 1)
        cache = self._cache if rows.warm else None
        count_B = position_B.clamp(max=_FIRST)
        sizes = PackSizes(_FIRST * len(slot_B), len(slot_B), _FIRST)
        if table.device.type == "cpu":
            sizes = sizes._replace(tokens=int(count_B.sum()))
        batch = pack_batch(
            table.state, slot_B, position_B - count_B, count_B, torch.ones_like(slot_B), sizes,
            self.block_size,
        )  # fmt: skip
        drafts: list[Tensor] = []
        for i in range(rows.most):
            if i:
                batch = self._next(rows, drafts[-1], i < num_B, i)
            logits_BV = self.model.forward(batch, self.kv).logits_NV
            drafts.append(self._draw_at(logits_BV, rows, i, cache))
        index_K = torch.arange(rows.most, device=table.device)
        token_BK = torch.stack(drafts, dim=1).masked_fill(index_K >= num_B[:, None], -1)
        params = table.params
        real_q_B = torch.zeros_like(num_B, dtype=torch.bool)
        if cache is not None:
            coupled_B = params.rule_S[rows.slot_B] == Rule.COUPLED
            real_q_B = (params.temperature_S[rows.slot_B] > 0) & ~coupled_B & (num_B > 0)
        return DraftBlock(token_BK, num_B, cache, real_q_B)

    def _next(self, rows: DraftRows, token_B: Tensor, goes_on_B: Tensor, i: int) -> ForwardBatch:
        """A pass over draft i - 1 of each; who wants no more computes for nobody."""
        state, count = self.table.state, len(token_B)
        slot_B = torch.where(goes_on_B, rows.slot_B, self.table.spare)
        position_B = torch.where(goes_on_B, rows.position_B + (i - 1), 0)
        index_B1 = torch.arange(count + 1, device=self.table.device)
        attention = AttentionBatch(
            index_B1,
            position_B + 1,
            state.block_SL[slot_B],
            self.block_size,
            most_queries=1,
            values_fit=True,
        )
        return ForwardBatch(token_B, position_B, index_B1[:-1], attention)

    def _draw_at(
        self, logits_BV: Tensor, rows: DraftRows, i: int, cache: DraftCache | None
    ) -> Tensor:
        if cache is None:
            return logits_BV.argmax(dim=-1)
        noise = Noise(
            rows.position_B + i, torch.full_like(rows.slot_B, i), DRAFT, self.config.use_fp64_gumbel
        )
        return self.backend.draft(Rows(logits_BV, self.table.params, rows.slot_B), noise, cache)

    def observe(self, rows: StepRows, batch: ForwardBatch, result: StepResult) -> None:
        """Compute what the target computed, unless a round of drafting did."""
        if rows.most_drafts and max(rows.step.num_tokens_B, default=1) == 1:
            return
        position_T = batch.position_T.clamp(max=self.model.max_model_len - 1)
        none_N = batch.logit_row_N[:0]
        self.model.forward(batch._replace(position_T=position_T, logit_row_N=none_N), self.kv)

    def clear(self, block_ids: Sequence[int]) -> None:
        """Zero the K/V of blocks that change hands if the model multiplies masked keys."""
        if self.model.multiplies_masked_keys:
            self.kv.clear(block_ids)

    def release(self, slot: int) -> None:
        """Nothing is kept for a slot but K/V, in blocks that are not its own."""

    def held_slots(self) -> Iterable[int]:
        """None."""
        return ()

"""An EAGLE-3 head drafts from the target's own hidden states.

The head keeps K/V by the target's block ids, and runs in lock-step with the target: `observe` runs
it over the very rows that the target has computed, also in steps without drafts, so that there is
never anything to catch up on. Row i takes the token at i + 1, which is known by then. Rows at and
after a request's last known token are of rejected drafts; what they leave in the cache is written
again before another row reads it. By slot is kept what the head put out in the last row that
counts: the first draft is drawn from that, and each further one after a pass of one row a request.

Shape suffixes: B requests, K drafts, S slots, L tokens or blocks of a slot, T packed rows, C the
head's hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from foretoken.config import EngineConfig
from foretoken.drafting.autoregressive import Autoregressive
from foretoken.drafting.base import DrafterSetup, no_drafts, q_flags
from foretoken.errors import ConfigError, IntegrityError
from foretoken.models import TargetView, folder_of
from foretoken.models.checkpoint import parse_config, quiet_transformers, read_config
from foretoken.models.eagle3 import Eagle3Head, fuse
from foretoken.models.eagle3_checkpoint import lacks_head, load_eagle3
from foretoken.models.eagle3_config import default_aux_layers, read_eagle3_config
from foretoken.ops import DRAFT, AttentionBatch, DraftBlock, DraftCache, DraftRound, Noise, Rows
from foretoken.ops.decoder import RoundHead
from foretoken.ops.steps import DraftRequests, ForwardBatch, Round
from foretoken.slots.step import StepRequests, StepResult
from foretoken.slots.table import SlotTable

BUILT_IN_HEADS = {"tiny-python": "tiny-python-eagle3"}


class Eagle3(Autoregressive):
    """Drafts are drawn by the target's ids, also where the head knows only some of them: q is real,
    and `coupled` drafts share the target's noise.
    """

    reads_next_token = True

    @classmethod
    def target_view(cls, config: EngineConfig) -> TargetView:
        """Hidden states that the head reads, by its `config.json` or by the target's depth; and
        the target's output layer, if it has none."""
        is_dummy, folder = config.load_format == "dummy", _folder(config)
        head = read_eagle3_config(folder)
        target = folder_of(config, config.model, config.revision, weights=False)
        with quiet_transformers():
            parsed = parse_config(target, read_config(target)["model_type"])
        depth = parsed.get_text_config().num_hidden_layers
        layers = head.aux_layers or default_aux_layers(depth)
        if not all(0 <= layer < depth for layer in layers):
            # Trained on what leaves the last layer; here the last state is normed already.
            bound = f"a head that reads hidden states in 0..{depth - 1} of its target"
            remedy = f"It reads {list(layers)}; the target has {depth} layers."
            name = config.speculative_config and config.speculative_config.model
            raise ConfigError("speculative_config.model", name, bound, remedy)
        return TargetView(layers, head=not is_dummy and lacks_head(folder, head))

    def __init__(self, setup: DrafterSetup) -> None:
        self.head = _load_checked(setup)
        super().__init__(setup, self.head, setup.vocab_size)
        row_numbers = setup.vocab_size if self.head.fused else 0
        numbers = self.head.config.hidden_size + row_numbers
        self.bytes_per_slot += numbers * self.head.dtype.itemsize

    def allocate(self, slots: SlotTable, num_blocks: int) -> None:
        """See `Autoregressive`; and a hidden state for every slot."""
        super().allocate(slots, num_blocks)
        head, count = self.head, len(slots.state.length_S)
        width = head.config.hidden_size
        self._hidden_SC = torch.zeros(count, width, dtype=head.dtype, device=head.device)
        on_host = slots.on_host
        self._round_head = head.fused if on_host and isinstance(head.fused, RoundHead) else None

    def observe(self, requests: StepRequests, batch: ForwardBatch, result: StepResult) -> None:
        """Run the head over the target's rows, each with the token after it."""
        slots, slot_B = self.slots, requests.slot_B
        if self._round_head is not None:  # and not over what was rejected
            length_B = [int(slots.length_S[slot]) for slot in requests.step.slot_B]
            where = self.kv.only_layer(batch.attention)
            known = (slots.state.token_SL, length_B, slot_B)
            self._round_head.observe(self._hidden_SC, *known, result.aux, where)
            return
        token_T, row_B = slots.steps.shift(slot_B, batch.attention, len(batch.token_T))
        batch = batch._replace(token_T=token_T)
        hidden_BC = self.head.forward(batch, result.aux, self.kv, row_B)
        self._hidden_SC.index_copy_(0, slot_B, hidden_BC)

    def propose(self, asked: DraftRequests) -> DraftBlock:
        """See `Drafter.propose`."""
        size, device = len(asked.slot_B), self.head.device
        if asked.most == 0:
            return no_drafts(size, device)
        cache = self.cache if asked.samples else None
        token_BK = self._draft(asked, cache)
        # At T=0 and under COUPLED nothing of q is read. On the host the comparison takes 25 us.
        alike = cache is None or (self._round_head is not None and all(asked.num_B.tolist()))
        real_q_B = q_flags(size, device, real=cache is not None) if alike else asked.num_B > 0
        return DraftBlock(token_BK, asked.num_B, cache, real_q_B)

    def _draft(self, asked: DraftRequests, cache: DraftCache | None) -> Tensor:
        """The drafts of each request; those with a grammar apart, so that none depend on others."""
        head = self._round_head
        if head is None:
            return self._draft_by_passes(asked, cache)
        masked = [self.has_grammar(slot) for slot in asked.slot_B.tolist()]
        if not any(masked):
            return self._draft_at_once(head, asked, cache)
        masked_B = torch.tensor(masked)
        token_BK = asked.slot_B.new_full((len(masked_B), asked.most), -1)
        for index_B in (masked_B.nonzero()[:, 0], (~masked_B).nonzero()[:, 0]):
            if len(index_B):
                slot_B, num_B, position_B = (column[index_B] for column in asked[:3])
                some = asked._replace(slot_B=slot_B, num_B=num_B, position_B=position_B)
                if masked_B[index_B[0]]:
                    drawn_BK = self._draft_by_passes(some, cache)
                else:
                    drawn_BK = self._draft_at_once(head, some, cache)
                token_BK[index_B, : drawn_BK.shape[1]] = drawn_BK.to(token_BK.dtype)
        return token_BK

    def _draft_at_once(
        self, head: RoundHead, asked: DraftRequests, cache: DraftCache | None
    ) -> Tensor:
        """All passes and draws in one native call."""
        fp64 = self.config.use_fp64_gumbel
        drafting = DraftRound(asked.params, asked.slot_B, asked.num_B, cache, fp64)
        block_SL = self.slots.state.block_SL  # all of it: to gather rows of it would take 45 us
        known = AttentionBatch(asked.slot_B, asked.position_B, block_SL, self.block_size)
        return head.draft_round(self._hidden_SC, self.kv.only_layer(known), drafting)

    def _draft_by_passes(self, asked: DraftRequests, cache: DraftCache | None) -> Tensor:
        """Passes run for all requests; of some, more than are read."""
        plan, on_host = self._plan(asked), self.slots.on_host
        masked = on_host and any(map(self.has_grammar, asked.slot_B.tolist()))
        hidden_BC, drafts = self._hidden_SC[asked.slot_B], list[Tensor]()
        logits_BV = self.head.logits(hidden_BC)
        for i in range(asked.most):
            if i:
                # Draft i is drawn from the row one before it, whose token is draft i - 1.
                batch = plan.batch(i - 1, drafts[-1])
                hidden_BC, logits_BV = self.head.draft(batch, hidden_BC, self.kv)
            if masked:
                so_far_BK = torch.stack(drafts, 1) if drafts else asked.slot_B[:, None][:, :0]
                logits_BV = self.mask(logits_BV, asked.slot_B.tolist(), so_far_BK.numpy())
            noise = (plan.length_KB[i], plan.index_KB[i], DRAFT, self.config.use_fp64_gumbel)
            drafts.append(self._draw(logits_BV, asked, Noise(*noise), cache))
        return self.slots.steps.join_drafts(drafts, asked.num_B)

    def clear(self, block_ids: Sequence[int]) -> None:
        """Zero K/V, if attention multiplies with masked keys, too: a NaN would spread."""
        if self.head.fused is None:
            self.kv.clear(block_ids)

    def _plan(self, asked: DraftRequests) -> Round:
        """Pass i > 0 computes one token of each request, at row i - 1 of the plan."""
        state, size = self.slots.state, len(asked.slot_B)
        if not self.slots.on_host:
            longest = state.block_SL.shape[1] * self.block_size
            return self.slots.steps.begin_round(asked, 1, longest, self.block_size)
        # A request whose drafts are all made stays where its last pass may be, in its own blocks.
        index_K1 = torch.arange(asked.most, device=asked.slot_B.device)[:, None]
        length_KB = asked.position_B + torch.minimum(index_K1, (asked.num_B - 1).clamp_(min=0))
        index_B1 = torch.arange(size + 1, device=asked.slot_B.device)
        index_KB, block_BL = index_K1.expand(-1, size).contiguous(), state.block_SL[asked.slot_B]
        known = AttentionBatch(index_B1, asked.position_B, block_BL, self.block_size)
        none_T = asked.slot_B[:0]
        first = ForwardBatch(none_T, none_T, none_T, known)  # the target's pass was the first
        return Round(asked.num_B, first, index_B1, length_KB - 1, length_KB, index_KB)

    def _draw(
        self, logits_BV: Tensor, asked: DraftRequests, noise: Noise, cache: DraftCache | None
    ) -> Tensor:
        """A draft of each request, and the q that it came from, by slot."""
        if cache is None and asked.samples:
            return logits_BV.argmax(dim=-1)
        return self.backend.draft(Rows(logits_BV, asked.params, asked.slot_B), noise, cache)


def _folder(config: EngineConfig) -> Path:
    """Where the head is; `ConfigError` if it is not said."""
    speculation = config.speculative_config
    if speculation is None:
        raise IntegrityError("`eagle3` was asked for a head without a configuration")
    name = speculation.model or BUILT_IN_HEADS.get(config.model)
    if name is None:
        remedy = "Name a folder or hub id of a head that was trained for this target."
        raise ConfigError("speculative_config.model", None, "an EAGLE-3 head", remedy)
    return folder_of(config, name, speculation.revision)


def _load_checked(setup: DrafterSetup) -> Eagle3Head:
    """Load the head; `ConfigError` unless it was made for a target of this shape."""
    is_dummy, embedding = setup.config.load_format == "dummy", setup.embedding
    if embedding is None:
        raise IntegrityError("`eagle3` was given no embedding of its target")
    folder = _folder(setup.config)
    config = read_eagle3_config(folder)
    width = embedding.shape[1]
    for what, own, targets in (
        ("logits", config.vocab_size, setup.vocab_size),
        ("numbers in a hidden state of its target", config.target_hidden_size, width),
    ):
        if own != targets:
            bound = "a head that was trained for this target"
            remedy = f"It takes {own} {what}; the target has {targets}."
            raise ConfigError("speculative_config.model", setup.speculation.model, bound, remedy)
    head = load_eagle3(
        folder, config, embedding=embedding, backend=setup.backend, head=setup.head,
        dummy_seed=setup.config.seed if is_dummy else None,
    )  # fmt: skip
    # Blocks may reach further than the longest request.
    fuse(head, setup.max_model_len + setup.block_size, setup.config.max_num_seqs)
    return head

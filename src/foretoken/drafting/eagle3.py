"""An EAGLE-3 head drafts from the target's own hidden states.

The head keeps K/V by the target's block ids, and runs in lock-step with the target: `observe` runs
it over the very rows that the target has computed, also in steps without drafts, so that there is
never anything to catch up on. Row i takes the token at i + 1, which is known by then. Rows at and
behind a request's last known token are of rejected drafts; what they leave in the cache is written
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

from foretoken.cache.batch import ForwardBatch
from foretoken.cache.kv_pool import KVPool
from foretoken.config import EngineConfig
from foretoken.drafting.base import Drafter, DrafterSetup, no_drafts
from foretoken.errors import ConfigError, IntegrityError
from foretoken.models import TargetView, resolve_checkpoint
from foretoken.models.checkpoint import parse_config, quiet_transformers, read_config
from foretoken.models.eagle3 import Eagle3Head
from foretoken.models.eagle3_checkpoint import default_aux_layers, load_eagle3, read_eagle3_config
from foretoken.ops import DRAFT, AttentionBatch, DraftBlock, DraftCache, Noise, Rows
from foretoken.ops.steps import DraftRows
from foretoken.slots.device import DeviceSlotTable
from foretoken.slots.step import StepResult, StepRows
from foretoken.slots.table import SlotTable


class Eagle3(Drafter):
    """Autoregressive drafting, `probabilistic` (q kept for verification) or `greedy` (one-hot).

    Drafts are drawn by the target's ids, also where the head knows only some of them: q is real,
    and `coupled` drafts share the target's noise.
    """

    options = frozenset({"model", "revision", "draft_sample_method"})
    reads_next_token = True

    @classmethod
    def target_view(cls, config: EngineConfig) -> TargetView:
        """Hidden states that the head reads, by its `config.json` or by the target's depth."""
        layers = read_eagle3_config(_folder(config, weights=False)).aux_layers
        if layers is None:
            target = resolve_checkpoint(
                config.model,
                revision=config.revision,
                local_files_only=config.local_files_only,
                weights=False,
            )
            with quiet_transformers():
                parsed = parse_config(target, read_config(target)["model_type"])
            layers = default_aux_layers(parsed.get_text_config().num_hidden_layers)
        return TargetView(aux_layers=layers)

    def __init__(self, setup: DrafterSetup) -> None:
        self.head = _load_checked(setup)
        self.config = setup.config
        self.backend = setup.backend
        self.block_size = setup.block_size
        self.probabilistic = setup.speculation.draft_sample_method != "greedy"
        num_drafts = setup.speculation.num_speculative_tokens if self.probabilistic else 0
        self._cache_shape = (num_drafts, setup.vocab_size, self.head.dtype)
        one = DraftCache.empty(1, *self._cache_shape, torch.device("meta"))
        hidden_bytes = self.head.config.hidden_size * self.head.dtype.itemsize
        q_bytes = one.logits_SKV.nbytes + one.threshold_SK.nbytes + one.lse_SK.nbytes
        self.bytes_per_slot = hidden_bytes + q_bytes
        self.kv_bytes_per_block = KVPool.bytes_per_block(
            self.head.layer_shapes, setup.block_size, self.head.dtype
        )

    def allocate(self, slots: SlotTable | DeviceSlotTable, num_blocks: int) -> None:
        """K/V for as many blocks as the target has; a hidden state and q for every slot."""
        shapes, dtype, device = self.head.layer_shapes, self.head.dtype, self.head.device
        self.slots = slots
        num_slots = len(slots.state.length_S)
        width = self.head.config.hidden_size
        self._hidden_SC = torch.zeros(num_slots, width, dtype=dtype, device=device)
        self._cache = None
        if self.probabilistic:
            self._cache = DraftCache.empty(num_slots, *self._cache_shape, device)
        self.kv = KVPool(shapes, num_blocks, self.block_size, dtype=dtype, device=device)

    def observe(self, rows: StepRows, batch: ForwardBatch, result: StepResult) -> None:
        """Run the head over the target's rows, each with the token behind it."""
        state, attention = self.slots.state, batch.attention
        start_B, end_B = attention.query_start_B1[:-1], attention.query_start_B1[1:]
        index_T = torch.arange(len(batch.token_T), device=end_B.device)
        # Padding behind the last request's rows takes that request's tokens: nobody reads it.
        owner_T = torch.searchsorted(end_B, index_T, right=True).clamp_(max=len(end_B) - 1)
        next_T = (batch.position_T + 1).clamp_(max=state.token_SL.shape[1] - 1)
        # Behind a request's last token stand leftovers, on a host -1.
        token_T = state.token_SL[rows.slot_B[owner_T], next_T].long().clamp_(min=0)
        feature_TC = self.head.features(result.aux)
        hidden_TC = self.head.forward(batch._replace(token_T=token_T), feature_TC, self.kv)
        first_B = attention.length_B - (end_B - start_B)
        last_B = torch.minimum(attention.length_B - 1, state.length_S[rows.slot_B] - 2)
        row_B = start_B + (last_B - first_B).clamp_(min=0)  # < 0: a request that has failed
        self._hidden_SC.index_copy_(0, rows.slot_B, hidden_TC[row_B])

    def propose(self, rows: DraftRows) -> DraftBlock:
        """See `Drafter.propose`. Passes run for all requests; of some, more than are read."""
        size, device, block_size = len(rows.slot_B), self.head.device, self.block_size
        if rows.most == 0:
            return no_drafts(size, device)
        block_BL = self.slots.state.block_SL[rows.slot_B]
        start_B1, row_B = torch.arange(size + 1, device=device), torch.arange(size, device=device)
        # A request whose drafts are all made stays where its last pass was, in its own blocks.
        last_B = (rows.num_B - 2).clamp_(min=0)
        hidden_BC, drafts = self._hidden_SC[rows.slot_B], list[Tensor]()
        cache = self._cache if rows.warm else None
        for i in range(rows.most):
            if i:
                position_B = rows.position_B - 1 + last_B.clamp(max=i - 1)
                attention = AttentionBatch(
                    start_B1, position_B + 1, block_BL, block_size, most_queries=1, values_fit=True
                )
                batch = ForwardBatch(drafts[-1], position_B, row_B, attention)
                hidden_BC = self.head.forward(batch, hidden_BC, self.kv)
            drafts.append(self._draw(hidden_BC, rows, i, cache))
        index_K = torch.arange(rows.most, device=device)
        return DraftBlock(
            token_BK=torch.stack(drafts, 1).masked_fill_(index_K >= rows.num_B[:, None], -1),
            num_B=rows.num_B,
            cache=cache,
            real_q_B=(rows.num_B > 0) & (cache is not None),
        )

    def clear(self, block_ids: Sequence[int]) -> None:
        """Zero K/V that attention multiplies also where it is masked: a NaN would spread."""
        self.kv.clear(block_ids)

    def _draw(self, hidden_BC: Tensor, rows: DraftRows, i: int, cache: DraftCache | None) -> Tensor:
        """Draft i of each request, and the q that it came from, by slot."""
        logits_BV = self.head.logits(hidden_BC)
        if cache is None:
            return logits_BV.argmax(dim=-1)
        index_B = torch.full_like(rows.slot_B, i)
        noise = Noise(rows.position_B + i, index_B, DRAFT, self.config.use_fp64_gumbel)
        return self.backend.draft(Rows(logits_BV, self.slots.params, rows.slot_B), noise, cache)


def _folder(config: EngineConfig, weights: bool) -> Path:
    """Where the head is; `ConfigError` if it is not said."""
    speculation = config.speculative_config
    if speculation is None or speculation.model is None:
        remedy = "Name a folder or hub id of a head that was trained for this target."
        raise ConfigError("speculative_config.model", None, "an EAGLE-3 head", remedy)
    return resolve_checkpoint(
        speculation.model,
        revision=speculation.revision,
        local_files_only=config.local_files_only,
        weights=weights,
    )


def _load_checked(setup: DrafterSetup) -> Eagle3Head:
    """Load the head; `ConfigError` unless it was made for a target of this shape."""
    is_dummy, embedding = setup.config.load_format == "dummy", setup.embedding
    if embedding is None:
        raise IntegrityError("`eagle3` was given no embedding of its target")
    folder = _folder(setup.config, weights=not is_dummy)
    config = read_eagle3_config(folder)
    width = embedding.shape[1]
    for what, own, targets in (
        ("logits", config.vocab_size, setup.vocab_size),
        ("numbers in a hidden state of its target", config.target_hidden_size, width),
        ("numbers in a token's embedding", config.hidden_size, width),
    ):
        if own != targets:
            bound = "a head that was trained for this target"
            remedy = f"It takes {own} {what}; the target has {targets}."
            raise ConfigError("speculative_config.model", setup.speculation.model, bound, remedy)
    return load_eagle3(
        folder,
        config,
        embedding=embedding,
        backend=setup.backend,
        dummy_seed=setup.config.seed if is_dummy else None,
    )

"""A small language model drafts for a large one that shares its tokenizer.

Its K/V cache is addressed by the target's block ids, so accepting, rejecting and freeing need no
bookkeeping here beyond one number per slot: how many leading tokens its cache holds. After steps
in which it was not asked (K = 0), the next proposal first catches up on what it missed.

The target's blocks are shared between requests that begin with the same tokens, and the draft's
half of such a block may or may not be there: whoever filled the target's half may never have been
drafted for. So each block has a mark, `complete`: every one of its positions was computed here from
a known token. A request that is new to its slot starts behind its leading complete blocks. That is
right because
- a block is in two requests' tables only if all their tokens up to its end are equal, and K/V at a
  position are a function of the tokens up to it: who computed them does not matter;
- drafts stand behind all known tokens, hence in no complete block: what a rejected draft leaves
  behind lies in a block that is not marked, and is computed again before it is;
- a block that is handed out anew passes through `clear`, which removes the mark.
Requests that share a block which is not complete each compute it; they write the same values.

Shape suffixes: B requests, K drafts, S slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from foretoken.cache.batch import ForwardBatch, gather_batch
from foretoken.cache.kv_pool import KVPool
from foretoken.drafting.base import Drafter, DrafterSetup, Needs, one_hot_block
from foretoken.errors import ConfigError
from foretoken.models import CausalLM, load_model, load_tokenizer, resolve_checkpoint
from foretoken.ops import DraftBlock, DraftCache, DraftRound, Rule
from foretoken.slots.step import StepInput, StepResult
from foretoken.slots.table import Array, SlotTable

BUILT_IN_DRAFTS = {"tiny-python": "tiny-python-draft"}


class DraftModel(Drafter):
    """Autoregressive drafting, `probabilistic` (q kept for verification) or `greedy` (one-hot)."""

    options = frozenset({"model", "revision", "draft_sample_method"})

    def __init__(self, setup: DrafterSetup, model: CausalLM | None = None) -> None:
        self.model = model or _load_checked(setup)
        self.config = setup.config
        self.backend = setup.backend
        self.probabilistic = setup.speculation.draft_sample_method != "greedy"
        num_drafts = setup.speculation.num_speculative_tokens if self.probabilistic else 0
        self._cache_shape = (setup.config.max_num_seqs, num_drafts, self.model.vocab_size)
        self.needs = Needs(
            bytes_per_slot=_cache_bytes(num_drafts, self.model.vocab_size, self.model.dtype),
            kv_bytes_per_block=KVPool.bytes_per_block(
                self.model.layer_shapes, setup.config.block_size, self.model.dtype
            ),
        )

    def allocate(self, slots: SlotTable, num_blocks: int) -> None:
        """K/V tensors for as many blocks as the target has, and q for every slot."""
        dtype, device = self.model.dtype, self.model.device
        self.slots = slots
        self._num_computed_S = np.zeros(slots.num_slots, dtype=np.int64)
        self._complete = np.zeros(num_blocks, dtype=bool)
        self._cache = None
        if self.probabilistic:
            self._cache = DraftCache.empty(*self._cache_shape, dtype, device)
        size = self.config.block_size
        self.kv = KVPool(self.model.layer_shapes, num_blocks, size, dtype=dtype, device=device)

    def propose(self, slot_B: Array, num_drafts_B: Array) -> DraftBlock:
        """See `Drafter.propose`. Drafts end where the draft model's context does."""
        # The last draft is drawn, but not computed.
        room_B = self.model.max_model_len - self.slots.length_S[slot_B] + 1
        num_B = np.minimum(num_drafts_B, room_B).clip(min=0)
        asked = num_B.nonzero()[0]
        if not len(asked):
            return one_hot_block([[]] * len(slot_B), self.model.device)
        slot_A, num_A = slot_B[asked], num_B[asked]
        slots = slot_A.tolist()
        for slot in slots:
            self._skip_complete(slot)
        self._catch_up(slots)
        warm = any(self.slots.temperatures[slot] > 0 for slot in slots)
        # Coupled requests keep no q, but draw, too: with the target's own noise.
        cache = self._cache if warm else None
        draft = self._draft_by_passes if self.model.fused is None else self._draft_at_once
        token_BK = draft(slot_A, num_A, cache)
        for slot in slots:
            self._advance(slot, int(self.slots.length_S[slot]))
        if len(asked) < len(slot_B):
            token_AK = token_BK
            token_BK = token_AK.new_full((len(slot_B), token_AK.shape[1]), -1)
            token_BK[torch.from_numpy(asked)] = token_AK
        real_q_B = np.array([self._keeps_q(slot) for slot in slot_B.tolist()])
        real_q_B &= (num_B > 0) & (cache is not None)
        return DraftBlock(
            token_BK=token_BK,
            num_B=torch.from_numpy(num_B),
            cache=cache if real_q_B.any() else None,
            real_q_B=torch.from_numpy(real_q_B),
        )

    def _keeps_q(self, slot: int) -> bool:
        """Whether verification will ask for the q of its drafts, if they are drawn from one."""
        return self.slots.temperatures[slot] > 0 and self.slots.rules[slot] is not Rule.COUPLED

    def _draft_at_once(self, slot_B: Array, num_B: Array, cache: DraftCache | None) -> Tensor:
        """All passes and draws in one native call; the drafts, -1 behind a request's last.

        With K = 5 the draft passes of the embedded pair took 3.7 to 4.6 ms a step through the
        modules, and the work beside them 1.5.
        """
        first = self._missing(slot_B, ahead=int(num_B.max()) - 1)
        drafting = DraftRound(
            self.slots.params,
            torch.from_numpy(slot_B),
            torch.from_numpy(num_B),
            cache,
            self.config.use_fp64_gumbel,
        )
        return self.model.fused.draft(  # type: ignore[union-attr]
            first.token_T, first.attention, self.kv.keys, self.kv.values, drafting
        )

    def _draft_by_passes(self, slot_B: Array, num_B: Array, cache: DraftCache | None) -> Tensor:
        """One pass per draft index over the requests that still want one."""
        most = int(num_B.max())
        token_BK = np.full((len(slot_B), most), -1, dtype=np.int64)
        for i in range(most):
            live = (num_B > i).nonzero()[0]
            slot_A = slot_B[live]
            if i:
                self.slots.put_drafts(slot_A, token_BK[live, :i])
                start_A, one_A = self.slots.length_S[slot_A] + i - 1, np.ones_like(slot_A)
                size = self.config.block_size
                batch = gather_batch(self.slots, slot_A, start_A, one_A, one_A, size)
            else:
                batch = self._missing(slot_A)
            logits_AV = self.model.forward(batch, self.kv).logits_NV
            if cache is None:
                token_A = logits_AV.argmax(dim=-1)
            else:
                token_A = self._draw(logits_AV, slot_A, i, cache)
            token_BK[live, i] = token_A.numpy()
        return torch.from_numpy(token_BK)

    def observe(self, step: StepInput, result: StepResult) -> None:
        """Keep the K/V of accepted drafts; the last draft proposed was never computed."""
        num_D, n_accept_D = result.drafts.num_B.numpy(), result.verdict.n_accept_B.numpy()
        slot_D = step.slot_B[result.deciding]
        self._num_computed_S[slot_D] += np.minimum(n_accept_D, (num_D - 1).clip(min=0))

    def clear(self, block_ids: Sequence[int]) -> None:
        """Remove these blocks' marks; zero their K/V if the model multiplies masked keys."""
        if self.model.multiplies_masked_keys:
            self.kv.clear(block_ids)
        self._complete[block_ids] = False

    def release(self, slot: int) -> None:
        """Forget the request in this slot."""
        self._num_computed_S[slot] = 0

    def held_slots(self) -> Iterable[int]:
        """Slots whose tokens it has computed."""
        return self._num_computed_S.nonzero()[0].tolist()

    def _skip_complete(self, slot: int) -> None:
        """Start a request that is new to its slot behind the leading blocks that are complete."""
        if self._num_computed_S[slot]:
            return
        last = int(self.slots.length_S[slot]) - 1
        for block in self.slots.block_SL[slot, : last // self.config.block_size].tolist():
            if not self._complete[block]:
                break
            self._num_computed_S[slot] += self.config.block_size

    def _advance(self, slot: int, num_computed: int) -> None:
        """Count a request's leading known tokens that were computed, and mark blocks they fill."""
        self._num_computed_S[slot] = num_computed
        for i in reversed(range(num_computed // self.config.block_size)):
            block = self.slots.block_SL[slot, i]
            if self._complete[block]:
                return  # and so are those before it
            self._complete[block] = True

    def _missing(self, slot_B: Array, ahead: int = 0) -> ForwardBatch:
        """All known tokens that the cache lacks, and the logits of the last one."""
        start_B = self._num_computed_S[slot_B]
        count_B = self.slots.length_S[slot_B] - start_B
        one_B, size = np.ones_like(slot_B), self.config.block_size
        return gather_batch(self.slots, slot_B, start_B, count_B, one_B, size, ahead=ahead)

    def _catch_up(self, slots: Sequence[int]) -> None:
        """Compute missing tokens until those left fit one pass of the engine's token budget."""
        budget = self.config.max_num_batched_tokens
        share = max(budget // len(slots), 1)
        while True:
            parts, room = [], budget
            for slot in slots:
                start = int(self._num_computed_S[slot])
                size = min(int(self.slots.length_S[slot]) - start - share, room)
                if size > 0:
                    parts.append((slot, start, size, 0))
                    room -= size
            if not parts:
                return
            slot_B, start_B, count_B, none_B = np.array(parts, dtype=np.int64).T
            size = self.config.block_size
            batch = gather_batch(self.slots, slot_B, start_B, count_B, none_B, size)
            self.model.forward(batch, self.kv)
            for slot, start, size, _ in parts:
                self._advance(slot, start + size)

    def _draw(self, logits_BV: Tensor, slot_B: Array, i: int, cache: DraftCache) -> Tensor:
        """Sample draft i of each request and keep the q it came from, by slot."""
        keeps_q = any(self._keeps_q(slot) for slot in slot_B.tolist())
        return self.backend.draft(
            logits_BV,
            self.slots.params,
            torch.from_numpy(slot_B),
            torch.from_numpy(self.slots.length_S[slot_B] + i),
            torch.full((len(slot_B),), i),
            cache if keeps_q else None,
            fp64_noise=self.config.use_fp64_gumbel,
        )


def _cache_bytes(num_drafts: int, vocab_size: int, dtype: torch.dtype) -> int:
    """Bytes of a `DraftCache` for one slot."""
    one = DraftCache.empty(1, num_drafts, vocab_size, dtype, torch.device("meta"))
    return sum(t.numel() * t.element_size() for t in (one.logits_SKV, one.threshold_SK, one.lse_SK))


def _load_checked(setup: DrafterSetup) -> CausalLM:
    """Load the draft model; `ConfigError` unless it has the target's vocabulary."""
    config, name = setup.config, setup.speculation.model
    name = name or BUILT_IN_DRAFTS.get(config.model)
    if name is None:
        raise ConfigError(
            "speculative_config.model",
            None,
            "a draft model",
            "Name a small checkpoint that shares the target's tokenizer, or use `ngram`.",
        )
    folder = resolve_checkpoint(
        name,
        revision=setup.speculation.revision,
        local_files_only=config.local_files_only,
        weights=config.load_format == "auto",
    )
    tokenizer = load_tokenizer(folder)
    if setup.target_tokens is not None and tokenizer is not None:
        _check_same_tokens(name, tokenizer.get_vocab(), setup.target_tokens)
    model = load_model(
        folder,
        device=setup.device,
        dtype=config.dtype,
        backend=setup.backend,
        dummy_seed=config.seed if config.load_format == "dummy" else None,
        max_model_len=setup.max_model_len,
        shorten=True,
    )
    if model.vocab_size != setup.vocab_size:
        raise _other_vocabulary(
            name, f"{model.vocab_size} logits where the target has {setup.vocab_size}"
        )
    return model


def _check_same_tokens(name: str, draft: dict[str, int], target: dict[str, int]) -> None:
    if draft == target:
        return
    differing = sum(target.get(token) != i for token, i in draft.items())
    raise _other_vocabulary(
        name,
        f"{len(draft)} tokens where the target has {len(target)}, {differing} with another id",
    )


def _other_vocabulary(name: str, difference: str) -> ConfigError:
    return ConfigError(
        "speculative_config.model",
        name,
        "a model with the target's vocabulary",
        f"It has {difference}. Choose a draft that shares the target's tokenizer, or `ngram`.",
    )

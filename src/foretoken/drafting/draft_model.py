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

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from foretoken.cache.batch import Span, build_batch
from foretoken.cache.kv_pool import KVPool
from foretoken.drafting.base import (
    DraftContext,
    Drafter,
    DrafterSetup,
    DraftRequest,
    Needs,
)
from foretoken.errors import ConfigError, IntegrityError
from foretoken.models import CausalLM, load_model, load_tokenizer, resolve_checkpoint
from foretoken.ops import DRAFT, DraftBlock, DraftCache, Noise, Rows, SlotParams

BUILT_IN_DRAFTS = {"tiny-python": "tiny-python-draft"}


class DraftModel(Drafter):
    """Autoregressive drafting, `probabilistic` (q kept for verification) or `greedy` (one-hot)."""

    options = frozenset({"model", "revision", "draft_sample_method"})

    def __init__(self, setup: DrafterSetup, model: CausalLM | None = None) -> None:
        self.model = model or _load_checked(setup)
        self.config = setup.config
        self.backend = setup.backend
        self.device = setup.device
        self.probabilistic = setup.speculation.draft_sample_method != "greedy"
        num_drafts = setup.speculation.num_speculative_tokens if self.probabilistic else 0
        self._cache_shape = (setup.config.max_num_seqs, num_drafts, self.model.vocab_size)
        self.needs = Needs(
            bytes_per_slot=_cache_bytes(num_drafts, self.model.vocab_size, self.model.dtype),
            kv_bytes_per_block=KVPool.bytes_per_block(
                self.model.layer_shapes, setup.config.block_size, self.model.dtype
            ),
        )
        self._num_computed_S = [0] * setup.config.max_num_seqs
        self._num_proposed_S = [0] * setup.config.max_num_seqs
        self._complete = bytearray()
        self._kv: KVPool | None = None
        self._cache: DraftCache | None = None

    def allocate(self, num_blocks: int) -> None:
        """K/V tensors for as many blocks as the target has, and q for every slot."""
        if self.probabilistic:
            self._cache = DraftCache.empty(*self._cache_shape, self.model.dtype, self.device)
        self._complete = bytearray(num_blocks)
        self._kv = KVPool(
            self.model.layer_shapes,
            num_blocks,
            self.config.block_size,
            dtype=self.model.dtype,
            device=self.device,
        )

    def propose(self, context: DraftContext) -> DraftBlock:
        """One pass per draft index over the requests that still want one. See `Drafter.propose`."""
        requests = context.requests
        num_drafts = [_fit(r, self.model.max_model_len) for r in requests]
        asked = [(r, k) for r, k in zip(requests, num_drafts, strict=True) if k]
        for request, _ in asked:
            self._skip_complete(request)
        self._catch_up([request for request, _ in asked])
        # Coupled requests keep no q, but draw, too: with the target's own noise.
        cache = self._cache if any(r.temperature > 0 for r, _ in asked) else None
        draft = self._draft_by_passes if self.model.fused is None else self._draft_at_once
        drafts = draft(asked, context.params, cache) if asked else torch.empty(0, 0).long()
        for request, k in asked:
            self._advance(request, len(request.token_ids))
            self._num_proposed_S[request.slot] = k
        if len(asked) < len(requests):
            drafts = _spread(drafts, num_drafts)
        real = [
            cache is not None and k > 0 and r.keeps_q
            for r, k in zip(requests, num_drafts, strict=True)
        ]
        return DraftBlock(
            token_BK=drafts,
            num_B=torch.from_numpy(np.array(num_drafts, dtype=np.int64)).to(self.device),
            cache=cache if any(real) else None,
            real_q_B=torch.from_numpy(np.array(real, dtype=bool)).to(self.device),
        )

    def _draft_at_once(
        self,
        asked: Sequence[tuple[DraftRequest, int]],
        params: SlotParams,
        cache: DraftCache | None,
    ) -> Tensor:
        """All passes and draws in one native call; the drafts, -1 behind a request's last.

        With K = 5 the draft passes of the embedded pair took 3.7 to 4.6 ms a step through the
        modules, and the work beside them 1.5.
        """
        fused, kv = self.model.fused, self._kv
        if fused is None or kv is None:
            raise IntegrityError("the drafter was asked to propose before `allocate`")
        first = build_batch(
            [self._next_span(request, []) for request, _ in asked], kv.block_size, self.device
        )
        last_computed = max(len(r.token_ids) + k - 1 for r, k in asked)
        columns = -(-last_computed // kv.block_size)
        blocks = [[*r.block_ids[:columns], *[0] * (columns - len(r.block_ids))] for r, _ in asked]
        numbers = [
            [r.slot for r, _ in asked],
            [len(r.token_ids) for r, _ in asked],
            [k for _, k in asked],
        ]
        return fused.draft(
            first,
            kv,
            params,
            torch.from_numpy(np.array(blocks, dtype=np.int64)),
            torch.from_numpy(np.array(numbers, dtype=np.int64)),
            cache,
            self.config.use_fp64_gumbel,
        )

    def _draft_by_passes(
        self,
        asked: Sequence[tuple[DraftRequest, int]],
        params: SlotParams,
        cache: DraftCache | None,
    ) -> Tensor:
        """One pass per draft index over the requests that still want one."""
        drafts: list[list[int]] = [[] for _ in asked]
        most = max(k for _, k in asked)
        for i in range(most):
            live = [(r, own) for (r, k), own in zip(asked, drafts, strict=True) if k > i]
            logits_BV = self._forward([self._next_span(r, own) for r, own in live])
            if cache is not None:
                token_B = self._draw(logits_BV, params, [r for r, _ in live], i, cache)
            else:
                token_B = logits_BV.argmax(dim=-1)
            for (_, own), token in zip(live, token_B.tolist(), strict=True):
                own.append(token)
        padded = [own + [-1] * (most - len(own)) for own in drafts]
        return torch.tensor(padded, dtype=torch.int64, device=self.device)

    def observe(self, slot: int, num_drafted: int, num_accepted: int) -> None:
        """Keep the K/V of accepted drafts; the last draft proposed was never computed."""
        self._num_computed_S[slot] += min(num_accepted, self._num_proposed_S[slot] - 1)

    def clear(self, block_ids: Sequence[int]) -> None:
        """Remove these blocks' marks; zero their K/V if the model multiplies masked keys."""
        if self._kv is not None:
            if self.model.multiplies_masked_keys:
                self._kv.clear(block_ids)
            for block in block_ids:
                self._complete[block] = False

    def release(self, slot: int) -> None:
        """Forget the request in this slot."""
        self._num_computed_S[slot] = 0

    def _skip_complete(self, request: DraftRequest) -> None:
        """Start a request that is new to its slot behind the leading blocks that are complete."""
        if self._num_computed_S[request.slot]:
            return
        size, last = self.config.block_size, len(request.token_ids) - 1
        for block in request.block_ids[: last // size]:
            if not self._complete[block]:
                break
            self._num_computed_S[request.slot] += size

    def _advance(self, request: DraftRequest, num_computed: int) -> None:
        """Count a request's leading known tokens that were computed, and mark blocks they fill."""
        self._num_computed_S[request.slot] = num_computed
        for i in reversed(range(num_computed // self.config.block_size)):
            block = request.block_ids[i]
            if self._complete[block]:
                return  # and so are those before it
            self._complete[block] = True

    def _next_span(self, request: DraftRequest, drafts: Sequence[int]) -> Span:
        """All tokens the cache lacks before the first draft, then the last draft alone."""
        known = len(request.token_ids)
        if drafts:
            return Span(request.block_ids, known + len(drafts) - 1, drafts[-1:], 1)
        start = self._num_computed_S[request.slot]
        return Span(request.block_ids, start, request.token_ids[start:], 1)

    def _catch_up(self, requests: Sequence[DraftRequest]) -> None:
        """Compute missing tokens until those left fit one pass of the engine's token budget."""
        if not requests:
            return
        budget = self.config.max_num_batched_tokens
        share = max(budget // len(requests), 1)
        while True:
            spans, ends, room = [], [], budget
            for request in requests:
                start = self._num_computed_S[request.slot]
                size = min(len(request.token_ids) - start - share, room)
                if size > 0:
                    tokens = request.token_ids[start : start + size]
                    spans.append(Span(request.block_ids, start, tokens, 0))
                    ends.append((request, start + size))
                    room -= size
            if not spans:
                return
            self._forward(spans)
            for request, end in ends:
                self._advance(request, end)

    def _forward(self, spans: Sequence[Span]) -> Tensor:
        if self._kv is None:
            raise IntegrityError("the drafter was asked to propose before `allocate`")
        batch = build_batch(spans, self.config.block_size, self.device)
        return self.model.forward(batch, self._kv)

    def _draw(
        self,
        logits_BV: Tensor,
        params: SlotParams,
        requests: Sequence[DraftRequest],
        i: int,
        cache: DraftCache,
    ) -> Tensor:
        """Sample draft i of each request and keep the q it came from, by slot."""
        numbers = [
            [r.slot for r in requests],
            [len(r.token_ids) + i for r in requests],
            [i] * len(requests),
        ]
        numbers_3B = torch.from_numpy(np.array(numbers, dtype=np.int64)).to(self.device)
        slot_B, position_B, index_B = numbers_3B
        return self.backend.draft(
            Rows(logits_BV, params, slot_B),
            Noise(position_B, index_B, DRAFT, self.config.use_fp64_gumbel),
            cache if any(r.keeps_q for r in requests) else None,
        )


def _spread(drafts: Tensor, num_drafts: Sequence[int]) -> Tensor:
    """Drafts of the requests that have some, as rows of a batch in which others have none."""
    all_BK = drafts.new_full((len(num_drafts), drafts.shape[1]), -1)
    all_BK[torch.tensor([k > 0 for k in num_drafts], device=drafts.device)] = drafts
    return all_BK


def _cache_bytes(num_drafts: int, vocab_size: int, dtype: torch.dtype) -> int:
    """Bytes of a `DraftCache` for one slot."""
    one = DraftCache.empty(1, num_drafts, vocab_size, dtype, torch.device("meta"))
    return sum(t.numel() * t.element_size() for t in (one.logits_SKV, one.threshold_SK, one.lse_SK))


def _fit(request: DraftRequest, max_model_len: int) -> int:
    """Drafts that the draft model's context still allows: draft K is drawn but not computed."""
    return max(0, min(request.num_drafts, max_model_len - len(request.token_ids) + 1))


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
        load_format=config.load_format,
        max_model_len=setup.max_model_len,
        shorten=True,
        seed=config.seed,
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

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

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import cast

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
    one_hot_block,
)
from foretoken.errors import ConfigError, IntegrityError
from foretoken.models import CausalLM, load_model, load_tokenizer
from foretoken.ops import DraftBlock, SlotParams, Stream

BUILT_IN_DRAFTS = {"tiny-python": "tiny-python-draft"}


class DraftModel(Drafter):
    """Autoregressive drafting, `probabilistic` (q kept for verification) or `greedy` (one-hot)."""

    options = frozenset({"model", "draft_sample_method"})

    def __init__(self, setup: DrafterSetup, model: CausalLM | None = None) -> None:
        self.model = model or _load_checked(setup)
        self.config = setup.config
        self.backend = setup.backend
        self.device = setup.device
        self.probabilistic = setup.speculation.draft_sample_method != "greedy"
        # Float32 logits of every draft, by slot: what `process_logits` gives, in any backend.
        self._q_shape = (
            setup.config.max_num_seqs,
            setup.speculation.num_speculative_tokens if self.probabilistic else 0,
            self.model.vocab_size,
        )
        self.needs = Needs(
            bytes_per_slot=4 * self._q_shape[1] * self._q_shape[2],
            kv_bytes_per_block=KVPool.bytes_per_block(
                self.model.layer_shapes, setup.config.block_size, self.model.dtype
            ),
        )
        self._num_computed_S = [0] * setup.config.max_num_seqs
        self._num_proposed_S = [0] * setup.config.max_num_seqs
        self._complete = bytearray()
        self._kv: KVPool | None = None
        self._q_logits_SKV = torch.empty(0)

    def allocate(self, num_blocks: int) -> None:
        """K/V tensors for as many blocks as the target has, and q for every slot."""
        self._q_logits_SKV = torch.empty(self._q_shape, dtype=torch.float32, device=self.device)
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
        slots = np.array([r.slot for r in requests], dtype=np.int64)
        slot_B = torch.from_numpy(slots).to(self.device)
        real_q_B = (context.params.temperature_S[slot_B] > 0) & self.probabilistic
        capture = bool(real_q_B.any())
        asked = [(r, k) for r, k in zip(requests, num_drafts, strict=True) if k]
        for request, _ in asked:
            self._skip_complete(request)
        self._catch_up([request for request, _ in asked])
        found = self._draft_at_once(asked, context.params, capture)
        if found is None:
            found = self._draft_by_passes(asked, context.params, capture)
        for request, k in asked:
            self._advance(request, len(request.token_ids))
            self._num_proposed_S[request.slot] = k
        block = one_hot_block([next(found) if k else [] for k in num_drafts], self.device)
        if not capture:
            return block
        return replace(block, logits_SKV=self._q_logits_SKV, real_q_B=real_q_B)

    def _draft_at_once(
        self, asked: Sequence[tuple[DraftRequest, int]], params: SlotParams, capture: bool
    ) -> Iterator[list[int]] | None:
        """All passes and draws in one native call, or None where that does not cover what is asked.

        With K = 5 the draft passes of the embedded pair took 3.7 to 4.6 ms a step through the
        modules, and the work beside them 1.5.
        """
        fused, kv = self.model.fused, self._kv
        if fused is None or kv is None or not asked or (capture and self.config.use_fp64_gumbel):
            return None
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
        token_BK = fused.draft(
            first,
            kv,
            params,
            torch.from_numpy(np.array(blocks, dtype=np.int64)),
            torch.from_numpy(np.array(numbers, dtype=np.int64)),
            self._q_logits_SKV if capture else None,
        )
        if token_BK is None:
            return None
        return (row[:k] for row, (_, k) in zip(token_BK.tolist(), asked, strict=True))

    def _draft_by_passes(
        self, asked: Sequence[tuple[DraftRequest, int]], params: SlotParams, capture: bool
    ) -> Iterator[list[int]]:
        drafts: list[list[int]] = [[] for _ in asked]
        for i in range(max((k for _, k in asked), default=0)):
            live = [(r, own) for (r, k), own in zip(asked, drafts, strict=True) if k > i]
            logits_BV = self._forward([self._next_span(r, own) for r, own in live])
            if capture:
                tokens = self._draw(logits_BV, params, [r for r, _ in live], i)
            else:
                tokens = logits_BV.argmax(dim=-1).tolist()
            for (_, own), token in zip(live, tokens, strict=True):
                own.append(token)
        return iter(drafts)

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
        self, logits_BV: Tensor, params: SlotParams, requests: Sequence[DraftRequest], i: int
    ) -> list[int]:
        """Sample draft i of each request and keep the q it came from, by slot."""
        slot_B = torch.tensor([r.slot for r in requests], device=self.device)
        processed_BV = self.backend.process_logits(logits_BV, params, slot_B, None).float()
        self._q_logits_SKV[slot_B, i] = processed_BV
        position_B = torch.tensor([len(r.token_ids) + i for r in requests], device=self.device)
        token_B = self.backend.sample(
            processed_BV,
            params,
            slot_B,
            position_B,
            torch.full_like(position_B, i),
            (Stream.DRAFT_TOKEN, Stream.DRAFT_BLOCK),
            fp64_noise=self.config.use_fp64_gumbel,
        )
        return cast(list[int], token_B.tolist())


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
    tokenizer = load_tokenizer(name)
    if setup.target_tokens is not None and tokenizer is not None:
        _check_same_tokens(name, tokenizer.get_vocab(), setup.target_tokens)
    model = load_model(
        name,
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

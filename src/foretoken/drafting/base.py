"""The contract of drafters.

A drafter proposes up to K tokens for each request in one call, at the beginning of the step that
verifies them. It observes the outcome of every step, prefill included. It may drop a draft only
because of q and the tokens before the draft, never because of the drafted token: otherwise the
rejection rules would be biased.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from foretoken.config import EngineConfig, SpeculativeConfig
from foretoken.errors import IntegrityError
from foretoken.models import CausalLM, TargetView, load_model
from foretoken.ops import Backend, DraftBlock
from foretoken.ops.stack import Weight
from foretoken.ops.steps import DraftRequests, ForwardBatch
from foretoken.slots.step import StepRequests, StepResult
from foretoken.slots.table import SlotTable


@dataclass(frozen=True, slots=True)
class DrafterSetup:
    """The arguments of a drafter. The size of the block pool comes later, with `allocate`.

    config: the engine's options.
    speculation: the options of this drafter.
    vocab_size, max_model_len: of the target.
    tokenizer: the target's `PreTrainedTokenizerBase`; None if the target has no tokenizer.
    embedding, head: weights [V, H] of the target; the head only if `target_view` asks for it.
    on_host: whether the tensors of a step may be read without waiting, see `SlotTable`.
    """

    config: EngineConfig
    speculation: SpeculativeConfig
    backend: Backend
    device: torch.device
    vocab_size: int
    max_model_len: int
    tokenizer: Any = None
    embedding: Weight | None = None
    head: Weight | None = None
    on_host: bool = True
    load_model: Callable[..., CausalLM] = load_model

    @property
    def block_size(self) -> int:
        if self.config.block_size is None:
            raise IntegrityError("an engine's options reached a drafter without `block_size`")
        return self.config.block_size


class Drafter(ABC):
    """Base class of all drafters.

    options: the fields of `SpeculativeConfig` that the drafter reads in addition to the fields that
        every drafter reads; all other fields must be unset.
    looks_up: whether the drafter looks up drafts at hardly any cost, and may find no drafts.
        `hybrid` asks such drafters first.
    names: if several drafters are loaded together, their names by number, then `hybrid` if requests
        may use it; () for a single drafter.
    kv_bytes_per_block: memory for the drafter's K/V of one cache block. Drafters use the engine's
        block ids, so their K/V roll back with the target's.
    bytes_per_slot: memory for one request in addition to K/V. It is assumed to grow with K, since
        most of it is the q of the drafts.
    bytes_shared: host memory for the texts that all requests look up.
    reads_next_token: whether the state that the drafter keeps for a position also depends on the
        token after it. A block is then shared only by requests with the same token after the block.
    prediction_readers: names of the loaded drafters that draft from `SamplingParams.prediction`.
    measured: number of the drafter, if there are several, that is timed at start for K = `auto`.
    num_behind: the most tokens of a request that the target's cache may have, and the drafter's
        cache lack, after any step: without drafts, with another drafter's drafts, with prompts, or
        the request's last step. Other requests find a block only once the target has computed this
        many tokens past the block's end. 0 if the drafter remembers which blocks it filled.
    """

    options: ClassVar[frozenset[str]] = frozenset()
    looks_up: ClassVar[bool] = False
    names: tuple[str, ...] = ()
    reads_next_token: bool = False
    prediction_readers: tuple[str, ...] = ()
    measured: int = 0
    num_behind: int = 0
    kv_bytes_per_block: int = 0
    bytes_per_slot: int = 0
    bytes_shared: int = 0

    @classmethod
    def target_view(cls, config: EngineConfig) -> TargetView:
        """What the drafter reads of the target in addition to tokens; no model is loaded yet."""
        return TargetView()

    @abstractmethod
    def __init__(self, setup: DrafterSetup) -> None:
        """Load the drafter's model, if it has one."""

    @abstractmethod
    def allocate(self, slots: SlotTable, num_blocks: int) -> None:
        """Remember the slots, and allocate memory, which replaces that of an earlier call. On a GPU
        there are two calls: one with a pool of one block, for the steps that measure memory, and
        one when the engine has chosen the size of its pool."""

    @abstractmethod
    def propose(self, requests: DraftRequests) -> DraftBlock:
        """Draft up to `num_B` tokens (0 allowed) after the known tokens of each request.

        Returns a block with one row per request, in the order of `requests`. Every draft is a
        token; -1 is only padding after a request's last draft. An error that concerns one request
        goes into the block's `faults`.

        Draft i of a request is drawn by `Backend.draft` at (position length + i, draft index i),
        from q at the request's temperature and filters: with DRAFT noise, or under COUPLED with the
        target's noise. Drafts ignore penalties, bias and bans. A real q, the distribution from
        which the draft was drawn, is in the block's cache at [slot, i] until the next call.

        The slots' block tables cover position_B + num_B tokens. Leading blocks may be shared with
        requests that begin with the same tokens, and that may never have had drafts.
        """

    def observe(  # noqa: B027 (optional hook)
        self, requests: StepRequests, batch: ForwardBatch, result: StepResult
    ) -> None:
        """Learn what the target computed, prompts included, and which drafts were accepted.

        The slots already have the outcome: lengths count the tokens that this step drew. On a
        host `num_drafts` of a decision is 0 where another drafter made the drafts. `result.aux` has
        the hidden states that `target_view` asks for, in the order of `batch`.
        """

    def observes(self, requests: StepRequests) -> bool:
        """Whether `observe` has work after this step, as far as the host knows."""
        return type(self).observe is not Drafter.observe

    def clear(self, block_ids: Sequence[int]) -> None:  # noqa: B027
        """Forget what is kept for these blocks, which get other tokens. Their K/V need not be
        zeroed unless the model multiplies masked keys (a NaN would spread)."""

    def release(self, slot: int) -> None:  # noqa: B027
        """Forget the request in this slot: it ended, or was preempted and will get a new slot."""

    def held_slots(self) -> Iterable[int]:
        """Slots for which the drafter keeps state; each must have a request."""
        return ()


def select_requests(requests: DraftRequests, index_A: Tensor) -> DraftRequests:
    """The requests at these indices (one or more). Only on a host, because `num_B` is read."""
    num_A, position_A = requests.num_B[index_A], requests.position_B[index_A]
    return requests._replace(
        slot_B=requests.slot_B[index_A], num_B=num_A, position_B=position_A, most=int(num_A.max())
    )


def draft_by_grammar(
    requests: DraftRequests,
    grammar_B: Sequence[bool | None],
    draft: Callable[[DraftRequests, bool], Tensor],
) -> Tensor:
    """Drafts [B, K]; -1 after a request's last draft.

    Requests with and without a grammar have separate calls of `draft`, so that a request's text
    does not depend on whether other requests have grammars.

    Args:
        grammar_B: for each request whether it has a grammar, None for a request that gets no
            drafts; or a single value for all requests.
        draft: makes the drafts of some requests, which all have a grammar (True) or all have none.
    """
    if len({*grammar_B}) == 1:
        return draft(requests, bool(grammar_B[0]))
    token_BK = torch.full((len(grammar_B), requests.most), -1)
    for has_grammar in {*grammar_B} - {None}:
        index_A = torch.tensor([b for b, value in enumerate(grammar_B) if value == has_grammar])
        requests_A = select_requests(requests, index_A)
        if requests_A.most:
            token_AK = draft(requests_A, bool(has_grammar))
            token_BK[index_A, : token_AK.shape[1]] = token_AK
    return token_BK


@cache
def no_drafts(num_requests: int, device: torch.device) -> DraftBlock:
    """A `DraftBlock` without drafts, the same object in every step."""
    return one_hot_block([[]] * num_requests, device)


@cache
def q_flags(num_requests: int, device: torch.device, *, real: bool) -> Tensor:
    """`DraftBlock.real_q_B` with one value for all requests, the same tensor in every step."""
    return torch.full((num_requests,), real, device=device)


def one_hot_block(drafts: Sequence[Sequence[int]], device: torch.device) -> DraftBlock:
    """A `DraftBlock` with one-hot q, from the drafts of each request."""
    counts = [len(tokens) for tokens in drafts]
    widest = max(counts, default=0)
    rows = [[*tokens, *[-1] * (widest - len(tokens))] for tokens in drafts]
    # For 450 numbers numpy takes 6 us, `torch.tensor` 40 us.
    token_BK = np.array(rows, dtype=np.int64).reshape(len(drafts), widest)
    num_B = torch.from_numpy(np.array(counts, dtype=np.int64)).to(device)
    real_q_B = torch.zeros(len(drafts), dtype=torch.bool, device=device)
    return DraftBlock(torch.from_numpy(token_BK).to(device), num_B, None, real_q_B)

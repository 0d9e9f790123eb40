"""The drafter contract: memory and view of the target as data; propose; observe the outcome.

Charter: what every drafter is given and must return. A drafter proposes up to K tokens for each
request in one call, at the beginning of the step that verifies them, and sees the outcome of every
step, prefill included. It never sees the token that the target will draw. Whether a draft is kept
must not depend on the token drafted there, only on the tokens before it and on q: else the
rejection rules would be biased.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from foretoken.config import EngineConfig, SpeculativeConfig
from foretoken.errors import IntegrityError
from foretoken.models import TargetView
from foretoken.ops import Backend, DraftBlock
from foretoken.ops.stack import Weight
from foretoken.ops.steps import DraftRequests, ForwardBatch
from foretoken.slots.step import StepRequests, StepResult
from foretoken.slots.table import SlotTable


@dataclass(frozen=True, slots=True)
class DrafterSetup:
    """What a drafter is built from; the pool's size comes later, with `allocate`.

    Attributes:
        config: the engine's options; `speculation`: this drafter's own.
        vocab_size, max_model_len: the target's.
        tokenizer: the target's (`PreTrainedTokenizerBase`), or None if it has none.
        embedding, head: the target's own weights, [V, H]; `head` only if `target_view` asks for it.
        on_host: whether tensors of a step may be read without waiting, see `SlotTable`.
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

    @property
    def block_size(self) -> int:
        """Tokens per cache block."""
        if self.config.block_size is None:
            raise IntegrityError("an engine's options reached a drafter without `block_size`")
        return self.config.block_size


class Drafter(ABC):
    """Base class of all drafters; built as `cls(setup)`.

    options: the optional fields of `SpeculativeConfig` that it reads; others are refused.
    looks_up: it finds drafts at hardly any cost, or has none: `hybrid` asks it first.
    names: names of several drafters loaded together, by number, with `hybrid` last if it is one of
        them; () for a single drafter.
    kv_bytes_per_block: memory for K/V of one cache block. Drafters use the engine's block ids, so
        their K/V roll back with the target's.
    bytes_per_slot: memory for one request besides K/V. It is assumed to grow with K, since most of
        it is the q of the drafts.
    bytes_shared: host memory that all requests share, in which texts are looked up.
    reads_next_token: what it keeps for a position also depends on the token after it. A block is
        then shared only among requests that have the same token after its last one.
    prediction_readers: names of drafters in it that draft from `SamplingParams.prediction`.
    measured: of several, the number of the drafter that is timed at start for K = `auto`.
    num_behind: how many of the last tokens that the target has computed for a request the drafter's
        half of the cache may lack after any step: a round, a step without drafts or with another
        drafter's, prompts in the same step, a request that ends. Other requests find a block only
        once the target has computed this many tokens past its end. Also 0 if the drafter itself
        remembers which blocks are complete.
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
        """What it reads of the target besides tokens; called before the target is loaded."""
        return TargetView()

    @abstractmethod
    def __init__(self, setup: DrafterSetup) -> None:
        """Load its model, if any; memory by slot and block comes with `allocate`."""

    @abstractmethod
    def allocate(self, slots: SlotTable, num_blocks: int) -> None:
        """Remember the slots and allocate memory; a second call replaces the first one's.

        On a GPU there are two calls: the first, with a pool of one block, is for steps that measure
        memory; the second comes when the engine has sized its pool.
        """

    @abstractmethod
    def propose(self, requests: DraftRequests) -> DraftBlock:
        """Draft up to `num_B` tokens (0 allowed) after each slot's known ones, in the given order.

        Token i of a request is drawn by `Backend.draft` at (position length + i, draft index i),
        from q at the request's temperature and filters: with DRAFT noise, or under COUPLED with the
        target's own. Drafts ignore penalties, bias and bans; q is what they were really drawn from.
        Where q is real, the block's cache has it at [slot, i], unchanged until the next call.
        Every draft is a token; -1 is only padding after a request's last one. An error that
        concerns one request goes into the block's `faults`.

        The slots' block tables cover length + num_drafts tokens. Leading blocks may be shared with
        requests that begin with the same tokens, and may have been filled for a request that never
        had drafts.
        """

    def observe(  # noqa: B027 (optional hook)
        self, requests: StepRequests, batch: ForwardBatch, result: StepResult
    ) -> None:
        """Learn what the target computed, prompts included, and which drafts were accepted.

        Among several drafters, `num_drafts` of a decision is 0 if another one made the drafts. The
        slots already hold the outcome: lengths count the tokens that were drawn. `result.aux` has
        the hidden states that `target_view` asks for, in the order of `batch`.
        """

    def observes(self, requests: StepRequests) -> bool:
        """Whether `observe` has work after this step, as far as the host knows."""
        return type(self).observe is not Drafter.observe

    def clear(self, block_ids: Sequence[int]) -> None:  # noqa: B027
        """Forget what is kept for these blocks: they are reused for other tokens.

        K/V need not be zeroed unless the model multiplies masked keys (a NaN would spread).
        """

    def release(self, slot: int) -> None:  # noqa: B027
        """Forget the request in this slot: it ended, or was preempted and will get a new slot."""

    def held_slots(self) -> Iterable[int]:
        """Slots for which it keeps anything; a slot without a request must not be among them."""
        return ()


def select_requests(requests: DraftRequests, index_A: Tensor) -> DraftRequests:
    """The requests at these indices, one or more; reads `num_B`, so only on a host."""
    num_A = requests.num_B[index_A]
    return requests._replace(
        slot_B=requests.slot_B[index_A],
        num_B=num_A,
        position_B=requests.position_B[index_A],
        most=int(num_A.max()),
    )


@cache
def no_drafts(num_requests: int, device: torch.device) -> DraftBlock:
    """A `DraftBlock` without drafts, the same object in every step."""
    return one_hot_block([[]] * num_requests, device)


@cache
def q_flags(num_requests: int, device: torch.device, *, real: bool) -> Tensor:
    """`DraftBlock.real_q_B` with one value for all requests, the same tensor in every step."""
    return torch.full((num_requests,), real, device=device)


def one_hot_block(drafts: Sequence[Sequence[int]], device: torch.device) -> DraftBlock:
    """A `DraftBlock` of ragged token lists, with one-hot q."""
    counts = [len(d) for d in drafts]
    widest = max(counts, default=0)
    rows = [[*d, *[-1] * (widest - len(d))] for d in drafts]
    # numpy first: torch.tensor takes 40 us for 450 numbers, this 6.
    token_BK = np.array(rows, dtype=np.int64).reshape(len(drafts), widest)
    return DraftBlock(
        token_BK=torch.from_numpy(token_BK).to(device),
        num_B=torch.from_numpy(np.array(counts, dtype=np.int64)).to(device),
        cache=None,
        real_q_B=torch.zeros(len(drafts), dtype=torch.bool, device=device),
    )

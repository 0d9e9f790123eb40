"""The drafter contract: memory and the view of the target as data; propose; observe the outcome.

Charter: what every drafter is given and must give back. A drafter proposes up to K tokens for each
request in one call, at the beginning of the step that verifies them, and sees every step's outcome,
prefill too. It never sees the token that the target will draw, and never decides a draft's length
from the token drafted there (that would bias the rejection rules): the length may depend on the
tokens before it and on q alone.
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
    """What a drafter is built from; the pool's size comes later, with `allocate`.

    Attributes:
        config: the engine's options; `speculation` are those of this drafter.
        vocab_size, max_model_len: the target's.
        tokenizer: the target's (`PreTrainedTokenizerBase`), or None without one.
        embedding, head: weights [V, H] of the target itself; the head if `target_view` asks for it.
        on_host: whether the numbers of a step may be read at once, see `SlotTable`.
        load_model: loads a draft model.
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
        """Tokens per cache block."""
        if self.config.block_size is None:
            raise IntegrityError("an engine's options reached a drafter without `block_size`")
        return self.config.block_size


class Drafter(ABC):
    """Base class of all drafters; built as `cls(setup)`.

    options: the optional fields of `SpeculativeConfig` that it reads; others are refused.
    looks_up: drafts are found at hardly any cost, or there are none: `hybrid` asks it first.
    names: of several drafters loaded together, by number, and `hybrid` after them where there is
        one; () for a drafter by itself.
    kv_bytes_per_block, bytes_per_slot: memory that the instance asks for: K/V of one cache block,
        addressed by the engine's block ids, so that they roll back with the target's; and what it
        keeps for one request besides K/V, the q of its drafts above all, so that it is taken to
        grow with K.
    bytes_shared: memory on the host that all requests share, in which texts are looked up.
    reads_next_token: what it keeps for a position depends on the token after it, too. A block is
        then shared only among requests that agree in the token after its last one.
    prediction_readers: names of drafters in it that draft from `SamplingParams.prediction`.
    measured: of several, the number of the one whose time is measured at start for K = `auto`.
    num_behind: of the tokens that the target has computed for a request, how many of the last may
        be missing in the drafter's half of the cache after a step, whatever the step was: rounds,
        steps without drafts or with others', prompts next to them, a request that ends. A block is
        found by others once the target has computed so many tokens past its end. 0 also if the
        drafter itself remembers which blocks are complete.
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
        """What it will see of the target beyond tokens; asked before the target is loaded."""
        return TargetView()

    @abstractmethod
    def __init__(self, setup: DrafterSetup) -> None:
        """Load what it drafts with; memory by slot and block comes with `allocate`."""

    @abstractmethod
    def allocate(self, slots: SlotTable, num_blocks: int) -> None:
        """Remember the slots, allocate memory; a second call forgets what the first one gave.

        On a GPU the first is for steps whose memory is measured, with a pool of one block; the
        second is when the engine has sized its pool.
        """

    @abstractmethod
    def propose(self, asked: DraftRequests) -> DraftBlock:
        """Draft up to so many tokens (0 allowed) after the known ones of each slot, in this order.

        Token i of a request is drawn by `Backend.draft` at (position length + i, draft index i),
        from q at the request's temperature and filters: with DRAFT noise, or with the target's own
        under COUPLED. Where q is real, the block's cache states it at [slot, i] and stays so until
        the next call. Drafts see temperature and filters, not penalties, bias or bans: q says what
        they saw. Every draft is a token: -1 stands only after a request's last one, as padding.
        What is raised for one request alone goes into `faults` of the block.

        The slots' block tables cover length + num_drafts tokens. Leading blocks may be shared with
        requests that begin with the same tokens, and may have been filled by one that was never
        drafted for.
        """

    def observe(  # noqa: B027 (optional hook)
        self, requests: StepRequests, batch: ForwardBatch, result: StepResult
    ) -> None:
        """See what the target computed, prompts too, and what became of its drafts.

        With other drafters, `num_drafts` of a decision is 0 where the drafts were another's.
        The slots hold the outcome: lengths count the tokens that were drawn. Hidden states
        that `target_view` asks for are `result.aux`, in the order of `batch`.
        """

    def observes(self, requests: StepRequests) -> bool:
        """Whether `observe` has anything to do after such a step, as far as the host knows."""
        return type(self).observe is not Drafter.observe

    def clear(self, block_ids: Sequence[int]) -> None:  # noqa: B027
        """Forget what is kept for these blocks: they are handed out anew, for other tokens.

        K/V need not be zeroed unless the model multiplies masked keys (a NaN would spread).
        """

    def release(self, slot: int) -> None:  # noqa: B027
        """Forget the request in this slot: it ended, or was preempted and will be new to a slot."""

    def held_slots(self) -> Iterable[int]:
        """Slots for which it keeps anything, to be found empty when no request has them."""
        return ()


@cache
def no_drafts(num_requests: int, device: torch.device) -> DraftBlock:
    """A `DraftBlock` without drafts, the same one in every step."""
    return one_hot_block([[]] * num_requests, device)


@cache
def q_flags(num_requests: int, device: torch.device, *, real: bool) -> Tensor:
    """`DraftBlock.real_q_B` of requests that are alike, the same tensor in every step."""
    return torch.full((num_requests,), real, device=device)


def one_hot_block(drafts: Sequence[Sequence[int]], device: torch.device) -> DraftBlock:
    """A `DraftBlock` of ragged token lists whose q is one-hot."""
    counts = [len(d) for d in drafts]
    widest = max(counts, default=0)
    rows = [[*d, *[-1] * (widest - len(d))] for d in drafts]
    # By way of numpy: torch.tensor takes 40 us for 450 numbers, this 6.
    token_BK = np.array(rows, dtype=np.int64).reshape(len(drafts), widest)
    return DraftBlock(
        token_BK=torch.from_numpy(token_BK).to(device),
        num_B=torch.from_numpy(np.array(counts, dtype=np.int64)).to(device),
        cache=None,
        real_q_B=torch.zeros(len(drafts), dtype=torch.bool, device=device),
    )

"""The drafter contract: needs declared as data, propose, observe the outcome.

Charter: what every drafter is given and must give back. A drafter proposes up to K tokens for each
request in one call and later learns how many were accepted. It never sees the token that the
target will draw, and never decides a draft's length from the token drafted there (that would bias
the rejection rules): the length may depend on the tokens before it and on q alone.

Shape suffixes: B requests of the call, K most drafts, S slots, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from foretoken.config import EngineConfig, SpeculativeConfig
from foretoken.ops import Backend, DraftBlock, Rule, SlotParams


@dataclass(frozen=True, slots=True)
class Needs:
    """What a drafter asks of the engine, counted in its memory plan.

    Attributes:
        kv_bytes_per_block: K/V bytes of one cache block; the drafter keeps its own tensors but
            addresses them by the engine's block ids, so its cache rolls back with the target's.
        bytes_per_slot: what it keeps for one request beside K/V, the q of its drafts above all.
    """

    kv_bytes_per_block: int = 0
    bytes_per_slot: int = 0


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """What a drafter may know of one request.

    Attributes:
        slot: permanent index of the request's state.
        token_ids: every known token, prompt and output; the first draft is for position
            len(token_ids).
        block_ids: cache blocks covering len(token_ids) + num_drafts tokens. Leading ones may be
            shared with requests that begin with the same tokens, and may have been filled by one
            that was never drafted for.
        num_drafts: most tokens to draft, >= 1.
        temperature, rule: those of its slot, known to the host. Drafts are drawn from q if the
            temperature is not 0, and the rule asks for that q unless it is COUPLED.
    """

    slot: int
    token_ids: Sequence[int]
    block_ids: Sequence[int]
    num_drafts: int
    temperature: float
    rule: Rule

    @property
    def keeps_q(self) -> bool:
        """Whether verification will ask for the q of its drafts, if they are drawn from one."""
        return self.temperature > 0 and self.rule is not Rule.COUPLED


@dataclass(frozen=True, slots=True)
class DraftContext:
    """One call's input: the requests in batch order, and every slot's sampling state."""

    requests: Sequence[DraftRequest]
    params: SlotParams


@dataclass(frozen=True, slots=True)
class DrafterSetup:
    """What a drafter is built from; the pool's size comes later, with `allocate`.

    Attributes:
        config: the engine's options; `speculation` are those of this drafter.
        vocab_size, max_model_len: the target's.
        target_tokens: token text -> id of the target's tokenizer, or None without a tokenizer.
    """

    config: EngineConfig
    speculation: SpeculativeConfig
    backend: Backend
    device: torch.device
    vocab_size: int
    max_model_len: int
    target_tokens: dict[str, int] | None = None


class Drafter(ABC):
    """Base class of all drafters; built as `cls(setup)` by the registry.

    options: the optional fields of `SpeculativeConfig` that it reads; others are refused.
    needs: set by the instance if it needs anything.
    """

    options: ClassVar[frozenset[str]] = frozenset()
    needs: Needs = Needs()

    @abstractmethod
    def __init__(self, setup: DrafterSetup) -> None:
        """Load what it drafts with; per-block memory comes with `allocate`."""

    def allocate(self, num_blocks: int) -> None:  # noqa: B027 (optional hook)
        """Allocate per-block memory; called once, when the engine has sized its pool."""

    @abstractmethod
    def propose(self, context: DraftContext) -> DraftBlock:
        """Draft up to `num_drafts` tokens per request, in the order given.

        Token i of a request is drawn by `Backend.draft` at (position len(token_ids) + i, draft
        index i), from q at the request's temperature and filters: with DRAFT noise, or with the
        target's own under COUPLED. Where q is real, the block's cache states it at [slot, i] and
        stays so until the next call. Drafts see temperature and filters, not penalties, bias or
        bans: q says what they saw. A drawn token is never replaced by -1 for what it is.
        """

    def observe(self, slot: int, num_drafted: int, num_accepted: int) -> None:  # noqa: B027
        """Learn what became of this slot's last proposal: how many of its drafts were accepted."""

    def clear(self, block_ids: Sequence[int]) -> None:  # noqa: B027
        """Forget what is kept for these blocks: they are handed out anew, for other tokens.

        K/V need not be zeroed unless the model multiplies masked keys (a NaN would spread).
        """

    def release(self, slot: int) -> None:  # noqa: B027
        """Forget the request in this slot: it ended, or was preempted and will be new to a slot."""


def one_hot_block(drafts: Sequence[Sequence[int]], device: torch.device) -> DraftBlock:
    """A `DraftBlock` of ragged token lists whose q is one-hot (or of no drafts at all)."""
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

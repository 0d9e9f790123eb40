"""What a step does with its slots between the models: the contract, and the data of it.

On an asynchronous device tokens and lengths are known there alone; what the host gives besides are
upper bounds. There every function launches a kernel or two, whatever the batch, and reads nothing
on the host, so that steps can be captured. On a CPU batches have their true sizes. The functions
are an engine's own: arguments are not checked. All tensors are contiguous.

The last slot is the spare: padding of a batch names it, as often as it takes. It has one token, may
have no more, and all its blocks are one that belongs to no request.

Shape suffixes: S slots, W tokens of a slot, L its block-table columns, B requests, D those that
decide, K drafts, T packed tokens, N rows of logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from foretoken.ops.types import AttentionBatch, SlotParams, Verdict


class SlotState(NamedTuple):
    """Tokens, blocks and lengths of all slots, as contiguous tensors on the slots' device.

    Attributes:
        token_SL: int32 [S, W], known tokens, then drafts, then anything.
        block_SL: int64 [S, L], cache blocks by position.
        length_S: int64, known tokens, those of the latest step included.
        computed_S: int64, leading tokens whose K/V are in the target's cache.
        limit_S: int64, most tokens the request may have; its length, once nothing may be added.
    """

    token_SL: Tensor
    block_SL: Tensor
    length_S: Tensor
    computed_S: Tensor
    limit_S: Tensor


class StepTokens(NamedTuple):
    """What a step computes of each request: known tokens, then drafts if it decides.

    slot_B:       int64, no two alike but the spare
    num_tokens_B: int64, known tokens, one at least
    of_B:         int64, which of the D deciding requests each is, -1: none of them; None: all B
                  decide, in this order
    num_D:        int64, drafts of those that decide
    """

    slot_B: Tensor
    num_tokens_B: Tensor
    of_B: Tensor | None
    num_D: Tensor


class PackSizes(NamedTuple):
    """How large a batch is: upper bounds known to the host.

    tokens, rows: no more than so many tokens, and rows whose logits are wanted
    queries:      no request has more new tokens
    ahead:        positions after each request's last token that its block table covers, too
    """

    tokens: int
    rows: int
    queries: int
    ahead: int = 0


class ForwardBatch(NamedTuple):
    """Packed input of one forward pass, request by request.

    On a device, after the tokens of the last request may follow those of the spare slot at
    position 0, and after the last row that is wanted token 0: these are not read.

    token_T, position_T: int64
    logit_row_N: int64 indices into T whose logits are wanted; T of them are all, in order
    attention:   which request's the tokens are, and where their K/V go; its `block_BL` is written
                 as far as the batch reads it
    num_deciding: so many of the rows, the first ones, decide: the last K_b + 1 of each deciding
                 request, in order; None: all do
    """

    token_T: Tensor
    position_T: Tensor
    logit_row_N: Tensor
    attention: AttentionBatch
    num_deciding: int | None = None

    def deciding(self, logits_NV: Tensor) -> Tensor:
        """The rows that decide."""
        return logits_NV if self.num_deciding is None else logits_NV[: self.num_deciding]


class DraftRequests(NamedTuple):
    """Requests that want drafts, and how many.

    slot_B:     int64
    num_B:      int64, most drafts of each, 0 allowed: K_b
    position_B: int64, known tokens of each: where its first draft stands
    most:       no request wants more, as far as the host knows
    params:     the parameters of all slots, with what is promised of them in this step
    samples:    whether a request draws at random; True says nothing
    drafters:   numbers of the drafters that requests of the step may have
    """

    slot_B: Tensor
    num_B: Tensor
    position_B: Tensor
    most: int
    params: SlotParams
    samples: bool = True
    drafters: frozenset[int] = frozenset()


class Round(NamedTuple):
    """Where a round's passes compute, all of them over one block table, `first.attention`'s.

    Pass i > 0 computes one token of each request, draft i - 1, also for those that want no more:
    after what their blocks reach over, the table leads to the spare's block.

    num_B:       int64, drafts of each that the model has positions for
    first:       the known tokens of pass 0, with logits of each request's last one
    index_B1:    0..B
    position_KB: where pass i computes; length_KB: tokens in the cache then, which is also the
                 position of draft i wherever there is one; index_KB: i. Each row contiguous
    """

    num_B: Tensor
    first: ForwardBatch
    index_B1: Tensor
    position_KB: Tensor
    length_KB: Tensor
    index_KB: Tensor

    def batch(self, i: int, token_B: Tensor) -> ForwardBatch:
        """One token of each request, computed at the places of row i."""
        index_B1, known = self.index_B1, self.first.attention
        attention = AttentionBatch(
            index_B1, self.length_KB[i], known.block_BL, known.block_size,
            most_queries=1, values_fit=True,
        )  # fmt: skip
        return ForwardBatch(token_B, self.position_KB[i], index_B1[:-1], attention)


class Steps(Protocol):
    """Functions of a backend on one `SlotState`; `write_drafts` and `advance` change it.

    On a CPU what `count_drafts` and `pack` return may lie in memory that their next call on the
    same object overwrites.
    """

    def __init__(self, state: SlotState) -> None: ...

    def count_drafts(self, slot_B: Tensor, most_B: Tensor) -> tuple[Tensor, Tensor]:
        """K_b = min(most, tokens that may follow, less one), and the known tokens of each slot."""

    def write_drafts(
        self, asked: DraftRequests, num_B: Tensor, token_BK: Tensor, last_id: int
    ) -> None:
        """Write the first `num_B` drafts of each after its known tokens, as ids in 0..last_id.

        Raises:
            IntegrityError: on a CPU, if a request has more than it was asked for.
        """

    def pack(self, tokens: StepTokens, sizes: PackSizes, block_size: int) -> ForwardBatch:
        """The tokens after those computed, with the last K_b + 1 rows of who decides.

        In the place of a request that may have no more tokens stands the spare. On a CPU the batch
        has as many tokens, rows and columns of blocks as it needs, whatever the bounds.
        """

    def advance(self, tokens: StepTokens, verdict: Verdict) -> Tensor:
        """Take over a step: accepted drafts and the token after them are known now.

        Of requests that may have no more tokens nothing is taken over; one whose row was not finite
        stops.

        Returns:
            What the host will ask for, in memory of its own, int64 [B + D * (K + 4)]: tokens of
            each request computed before the step; then, of each that decided: drafts, accepted,
            finite, `token_BK1`.
        """

    def begin_round(self, asked: DraftRequests, known: int, max_len: int, block_size: int) -> Round:
        """Plan a round of `asked.most` passes of a model that has `max_len` positions.

        The first pass computes the last `known` tokens of each, or all it has. Blocks of slots
        reach over position + num tokens. A request that has more tokens than the model positions
        takes part as the spare.
        """

    def shift(
        self, slot_B: Tensor, batch: AttentionBatch, num_tokens: int
    ) -> tuple[Tensor, Tensor]:
        """What follows the tokens that a pass computed, once its step was taken over.

        Args:
            num_tokens: T; those after the batch's last are padding.

        Returns:
            int64 [T], the token after each one's position, drafted ones too; where there is none,
            some id. And int64 [B], the last token of each request with a known one after it; its
            first if none has.
        """

    def join_drafts(self, drafts: Sequence[Tensor], num_B: Tensor) -> Tensor:
        """Drafts [B] of each pass as `DraftBlock.token_BK`, -1 after a request's last."""

    def look_up(self, asked: DraftRequests, shortest: int, longest: int) -> tuple[Tensor, Tensor]:
        """`token_BK` of `asked.most` columns and `num_B`, by prompt lookup (`drafting/ngram.py`).

        Args:
            shortest, longest: tokens of a suffix that counts.
        """

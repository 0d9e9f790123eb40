"""The bookkeeping of a step over its slots, between the models: the contract and its data.

On an asynchronous device only the device knows tokens and lengths; sizes are upper bounds known to
the host. There every function launches one or two kernels, whatever the batch, and reads nothing
back, so that steps can be captured. On a CPU batches have their true sizes. The engine is the only
caller: arguments are not checked. All tensors are contiguous.

The last slot is the spare: it pads batches and may occur in one several times. It has one token,
may have no more, and its whole block table names one block that belongs to no request.

A request *decides* in a step if the step verifies its drafts and samples its next token.

Shape suffixes: S slots, W tokens of a slot, L its block-table columns, B requests, D requests that
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
        computed_S: int64, leading tokens with K/V in the target's cache.
        limit_S: int64, most tokens the request may have; its length, once nothing may be added.
    """

    token_SL: Tensor
    block_SL: Tensor
    length_S: Tensor
    computed_S: Tensor
    limit_S: Tensor


class StepTokens(NamedTuple):
    """The tokens that a step computes of each request: known ones, then drafts if it decides.

    slot_B:       int64, no two alike except the spare
    num_tokens_B: int64, known tokens, at least one
    of_B:         int64, index of the request among the D that decide, -1 if it does not; None: all
                  B decide, in this order
    num_D:        int64, number of drafts of each request that decides
    """

    slot_B: Tensor
    num_tokens_B: Tensor
    of_B: Tensor | None
    num_D: Tensor


class PackSizes(NamedTuple):
    """How large a batch is: upper bounds known to the host.

    tokens, rows: most tokens, and most rows of logits, in the batch
    queries:      most new tokens of a request
    ahead:        positions after a request's last token that its block table also covers
    """

    tokens: int
    rows: int
    queries: int
    ahead: int = 0


class ForwardBatch(NamedTuple):
    """Packed input of one forward pass, request by request.

    On a device the batch may be padded: T with the spare slot's token at position 0, N with index
    0. Results of padding are not read.

    token_T, position_T: int64
    logit_row_N: int64 indices into T of the tokens that need logits; if N = T, all in order
    attention:   which request each token belongs to, and where its K/V go; `block_BL` is filled
                 only as far as the batch reads it
    num_deciding: how many of the N rows decide: the first ones, which are the last K_b + 1 of each
                 deciding request, in order; None: all
    """

    token_T: Tensor
    position_T: Tensor
    logit_row_N: Tensor
    attention: AttentionBatch
    num_deciding: int | None = None

    def deciding(self, logits_NV: Tensor) -> Tensor:
        """The logits of the rows that decide."""
        return logits_NV if self.num_deciding is None else logits_NV[: self.num_deciding]


class DraftRequests(NamedTuple):
    """Requests to draft for, and how many drafts to make.

    slot_B:     int64
    num_B:      int64, most drafts of each, 0 allowed: K_b
    position_B: int64, known tokens of each: the position of its first draft
    most:       upper bound of `num_B`, known to the host
    params:     the parameters of all slots; their promises hold for this step
    samples:    False: no request draws at random; True promises nothing
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
    """The batches of all passes of a round of drafting, over the block table of `first.attention`.

    Pass i > 0 computes one token of each request, draft i - 1, even if the request needs no more:
    past the request's own blocks the table names the spare's block.

    num_B:       int64, drafts of each request that fit the positions of the model
    first:       the batch of pass 0: known tokens, with logits of each request's last one
    index_B1:    0..B
    position_KB: position that pass i computes
    length_KB:   tokens in the cache after it, which is also the position of draft i if there is one
    index_KB:    i. Rows of all three are contiguous
    """

    num_B: Tensor
    first: ForwardBatch
    index_B1: Tensor
    position_KB: Tensor
    length_KB: Tensor
    index_KB: Tensor

    def batch(self, i: int, token_B: Tensor) -> ForwardBatch:
        """The batch of pass i > 0: one token of each request."""
        index_B1, known = self.index_B1, self.first.attention
        attention = AttentionBatch(
            index_B1, self.length_KB[i], known.block_BL, known.block_size,
            most_queries=1, values_fit=True,
        )  # fmt: skip
        return ForwardBatch(token_B, self.position_KB[i], index_B1[:-1], attention)


class Steps(Protocol):
    """Functions of a backend on one `SlotState`; `write_drafts` and `advance` change it.

    On a CPU the next call of `count_drafts` or `pack` on the same object may overwrite what the
    last one returned.
    """

    def __init__(self, state: SlotState) -> None: ...

    def count_drafts(self, slot_B: Tensor, most_B: Tensor) -> tuple[Tensor, Tensor]:
        """K_b = min(most, tokens that may follow - 1), at least 0; and each slot's known tokens."""

    def write_drafts(
        self, asked: DraftRequests, num_B: Tensor, token_BK: Tensor, last_id: int
    ) -> None:
        """Write each request's first `num_B` drafts after its known tokens, as ids in 0..last_id.

        Raises:
            IntegrityError: on a CPU, if a request has more than it was asked for.
        """

    def pack(self, tokens: StepTokens, sizes: PackSizes, block_size: int) -> ForwardBatch:
        """Pack the tokens after the computed ones; K_b + 1 rows of each deciding request.

        The spare replaces a request that may have no more tokens. On a CPU the batch has exactly
        the tokens, rows and columns of blocks that it needs, whatever the bounds.
        """

    def advance(self, tokens: StepTokens, verdict: Verdict) -> Tensor:
        """Apply a verdict: accepted drafts and the token after them become known tokens.

        Requests that may have no more tokens do not change; a request with a row that was not
        finite stops.

        Returns:
            What the host reads later, in memory of its own, int64 [B + D * (K + 4)]: the tokens of
            each request computed before the step; then, for each request that decided: number of
            drafts, accepted, finite, `token_BK1`.
        """

    def begin_round(self, asked: DraftRequests, known: int, max_len: int, block_size: int) -> Round:
        """Plan a round of `asked.most` passes of a model that has `max_len` positions.

        The first pass computes the last `known` tokens of each request, or all it has. The blocks
        of a slot hold position + num tokens. The spare replaces a request that has more tokens than
        the model has positions.
        """

    def shift(
        self, slot_B: Tensor, batch: AttentionBatch, num_tokens: int
    ) -> tuple[Tensor, Tensor]:
        """The token that follows each token of a pass, after `advance` of its step.

        Args:
            num_tokens: T; tokens after the batch's last are padding.

        Returns:
            int64 [T], the token at the next position, which may be a draft; some id if there is
            none. And int64 [B], the index in T of each request's last token that has a known token
            after it; of its first token if none has.
        """

    def join_drafts(self, drafts: Sequence[Tensor], num_B: Tensor) -> Tensor:
        """The drafts of each pass, [B], as `DraftBlock.token_BK`: -1 after a request's last."""

    def look_up(self, asked: DraftRequests, shortest: int, longest: int) -> tuple[Tensor, Tensor]:
        """`token_BK` of `asked.most` columns and `num_B`, by prompt lookup (`drafting/ngram.py`).

        Args:
            shortest, longest: lengths of the suffixes that are looked up.
        """

"""The contract of a backend's functions on the slots of a step, between the passes of models.

On an asynchronous device only the device knows tokens and lengths; sizes are upper bounds known to
the host. On such a device every function launches one or two kernels, whatever the batch, and reads
nothing back, so that steps can be captured. On a CPU batches have their true sizes. Arguments are
not checked, because the engine is the only caller. All tensors are contiguous.

The last slot is the spare slot. It pads batches, and may occur several times in one batch. It has
one token, may have no more, and its whole block table names one block that belongs to no request.

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

    token_SL: int32 [S, W], known tokens, then drafts; any values after these.
    block_SL: int64 [S, L], cache blocks by position.
    length_S: int64, known tokens, those of the latest step included.
    computed_S: int64, leading tokens with K/V in the target's cache.
    limit_S: int64, the number of tokens that the request may have. It is lowered to the request's
        length if logits were not finite.
    """

    token_SL: Tensor
    block_SL: Tensor
    length_S: Tensor
    computed_S: Tensor
    limit_S: Tensor


class StepTokens(NamedTuple):
    """The tokens that a step computes: known tokens of each request, then its drafts if it decides.

    slot_B: int64, no two alike except the spare slot
    num_tokens_B: int64, number of known tokens to compute, at least one
    decider_B: int64, index of each request among the D requests that decide, -1 if it does not
        decide; None: all B decide, in this order
    num_D: int64, number of drafts of each request that decides
    """

    slot_B: Tensor
    num_tokens_B: Tensor
    decider_B: Tensor | None
    num_D: Tensor


class PackSizes(NamedTuple):
    """Upper bounds of a batch's size, known to the host.

    tokens, rows: number of tokens, and of rows of logits, in the batch
    queries: number of new tokens of one request
    ahead: number of positions after a request's last token that the block table also covers
    """

    tokens: int
    rows: int
    queries: int
    ahead: int = 0


class ForwardBatch(NamedTuple):
    """Packed input of one forward pass, request by request.

    On a device the batch may be padded: tokens with the spare slot's token at position 0, rows of
    logits with index 0. Results of padding are not read.

    token_T, position_T: int64
    logit_row_N: int64 indices into T of the tokens that need logits; if N = T, all in order
    attention: which request each token belongs to, and the blocks of each request, as far as this
        pass needs them
    num_deciding: number of rows with which requests decide. These rows come first: K_b + 1 of each
        deciding request, in order. None: all N rows
    """

    token_T: Tensor
    position_T: Tensor
    logit_row_N: Tensor
    attention: AttentionBatch
    num_deciding: int | None = None

    def deciding(self, logits_NV: Tensor) -> Tensor:
        return logits_NV if self.num_deciding is None else logits_NV[: self.num_deciding]


class DraftRequests(NamedTuple):
    """Requests to draft for, and how many drafts to make.

    slot_B: int64
    num_B: int64, K_b: upper bound of the drafts of each request, 0 allowed
    position_B: int64, number of known tokens of each request: the position of the first draft
    most: upper bound of all `num_B`, known to the host
    params: the parameters of all slots; the flags hold for this step
    samples: False: no request draws at random; True: some may
    drafters: numbers of the drafters that requests of the step may have
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

    Pass i > 0 computes one token of each request, draft i - 1. If the request needs no more drafts,
    its K/V go to the spare slot's block, which the table names after the request's own blocks. Row
    i of the fields with suffix KB belongs to pass i.

    num_B: int64, number of drafts of each request for which the model has positions
    first: the batch of pass 0: known tokens, with logits of each request's last known token
    index_B1: 0..B
    position_KB: position of the token that the pass computes
    length_KB: tokens in the cache after the pass, which is also the position of draft i
    index_KB: the number i
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
    """Functions of a backend on one `SlotState`; `write_drafts` and `advance` change the state.

    On a CPU a call of `count_drafts` or `pack` may overwrite the tensors of the last call.
    """

    def __init__(self, state: SlotState) -> None: ...

    def count_drafts(self, slot_B: Tensor, most_B: Tensor) -> tuple[Tensor, Tensor]:
        """The number of drafts K_b and of known tokens of each slot: K_b = min(most_B[b], number of
        tokens that may still be added - 1), at least 0."""

    def write_drafts(
        self, requests: DraftRequests, num_B: Tensor, token_BK: Tensor, last_id: int
    ) -> None:
        """Write each request's first `num_B` drafts after its known tokens, as ids in 0..last_id.
        On a CPU, `IntegrityError` unless `num_B` has an entry per request, at most that of
        `requests.num_B`."""

    def pack(self, tokens: StepTokens, sizes: PackSizes, block_size: int) -> ForwardBatch:
        """Pack each request's next tokens; deciding requests have K_b + 1 rows of logits.

        The spare slot replaces a request that may have no more tokens. On a CPU the batch has
        exactly the tokens, rows and columns of blocks that it needs, whatever the bounds;
        `IntegrityError` if a token was never written or a slot lacks room.
        """

    def advance(self, tokens: StepTokens, verdict: Verdict) -> Tensor:
        """Apply a verdict: accepted drafts and the token after them become known tokens.

        Requests that may have no more tokens do not change. A request with a row that was not
        finite may have no more tokens from now on.

        Returns:
            A new tensor for the host to read later, int64 [B + D * (K + 4)]. First, for each
            request, how many of its tokens were computed before the step. Then, for each request
            that decided: number of drafts, number of accepted drafts, whether it was finite, and
            its row of `token_BK1`.
        """

    def begin_round(
        self, requests: DraftRequests, known: int, max_len: int, block_size: int
    ) -> Round:
        """Plan a round of `requests.most` passes of a model that has `max_len` positions.

        The first pass computes the last `known` tokens of each request, or all if it has fewer.
        The blocks of each slot must have room for position_B + num_B tokens. The spare slot
        replaces a request that has more tokens than the model has positions.
        """

    def shift(
        self, slot_B: Tensor, batch: AttentionBatch, num_tokens: int
    ) -> tuple[Tensor, Tensor]:
        """The token that follows each of the T = `num_tokens` tokens of a pass, padding included;
        call it after `advance` of the step.

        Returns:
            int64 [T]: the token at the next position, which may be a draft; any id if there is no
            next token. And int64 [B]: the index in T of each request's last token that has a known
            token after it, or of the request's first token if no token has.
        """

    def join_drafts(self, drafts: Sequence[Tensor], num_B: Tensor) -> Tensor:
        """`DraftBlock.token_BK` from each pass's drafts [B]; -1 after a request's last draft."""

    def look_up(
        self, requests: DraftRequests, shortest: int, longest: int
    ) -> tuple[Tensor, Tensor]:
        """Drafts by prompt lookup of suffixes of `shortest` to `longest` tokens
        (`drafting/ngram.py`): `token_BK` and `num_B` of a `DraftBlock`."""

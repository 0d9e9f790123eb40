"""Verification of few requests in one launch after the scan: a program takes one of their blocks.

Each program comes to the request's decision by itself and draws the best token of its block, and
the last one to arrive compares: one launch less, and no draw at the end. With many requests,
deciding so often is wasted work (decision 010). BLOCK, which needs the masses of all rows first,
goes through `residual.py`.

All programs of a request must come to one decision, though some are ahead of others. So until all
have arrived, a program changes nothing that decisions read: what it stores there (`Scratch.lse_N`)
is the number that was there before.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foretoken.ops.backends.triton.decide import decision, draw_at_once
from foretoken.ops.backends.triton.draw import Softmax, Target, draw_verified, q_offset, weigh
from foretoken.ops.backends.triton.noise import (
    RESIDUAL_TOKEN,
    Address,
    argmax_with,
    block_address,
    gumbel_at,
    noise_span,
)
from foretoken.ops.backends.triton.records import Batch, Candidates, Drafts
from foretoken.ops.backends.triton.request import (
    DRAW,
    ONE_ROW,
    all_finite,
    store_accepted,
    store_token,
    value_at,
)
from foretoken.ops.backends.triton.residual import weigh_blocks
from foretoken.ops.backends.triton.rows import BLOCK, Settings
from foretoken.ops.types import Verdict

FEW = tl.constexpr(4)  # most requests that come here, a power of 2


@triton.jit
def settle_kernel(
    batch: Batch, drafts: Drafts, outcome: Verdict, candidates: Candidates, KP: tl.constexpr,
    NBP: tl.constexpr, FP64: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Programs: (request, block of the row that has to be drawn). No slot may be under BLOCK.

    ONE_ROW: every program draws from its block of the residual, and the last to arrive takes the
    best. Else the first program draws, and the others have nothing to do.
    """
    batch = batch  # see `records.py`
    NB = batch.rows.NB
    b, block = tl.program_id(0) // NB, tl.program_id(0) % NB
    decided = decision(batch, drafts, None, b, RAGGED=True, UNDER_BLOCK=False, LATER=True,
                       AT_ONCE=FEW, KP=KP, NBP=NBP, FP64=FP64, OVERLAP=OVERLAP)  # fmt: skip
    request, drafted, accepted = decided.request, decided.drafted, decided.accepted
    pending, settings = decided.pending, request.settings
    row, position = request.first + accepted, request.position + accepted
    p = Softmax(
        value_at(decided.p.threshold, accepted), settings.scale,
        value_at(decided.p.lse, accepted),
    )  # fmt: skip
    target = Target(
        decided.mode, value_at(drafted.token, accepted),
        q_offset(batch.q, settings.slot, accepted), value_at(drafted.q_threshold, accepted),
        value_at(drafted.q_lse, accepted), 0.0,
    )  # fmt: skip
    finite = all_finite(decided.p.lse, accepted)
    if block == 0:
        if not decided.by_own_draw:
            store_accepted(outcome, drafts, b, accepted, finite, KP)
    drawn_token = tl.full((), -1, tl.int64)
    undrawn = (pending == ONE_ROW) | (pending == DRAW)
    if pending == ONE_ROW:
        address = Address(settings.key, position, 0, RESIDUAL_TOKEN)
        of_b = candidates.score_token_BJ2 + b.to(tl.int64) * NB * 2
        _store_candidate(batch, row, block, settings, p, target, address, of_b + 2 * block, FP64)
        tl.debug_barrier()
        if tl.atomic_add(candidates.arrived_B + b, 1, sem="acq_rel") != NB - 1:
            return
        drawn_token, undrawn = _best_candidate(of_b, NB, NBP)
        if undrawn:  # no mass makes `draw` fall back to p; by now all have read the masses of p
            j = tl.arange(0, NBP)
            tl.store(batch.scratch.mass_NJ + row * NB + j, float("-inf"), mask=j < NB)
            tl.debug_barrier()
    else:
        if block > 0:
            return
    if undrawn:
        drawn_token = draw_verified(batch, row, settings, target, position, NBP, FP64)
    if decided.by_own_draw:
        accepted, drawn_token = draw_at_once(batch, decided, NBP, FP64)
        finite = all_finite(decided.p.lse, accepted)
        store_accepted(outcome, drafts, b, accepted, finite, KP)
    store_token(outcome, drafts, b, accepted, drawn_token, finite)


@triton.jit
def _store_candidate(batch: Batch, row, block, settings: Settings, p: Softmax, target: Target,
                     address: Address, candidate, FP64: tl.constexpr):  # fmt: skip
    """Store the score with which a block of the residual competes for its row, and its token."""
    mass, best, x = weigh_blocks(batch, row, block, settings, p, target, address, 1, FP64)
    score = mass + gumbel_at(block_address(address), block + tl.arange(0, 1), FP64)
    score = tl.where(settings.flat, best.to(tl.float64), score.to(tl.float64))
    first = block * BLOCK
    weight = weigh(x, first + tl.arange(0, BLOCK), p, target, batch.q)
    token = first + argmax_with(weight, noise_span(address, first, BLOCK, FP64), FP64)
    tl.store(candidate, tl.max(tl.where(mass > float("-inf"), score, float("-inf")), axis=0))
    tl.store(candidate + 1, token.to(tl.float64))


@triton.jit
def _better(score, token, other_score, other_token):
    """The larger score and its token, the lower one of equals."""
    first = (score > other_score) | ((score == other_score) & (token < other_token))
    return tl.where(first, score, other_score), tl.where(first, token, other_token)


@triton.jit
def _best_candidate(candidates, NB, NBP: tl.constexpr):
    """(token, whether no block has one) of a row's candidates."""
    j = tl.arange(0, NBP)
    score = tl.load(candidates + 2 * j, mask=j < NB, other=float("-inf"), cache_modifier=".cg")
    token = tl.load(candidates + 2 * j + 1, mask=j < NB, other=0.0, cache_modifier=".cg")
    best, token = tl.reduce((score, token), 0, _better)
    return token.to(tl.int64), best == float("-inf")

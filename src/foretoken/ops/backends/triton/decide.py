"""Verification after the scan: how many drafts each request accepts, and what is left to do.

A program per request loads its drafts and their q while the scan may still run, waits for the
scan's masses, applies the request's rule (`decision`), and plans the rest for `residual.py`: the
draw of the next token, the residual of one row before that, or of all rows under BLOCK. So K + 1
rows are read, then p and q of one row for each request that rejects a draft. Only what is decided
by draws (T=0, COUPLED), or leaves no residual to sum, is drawn here.

What follows the wait is a chain of latencies and costs all the time: hence the loads before it.

Shapes: B requests, K most drafts, KP a power of 2 above it, N rows, V vocabulary, NB blocks.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any, NamedTuple

import triton
import triton.language as tl

from foretoken.ops.backends.triton import rules
from foretoken.ops.backends.triton.draw import (
    FROM_P,
    RESIDUAL,
    WITHOUT_TOKEN,
    Softmax,
    Target,
    draw_verified,
    q_offset,
)
from foretoken.ops.backends.triton.noise import LOG2E
from foretoken.ops.backends.triton.plan import (
    ALL_ROWS,
    DONE,
    DRAW,
    ONE_ROW,
    PlannedRow,
    RequestPlan,
    plan_of,
    store_planned,
)
from foretoken.ops.backends.triton.records import Batch, Drafts, Outcome, Plan
from foretoken.ops.backends.triton.request import (
    Request,
    accept_uniforms,
    all_finite,
    is_finite,
    load_masses,
    log2_of,
    read_request,
    shifted,
    store_accepted,
    store_token,
    value_at,
)
from foretoken.ops.backends.triton.rows import (
    CHUNK,
    let_next_start,
    load_at,
    log2_sum_rows,
    wait_for_writes,
)
from foretoken.ops.backends.triton.rules import BLOCK_RULE, COUPLED, SYNTHETIC, is_stated

Drafted = namedtuple("Drafted", "token x log_q q_threshold q_lse real_q u")
"""A request's drafts: vectors [KP], except for `real_q`.

token:  -1 behind the last
x:      the target's edited logit of the draft; -inf if the target lacks it
log_q:  log2 q(x_i); 0 if q is one-hot, -inf if there is no draft or q lacks it
q_threshold, q_lse: what `Softmax` takes of the rows of q
real_q: whether q comes from the draft cache; else it is one-hot, or nobody reads it
u:      the uniforms by which drafts are accepted
"""


class Decision(NamedTuple):
    """What is known of a request once its rule has been applied.

    p:           of its rows, vectors [KP]
    accepted:    how many drafts are accepted; 0 as long as that depends on what is pending
    pending:     DONE, DRAW, ONE_ROW or ALL_ROWS of `plan.py`
    mode:        of the `Target` of the token after the accepted drafts
    by_own_draw: p is one-hot (T=0), or p and q share their noise (COUPLED): drafts are accepted
                 while they equal the target's own draws, which are still to be made. Not under
                 SYNTHETIC
    """

    request: Request
    drafted: Drafted
    p: Softmax
    accepted: Any
    pending: Any
    mode: Any
    by_own_draw: Any


@triton.jit
def _load_drafts(batch: Batch, drafts: Drafts, request: Request, b, i, ignore_q,
                 FP64: tl.constexpr):  # fmt: skip
    """The drafts of request b. Reads nothing that the scan writes."""
    V, slot = batch.rows.V, request.settings.slot
    token = tl.load(drafts.token_BK + b * drafts.K + i, mask=i < request.num, other=-1)
    token = token.to(tl.int64)
    # Under SYNTHETIC an id >= V is no draft: a rate cannot make it a token of the target.
    known = (token >= 0) & ((token < V) | (request.settings.rule != SYNTHETIC))
    inside = known & (token < V)
    row = request.first + tl.minimum(i, request.num)
    x = load_at(batch.rows, row, tl.where(inside, token, 0), inside)
    log_q = tl.where(known, 0.0, float("-inf"))
    threshold, lse = tl.zeros_like(log_q), tl.zeros_like(log_q)
    real_q = request.num < 0
    if batch.q is not None:
        q = batch.q
        real_q = (tl.load(drafts.real_q_B + b) != 0) & (not ignore_q)
        place = slot * q.K + i
        threshold = tl.load(q.threshold_SK + place, mask=known, other=0.0)
        lse = (tl.load(q.lse_SK + place, mask=known, other=0.0) * LOG2E).to(tl.float32)
        if real_q:
            in_q = known & (token < q.V)
            raw = tl.load(q.logits_SKV + place * q.V + token, mask=in_q, other=float("-inf"))
            raw = raw.to(tl.float32)
            usable = in_q & (raw >= threshold) & (raw > float("-inf")) & is_finite(lse)
            log_q = tl.where(usable, raw * request.settings.scale - lse, float("-inf"))
    u = accept_uniforms(request, i, FP64)
    return Drafted(token, x, log_q, threshold, lse, real_q, u)


@triton.jit
def _no_drafts(i):
    """In place of `_load_drafts` where no request has any."""
    zero = i * 0.0
    return Drafted(i.to(tl.int64) * 0 - 1, zero, zero, zero, zero, False, zero)


@triton.jit
def _reduce_rows(batch: Batch, request: Request, i, KP: tl.constexpr, NBP: tl.constexpr):
    """(p, whether survivors are in a short list) of a request's rows [KP]; stores their lse."""
    scratch, row, live = batch.scratch, request.first + i, i <= request.num
    block_mass = load_masses(batch, row, live, NBP)
    # A lane per row: in the layout that the sum leaves each thread would hold, and compute, all of
    # them, and all that meets them, back to the noise, would follow (1 700 instructions for 340).
    lse = tl.gather(log2_sum_rows(block_mass), i, 0)
    threshold = tl.full((KP,), float("-inf"), tl.float32)
    compact = i < 0
    if scratch.filtered is not None:
        compact = tl.load(scratch.filtered.count_N + row, mask=live, other=-1) >= 0
        lse = tl.where(compact, tl.load(scratch.lse_N + row, mask=live, other=0.0), lse)
        threshold = tl.load(scratch.filtered.threshold_N + row, mask=live, other=float("-inf"))
    tl.store(scratch.lse_N + row, lse, mask=live)
    return Softmax(threshold, request.settings.scale, lse), compact


@triton.jit
def _mode_of(log_q, real_q):
    """What the token in place of a draft is drawn from: the residual, or p if there is no draft."""
    residual = tl.where(real_q, RESIDUAL, WITHOUT_TOKEN)
    return tl.where(log_q == float("-inf"), FROM_P, residual)


@triton.jit
def _planned(batch: Batch, request: Request, drafted: Drafted, p: Softmax, i, row, mode,
             log_w=0.0, log_p=0.0, log_next=0.0):  # fmt: skip
    """Rows i of a request, as they are planned."""
    offset = q_offset(batch.q, request.settings.slot, i)
    target = Target(mode, drafted.token, offset, drafted.q_threshold, drafted.q_lse, log_w)
    position = request.position + i
    return PlannedRow(row, position, p, target, log_p, drafted.log_q, log_next)


@triton.jit
def _plan_all_rows(batch: Batch, request: Request, drafted: Drafted, p: Softmax, here: RequestPlan,
                   log_p, log_next, compact, i, K, KP: tl.constexpr):  # fmt: skip
    """Plan all rows of a request under BLOCK, whose rule needs their residual masses.

    The residual pass sums only those of dense rows with a real q: that of a one-hot q follows from
    p(x_i), but drawing from it by flat noise needs the scores that the pass finds; those of short
    lists are summed when the rule is applied.
    """
    log_w = shifted(log_next, i, -1, KP)
    summed = (i < request.num) & (drafted.log_q > float("-inf")) & (log_w > float("-inf"))
    summed = summed & (request.settings.flat | drafted.real_q) & (compact == 0)
    row = tl.where(summed, request.first + i, -1)
    mode = _mode_of(drafted.log_q, drafted.real_q)
    planned = _planned(batch, request, drafted, p, i, row, mode, log_w, log_p, log_next)
    store_planned(here, i, planned, i < K)


@triton.jit
def _apply_rule(batch: Batch, drafts: Drafts, plan: Plan | None, request: Request,
                drafted: Drafted, p: Softmax, b, compact, by_own_draw, i, BLOCKS: tl.constexpr,
                KP: tl.constexpr, FP64: tl.constexpr):  # fmt: skip
    """(accepted drafts, what is pending): ALL_ROWS if BLOCK needs residual masses, else DONE."""
    x, log_q, rule, num = drafted.x, drafted.log_q, request.settings.rule, request.num
    pending = tl.full((), DONE, tl.int32)
    usable = (x >= p.threshold) & (x > float("-inf")) & is_finite(p.lse)
    log_p = tl.where(usable, x * p.scale - p.lse, float("-inf"))
    log_u = log2_of(drafted.u, FP64)
    accepted = rules.standard(log_p, log_q, log_u, i, num)
    if drafts.rate_K is not None:
        rate = tl.load(drafts.rate_K + i, mask=i < num, other=0.0)
        if rule == SYNTHETIC:
            accepted = rules.synthetic(rate, log_q, drafted.u.to(tl.float64), i, num)
    if by_own_draw:
        accepted = tl.full((), 0, tl.int32)
    if BLOCKS:
        if (rule == BLOCK_RULE) & (not by_own_draw):
            log_next = rules.block_weights(log_p, log_q)
            accepted = rules.block_all(log_next, log_q, log_u, i, num)
            if accepted < num:
                pending = tl.full((), ALL_ROWS, tl.int32)
                here = plan_of(plan, b, drafts.K)
                _plan_all_rows(batch, request, drafted, p, here, log_p, log_next, compact, i,
                               drafts.K, KP)  # fmt: skip
    return accepted, pending


@triton.jit
def decision(
    batch: Batch, drafts: Drafts, plan: Plan | None, b, RAGGED: tl.constexpr,
    BLOCKS: tl.constexpr, LATER: tl.constexpr, CHUNK: tl.constexpr, KP: tl.constexpr,
    NBP: tl.constexpr, FP64: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The `Decision` on request b; plans the rows that BLOCK needs before it can decide.

    RAGGED: requests may have drafts. BLOCKS: they may be under BLOCK. LATER: draws are left to what
    follows. CHUNK: see `first_row`.
    """
    i = tl.arange(0, KP)
    request = read_request(batch, b, RAGGED, CHUNK)
    settings = request.settings
    from_p = settings.greedy | (settings.rule == COUPLED)  # there is no residual
    by_own_draw = from_p & (settings.rule != SYNTHETIC)
    if RAGGED:
        drafted = _load_drafts(batch, drafts, request, b, i, from_p, FP64)
    else:
        drafted = _no_drafts(i)
    wait_for_writes(OVERLAP)
    p, compact = _reduce_rows(batch, request, i, KP, NBP)
    # Under a rule that is not stated here no row is finite: the request gets no token.
    stated = is_stated(settings.rule, BLOCKS, drafts.rate_K is not None)
    p = Softmax(p.threshold, p.scale, tl.where(stated, p.lse, float("nan")))
    accepted, pending = tl.full((), 0, tl.int32), tl.full((), DONE, tl.int32)
    if RAGGED:
        accepted, pending = _apply_rule(batch, drafts, plan, request, drafted, p, b, compact,
                                        by_own_draw, i, BLOCKS, KP, FP64)  # fmt: skip
    next_draft = (i == accepted) & (i < request.num)
    log_q = tl.max(tl.where(next_draft, drafted.log_q, float("-inf")), axis=0)
    mode = tl.where(from_p, FROM_P, _mode_of(log_q, drafted.real_q))
    if LATER:
        if (pending == DONE) & all_finite(p.lse, i, accepted) & (not by_own_draw):
            listed = tl.sum(((i == accepted) & compact).to(tl.int32), axis=0) > 0
            summed = (mode == RESIDUAL) | ((mode == WITHOUT_TOKEN) & settings.flat)
            pending = tl.where(summed & (not listed), ONE_ROW, DRAW)
    return Decision(request, drafted, p, accepted, pending, mode, by_own_draw)


@triton.jit
def draw_at_once(batch: Batch, decision: Decision, KP: tl.constexpr, NBP: tl.constexpr,
                 FP64: tl.constexpr):  # fmt: skip
    """(accepted drafts, the token after them) where no residual has to be summed.

    By the target's own draw, row after row is drawn as long as the token is the draft.
    """
    request, i, accepted = decision.request, tl.arange(0, KP), decision.accepted
    drawn_token = tl.full((), -1, tl.int64)
    finite = is_finite(decision.p.lse).to(tl.int32)
    going_on = True
    while going_on:
        draft_token = value_at(decision.drafted.token, i, accepted)
        target = Target(decision.mode, draft_token, 0, 0.0, 0.0, 0.0)
        drawn_token = draw_verified(batch, request.first + accepted, request.settings, target,
                                    request.position + accepted, NBP, FP64)  # fmt: skip
        going_on = False
        if decision.by_own_draw & (accepted < request.num):
            if (draft_token == drawn_token) & (value_at(finite, i, accepted) == 1):
                accepted += 1
                going_on = True
    return accepted, drawn_token


@triton.jit
def decide_kernel(
    batch: Batch, drafts: Drafts, outcome: Outcome, plan: Plan | None, RAGGED: tl.constexpr,
    BLOCKS: tl.constexpr, KP: tl.constexpr, NBP: tl.constexpr, FP64: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program per request: how many drafts are accepted, and the next token, drawn or planned.

    plan: None if nothing follows; then every token is drawn here. RAGGED: requests may have drafts.
    BLOCKS: they may be under BLOCK.
    """
    let_next_start(OVERLAP)
    batch = batch  # see `records.py`
    b, i = tl.program_id(0), tl.arange(0, KP)
    LATER: tl.constexpr = plan is not None
    decided = decision(batch, drafts, plan, b, RAGGED, BLOCKS, LATER, CHUNK, KP, NBP, FP64,
                       OVERLAP)  # fmt: skip
    request, p, accepted = decided.request, decided.p, decided.accepted
    drawn_token = tl.full((), -1, tl.int64)
    draws = True
    if LATER:
        draws = decided.by_own_draw
        here = plan_of(plan, b, drafts.K)
        if (decided.pending == DRAW) | (decided.pending == ONE_ROW):
            row = request.first + i
            planned = _planned(batch, request, decided.drafted, p, i, row, decided.mode)
            store_planned(here, i * 0, planned, i == accepted)
        tl.store(here.pending, decided.pending)
        tl.store(here.arrived, 0)
        tl.store(here.arrived_first, 0)
    if draws:
        accepted, drawn_token = draw_at_once(batch, decided, KP, NBP, FP64)
    finite = all_finite(p.lse, i, accepted)
    store_accepted(outcome, drafts, b, accepted, finite, KP)
    if decided.pending == DONE:
        store_token(outcome, drafts, b, accepted, drawn_token, finite)

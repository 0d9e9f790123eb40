"""Verification after the scan: how many drafts each request accepts, and what is left to do.

A program per request loads its drafts and their q while the scan may still run, waits for the
scan's masses, and applies the request's rule (`decision`, which `settle_kernel` uses, too). Then it
writes the request's *agenda* for `verify.py`, which says what is pending. DRAW: the next token must
be drawn. ONE_ROW: the residual that it is drawn from must be summed first. ALL_ROWS: the residuals
of all rows must be summed, since BLOCK decides by them. So K + 1 rows are read, then p and q of one
row for each request that rejects a draft. This kernel draws where draws decide (T=0, COUPLED), or
for all requests if no residual pass follows.

Loads after the wait form one chain of latencies, so all that can be loaded before the wait is.
"""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from foretoken.ops.backends.triton import rules

from foretoken.ops.backends.triton.draw import (  # isort: skip
    FROM_P, RESIDUAL, WITHOUT_TOKEN, Softmax, Target, draw_verified, q_offset,
)  # fmt: skip
from foretoken.ops.backends.triton.noise import ACCEPT, LOG2E, Address, log2, uniform_at
from foretoken.ops.backends.triton.records import Agenda, Batch, Drafts

from foretoken.ops.backends.triton.rows import (  # isort: skip
    REQUESTS_AT_ONCE, false_like, first_row, let_next_start, load_at, log2_sum_rows, read_settings,
    wait_for_writes, zero_like,
)  # fmt: skip
from foretoken.ops.backends.triton.rules import BLOCK_RULE, COUPLED, SYNTHETIC, is_stated
from foretoken.ops.types import Verdict

# What is pending after the decision: nothing; a draw; the sum of one row's residual, and a draw;
# the sums of all rows' residuals, then the block rule, and a draw.
DONE, DRAW, ONE_ROW, ALL_ROWS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)

# Sizes of a request's agenda: integers before its lines; integers and floats of each line.
HEAD, INTEGERS, FLOATS = tl.constexpr(3), tl.constexpr(5), tl.constexpr(9)

Request = namedtuple("Request", "first num position settings")
"""first: its first row. num: its number of drafts. position: of the token that `first` decides."""

RequestAgenda = namedtuple("RequestAgenda", "pending arrived arrived_first integers floats")
"""Pointers to one request's part of an `Agenda`, which has K lines.

pending:       DONE, DRAW, ONE_ROW or ALL_ROWS
arrived:       how many programs have summed their part of a row
arrived_first: under BLOCK the same for row 0; `arrived` then counts programs of other rows
integers, floats: of line 0
"""

Line = namedtuple("Line", "row position p target log_p log_q log_next")
"""A line of an agenda, or a vector of lines: one row of the request.

row:       -1 if it has no residual to be summed
position:  the position of the token that the row decides
p, target: its `Softmax` and its `Target`
log_p, log_q, log_next: for BLOCK: log2 p(x_i), log2 q(x_i), the next row's log2 w
"""


@triton.jit
def read_request(batch: Batch, b, RAGGED: tl.constexpr, AT_ONCE: tl.constexpr):
    """The `Request` b. RAGGED: requests may have drafts. AT_ONCE: see `first_row`."""
    num = tl.full((), 0, tl.int32)
    if RAGGED:
        num = tl.load(batch.requests.num_B + b).to(tl.int32)
    return Request(
        first_row(batch.requests, b, RAGGED, AT_ONCE),
        num,
        tl.load(batch.requests.position_B + b),
        read_settings(batch.slots, tl.load(batch.requests.slot_B + b), batch.rows.V),
    )


@triton.jit
def load_masses(batch: Batch, row, mask, NBP: tl.constexpr):
    """Block masses of rows [KP], as [KP, NBP]; -inf where not `mask`, and after the last block."""
    NB, j = batch.rows.NB, tl.arange(0, NBP)
    return tl.load(
        batch.scratch.mass_NJ + row[:, None] * NB + j[None, :],
        mask=mask[:, None] & (j < NB)[None, :],
        other=float("-inf"),
        cache_modifier=".cg",
    )


@triton.jit
def accept_uniforms(request: Request, i, FP64: tl.constexpr):
    """The uniforms by which drafts are accepted, [KP]."""
    address = Address(request.settings.key, request.position + i, i, ACCEPT)
    return uniform_at(address, zero_like(i), FP64)


@triton.jit
def log2_of(u, FP64: tl.constexpr):
    """log2 of a uniform u < 1, kept below 0 whatever the hardware's rounding."""
    if FP64:
        return tl.log(u) * LOG2E
    else:
        return tl.minimum(log2(u), -1e-8)


@triton.jit
def value_at(x, k):
    """x_k of a vector."""
    i = tl.arange(0, x.shape[0])
    return tl.sum(tl.where(i == k, x, tl.zeros_like(x)), axis=0)


@triton.jit
def shifted(x, by):
    """The vector of x_{i + by}, 0 where there is none."""
    i = tl.arange(0, x.shape[0])
    return tl.sum(tl.where(i[None, :] == i[:, None] + by, x[None, :], 0.0), axis=1)


@triton.jit
def is_finite(x):
    """Whether a number is finite: x - x is NaN if x is infinite or NaN."""
    return x - x == 0


@triton.jit
def all_finite(lse, k):
    """Whether the rows 0..k of a request are finite."""
    i = tl.arange(0, lse.shape[0])
    return tl.sum(((i <= k) & ~is_finite(lse)).to(tl.int32), axis=0) == 0


@triton.jit
def store_accepted(outcome: Verdict, drafts: Drafts, b, k, finite, KP: tl.constexpr):
    """Store all of a verdict except the token after the k accepted drafts; later tokens are -1."""
    i, K = tl.arange(0, KP), drafts.K
    token = tl.load(drafts.token_BK + b * K + i, mask=(i < k) & (i < K), other=-1).to(tl.int64)
    mask = (i <= K) & (i != k)
    tl.store(outcome.token_BK1 + b * (K + 1) + i, tl.where(i < k, token, -1), mask=mask)
    tl.store(outcome.n_accept_B + b, k.to(tl.int64))
    tl.store(outcome.finite_B + b, finite)


@triton.jit
def store_token(outcome: Verdict, drafts: Drafts, b, k, token, finite):
    """Store the token after k accepted drafts; -1 if a row that decided is not finite."""
    tl.store(outcome.token_BK1 + b * (drafts.K + 1) + k, tl.where(finite, token, -1))


@triton.jit
def agenda_of(agenda: Agenda, b, K):
    """The `RequestAgenda` of request b."""
    integers = agenda.integers + b.to(tl.int64) * (HEAD + INTEGERS * K)
    floats = agenda.floats + b.to(tl.int64) * (FLOATS * K)
    return RequestAgenda(integers, integers + 1, integers + 2, integers + HEAD, floats)


@triton.jit
def store_lines(agenda_b: RequestAgenda, number, lines: Line, mask):
    """Write a vector of lines to an agenda; `number`: the number of each line."""
    integers, floats = agenda_b.integers + number * INTEGERS, agenda_b.floats + number * FLOATS
    row, position, p, target, log_p, log_q, log_next = lines
    whole = (row, position, target.mode, target.token, target.q_offset)
    parts = (target.q_threshold, target.q_lse, target.log_w, p.threshold, p.scale, p.lse, log_p,
             log_q, log_next)  # fmt: skip
    for n in tl.static_range(INTEGERS):
        tl.store(integers + n, whole[n], mask=mask)
    for n in tl.static_range(FLOATS):
        tl.store(floats + n, parts[n], mask=mask)


@triton.jit
def store_first_line(agenda_b: RequestAgenda, i, lines: Line, k):
    """Write the k-th of a vector of lines to line 0 of an agenda: only lane k stores."""
    store_lines(agenda_b, zero_like(i), lines, i == k)


@triton.jit
def load_line(agenda_b: RequestAgenda, number, mask):
    """The `Line` of this number, or a vector of them; where not `mask`, `row` is -1."""
    integers, floats = agenda_b.integers + number * INTEGERS, agenda_b.floats + number * FLOATS
    target = Target(
        mode=tl.load(integers + 2, mask=mask, other=0),
        token=tl.load(integers + 3, mask=mask, other=0),
        q_offset=tl.load(integers + 4, mask=mask, other=0),
        q_threshold=tl.load(floats, mask=mask, other=0.0),
        q_lse=tl.load(floats + 1, mask=mask, other=0.0),
        log_w=tl.load(floats + 2, mask=mask, other=0.0),
    )
    p = Softmax(
        threshold=tl.load(floats + 3, mask=mask, other=0.0),
        scale=tl.load(floats + 4, mask=mask, other=0.0),
        lse=tl.load(floats + 5, mask=mask, other=0.0),
    )
    return Line(
        row=tl.load(integers, mask=mask, other=-1),
        position=tl.load(integers + 1, mask=mask, other=0),
        p=p,
        target=target,
        log_p=tl.load(floats + 6, mask=mask, other=0.0),
        log_q=tl.load(floats + 7, mask=mask, other=0.0),
        log_next=tl.load(floats + 8, mask=mask, other=0.0),
    )


Drafted = namedtuple("Drafted", "token logit log_q q_threshold q_lse real_q u")
"""One request's drafts x_i: vectors [KP], except for `real_q`.

token: x_i, -1 after the last
logit: the target's edited logit of x_i; -inf if the target lacks it
log_q: log2 q(x_i); 0 if q is one-hot, -inf if there is no draft or q lacks it
q_threshold, q_lse: the `Softmax` of each row of q, with the scale of p
real_q: whether q comes from the draft cache; else it is one-hot, or not read at all
u: the uniforms by which drafts are accepted
"""

Decision = namedtuple("Decision", "request drafted p accepted pending mode by_own_draw")
"""The state of a request once its rule has been applied.

p: the `Softmax` of its rows, vectors [KP]
accepted: how many drafts are accepted; 0 if that depends on what is pending
pending: DONE, DRAW, ONE_ROW or ALL_ROWS as above
mode: the mode (`Target`) in which the token after the accepted drafts is drawn
by_own_draw: p is one-hot (T=0), or p and q share their noise (COUPLED): drafts are accepted while
    they equal the target's own draws, which are not made yet. False under SYNTHETIC
"""


@triton.jit
def decide_kernel(
    batch: Batch, drafts: Drafts, outcome: Verdict, agenda: Agenda | None, RAGGED: tl.constexpr,
    UNDER_BLOCK: tl.constexpr, KP: tl.constexpr, NBP: tl.constexpr, FP64: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program per request: how many drafts are accepted, and the next token or how to draw it.

    agenda: None if no residual pass follows; then every token is drawn here. RAGGED: requests may
    have drafts. UNDER_BLOCK: they may be under BLOCK.
    """
    let_next_start(OVERLAP)
    batch = batch  # makes values of fields that are 1: Triton 3.6 loses constants in branches
    b, i = tl.program_id(0), tl.arange(0, KP)
    LATER: tl.constexpr = agenda is not None
    decided = decision(batch, drafts, agenda, b, RAGGED, UNDER_BLOCK, LATER, REQUESTS_AT_ONCE, KP,
                       NBP, FP64, OVERLAP)  # fmt: skip
    request, p, accepted = decided.request, decided.p, decided.accepted
    drawn_token = tl.full((), -1, tl.int64)
    draws = True
    if LATER:
        draws = decided.by_own_draw
        agenda_b = agenda_of(agenda, b, drafts.K)
        if (decided.pending == DRAW) | (decided.pending == ONE_ROW):
            row = request.first + i
            lines = _lines(batch, request, decided.drafted, p, i, row, decided.mode)
            store_first_line(agenda_b, i, lines, accepted)
        tl.store(agenda_b.pending, decided.pending)
        tl.store(agenda_b.arrived, 0)
        tl.store(agenda_b.arrived_first, 0)
    if draws:
        accepted, drawn_token = draw_at_once(batch, decided, NBP, FP64)
    finite = all_finite(p.lse, accepted)
    store_accepted(outcome, drafts, b, accepted, finite, KP)
    if decided.pending == DONE:
        store_token(outcome, drafts, b, accepted, drawn_token, finite)


@triton.jit
def decision(
    batch: Batch, drafts: Drafts, agenda: Agenda | None, b, RAGGED: tl.constexpr,
    UNDER_BLOCK: tl.constexpr, LATER: tl.constexpr, AT_ONCE: tl.constexpr, KP: tl.constexpr,
    NBP: tl.constexpr, FP64: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The `Decision` on request b. If BLOCK needs residuals first, writes the lines of the agenda.

    RAGGED, UNDER_BLOCK: as in `decide_kernel`. LATER: residuals may be summed after the decision.
    AT_ONCE: see `first_row`.
    """
    i = tl.arange(0, KP)
    request = read_request(batch, b, RAGGED, AT_ONCE)
    settings = request.settings
    from_p = settings.greedy | (settings.rule == COUPLED)  # every draw is from p, no residual
    by_own_draw = from_p & (settings.rule != SYNTHETIC)
    if RAGGED:
        drafted = _load_drafts(batch, drafts, request, b, i, from_p, FP64)
    else:
        zeros, none = tl.zeros((KP,), tl.float32), tl.full((KP,), -1, tl.int64)
        drafted = Drafted(none, zeros, zeros, zeros, zeros, False, zeros)
    wait_for_writes(OVERLAP)
    p, compact = _reduce_rows(batch, request, i, KP, NBP)
    # Under a rule that this kernel lacks, rows count as not finite: the request gets no token.
    stated = is_stated(settings.rule, UNDER_BLOCK, drafts.rate_K is not None)
    p = Softmax(p.threshold, p.scale, tl.where(stated, p.lse, float("nan")))
    accepted, pending = tl.full((), 0, tl.int32), tl.full((), DONE, tl.int32)
    if RAGGED:
        accepted, pending = _apply_rule(batch, drafts, agenda, request, drafted, p, b, compact,
                                        by_own_draw, i, UNDER_BLOCK, FP64)  # fmt: skip
    next_draft = (i == accepted) & (i < request.num)
    log_q = tl.max(tl.where(next_draft, drafted.log_q, float("-inf")), axis=0)
    mode = tl.where(from_p, FROM_P, _mode_in_place_of(log_q, drafted.real_q))
    if LATER:
        if (pending == DONE) & all_finite(p.lse, accepted) & (not by_own_draw):
            listed = tl.sum(((i == accepted) & compact).to(tl.int32), axis=0) > 0
            # A dense row's residual is summed first; `draw` itself sums that of a short list.
            summed = (mode == RESIDUAL) | ((mode == WITHOUT_TOKEN) & settings.flat)
            pending = tl.where(summed & (not listed), ONE_ROW, DRAW)
    return Decision(request, drafted, p, accepted, pending, mode, by_own_draw)


@triton.jit
def _load_drafts(batch: Batch, drafts: Drafts, request: Request, b, i, ignore_q,
                 FP64: tl.constexpr):  # fmt: skip
    """The `Drafted` of request b. Reads nothing that the scan writes."""
    V, slot = batch.rows.V, request.settings.slot
    token = tl.load(drafts.token_BK + b * drafts.K + i, mask=i < request.num, other=-1)
    token = token.to(tl.int64)
    # Under SYNTHETIC an id >= V is no draft: its rate must not make it an accepted token.
    known = (token >= 0) & ((token < V) | (request.settings.rule != SYNTHETIC))
    inside = known & (token < V)
    row = request.first + tl.minimum(i, request.num)
    logit = load_at(batch.rows, row, tl.where(inside, token, 0), inside)
    log_q = tl.where(known, 0.0, float("-inf"))
    threshold, lse = tl.zeros_like(log_q), tl.zeros_like(log_q)
    real_q = false_like(request.num)
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
    return Drafted(token, logit, log_q, threshold, lse, real_q, u)


@triton.jit
def _reduce_rows(batch: Batch, request: Request, i, KP: tl.constexpr, NBP: tl.constexpr):
    """(the `Softmax` of a request's rows [KP], whether each row is compact); stores each lse."""
    scratch, row, live = batch.scratch, request.first + i, i <= request.num
    block_mass = load_masses(batch, row, live, NBP)
    # The gather gives each lane one row. In the layout of the sum each thread would hold all rows,
    # also of all operands combined with them, back to the noise: 1 700 instructions, not 340.
    lse = tl.gather(log2_sum_rows(block_mass), i, 0)
    threshold = tl.full((KP,), float("-inf"), tl.float32)
    compact = false_like(i)
    if scratch.filtered is not None:
        compact = tl.load(scratch.filtered.count_N + row, mask=live, other=-1) >= 0
        lse = tl.where(compact, tl.load(scratch.lse_N + row, mask=live, other=0.0), lse)
        threshold = tl.load(scratch.filtered.threshold_N + row, mask=live, other=float("-inf"))
    tl.store(scratch.lse_N + row, lse, mask=live)
    return Softmax(threshold, request.settings.scale, lse), compact


@triton.jit
def _apply_rule(batch: Batch, drafts: Drafts, agenda: Agenda | None, request: Request,
                drafted: Drafted, p: Softmax, b, compact, by_own_draw, i,
                UNDER_BLOCK: tl.constexpr, FP64: tl.constexpr):  # fmt: skip
    """(number of accepted drafts, ALL_ROWS if BLOCK needs residual masses, else DONE)."""
    x, log_q, rule, num = drafted.logit, drafted.log_q, request.settings.rule, request.num
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
    if UNDER_BLOCK:
        if (rule == BLOCK_RULE) & (not by_own_draw):
            log_next = rules.block_weights(log_p, log_q)
            accepted = rules.block_all(log_next, log_q, log_u, i, num)
            if accepted < num:
                pending = tl.full((), ALL_ROWS, tl.int32)
                agenda_b = agenda_of(agenda, b, drafts.K)
                lines = _all_lines(batch, request, drafted, p, log_p, log_next, compact, i)
                store_lines(agenda_b, i, lines, i < drafts.K)
    return accepted, pending


@triton.jit
def _all_lines(batch: Batch, request: Request, drafted: Drafted, p: Softmax, log_p, log_next,
               compact, i):  # fmt: skip
    """The lines of a request under BLOCK: the rule needs the residual mass of every row.

    The residual pass sums the masses of dense rows with a real q. With a one-hot q the mass follows
    from p(x_i); under flat noise the pass still visits the row, since a draw needs its best scores.
    The mass of a short list is summed when the rule is applied.
    """
    log_w = shifted(log_next, -1)  # 0 for row 0: nothing precedes it
    summed = (i < request.num) & (drafted.log_q > float("-inf")) & (log_w > float("-inf"))
    summed = summed & (request.settings.flat | drafted.real_q) & (compact == 0)
    row = tl.where(summed, request.first + i, -1)
    mode = _mode_in_place_of(drafted.log_q, drafted.real_q)
    return _lines(batch, request, drafted, p, i, row, mode, log_w, log_p, log_next)


@triton.jit
def _lines(batch: Batch, request: Request, drafted: Drafted, p: Softmax, i, row, mode,
           log_w=0.0, log_p=0.0, log_next=0.0):  # fmt: skip
    """The lines of rows i of a request. row: -1 where no residual is to be summed."""
    offset = q_offset(batch.q, request.settings.slot, i)
    target = Target(mode, drafted.token, offset, drafted.q_threshold, drafted.q_lse, log_w)
    position = request.position + i
    return Line(row, position, p, target, log_p, drafted.log_q, log_next)


@triton.jit
def _mode_in_place_of(log_q, real_q):
    """The mode in which a draft's replacement is drawn: of its residual, FROM_P without draft."""
    residual = tl.where(real_q, RESIDUAL, WITHOUT_TOKEN)
    return tl.where(log_q == float("-inf"), FROM_P, residual)


@triton.jit
def draw_at_once(batch: Batch, decided: Decision, NBP: tl.constexpr, FP64: tl.constexpr):
    """(number of accepted drafts, the token after them), drawn without a pass for the residual.

    If `by_own_draw`, rows are drawn one after the other as long as the drawn token is the draft.
    """
    request, accepted = decided.request, decided.accepted
    drawn_token = tl.full((), -1, tl.int64)
    finite = is_finite(decided.p.lse).to(tl.int32)
    going_on = True
    while going_on:
        draft_token = value_at(decided.drafted.token, accepted)
        target = Target(decided.mode, draft_token, 0, 0.0, 0.0, 0.0)
        drawn_token = draw_verified(batch, request.first + accepted, request.settings, target,
                                    request.position + accepted, NBP, FP64)  # fmt: skip
        going_on = False
        if decided.by_own_draw & (accepted < request.num):
            if (draft_token == drawn_token) & (value_at(finite, accepted) == 1):
                accepted += 1
                going_on = True
    return accepted, drawn_token

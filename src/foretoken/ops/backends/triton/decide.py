"""Verification after the scan: how many drafts each request accepts, and what is still pending.

A program per request loads its drafts and their q while the scan is still running, waits for the
scan's masses, and applies the request's rule. Then it writes the request's *agenda* for
`verify.py`: what is pending until the next token is known, and on which rows. This kernel itself
draws if drafts are compared with draws (T=0, COUPLED), and for all requests if no residual pass
follows. Loads after the wait form a chain of latencies, so most data are loaded before the wait.
"""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from foretoken.ops.backends.triton import rules

from foretoken.ops.backends.triton.draw import (  # isort: skip
    FROM_P, RESIDUAL, WITHOUT_TOKEN, Softmax, Source, draw_verified, q_offset,
)  # fmt: skip
from foretoken.ops.backends.triton.noise import ACCEPT, LOG2E, Address, log2, uniform_at
from foretoken.ops.backends.triton.records import Agenda, Batch, Drafts

from foretoken.ops.backends.triton.rows import (  # isort: skip
    REQUEST_CHUNK, false_like, first_row, let_next_start, load_at, log2_sum_rows, read_settings,
    wait_for_writes, zero_like,
)  # fmt: skip
from foretoken.ops.backends.triton.rules import BLOCK_RULE, COUPLED, SYNTHETIC, is_compiled
from foretoken.ops.types import Verdict

# What is pending after the decision: nothing; a draw; the sum of one row's residual, then a draw
# from it; the sums of all rows' residuals, then the block rule, which needs them, and a draw.
DONE, DRAW, ONE_ROW, ALL_ROWS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)

# Sizes of a request's agenda: integers before its lines; integers and floats of each line.
HEADER, INTEGERS, FLOATS = tl.constexpr(3), tl.constexpr(5), tl.constexpr(9)

Request = namedtuple("Request", "first num position settings")
"""A request's first row, number of drafts, position of its first new token, `Settings`."""

RequestAgenda = namedtuple("RequestAgenda", "pending arrived arrived_first integers floats")
"""Pointers to one request's part of an `Agenda`, which has K lines.

pending:       DONE, DRAW, ONE_ROW or ALL_ROWS
arrived:       how many programs have summed their part of a row; under BLOCK, of rows 1..K-1
arrived_first: under BLOCK, how many programs have summed their part of row 0
integers, floats: of line 0
"""

Line = namedtuple("Line", "row position p source log_p log_q log_next")
"""A line of an agenda, or a vector of lines: one row of the request.

row:       -1 if the row's residual is not to be summed
position:  of the token that the row decides
log_p, log_q, log_next: for BLOCK: log2 p(x_i), log2 q(x_i), the next row's log2 w
"""


@triton.jit
def read_request(batch: Batch, b, RAGGED: tl.constexpr, CHUNK: tl.constexpr):
    """The `Request` b. RAGGED: whether requests can have drafts. CHUNK: see `first_row`."""
    num = tl.full((), 0, tl.int32)
    if RAGGED:
        num = tl.load(batch.requests.num_B + b).to(tl.int32)
    row, position = first_row(batch.requests, b, RAGGED, CHUNK), batch.requests.position_B + b
    settings = read_settings(batch.slots, tl.load(batch.requests.slot_B + b), batch.rows.V)
    return Request(row, num, tl.load(position), settings)


@triton.jit
def load_masses(batch: Batch, row, mask, NBP: tl.constexpr):
    """Block masses of rows [KP], as [KP, NBP]; -inf where not `mask`, and past a row's end."""
    NB, j = batch.rows.NB, tl.arange(0, NBP)
    mass_p = batch.scratch.mass_NJ + row[:, None] * NB + j[None, :]
    mask = mask[:, None] & (j < NB)[None, :]
    return tl.load(mass_p, mask=mask, other=float("-inf"), cache_modifier=".cg")


@triton.jit
def accept_uniforms(request: Request, i, FP64: tl.constexpr):
    """The uniforms by which drafts are accepted, [KP]."""
    address = Address(request.settings.key, request.position + i, i, ACCEPT)
    return uniform_at(address, zero_like(i), FP64)


@triton.jit
def log2_of(u, FP64: tl.constexpr):
    """log2 of a uniform u < 1, below 0 even if the hardware rounds up."""
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
    """Whether a number is finite."""
    return x - x == 0  # x - x is NaN if x is infinite or NaN


@triton.jit
def all_finite(lse, k):
    """Whether the rows 0..k of a request are finite."""
    i = tl.arange(0, lse.shape[0])
    return tl.sum(((i <= k) & ~is_finite(lse)).to(tl.int32), axis=0) == 0


@triton.jit
def store_accepted(outcome: Verdict, drafts: Drafts, b, k, finite, KP: tl.constexpr):
    """Store a verdict except the token after the k accepted drafts; all later tokens are -1."""
    i, K = tl.arange(0, KP), drafts.K
    token = tl.load(drafts.token_BK + b * K + i, mask=(i < k) & (i < K), other=-1).to(tl.int64)
    mask = (i <= K) & (i != k)
    tl.store(outcome.token_BK1 + b * (K + 1) + i, tl.where(i < k, token, -1), mask=mask)
    tl.store(outcome.n_accept_B + b, k.to(tl.int64))
    tl.store(outcome.finite_B + b, finite)


@triton.jit
def store_token(outcome: Verdict, drafts: Drafts, b, k, token, finite):
    """Store the token after k accepted drafts; -1 unless all rows 0..k are `finite`."""
    tl.store(outcome.token_BK1 + b * (drafts.K + 1) + k, tl.where(finite, token, -1))


@triton.jit
def agenda_of(agenda: Agenda, b, K):
    """The `RequestAgenda` of request b."""
    integers = agenda.integers + b.to(tl.int64) * (HEADER + INTEGERS * K)
    floats = agenda.floats + b.to(tl.int64) * (FLOATS * K)
    return RequestAgenda(integers, integers + 1, integers + 2, integers + HEADER, floats)


@triton.jit
def store_lines(agenda_b: RequestAgenda, index, lines: Line, mask):
    """Write a vector of lines to an agenda. index: the index of each line in the agenda."""
    integers, floats = agenda_b.integers + index * INTEGERS, agenda_b.floats + index * FLOATS
    row, position, p, source, log_p, log_q, log_next = lines
    _, _, _, q_threshold, q_lse, log_w = source
    integer_fields = (row, position, source.mode, source.token, source.q_offset)
    float_fields = (q_threshold, q_lse, log_w, p.threshold, p.scale, p.lse, log_p, log_q, log_next)
    for n in tl.static_range(INTEGERS):
        tl.store(integers + n, integer_fields[n], mask=mask)
    for n in tl.static_range(FLOATS):
        tl.store(floats + n, float_fields[n], mask=mask)


@triton.jit
def load_line(agenda_b: RequestAgenda, index, mask):
    """The `Line` at this index, or a vector of lines; where not `mask`, `row` is -1."""
    integers, floats = agenda_b.integers + index * INTEGERS, agenda_b.floats + index * FLOATS
    row = tl.load(integers, mask=mask, other=-1)
    position = tl.load(integers + 1, mask=mask, other=0)
    mode = tl.load(integers + 2, mask=mask, other=0)
    token = tl.load(integers + 3, mask=mask, other=0)
    offset = tl.load(integers + 4, mask=mask, other=0)
    q_threshold = tl.load(floats, mask=mask, other=0.0)
    q_lse = tl.load(floats + 1, mask=mask, other=0.0)
    log_w = tl.load(floats + 2, mask=mask, other=0.0)
    threshold = tl.load(floats + 3, mask=mask, other=0.0)
    scale = tl.load(floats + 4, mask=mask, other=0.0)
    lse = tl.load(floats + 5, mask=mask, other=0.0)
    log_p = tl.load(floats + 6, mask=mask, other=0.0)
    log_q = tl.load(floats + 7, mask=mask, other=0.0)
    log_next = tl.load(floats + 8, mask=mask, other=0.0)
    source = Source(mode, token, offset, q_threshold, q_lse, log_w)
    return Line(row, position, Softmax(threshold, scale, lse), source, log_p, log_q, log_next)


Drafted = namedtuple("Drafted", "token logit log_q q_threshold q_lse real_q u")
"""One request's drafts x_i: vectors [KP], except for `real_q`.

token: x_i, -1 after the last
logit: the target's edited logit of x_i; -inf if the target lacks it
log_q: log2 q(x_i); 0 if q is one-hot, -inf if there is no draft or q lacks it
q_threshold, q_lse: the `Softmax` of each row of q, with the scale of p
real_q: whether q is read from the draft cache; if not, it is one-hot or not needed
u: the uniforms by which drafts are accepted
"""

Decision = namedtuple("Decision", "request drafted p accepted pending mode draws_decide")
"""The state of a request once its rule has been applied.

p: the `Softmax` of its rows, vectors [KP]
accepted: how many drafts are accepted; 0 if that depends on what is pending
pending: DONE, DRAW, ONE_ROW or ALL_ROWS
mode: the mode (`Source`) in which the token after the accepted drafts is drawn
draws_decide: p is one-hot (T=0), or p and q share their noise (COUPLED): drafts are accepted while
    they equal the target's own draws, which are not made yet. False under SYNTHETIC
"""


@triton.jit
def decide_kernel(batch: Batch, drafts: Drafts, outcome: Verdict, agenda: Agenda | None,
                  RAGGED: tl.constexpr, UNDER_BLOCK: tl.constexpr, KP: tl.constexpr,
                  NBP: tl.constexpr, FP64: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """A program per request stores how many drafts it accepts, and the next token or its agenda.
    agenda: None if no residual pass follows; then every token is drawn here. RAGGED: whether
    requests can have drafts. UNDER_BLOCK: whether a request can be under BLOCK."""
    let_next_start(OVERLAP)
    batch = batch  # makes values of fields that are 1: Triton 3.6 loses constants in branches
    b, i = tl.program_id(0), tl.arange(0, KP)
    RESIDUALS: tl.constexpr = agenda is not None
    decision = decide_request(batch, drafts, agenda, b, RAGGED, UNDER_BLOCK, RESIDUALS,
                              REQUEST_CHUNK, KP, NBP, FP64, OVERLAP)  # fmt: skip
    request, p, accepted = decision.request, decision.p, decision.accepted
    drawn_token = tl.full((), -1, tl.int64)
    draws_here = True
    if RESIDUALS:
        draws_here = decision.draws_decide
        agenda_b = agenda_of(agenda, b, drafts.K)
        if (decision.pending == DRAW) | (decision.pending == ONE_ROW):
            row = request.first + i
            lines = _lines(batch, request, decision.drafted, p, i, row, decision.mode)
            # The line of row `accepted` becomes line 0 of the agenda: only that lane stores.
            store_lines(agenda_b, zero_like(i), lines, i == accepted)
        tl.store(agenda_b.pending, decision.pending)
        tl.store(agenda_b.arrived, 0)
        tl.store(agenda_b.arrived_first, 0)
    if draws_here:
        accepted, drawn_token = draw_next_token(batch, decision, NBP, FP64)
    finite = all_finite(p.lse, accepted)
    store_accepted(outcome, drafts, b, accepted, finite, KP)
    if decision.pending == DONE:
        store_token(outcome, drafts, b, accepted, drawn_token, finite)


@triton.jit
def decide_request(batch: Batch, drafts: Drafts, agenda: Agenda | None, b, RAGGED: tl.constexpr,
                   UNDER_BLOCK: tl.constexpr, RESIDUALS: tl.constexpr, CHUNK: tl.constexpr,
                   KP: tl.constexpr, NBP: tl.constexpr, FP64: tl.constexpr,
                   OVERLAP: tl.constexpr):  # fmt: skip
    """The `Decision` on request b. If BLOCK needs residuals first, writes the lines of the agenda.
    RAGGED, UNDER_BLOCK: as in `decide_kernel`. RESIDUALS: whether residuals can be summed after the
    decision. CHUNK: see `first_row`."""
    i = tl.arange(0, KP)
    request = read_request(batch, b, RAGGED, CHUNK)
    settings = request.settings
    from_p = settings.greedy | (settings.rule == COUPLED)  # every draw is from p, no residual
    draws_decide = from_p & (settings.rule != SYNTHETIC)
    if RAGGED:
        drafted = _load_drafts(batch, drafts, request, b, i, from_p, FP64)
    else:
        zeros, no_token = tl.zeros((KP,), tl.float32), tl.full((KP,), -1, tl.int64)
        drafted = Drafted(no_token, zeros, zeros, zeros, zeros, False, zeros)
    wait_for_writes(OVERLAP)
    p, compact = _load_softmax(batch, request, i, KP, NBP)
    # Under a rule that this kernel lacks, rows count as not finite: the request gets no token.
    has_rule = is_compiled(settings.rule, UNDER_BLOCK, drafts.rate_K is not None)
    p = Softmax(p.threshold, p.scale, tl.where(has_rule, p.lse, float("nan")))
    accepted, pending = tl.full((), 0, tl.int32), tl.full((), DONE, tl.int32)
    if RAGGED:
        accepted, pending = _apply_rule(batch, drafts, agenda, request, drafted, p, b, compact,
                                        draws_decide, i, UNDER_BLOCK, FP64)  # fmt: skip
    next_draft = (i == accepted) & (i < request.num)
    log_q = tl.max(tl.where(next_draft, drafted.log_q, float("-inf")), axis=0)
    mode = tl.where(from_p, FROM_P, _replacement_mode(log_q, drafted.real_q))
    if RESIDUALS:
        if (pending == DONE) & all_finite(p.lse, accepted) & (not draws_decide):
            is_compact = tl.sum(((i == accepted) & compact).to(tl.int32), axis=0) > 0
            # The residual pass sums a dense row's residual, `draw` itself that of a short list.
            needs_sum = (mode == RESIDUAL) | ((mode == WITHOUT_TOKEN) & settings.flat)
            pending = tl.where(needs_sum & (not is_compact), ONE_ROW, DRAW)
    return Decision(request, drafted, p, accepted, pending, mode, draws_decide)


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
def _load_softmax(batch: Batch, request: Request, i, KP: tl.constexpr, NBP: tl.constexpr):
    """(the `Softmax` of a request's rows [KP], whether each row is compact); stores each lse."""
    scratch, row, live = batch.scratch, request.first + i, i <= request.num
    block_mass = load_masses(batch, row, live, NBP)
    # The gather gives each lane one row. In the layout of the sum each thread would hold all rows
    # of `lse` and of every operand of the rule, even of the noise: 1 700 instructions, not 340.
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
                drafted: Drafted, p: Softmax, b, compact, draws_decide, i,
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
    if draws_decide:
        accepted = tl.full((), 0, tl.int32)
    if UNDER_BLOCK:
        if (rule == BLOCK_RULE) & (not draws_decide):
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
    The residual pass sums the masses of dense rows with a real q. `_block_rule` sums those of short
    lists; with a one-hot q a mass follows from p(x_i). Under flat noise the pass reads every dense
    row, since a draw needs the row's best scores."""
    log_w = shifted(log_next, -1)  # 0 for row 0: nothing precedes it
    needs_pass = (i < request.num) & (drafted.log_q > float("-inf")) & (log_w > float("-inf"))
    needs_pass = needs_pass & (request.settings.flat | drafted.real_q) & (compact == 0)
    row = tl.where(needs_pass, request.first + i, -1)
    mode = _replacement_mode(drafted.log_q, drafted.real_q)
    return _lines(batch, request, drafted, p, i, row, mode, log_w, log_p, log_next)


@triton.jit
def _lines(batch: Batch, request: Request, drafted: Drafted, p: Softmax, i, row, mode, log_w=0.0,
           log_p=0.0, log_next=0.0):  # fmt: skip
    """The lines of rows i of a request. row: -1 where no residual is to be summed."""
    offset = q_offset(batch.q, request.settings.slot, i)
    source = Source(mode, drafted.token, offset, drafted.q_threshold, drafted.q_lse, log_w)
    position = request.position + i
    return Line(row, position, p, source, log_p, drafted.log_q, log_next)


@triton.jit
def _replacement_mode(log_q, real_q):
    """The mode in which a draft's replacement is drawn; FROM_P if q lacks the draft."""
    residual = tl.where(real_q, RESIDUAL, WITHOUT_TOKEN)
    return tl.where(log_q == float("-inf"), FROM_P, residual)


@triton.jit
def draw_next_token(batch: Batch, decision: Decision, NBP: tl.constexpr, FP64: tl.constexpr):
    """(number of accepted drafts, the token after them) of a request that needs no residual.
    If draws decide, rows are drawn one after the other as long as the drawn token is the draft."""
    request, accepted = decision.request, decision.accepted
    drawn_token = tl.full((), -1, tl.int64)
    finite = is_finite(decision.p.lse).to(tl.int32)
    draws_again = True
    while draws_again:
        draft_token = value_at(decision.drafted.token, accepted)
        source = Source(decision.mode, draft_token, 0, 0.0, 0.0, 0.0)
        drawn_token = draw_verified(batch, request.first + accepted, request.settings, source,
                                    request.position + accepted, NBP, FP64)  # fmt: skip
        draws_again = False
        if decision.draws_decide & (accepted < request.num):
            if (draft_token == drawn_token) & (value_at(finite, accepted) == 1):
                accepted += 1
                draws_again = True
    return accepted, drawn_token

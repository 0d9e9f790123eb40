"""The pass over p and q together, and the draw of what `decide.py` planned.

Many programs sum a request's residual, each some blocks of a row, and count themselves; the last
to arrive finishes the request: the block rule, and the draw. That saves a fourth launch. A request
that has nothing to sum is drawn by its first program.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foretoken.ops.backends.triton import rules
from foretoken.ops.backends.triton.draw import (
    FROM_P,
    Softmax,
    Target,
    block_masses,
    draw_verified,
    in_mode,
    load_list,
    weigh,
)
from foretoken.ops.backends.triton.noise import RESIDUAL_TOKEN, Address, gumbel_span
from foretoken.ops.backends.triton.records import Batch, Drafts, Plan
from foretoken.ops.backends.triton.request import (
    ALL_ROWS,
    DONE,
    DRAW,
    Request,
    RequestPlan,
    accept_uniforms,
    all_finite,
    is_finite,
    load_masses,
    load_planned,
    log2_of,
    plan_of,
    read_request,
    shifted,
    store_accepted,
    store_token,
)
from foretoken.ops.backends.triton.rows import (
    BLOCK,
    REQUESTS_AT_ONCE,
    Settings,
    load_span,
    log2_sum,
    read_settings,
    wait_for_writes,
)
from foretoken.ops.types import Verdict


@triton.jit
def residual_kernel(
    batch: Batch, drafts: Drafts, outcome: Verdict, plan: Plan, parts, lines, KP: tl.constexpr,
    NBP: tl.constexpr, FP64: tl.constexpr, PER: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Programs: (request, line of its plan, PER blocks of the row that is planned there).

    DRAW: the first program draws at once. ONE_ROW: the programs of line 0 sum its row, and the
    last to arrive draws. ALL_ROWS: row i of the request is at line i. The last program of all that
    sum rows 1..K-1 applies the rule. If that accepts a draft, row 0 is not needed, and the same
    program draws. If it accepts none, the last to arrive at row 0 draws: one of those that sum it,
    or the one that applied the rule.

    parts: programs per row. lines: of a request's plan, that programs look at.

    Requests come in reverse: the rows that the scan read last may still be in the L2 cache. Row 0
    of all requests runs last: under BLOCK its mass is unused once a draft has been accepted.
    """
    batch = batch  # see `records.py`
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    part, item = pid % parts, pid // parts
    requests = tl.num_programs(0) // (parts * lines)
    line, b = item // requests, item % requests
    settings = read_settings(batch.slots, tl.load(batch.requests.slot_B + b), batch.rows.V)
    wait_for_writes(OVERLAP)
    plan_b = plan_of(plan, b, drafts.K)
    pending = tl.load(plan_b.pending, cache_modifier=".cg")
    planned = load_planned(plan_b, line, True)
    accepted = tl.load(outcome.n_accept_B + b).to(tl.int32)
    # For one row the programs of line 0 suffice; for a draw alone, one program.
    if (pending == DONE) | ((pending != ALL_ROWS) & (line > 0)) | ((pending == DRAW) & (part > 0)):
        return
    i = tl.arange(0, KP)
    # So many programs are to count themselves in `arrived`; the last of them goes on.
    arrived, expected, others = plan_b.arrived, tl.full((), 0, tl.int32) + parts, 0
    if pending == ALL_ROWS:
        summed = (load_planned(plan_b, i, i < lines).row >= 0).to(tl.int32)
        others = tl.sum(tl.where(i > 0, summed, 0), axis=0)  # rows to be summed, except row 0
        if (planned.row < 0) & ((tl.sum(summed, axis=0) > 0) | (part + line > 0)):
            return  # of a request without rows to be summed, the first program goes on
        expected = others * parts
        if line == 0:  # the program that applies the rule arrives here, too
            arrived, expected = plan_b.arrived_first, parts + tl.minimum(others, 1)
    if (planned.row >= 0) & (pending != DRAW):
        address = Address(settings.key, planned.position, 0, RESIDUAL_TOKEN)
        mass, best, _ = weigh_blocks(batch, planned.row, part, settings, planned.p, planned.target,
                                     address, PER, FP64)  # fmt: skip
        j = part * PER + tl.arange(0, PER)
        place = planned.row * batch.rows.NB + j
        tl.store(batch.scratch.mass_NJ + place, mass, mask=j < batch.rows.NB)
        if batch.scratch.filtered is not None:
            if settings.flat:
                tl.store(batch.scratch.best_NJ + place, best, mask=j < batch.rows.NB)
        tl.debug_barrier()
        if tl.atomic_add(arrived, 1, sem="acq_rel") != expected - 1:
            return
    # Of requests that are finite alone a draw or one row is planned.
    row, position, target, finite = planned.row, planned.position, planned.target, True
    if pending == ALL_ROWS:
        request = read_request(batch, b, True, REQUESTS_AT_ONCE)
        accepted = tl.full((), 0, tl.int32)
        if (line > 0) | (others == 0):
            accepted = _block_rule(batch, drafts, plan_b, request, b, KP, NBP, FP64)
            lse = tl.load(batch.scratch.lse_N + request.first + i, mask=i <= accepted, other=0.0)
            finite = all_finite(lse, accepted)
            store_accepted(outcome, drafts, b, accepted, finite, KP)
            if (accepted == 0) & (others > 0) & (load_planned(plan_b, 0, True).row >= 0):
                tl.debug_barrier()
                if tl.atomic_add(plan_b.arrived_first, 1, sem="acq_rel") != parts:
                    return  # row 0 is still being summed; if a draft was accepted, it is not needed
            tl.store(plan_b.pending, DONE)  # programs of row 0 that come later have nothing to do
        else:  # the rule was applied by another program, and accepted nothing
            finite = tl.load(outcome.finite_B + b) != 0
        next_row = load_planned(plan_b, tl.minimum(accepted, drafts.K - 1), True)
        mode = tl.where(accepted < request.num, next_row.target.mode, FROM_P)
        target = in_mode(next_row.target, mode)
        row, position = request.first + accepted, request.position + accepted
    drawn_token = draw_verified(batch, row, settings, target, position, NBP, FP64)
    store_token(outcome, drafts, b, accepted, drawn_token, finite)


@triton.jit
def weigh_blocks(batch: Batch, row, part, settings: Settings, p: Softmax, target: Target,
                 address: Address, PER: tl.constexpr, FP64: tl.constexpr):  # fmt: skip
    """(masses, best scores, logits) of the part-th PER blocks of a row's residual.

    Best scores are those of flat noise, and mean nothing without it.
    """
    width: tl.constexpr = PER * BLOCK
    start = part * width
    off = start + tl.arange(0, width)
    x = load_span(batch.rows, row, start, width, "evict_first")
    mass = block_masses(x, off, p, target, batch.q, PER)
    best = mass
    if batch.scratch.filtered is not None:
        if settings.flat:
            score = weigh(x, off, p, target, batch.q) + gumbel_span(address, start, width, FP64)
            best = tl.max(tl.reshape(score, (PER, BLOCK)), axis=1).to(tl.float32)
    return mass, best, x


@triton.jit
def _block_rule(batch: Batch, drafts: Drafts, plan_b: RequestPlan, request: Request, b,
                KP: tl.constexpr, NBP: tl.constexpr, FP64: tl.constexpr):  # fmt: skip
    """How many drafts BLOCK accepts, from the residual masses of all rows that have a q."""
    i, scratch, num = tl.arange(0, KP), batch.scratch, request.num
    planned = load_planned(plan_b, i, i < num)
    log_w = planned.target.log_w
    mass = tl.exp2(log_w) * (1 - tl.exp2(planned.log_p))  # of a one-hot q: w (1 - p(x_i))
    if batch.q is not None:
        if tl.load(drafts.real_q_B + b) != 0:
            block_mass = load_masses(batch, request.first + i, i < num, NBP)
            mass = tl.where(log_w > float("-inf"), tl.sum(tl.exp2(block_mass), axis=1), 0.0)
            if scratch.filtered is not None:
                for k in range(num):  # rows with a short list
                    row = request.first + k
                    count = tl.load(scratch.filtered.count_N + row)
                    if count >= 0:
                        one = load_planned(plan_b, k, True)
                        x, id_ = load_list(scratch.filtered, row, count)
                        weight = weigh(x, id_, one.p, one.target, batch.q)
                        mass = tl.where(i == k, tl.exp2(log2_sum(weight)), mass)
    mass = tl.where((i < num) & is_finite(planned.p.lse), mass, 0.0)
    has_q = (i < num) & (planned.log_q > float("-inf"))
    ends = shifted(has_q.to(tl.float32), 1) == 0
    log_u = log2_of(accept_uniforms(request, i, FP64), FP64)
    mass_next = shifted(mass, 1)
    return rules.block(planned.log_next, mass_next, ends, planned.log_q, log_u, i, num)

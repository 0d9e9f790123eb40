"""What the verification kernels share: a request, its outcome, and what is planned to finish it.

`decide.py` plans what `residual.py` does: what is pending, two counters, and up to K rows.
"""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from foretoken.ops.backends.triton.draw import Softmax, Target
from foretoken.ops.backends.triton.noise import ACCEPT, LOG2E, Address, log2, uniform_at
from foretoken.ops.backends.triton.records import Batch, Drafts, Plan
from foretoken.ops.backends.triton.rows import first_row, read_settings
from foretoken.ops.types import Verdict

# What is pending after the decision: nothing; a draw; the sum of one row's residual, and a draw;
# the sums of all rows' residuals, then the block rule, and a draw.
DONE, DRAW, ONE_ROW, ALL_ROWS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)

# Numbers in a request's plan: before the rows; integers and floats of each row.
HEAD, INTEGERS, FLOATS = tl.constexpr(3), tl.constexpr(5), tl.constexpr(9)

Request = namedtuple("Request", "first num position settings")
"""first: its first row; num: how many drafts it has; position: of row `first`."""

RequestPlan = namedtuple("RequestPlan", "pending arrived arrived_first integers floats")
"""Pointers to one request's part of a `Plan`.

arrived:       how many programs have summed their part of a row
arrived_first: the same of row 0 under BLOCK, which `arrived` leaves out
integers, floats: of the first planned row
"""

PlannedRow = namedtuple("PlannedRow", "row position p target log_p log_q log_next")
"""One row of a request, or a vector of rows.

row:       -1 if it has no residual to be summed
position:  of the token that the row decides
p, target: its `Softmax` and its `Target`
log_p, log_q, log_next: what BLOCK decides by: log2 p(x_i), log2 q(x_i), the next row's log2 w
"""


@triton.jit
def read_request(batch: Batch, b, RAGGED: tl.constexpr, AT_ONCE: tl.constexpr):
    """Request b. RAGGED: requests may have drafts. AT_ONCE: see `first_row`."""
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
    """Block masses of rows [KP], as [KP, NBP]; -inf where not `mask`, and behind the last block."""
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
    return uniform_at(address, i * 0, FP64)


@triton.jit
def log2_of(u, FP64: tl.constexpr):
    """log2 of a uniform, below 0 whatever the hardware's rounding: u < 1 must stay so."""
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
    """Whether a number is finite: of infinities and NaN the difference is NaN."""
    return x - x == 0


@triton.jit
def all_finite(lse, k):
    """Whether the rows 0..k of a request are finite."""
    i = tl.arange(0, lse.shape[0])
    return tl.sum(((i <= k) & ~is_finite(lse)).to(tl.int32), axis=0) == 0


@triton.jit
def store_accepted(outcome: Verdict, drafts: Drafts, b, k, finite, KP: tl.constexpr):
    """All of a verdict except the token after the k accepted drafts; behind that comes -1."""
    i, K = tl.arange(0, KP), drafts.K
    token = tl.load(drafts.token_BK + b * K + i, mask=(i < k) & (i < K), other=-1).to(tl.int64)
    mask = (i <= K) & (i != k)
    tl.store(outcome.token_BK1 + b * (K + 1) + i, tl.where(i < k, token, -1), mask=mask)
    tl.store(outcome.n_accept_B + b, k.to(tl.int64))
    tl.store(outcome.finite_B + b, finite)


@triton.jit
def store_token(outcome: Verdict, drafts: Drafts, b, k, token, finite):
    """The token after k accepted drafts; -1 if a row that decided the request is not finite."""
    tl.store(outcome.token_BK1 + b * (drafts.K + 1) + k, tl.where(finite, token, -1))


@triton.jit
def plan_of(plan: Plan, b, K):
    """Where the plan of request b is."""
    integers = plan.integers + b.to(tl.int64) * (HEAD + INTEGERS * K)
    floats = plan.floats + b.to(tl.int64) * (FLOATS * K)
    return RequestPlan(integers, integers + 1, integers + 2, integers + HEAD, floats)


@triton.jit
def store_planned(plan_b: RequestPlan, line, planned: PlannedRow, mask):
    """Write rows to lines 0..K-1 of a request's plan."""
    integers, floats = plan_b.integers + line * INTEGERS, plan_b.floats + line * FLOATS
    row, position, p, target, log_p, log_q, log_next = planned
    whole = (row, position, target.mode, target.token, target.q_offset)
    parts = (target.q_threshold, target.q_lse, target.log_w, p.threshold, p.scale, p.lse, log_p,
             log_q, log_next)  # fmt: skip
    for n in tl.static_range(INTEGERS):
        tl.store(integers + n, whole[n], mask=mask)
    for n in tl.static_range(FLOATS):
        tl.store(floats + n, parts[n], mask=mask)


@triton.jit
def load_planned(plan_b: RequestPlan, line, mask):
    """The rows at lines of a request's plan; where not `mask` one that is not to be summed."""
    integers, floats = plan_b.integers + line * INTEGERS, plan_b.floats + line * FLOATS
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
    return PlannedRow(
        row=tl.load(integers, mask=mask, other=-1),
        position=tl.load(integers + 1, mask=mask, other=0),
        p=p,
        target=target,
        log_p=tl.load(floats + 6, mask=mask, other=0.0),
        log_q=tl.load(floats + 7, mask=mask, other=0.0),
        log_next=tl.load(floats + 8, mask=mask, other=0.0),
    )

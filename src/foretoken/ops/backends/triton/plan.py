"""What `decide.py` leaves to `residual.py`: what is pending, two counters, and planned rows.

Shapes: B requests, K most drafts of one, and so many rows that can be planned.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any, NamedTuple

import triton
import triton.language as tl

from foretoken.ops.backends.triton.draw import Softmax, Target
from foretoken.ops.backends.triton.records import Plan

HEAD, INTEGERS, FLOATS = tl.constexpr(3), tl.constexpr(5), tl.constexpr(9)

# What is pending after the decision: nothing; a draw; one row's residual; the block rule itself.
DONE, DRAW, ONE_ROW, ALL_ROWS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)

RequestPlan = namedtuple("RequestPlan", "pending arrived arrived_first integers floats")
"""Pointers to one request's part of a `Plan`.

arrived, arrived_first: how many programs have summed their part of a row: of row 0 under BLOCK the
                        second counts, else the first
integers, floats:       of the planned rows, so many per row
"""


class PlannedRow(NamedTuple):
    """One row of a request, or a vector of rows.

    row:      -1 if it has no residual to be summed
    position: of the token that the row decides
    log_p, log_q, log_next: what BLOCK decides by: log2 p(x_i), log2 q(x_i), the next row's log2 w
    """

    row: Any
    position: Any
    p: Softmax
    target: Target
    log_p: Any
    log_q: Any
    log_next: Any


@triton.jit
def plan_of(plan: Plan, b, K):
    """Where the plan of request b is."""
    integers = plan.integers + b.to(tl.int64) * (HEAD + INTEGERS * K)
    floats = plan.floats + b.to(tl.int64) * (FLOATS * K)
    return RequestPlan(integers, integers + 1, integers + 2, integers + HEAD, floats)


@triton.jit
def store_planned(here: RequestPlan, place, planned: PlannedRow, mask):
    """Plan rows at places (0..K-1) of a request's plan."""
    integers, floats = here.integers + place * INTEGERS, here.floats + place * FLOATS
    tl.store(integers, planned.row, mask=mask)
    tl.store(integers + 1, planned.position, mask=mask)
    tl.store(integers + 2, planned.target.mode, mask=mask)
    tl.store(integers + 3, planned.target.token, mask=mask)
    tl.store(integers + 4, planned.target.q_offset, mask=mask)
    tl.store(floats, planned.target.q_threshold, mask=mask)
    tl.store(floats + 1, planned.target.q_lse, mask=mask)
    tl.store(floats + 2, planned.target.log_w, mask=mask)
    tl.store(floats + 3, planned.p.threshold, mask=mask)
    tl.store(floats + 4, planned.p.scale, mask=mask)
    tl.store(floats + 5, planned.p.lse, mask=mask)
    tl.store(floats + 6, planned.log_p, mask=mask)
    tl.store(floats + 7, planned.log_q, mask=mask)
    tl.store(floats + 8, planned.log_next, mask=mask)


@triton.jit
def load_planned(here: RequestPlan, place, mask):
    """What was planned at places; where not `mask` a row that is not to be summed."""
    integers, floats = here.integers + place * INTEGERS, here.floats + place * FLOATS
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

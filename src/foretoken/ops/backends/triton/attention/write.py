"""K/V of any number of new tokens, and their queries, ready to attend."""

from __future__ import annotations

import triton
import triton.language as tl

from foretoken.ops.backends.triton.attention.records import Cache, HeadInputs, Rows
from foretoken.ops.backends.triton.attention.rows import turned_heads, write_heads
from foretoken.ops.backends.triton.rows import let_next_start, wait_for_writes


@triton.jit
def write_kernel(
    rows: Rows, heads: HeadInputs, cache: Cache, query_start_B1, length_B, B,
    H: tl.constexpr, H_KV: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, ROTARY: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, AT_ONCE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program per ROWS tokens and K/V head: its keys and values, and the queries in place.

    AT_ONCE: requests at once, in the search for whose token is whose.
    """
    let_next_start(OVERLAP)
    rows, cache = rows, cache  # see `triton/records.py`
    h = tl.program_id(1)
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    request = tl.zeros((ROWS,), tl.int32)
    for chunk in range(0, B, AT_ONCE):
        b = chunk + tl.arange(0, AT_ONCE)
        end = tl.load(query_start_B1 + b + 1, mask=b < B, other=2**40)
        request += tl.sum((end[None, :] <= t[:, None]).to(tl.int32), 1)
    live = request < B
    request = tl.minimum(request, B - 1)
    behind = tl.load(query_start_B1 + request + 1) - t
    position = (tl.load(length_B + request) - behind).to(tl.int32)
    wait_for_writes(OVERLAP)
    write_heads(
        rows, heads, cache, t, position, live, request, h,
        H, H_KV, D, D_V, WIDTH, WIDTH_V, ROTARY, PAGE,
    )  # fmt: skip
    d = tl.arange(0, WIDTH)
    for g in range(H // H_KV):
        p = rows.query + t.to(tl.int64) * rows.stride + (h * (H // H_KV) + g) * D
        query = turned_heads(p, position, live, heads.q_norm_D, heads, D, WIDTH, ROTARY)
        tl.debug_barrier()  # a lane turns what another one replaces
        to = p[:, None] + d[None, :]
        inside = live[:, None] & (d < D)[None, :]
        tl.store(to, query.to(rows.query.dtype.element_ty), mask=inside)

"""K/V of any number of new tokens, and their queries, ready to attend."""

from __future__ import annotations

import triton
import triton.language as tl

from foretoken.ops.backends.triton.attention.records import Cache, HeadInputs, Rows
from foretoken.ops.backends.triton.attention.rows import load_angles, load_heads, turned_heads
from foretoken.ops.backends.triton.rows import let_next_start, wait_for_writes


@triton.jit(do_not_specialize=["B"])
def write_new_kernel(
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
    angles = load_angles(heads, position, live, WIDTH, ROTARY)
    block = tl.load(
        cache.block_BL + request.to(tl.int64) * cache.columns + position // PAGE,
        mask=live, other=0,
    )  # fmt: skip
    place = (block.to(tl.int64) * PAGE + position % PAGE) * H_KV + h
    row_p = rows.query + t.to(tl.int64) * rows.stride
    wait_for_writes(OVERLAP)
    d, d_v = tl.arange(0, WIDTH), tl.arange(0, WIDTH_V)
    inside, inside_v = live[:, None] & (d < D), live[:, None] & (d_v < D_V)
    key = turned_heads(row_p + (H + h) * D, angles, live, heads.k_norm_D, heads, D, WIDTH, ROTARY)
    value = load_heads(row_p + (H + H_KV) * D + h * D_V, live, D_V, WIDTH_V)
    to = cache.key + place[:, None] * D + d
    tl.store(to, key.to(value.dtype), mask=inside)
    tl.store(cache.value + place[:, None] * D_V + d_v, value, mask=inside_v)
    for g in range(H // H_KV):
        p = row_p + (h * (H // H_KV) + g) * D
        query = turned_heads(p, angles, live, heads.q_norm_D, heads, D, WIDTH, ROTARY)
        tl.debug_barrier()  # a lane turns what another one replaces
        tl.store(p[:, None] + d, query.to(value.dtype), mask=inside)

"""Attention of few queries: they meet pieces of their context, which a second kernel merges.

The rows of a request's new tokens, times the G heads of a K/V head, form one operand: K and V are
read once. Each of GROUPS warps has its own keys and its own softmax; they meet at the end of a
piece. What a row comes to depends on SIZE, COUNT, GROUPS and KEYS, and on nothing beside its
context: tiles lie at fixed positions, those that it does not see change no bit, and rows of a
product do not touch each other.

Letters: R rows of a tile, W warps (GROUPS for each of SETS of rows), Q rows of a warp, k keys of a
warp, D sizes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foretoken.ops.backends.triton.attention.plan import FEW, load_item, load_merge_row
from foretoken.ops.backends.triton.attention.records import (
    Cache,
    HeadInputs,
    Partials,
    Rows,
    Scores,
    Work,
)
from foretoken.ops.backends.triton.attention.rows import load_angles, load_heads, turned_heads
from foretoken.ops.backends.triton.attention.softmax import UNSEEN, score, settled
from foretoken.ops.backends.triton.rows import let_next_start, wait_for_writes


@triton.jit
def _for_warps(x, GROUPS: tl.constexpr, SETS: tl.constexpr, Q: tl.constexpr, D: tl.constexpr):
    """Rows [R, D] as each warp has them, [W, Q, D]."""
    x = tl.broadcast_to(x.reshape(SETS, 1, Q, D), (SETS, GROUPS, Q, D))
    return x.reshape(SETS * GROUPS, Q, D)


@triton.jit
def _for_sets(x, SETS: tl.constexpr):
    """Keys or values [GROUPS, k, D] for each set of rows, [W, k, D]."""
    if SETS > 1:
        x = tl.broadcast_to(x[None, :, :, :], (SETS, x.shape[0], x.shape[1], x.shape[2]))
        x = x.reshape(SETS * x.shape[1], x.shape[2], x.shape[3])
    return x


@triton.jit
def _blocks(table, begin, end, PAGE: tl.constexpr, GROUPS: tl.constexpr, KEYS: tl.constexpr):
    """In which blocks the tile at `begin` lies: [GROUPS, k], or [GROUPS, 1] if a warp's keys are in
    one block."""
    APART: tl.constexpr = 1 if PAGE % KEYS == 0 else KEYS
    at = begin + tl.arange(0, GROUPS)[:, None] * KEYS + tl.arange(0, APART)[None, :]
    return tl.load(table + at // PAGE, mask=at < end, other=0)


@triton.jit
def _places(block, begin, h, H_KV: tl.constexpr, PAGE: tl.constexpr, GROUPS: tl.constexpr,
            KEYS: tl.constexpr):  # fmt: skip
    """Which heads of the cache the tile at `begin` consists of, [GROUPS, k]."""
    at = _positions(begin, GROUPS, KEYS)
    return (block.to(tl.int64) * PAGE + at % PAGE) * H_KV + h


@triton.jit
def _positions(begin, GROUPS: tl.constexpr, KEYS: tl.constexpr):
    return begin + tl.arange(0, GROUPS)[:, None] * KEYS + tl.arange(0, KEYS)[None, :]


@triton.jit
def _write_new(
    table, rows: Rows, heads: HeadInputs, cache: Cache, item, h,
    H: tl.constexpr, H_KV: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr, WIDTH: tl.constexpr,
    WIDTH_V: tl.constexpr, ROTARY: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Write keys and values of the new tokens that lie in a piece."""
    new = tl.arange(0, FEW)
    at = item.start + new
    here = (at >= item.begin) & (at < item.end)
    row_p = rows.query + (item.first + new).to(tl.int64) * rows.stride
    angles = load_angles(heads, at, here, WIDTH, ROTARY)
    key = turned_heads(row_p + (H + h) * D, angles, here, heads.k_norm_D, heads, D, WIDTH, ROTARY)
    value = load_heads(row_p + (H + H_KV) * D + h * D_V, here, D_V, WIDTH_V)
    block = tl.load(table + at // PAGE, mask=here, other=0)
    place = ((block.to(tl.int64) * PAGE + at % PAGE) * H_KV + h)[:, None]
    d, d_v = tl.arange(0, WIDTH), tl.arange(0, WIDTH_V)
    to = cache.key + place * D + d
    tl.store(to, key.to(value.dtype), mask=here[:, None] & (d < D))
    tl.store(cache.value + place * D_V + d_v, value, mask=here[:, None] & (d_v < D_V))


@triton.jit
def _load_heads_or(p, live, other, D: tl.constexpr, WIDTH: tl.constexpr):
    """`load_heads`, but `other` where not live."""
    d = tl.arange(0, WIDTH)
    mask = tl.expand_dims(live, -1) & (d < D)
    return tl.load(tl.expand_dims(p, -1) + d, mask=mask, other=other)


@triton.jit
def _pass_over(
    top, total, acc, key, value, block, begin, end, cached, query, position, table,
    cache: Cache, scores: Scores, h, HAS_NEW: tl.constexpr, H_KV: tl.constexpr, D: tl.constexpr,
    D_V: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, GROUPS: tl.constexpr, KEYS: tl.constexpr, SETS: tl.constexpr,
    AHEAD: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The softmaxes of all warps, taken on over the tiles from `begin` to `end`.

    Args:
        key, value: the first tile, if AHEAD: the next one is asked for as soon as there is room in
            registers.
        block: of the first tile that is to be asked for.
        cached: new tokens begin here: nothing is asked for ahead from here on.
        HAS_NEW: they may lie in these tiles.
    """
    W: tl.constexpr = GROUPS * SETS
    TILE: tl.constexpr = GROUPS * KEYS
    for first in tl.range(begin, end, TILE, num_stages=STAGES):
        asked = first + TILE * AHEAD
        place = _places(block, asked, h, H_KV, PAGE, GROUPS, KEYS)
        exists = _positions(asked, GROUPS, KEYS) < cached
        block = _blocks(table, asked + TILE, cached, PAGE, GROUPS, KEYS)
        if AHEAD:
            this_key, this_value = key, value
        else:
            this_key = load_heads(cache.key + place * D, exists, D, WIDTH)
            this_value = load_heads(cache.value + place * D_V, exists, D_V, WIDTH_V)
        at = _positions(first, GROUPS, KEYS)
        if HAS_NEW:  # what this program has just written
            new = (at >= cached) & (at < end)
            its = _places(
                _blocks(table, first, end, PAGE, GROUPS, KEYS), first, h, H_KV, PAGE, GROUPS, KEYS
            )  # fmt: skip
            this_key = _load_heads_or(cache.key + its * D, new, this_key, D, WIDTH)
            this_value = _load_heads_or(cache.value + its * D_V, new, this_value, D_V, WIDTH_V)
        this_key, this_value = _for_sets(this_key, SETS), _for_sets(this_value, SETS)
        s = tl.dot(query, tl.trans(this_key, (0, 2, 1)), input_precision=PRECISION)
        if AHEAD:
            key = load_heads(cache.key + place * D, exists, D, WIDTH)
        at = tl.broadcast_to(at[None, :, :], (SETS, GROUPS, KEYS)).reshape(W, 1, KEYS)
        seen = at <= position
        if WINDOW:
            seen &= at > position - WINDOW
        s = tl.where(seen, score(s, scores), UNSEEN)
        higher = tl.maximum(top, tl.max(s, 2))
        weight = tl.exp2(s - higher[:, :, None])
        old = tl.exp2(top - higher)
        total = total * old + tl.sum(weight, 2)
        acc = tl.dot(
            weight.to(value.dtype), this_value, acc * old[:, :, None], input_precision=PRECISION
        )
        if AHEAD:
            value = load_heads(cache.value + place * D_V, exists, D_V, WIDTH_V)
        top = higher
    return top, total, acc, key, value, block


@triton.jit
def _store(
    top, total, acc, item, t, head, live, scores: Scores, partials: Partials, out,
    H: tl.constexpr, D_V: tl.constexpr, WIDTH_V: tl.constexpr, R: tl.constexpr,
    SETS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Let the warps of each set meet, and store what their rows came to."""
    Q: tl.constexpr = R // SETS
    top = top.reshape(SETS, GROUPS, Q)
    highest = tl.max(top, 1)
    share = tl.exp2(top - highest[:, None, :])
    total = tl.sum(total.reshape(SETS, GROUPS, Q) * share, 1).reshape(R)
    acc = acc.reshape(SETS, GROUPS, Q, WIDTH_V) * share[:, :, :, None]
    acc = tl.sum(acc, 1).reshape(R, WIDTH_V)
    highest = highest.reshape(R)
    d_v = tl.arange(0, WIDTH_V)
    inside = live[:, None] & (d_v < D_V)
    if item.piece < 0:
        result = settled(highest, total, acc, head, live, scores)
        to = out + ((item.first + t).to(tl.int64) * H + head)[:, None] * D_V + d_v
        tl.store(to, result.to(out.dtype.element_ty), mask=inside)
    else:
        place = ((item.slot + t).to(tl.int64) * H + head) * partials.pieces + item.piece
        tl.store(partials.acc_FHN + place[:, None] * D_V + d_v, acc, mask=inside)
        tl.store(partials.top_FHN + place, highest, mask=live)
        tl.store(partials.sum_FHN + place, total, mask=live)


@triton.jit
def decode_kernel(
    rows: Rows, heads: HeadInputs, cache: Cache, work: Work, partials: Partials, scores: Scores,
    out, H: tl.constexpr, H_KV: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, ROTARY: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, R: tl.constexpr, SETS: tl.constexpr, GROUPS: tl.constexpr,
    KEYS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (h, i) takes K/V head h of the items i, i + programs, ...

    ROTARY: 0 if `rows` attend as they are and their K/V is in the cache; else rows are of qkv.
    (Triton 3.6 cannot ask whether `heads` is None, if a field of it is None.)
    STAGES: 1 to ask for each tile one tile ahead, in registers; more to do so in shared memory.
    """
    let_next_start(OVERLAP)
    rows, cache, partials = rows, cache, partials  # see `triton/records.py`
    G: tl.constexpr = H // H_KV
    Q: tl.constexpr = R // SETS
    W: tl.constexpr = GROUPS * SETS
    TILE: tl.constexpr = GROUPS * KEYS
    AHEAD: tl.constexpr = STAGES == 1
    h = tl.program_id(0)
    items = tl.load(work.totals)
    for i in range(tl.program_id(1), items, tl.num_programs(1)):
        # Up to the wait nothing is read that the kernel before this one writes.
        item = load_item(work.few_I, i)
        table = cache.block_BL + item.request.to(tl.int64) * cache.columns
        r = item.row + tl.arange(0, R)
        t, head = r // G, h * G + r % G
        live = t < item.count
        position = item.start + t
        cached = item.end
        if ROTARY:
            cached = tl.minimum(item.end, item.start)
        block = _blocks(table, item.begin, cached, PAGE, GROUPS, KEYS)
        exists = _positions(item.begin, GROUPS, KEYS) < cached
        place = _places(block, item.begin, h, H_KV, PAGE, GROUPS, KEYS)
        key = load_heads(cache.key + place * D, exists & AHEAD, D, WIDTH)
        value = load_heads(cache.value + place * D_V, exists & AHEAD, D_V, WIDTH_V)
        if AHEAD:
            block = _blocks(table, item.begin + TILE, cached, PAGE, GROUPS, KEYS)
        row_p = rows.query + (item.first + t).to(tl.int64) * rows.stride + head * rows.head_stride
        if ROTARY:
            angles = load_angles(heads, position, live, WIDTH, ROTARY)
            wait_for_writes(OVERLAP)
            if item.end > item.start:
                _write_new(
                    table, rows, heads, cache, item, h,
                    H, H_KV, D, D_V, WIDTH, WIDTH_V, ROTARY, PAGE,
                )  # fmt: skip
            query = turned_heads(row_p, angles, live, heads.q_norm_D, heads, D, WIDTH, ROTARY)
            query = query.to(out.dtype.element_ty)
        else:
            wait_for_writes(OVERLAP)
            query = load_heads(row_p, live, D, WIDTH)
        query = _for_warps(query, GROUPS, SETS, Q, WIDTH)
        position = _for_warps(position[:, None], GROUPS, SETS, Q, 1)
        top = tl.full((W, Q), UNSEEN, tl.float32)
        total = tl.zeros((W, Q), tl.float32)
        acc = tl.zeros((W, Q, WIDTH_V), tl.float32)
        new_from = item.end
        if ROTARY:
            new_from = tl.maximum(item.begin, tl.minimum(item.end, item.start // TILE * TILE))
        top, total, acc, key, value, block = _pass_over(
            top, total, acc, key, value, block, item.begin, new_from, cached, query, position,
            table, cache, scores, h, False, H_KV, D, D_V, WIDTH, WIDTH_V, PAGE, WINDOW,
            GROUPS, KEYS, SETS, AHEAD, STAGES, PRECISION,
        )  # fmt: skip
        if ROTARY:
            tl.debug_barrier()  # lanes read what others wrote
            top, total, acc, key, value, block = _pass_over(
                top, total, acc, key, value, block, new_from, item.end, cached, query, position,
                table, cache, scores, h, True, H_KV, D, D_V, WIDTH, WIDTH_V, PAGE, WINDOW,
                GROUPS, KEYS, SETS, AHEAD, 1, PRECISION,
            )  # fmt: skip
        _store(
            top, total, acc, item, t, head, live, scores, partials, out,
            H, D_V, WIDTH_V, R, SETS, GROUPS,
        )  # fmt: skip
    wait_for_writes(OVERLAP)  # also those that have no item


@triton.jit
def merge_kernel(
    work: Work, partials: Partials, scores: Scores, out,
    H: tl.constexpr, D_V: tl.constexpr, WIDTH_V: tl.constexpr, HEADS: tl.constexpr,
    PIECES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (j, f) merges the pieces of HEADS heads of row f in their order, PIECES at once."""
    let_next_start(OVERLAP)
    partials = partials  # see `triton/records.py`
    f = tl.program_id(1)
    h = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    n, d_v = tl.arange(0, PIECES), tl.arange(0, WIDTH_V)
    rows = tl.load(work.totals + 1)
    row = load_merge_row(work.merge_F, f)
    top = tl.full((HEADS,), UNSEEN, tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    acc = tl.zeros((HEADS, WIDTH_V), tl.float32)
    wait_for_writes(OVERLAP)
    if (f < rows) & (row.first <= row.last):
        base = ((f.to(tl.int64) * H + h) * partials.pieces)[:, None]
        for begin in range(row.first // PIECES * PIECES, row.last + 1, PIECES):
            place = base + begin + n
            valid = (begin + n >= row.first) & (begin + n <= row.last)
            tops = tl.load(partials.top_FHN + place, mask=valid, other=UNSEEN)
            sums = tl.load(partials.sum_FHN + place, mask=valid, other=0.0)
            accs = load_heads(partials.acc_FHN + place * D_V, valid, D_V, WIDTH_V)
            higher = tl.maximum(top, tl.max(tops, 1))
            share, old = tl.exp2(tops - higher[:, None]), tl.exp2(top - higher)
            total = total * old + tl.sum(sums * share, 1)
            acc = acc * old[:, None] + tl.sum(accs * share[:, :, None], 1)
            top = higher
        result = settled(top, total, acc, h, h < H, scores)
        to = out + (row.row.to(tl.int64) * H + h)[:, None] * D_V + d_v
        tl.store(to, result.to(out.dtype.element_ty), mask=d_v < D_V)

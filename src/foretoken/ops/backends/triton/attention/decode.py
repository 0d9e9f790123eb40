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

from foretoken.ops.backends.triton.attention.plan import load_item, load_merge_row
from foretoken.ops.backends.triton.attention.records import (
    Cache,
    HeadInputs,
    Partials,
    Rows,
    Scores,
    Work,
)
from foretoken.ops.backends.triton.attention.rows import load_heads, turned_heads, write_heads
from foretoken.ops.backends.triton.attention.softmax import UNSEEN, score, settled
from foretoken.ops.backends.triton.rows import let_next_start, wait_for_writes

MERGED = tl.constexpr(32)  # pieces at once
NEW = tl.constexpr(16)  # new tokens of a request at once


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
def _piece(
    query, position, cache: Cache, scores: Scores, item, h,
    H_KV: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr, WIDTH: tl.constexpr,
    WIDTH_V: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, GROUPS: tl.constexpr,
    KEYS: tl.constexpr, SETS: tl.constexpr, Q: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The softmaxes of all warps over a piece: top and total [W, Q], acc [W, Q, D_v]."""
    TILE: tl.constexpr = GROUPS * KEYS
    W: tl.constexpr = GROUPS * SETS
    d, d_v = tl.arange(0, WIDTH)[None, None, :], tl.arange(0, WIDTH_V)[None, None, :]
    lane = tl.arange(0, GROUPS)[:, None] * KEYS + tl.arange(0, KEYS)[None, :]
    table = cache.block_BL + item.request.to(tl.int64) * cache.columns
    top = tl.full((W, Q), UNSEEN, tl.float32)
    total = tl.zeros((W, Q), tl.float32)
    acc = tl.zeros((W, Q, WIDTH_V), tl.float32)
    at = item.begin + lane
    block = tl.load(table + at // PAGE, mask=at < item.end, other=0)
    for begin in tl.range(item.begin, item.end, TILE, num_stages=STAGES):
        at = begin + lane
        exists = at < item.end
        place = ((block * PAGE + at % PAGE) * H_KV + h)[:, :, None]
        # One tile ahead: its addresses are known when its keys are asked for.
        block = tl.load(table + (at + TILE) // PAGE, mask=at + TILE < item.end, other=0)
        inside, inside_v = exists[:, :, None], exists[:, :, None]
        if D != WIDTH:
            inside &= d < D
        if D_V != WIDTH_V:
            inside_v &= d_v < D_V
        key = tl.load(cache.key + place * D + d, mask=inside, other=0.0)
        value = tl.load(cache.value + place * D_V + d_v, mask=inside_v, other=0.0)
        key, value = _for_sets(key, SETS), _for_sets(value, SETS)
        s = tl.dot(query, tl.trans(key, (0, 2, 1)), input_precision=PRECISION)
        key_at = tl.broadcast_to(at[None, :, :], (SETS, GROUPS, KEYS)).reshape(W, 1, KEYS)
        seen = key_at <= position
        if WINDOW:
            seen &= key_at > position - WINDOW
        s = tl.where(seen, score(s, scores), UNSEEN)
        higher = tl.maximum(top, tl.max(s, 2))
        weight = tl.exp2(s - higher[:, :, None])
        old = tl.exp2(top - higher)
        total = total * old + tl.sum(weight, 2)
        acc = tl.dot(
            weight.to(value.dtype), value, acc * old[:, :, None], input_precision=PRECISION
        )
        top = higher
    return top, total, acc


@triton.jit
def decode_kernel(
    rows: Rows, heads: HeadInputs, cache: Cache, work: Work, partials: Partials, scores: Scores,
    out, H: tl.constexpr, H_KV: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, ROTARY: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, R: tl.constexpr, SETS: tl.constexpr, GROUPS: tl.constexpr,
    KEYS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (h, i) takes K/V head h of the items i, i + programs, ...

    heads: None if `rows` attend as they are and their K/V is in the cache; else rows of qkv.
    """
    let_next_start(OVERLAP)
    rows, cache, partials = rows, cache, partials  # see `triton/records.py`
    G: tl.constexpr = H // H_KV
    Q: tl.constexpr = R // SETS
    h = tl.program_id(0)
    items = tl.load(work.totals)
    wait_for_writes(OVERLAP)
    for i in range(tl.program_id(1), items, tl.num_programs(1)):
        item = load_item(work.few_I, i)
        r = item.row + tl.arange(0, R)
        t, head = r // G, h * G + r % G
        live = t < item.count
        position = item.start + t
        row_p = rows.query + (item.first + t).to(tl.int64) * rows.stride + head * rows.head_stride
        if ROTARY == 0:  # no heads; Triton 3.6 cannot compare a record that holds a None
            query = load_heads(row_p, live, D, WIDTH)
        else:
            if item.end > item.start:
                new = tl.arange(0, NEW)
                new_at = item.start + new
                mine = (new_at >= item.begin) & (new_at < item.end)
                write_heads(
                    rows, heads, cache, item.first + new, new_at, mine,
                    tl.full((NEW,), 0, tl.int32) + item.request, h,
                    H, H_KV, D, D_V, WIDTH, WIDTH_V, ROTARY, PAGE,
                )  # fmt: skip
                tl.debug_barrier()  # this program's lanes read them with the rest of their tile
            query = turned_heads(row_p, position, live, heads.q_norm_D, heads, D, WIDTH, ROTARY)
            query = query.to(rows.query.dtype.element_ty)
        top, total, acc = _piece(
            _for_warps(query, GROUPS, SETS, Q, WIDTH),
            _for_warps(position[:, None], GROUPS, SETS, Q, 1), cache, scores, item, h,
            H_KV, D, D_V, WIDTH, WIDTH_V, PAGE, WINDOW, GROUPS, KEYS, SETS, Q, STAGES, PRECISION,
        )  # fmt: skip
        top = top.reshape(SETS, GROUPS, Q)
        highest = tl.max(top, 1)
        share = tl.exp2(top - highest[:, None, :])
        total = tl.sum(total.reshape(SETS, GROUPS, Q) * share, 1).reshape(R)
        acc = acc.reshape(SETS, GROUPS, Q, WIDTH_V) * share[:, :, :, None]
        acc = tl.sum(acc, 1).reshape(R, WIDTH_V)
        highest = highest.reshape(R)
        d_v = tl.arange(0, WIDTH_V)
        inside = live[:, None] & (d_v < D_V)[None, :]
        if item.piece < 0:
            result = settled(highest, total, acc, head, live, scores)
            to = out + ((item.first + t).to(tl.int64) * H + head)[:, None] * D_V + d_v[None, :]
            tl.store(to, result.to(out.dtype.element_ty), mask=inside)
        else:
            place = ((item.slot + t).to(tl.int64) * H + head) * partials.pieces + item.piece
            tl.store(partials.acc_FHN + place[:, None] * D_V + d_v[None, :], acc, mask=inside)
            tl.store(partials.top_FHN + place, highest, mask=live)
            tl.store(partials.sum_FHN + place, total, mask=live)


@triton.jit
def merge_kernel(
    work: Work, partials: Partials, scores: Scores, out,
    H: tl.constexpr, D_V: tl.constexpr, WIDTH_V: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (h, f) merges the pieces of one head of row f, in their order."""
    let_next_start(OVERLAP)
    partials = partials  # see `triton/records.py`
    h, f = tl.program_id(0), tl.program_id(1)
    n, d_v = tl.arange(0, MERGED), tl.arange(0, WIDTH_V)
    rows = tl.load(work.totals + 1)
    one = tl.arange(0, 1)
    top = tl.full((1,), UNSEEN, tl.float32)
    total = tl.zeros((1,), tl.float32)
    acc = tl.zeros((1, WIDTH_V), tl.float32)
    row = load_merge_row(work.merge_F, f)
    wait_for_writes(OVERLAP)
    if (f < rows) & (row.first <= row.last):
        base = (f.to(tl.int64) * H + h) * partials.pieces
        for begin in range(row.first // MERGED * MERGED, row.last + 1, MERGED):
            piece = begin + n
            valid = (piece >= row.first) & (piece <= row.last)
            tops = tl.load(partials.top_FHN + base + piece, mask=valid, other=UNSEEN)
            sums = tl.load(partials.sum_FHN + base + piece, mask=valid, other=0.0)
            p = partials.acc_FHN + (base + piece)[:, None] * D_V + d_v[None, :]
            accs = tl.load(p, mask=valid[:, None] & (d_v < D_V)[None, :], other=0.0)
            higher = tl.maximum(top, tl.max(tops, 0))
            share, old = tl.exp2(tops - higher), tl.exp2(top - higher)
            total = total * old + tl.sum(sums * share, 0)
            acc = acc * old[:, None] + tl.sum(accs * share[:, None], 0)[None, :]
            top = higher
        result = settled(top, total, acc, h + one, one == 0, scores)
        to = out + (row.row.to(tl.int64) * H + h) * D_V + d_v[None, :]
        tl.store(to, result.to(out.dtype.element_ty), mask=(d_v < D_V)[None, :])

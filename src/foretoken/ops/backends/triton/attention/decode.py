"""Attention of few queries: they meet pieces of their context, which a second kernel merges.

The rows of a request's new tokens, times the G heads of a K/V head, form one operand: K and V are
read once for a tile of them. Each of GROUPS warps has its own keys and its own softmax; they meet
at the end of a piece. With one group, all warps share keys, and each has rows of its own.

What a row comes to depends on its context, SIZE, COUNT, GROUPS, KEYS and how pieces are merged, and
on nothing else: tiles lie at fixed positions, those that it does not see change no bit, and rows
of a product do not touch each other, however many a tile has.

A piece has little data and many instructions (at 256 keys, 10 us for 128 KiB): the longest chain of
instructions that wait for each other decides. So whole tiles have no masks, addresses are constants
wherever the shape allows it, and warps meet by exchanging vectors.

Letters: R rows of a tile, W warps (GROUPS for each of SETS of rows), Q rows of a warp, k keys of a
warp, D sizes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foretoken.ops.backends.triton.attention.plan import load_item, load_merge_row

from foretoken.ops.backends.triton.attention.records import (  # isort: skip
    Cache, HeadInputs, Partials, Rows, Scores, Work,
)  # fmt: skip
from foretoken.ops.backends.triton.attention.rows import (  # isort: skip
    UNSEEN, load_angles, load_heads, score, settled, turned_heads,
)  # fmt: skip
from foretoken.ops.backends.triton.rows import let_next_start, wait_for_writes


@triton.jit
def _for_warps(x, GROUPS: tl.constexpr, SETS: tl.constexpr, Q: tl.constexpr, D: tl.constexpr):
    """Rows [R, D] as each warp has them, [W, Q, D]; as they are, where warps share all keys."""
    if SETS * GROUPS > 1:
        x = tl.broadcast_to(x.reshape(SETS, 1, Q, D), (SETS, GROUPS, Q, D))
        x = x.reshape(SETS * GROUPS, Q, D)
    return x


@triton.jit
def _spread(x, R: tl.constexpr):
    """Rows [n, D] as each R / n-th of [R, D]; the others are 0."""
    for _ in tl.static_range(6):
        if x.shape[0] < R:
            x = tl.permute(tl.join(x, tl.zeros_like(x)), (0, 2, 1)).reshape(
                2 * x.shape[0], x.shape[1]
            )
    return x


@triton.jit
def _lanes(GROUPS: tl.constexpr, KEYS: tl.constexpr):
    """The keys of a tile, [GROUPS, k]; [k] of one group."""
    if GROUPS == 1:
        return tl.arange(0, KEYS)
    else:
        return tl.arange(0, GROUPS)[:, None] * KEYS + tl.arange(0, KEYS)[None, :]


@triton.jit
def _for_sets(x, SETS: tl.constexpr):
    """Keys or values [GROUPS, k, D] for each set of rows, [W, k, D]."""
    if SETS > 1:
        x = tl.broadcast_to(x[None, :, :, :], (SETS, x.shape[0], x.shape[1], x.shape[2]))
        x = x.reshape(SETS * x.shape[1], x.shape[2], x.shape[3])
    return x


@triton.jit
def _blocks(table, first, end, PAGE: tl.constexpr, GROUPS: tl.constexpr, KEYS: tl.constexpr):
    """In which blocks the tile at `first` lies: one, or [GROUPS, 1] if a warp's keys are in one
    block, or [GROUPS, k]; [k] of one group."""
    if PAGE % (GROUPS * KEYS) == 0:
        at = first
    elif GROUPS == 1:
        at = first + tl.arange(0, KEYS)
    else:
        APART: tl.constexpr = 1 if PAGE % KEYS == 0 else KEYS
        at = first + tl.arange(0, GROUPS)[:, None] * KEYS + tl.arange(0, APART)[None, :]
    return tl.load(table + at // PAGE, mask=at < end, other=0)


@triton.jit
def _load_tile(
    pool, block, first, end, h, MASKED: tl.constexpr, H_KV: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, PAGE: tl.constexpr, GROUPS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Keys or values from position `first` on, [GROUPS, k, WIDTH], or [k, WIDTH] of one group; 0
    from `end` on, if MASKED."""
    TILE: tl.constexpr = GROUPS * KEYS
    lane = _lanes(GROUPS, KEYS)
    d = tl.arange(0, WIDTH)
    # Where tiles and pages share a border, an address is one of few and a constant: half of the
    # instructions of a tile were for addresses.
    block = block.to(tl.int64) * (PAGE * H_KV) + h
    if PAGE % TILE == 0:
        p, at = pool + (block + first % PAGE * H_KV) * D, lane
    else:
        p, at = pool + tl.expand_dims(block, -1) * D, (first + lane) % PAGE
        if TILE % PAGE == 0:
            at = lane % PAGE
    p += tl.expand_dims(at.to(tl.int64), -1) * (H_KV * D) + d
    if MASKED:
        x = tl.load(p, mask=tl.expand_dims(first + lane < end, -1) & (d < D), other=0.0)
    elif D != WIDTH:
        x = tl.load(p, mask=d < D, other=0.0)
    else:
        x = tl.load(p)
    return x


@triton.jit
def _prefetch_item(
    table, item, cache: Cache, h, H_KV: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr,
    PAGE: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Prefetch the first AHEAD of an item's keys and values into the L2, except new ones."""
    at = item.begin + tl.arange(0, AHEAD)
    old = at < tl.minimum(item.end, item.start)
    block = tl.load(table + at // PAGE, mask=old, other=0)
    place = (block.to(tl.int64) * PAGE + at % PAGE) * H_KV + h
    _prefetch(cache.key + place * D, old, D)
    _prefetch(cache.value + place * D_V, old, D_V)


@triton.jit
def _prefetch(p, wanted, D: tl.constexpr):
    """Prefetch D values at each address into the L2."""
    SIZE: tl.constexpr = p.dtype.element_ty.primitive_bitwidth // 8
    for line in tl.static_range(0, D * SIZE, 128):
        tl.inline_asm_elementwise(
            "{.reg .pred w; setp.ne.b32 w, $2, 0; @w prefetch.global.L2 [$1]; mov.b32 $0, 0;}",
            "=r,l,r", [(p + line // SIZE).to(tl.int64), wanted.to(tl.int32)], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _write_new(
    table, rows: Rows, heads: HeadInputs, cache: Cache, item, h,
    H: tl.constexpr, H_KV: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr, WIDTH: tl.constexpr,
    WIDTH_V: tl.constexpr, ROTARY: tl.constexpr, PAGE: tl.constexpr, NEW: tl.constexpr,
):  # fmt: skip
    """Write keys and values of the new tokens that lie in a piece."""
    new = tl.arange(0, NEW)
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
def _pass_over(
    top, total, acc, begin, end, query, position, table, cache: Cache, scores: Scores, h,
    MASKED: tl.constexpr, H_KV: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    GROUPS: tl.constexpr, KEYS: tl.constexpr, SETS: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The softmaxes of all warps, taken on over the keys begin..end - 1.

    MASKED: some rows do not see all of these keys, or the last tile is not full.
    """
    W: tl.constexpr = GROUPS * SETS
    TILE: tl.constexpr = GROUPS * KEYS
    KEY_AXIS: tl.constexpr = 2 if W > 1 else 1
    block = _blocks(table, begin, end, PAGE, GROUPS, KEYS)
    for first in tl.range(begin, end, TILE, num_stages=STAGES):
        key = _load_tile(
            cache.key, block, first, end, h, MASKED, H_KV, D, WIDTH, PAGE, GROUPS, KEYS
        )  # fmt: skip
        value = _load_tile(
            cache.value, block, first, end, h, MASKED, H_KV, D_V, WIDTH_V, PAGE, GROUPS, KEYS
        )  # fmt: skip
        block = _blocks(table, first + TILE, end, PAGE, GROUPS, KEYS)
        key, value = _for_sets(key, SETS), _for_sets(value, SETS)
        key = tl.trans(key, (0, 2, 1)) if W > 1 else tl.trans(key)
        s = tl.dot(query, key, input_precision=PRECISION)
        s = score(s, scores)
        if MASKED or WINDOW:
            at = first + tl.expand_dims(_lanes(GROUPS, KEYS), 0)
            if W > 1:
                at = tl.broadcast_to(at, (SETS, GROUPS, KEYS)).reshape(W, 1, KEYS)
            seen = at <= position
            if WINDOW:
                seen &= at > position - WINDOW
            s = tl.where(seen, s, UNSEEN)
        higher = tl.maximum(top, tl.max(s, KEY_AXIS))
        weight = tl.exp2(s - tl.expand_dims(higher, -1))
        old = tl.exp2(top - higher)
        total = total * old + tl.sum(weight, KEY_AXIS)
        acc = acc * tl.expand_dims(old, -1)
        acc = tl.dot(weight.to(value.dtype), value, acc, input_precision=PRECISION)
        top = higher
    return top, total, acc


@triton.jit
def _sum_groups(x, R: tl.constexpr, SETS: tl.constexpr, GROUPS: tl.constexpr):
    """[W, Q, D] -> [R, D], the sum over the groups of each set, neighbours first.

    By halves, each an exchange of whole vectors: `tl.sum` over warps takes three times as many
    instructions, and its order is its own.
    """
    D: tl.constexpr = x.shape[2]
    x = tl.permute(x.reshape(SETS, GROUPS, R // SETS, D), (0, 2, 3, 1)).reshape(R, D, GROUPS)
    for _ in tl.static_range(4):
        if x.shape[2] > 1:
            even, odd = tl.split(x.reshape(R, D, x.shape[2] // 2, 2))
            x = even + odd
    return x.reshape(R, D)


@triton.jit
def _store(
    top, total, acc, item, t, head, live, scores: Scores, partials: Partials, out,
    H: tl.constexpr, D_V: tl.constexpr, WIDTH_V: tl.constexpr, R: tl.constexpr,
    SETS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Let the warps of each set meet, and store what their rows came to."""
    W: tl.constexpr = SETS * GROUPS
    Q: tl.constexpr = R // SETS
    highest = top
    if W > 1:
        highest = tl.max(top.reshape(SETS, GROUPS, Q), 1)
        share = tl.broadcast_to(highest[:, None, :], (SETS, GROUPS, Q)).reshape(W, Q)
        share = tl.exp2(top - share)
        total = _sum_groups((total * share)[:, :, None], R, SETS, GROUPS).reshape(R)
        acc = _sum_groups(acc * share[:, :, None], R, SETS, GROUPS)
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
    WINDOW: tl.constexpr, R: tl.constexpr, LIVE: tl.constexpr, SETS: tl.constexpr,
    GROUPS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, NEW: tl.constexpr,
    AHEAD: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (h, i) takes K/V head h of item i, then of one in each further round of programs.

    ROTARY: 0 if `rows` attend as they are and their K/V is in the cache; else rows are of qkv.
    (Triton 3.6 cannot ask whether `heads` is None, if a field of it is None.)
    LIVE: rows of a tile that any step of this shape fills, a power of 2.
    NEW: new tokens of a request at most, a power of 2.
    AHEAD: tokens of an item that are prefetched into the L2 while the kernel before is running.
    """
    let_next_start(OVERLAP)
    rows, cache, partials = rows, cache, partials  # see `triton/records.py`
    G: tl.constexpr = H // H_KV
    Q: tl.constexpr = R // SETS
    W: tl.constexpr = GROUPS * SETS
    TILE: tl.constexpr = GROUPS * KEYS
    h, i, programs = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    items = tl.load(work.totals)
    item = load_item(work.few_I, i)
    while i < items:
        # Up to the wait nothing is read that the kernel before this one writes.
        table = cache.block_BL + item.request.to(tl.int64) * cache.columns
        r = item.row + tl.arange(0, LIVE)
        t, head = r // G, h * G + r % G
        live = t < item.count
        position = item.start + t
        if AHEAD and OVERLAP:
            _prefetch_item(table, item, cache, h, H_KV, D, D_V, PAGE, AHEAD)
        row_p = rows.query + (item.first + t).to(tl.int64) * rows.stride + head * rows.head_stride
        if ROTARY:
            angles = load_angles(heads, position, live, WIDTH, ROTARY)
            wait_for_writes(OVERLAP)
            if item.end > item.start:
                _write_new(
                    table, rows, heads, cache, item, h,
                    H, H_KV, D, D_V, WIDTH, WIDTH_V, ROTARY, PAGE, NEW,
                )  # fmt: skip
            query = turned_heads(row_p, angles, live, heads.q_norm_D, heads, D, WIDTH, ROTARY)
            query = query.to(out.dtype.element_ty)
        else:
            wait_for_writes(OVERLAP)
            query = load_heads(row_p, live, D, WIDTH)
        if LIVE < R:
            query = _spread(query, R)
            lane = tl.arange(0, R)
            r = item.row + lane // (R // LIVE)
            t, head = r // G, h * G + r % G
            live = (t < item.count) & (lane % (R // LIVE) == 0)
            position = item.start + t
        query = _for_warps(query, GROUPS, SETS, Q, WIDTH)
        position = _for_warps(position[:, None], GROUPS, SETS, Q, 1)
        if W > 1:
            top = tl.full((W, Q), UNSEEN, tl.float32)
            acc = tl.zeros((W, Q, WIDTH_V), tl.float32)
        else:
            top = tl.full((R,), UNSEEN, tl.float32)
            acc = tl.zeros((R, WIDTH_V), tl.float32)
        total = tl.zeros_like(top)
        # Tiles below `whole` need no mask: no row is before any of their keys.
        whole = tl.minimum(item.end, item.start) // TILE * TILE
        whole = tl.maximum(item.begin, whole)
        top, total, acc = _pass_over(
            top, total, acc, item.begin, whole, query, position, table, cache, scores, h, False,
            H_KV, D, D_V, WIDTH, WIDTH_V, PAGE, WINDOW, GROUPS, KEYS, SETS, STAGES, PRECISION,
        )  # fmt: skip
        if ROTARY:
            tl.debug_barrier()  # lanes read what others wrote
        top, total, acc = _pass_over(
            top, total, acc, whole, item.end, query, position, table, cache, scores, h, True,
            H_KV, D, D_V, WIDTH, WIDTH_V, PAGE, WINDOW, GROUPS, KEYS, SETS, 1, PRECISION,
        )  # fmt: skip
        _store(
            top, total, acc, item, t, head, live, scores, partials, out,
            H, D_V, WIDTH_V, R, SETS, GROUPS,
        )  # fmt: skip
        # The first items are the longest: who has one of them takes the last of the next round.
        i = tl.where(i < programs, 2 * programs - 1 - i, i + programs)
        item = load_item(work.few_I, tl.minimum(i, items - 1))
    wait_for_writes(OVERLAP)  # also those that have no item


@triton.jit
def merge_kernel(
    work: Work, partials: Partials, scores: Scores, out,
    H: tl.constexpr, D_V: tl.constexpr, WIDTH_V: tl.constexpr, HEADS: tl.constexpr,
    PIECES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (j, f) merges pieces of HEADS heads of rows f, f + programs, ..., in their order.

    PIECES: that are loaded at once.
    """
    let_next_start(OVERLAP)
    partials = partials  # see `triton/records.py`
    f = tl.program_id(1)
    h = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    n, d_v = tl.arange(0, PIECES), tl.arange(0, WIDTH_V)
    rows = tl.load(work.totals + 1)
    row = load_merge_row(work.merge_F, f)
    wait_for_writes(OVERLAP)
    while f < rows:
        if row.first <= row.last:
            top = tl.full((HEADS,), UNSEEN, tl.float32)
            total = tl.zeros((HEADS,), tl.float32)
            acc = tl.zeros((HEADS, WIDTH_V), tl.float32)
            base = ((f.to(tl.int64) * H + h) * partials.pieces)[:, None]
            for begin in range(row.first, row.last + 1, PIECES):
                place = base + begin + n
                valid = begin + n <= row.last
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
        f += tl.num_programs(1)
        row = load_merge_row(work.merge_F, tl.minimum(f, rows - 1))

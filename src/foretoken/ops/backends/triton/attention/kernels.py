"""Attention of many queries, and of few over pieces of context that a second kernel merges.

The new tokens of a request, times the G query heads of a K/V head, are the rows of one operand: K
and V are read once for a tile of rows. For many queries, a tile of `prefill_kernel` passes over all
the keys that it sees, as in FlashAttention-2 (Dao 2023). For few queries, each of GROUPS warps of
`decode_kernel` has its own keys and its own softmax; the warps' results are added at the end of a
piece. With one group, all warps share keys, and each has its own rows.

With few queries, a row's bits depend only on its context, SIZE, COUNT, GROUPS, KEYS and how pieces
are merged: tiles lie at fixed positions, tiles that a row does not see change none of its bits, and
rows of a product do not mix. A piece's time is that of its longest chain of dependent instructions
(256 keys: 10 us for 128 KiB). So tiles that every row sees whole have no masks, addresses are
constants wherever the shape allows it, and warps exchange whole vectors.

Letters: R rows of a tile, W warps (SETS * GROUPS), Q rows of a warp, k keys of a warp, D sizes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foretoken.ops.backends.triton.attention.plan import load_item, load_merge_row

from foretoken.ops.backends.triton.attention.records import (  # isort: skip
    Cache, HeadInputs, Partials, Scores, TokenRows, Work,
)  # fmt: skip
from foretoken.ops.backends.triton.attention.rows import (  # isort: skip
    UNSEEN, load_angles, load_heads, normalized, rotated_heads, score, store_key_and_value,
)  # fmt: skip
from foretoken.ops.backends.triton.rows import let_next_start, wait_for_writes


@triton.jit
def _softmax_step(top, total, acc, s, value, SHAPE: tl.constexpr, KEY_AXIS: tl.constexpr):
    """Continue a running softmax with keys of scores s.
    Returns the new (largest score, sum of weights, weighted sum of values)."""
    new_top = tl.maximum(top, tl.max(s, KEY_AXIS))
    weight = tl.exp2(s - tl.expand_dims(new_top, -1))
    rescale = tl.exp2(top - new_top)
    total = total * rescale + tl.sum(weight, KEY_AXIS)
    acc = acc * tl.expand_dims(rescale, -1)
    acc = tl.dot(weight.to(value.dtype), value, acc, input_precision=SHAPE.PRECISION)
    return new_top, total, acc


@triton.jit
def _repeat_for_groups(x, TILE: tl.constexpr):
    """Rows [R, D] repeated for each group of warps, [W, Q, D]; unchanged if W = 1."""
    if TILE.W > 1:
        D: tl.constexpr = x.shape[1]
        x = x.reshape(TILE.SETS, 1, TILE.Q, D)
        x = tl.broadcast_to(x, TILE.SETS, TILE.GROUPS, TILE.Q, D).reshape(TILE.W, TILE.Q, D)
    return x


@triton.jit
def _spread(x, R: tl.constexpr):
    """Spread rows [n, D] evenly over [R, D]: row i moves to i * R / n; the rows between are 0."""
    for _ in tl.static_range(6):
        if x.shape[0] < R:
            joined = tl.permute(tl.join(x, tl.zeros_like(x)), (0, 2, 1))
            x = joined.reshape(2 * x.shape[0], x.shape[1])
    return x


@triton.jit
def _key_numbers(TILE: tl.constexpr):
    """The numbers of a tile's keys, [GROUPS, k]; [k] if there is one group."""
    if TILE.GROUPS == 1:
        return tl.arange(0, TILE.KEYS)
    else:
        return tl.arange(0, TILE.GROUPS)[:, None] * TILE.KEYS + tl.arange(0, TILE.KEYS)[None, :]


@triton.jit
def _repeat_for_sets(x, SETS: tl.constexpr):
    """Keys or values [GROUPS, k, D] repeated for each set of rows, [W, k, D]."""
    if SETS > 1:
        x = tl.broadcast_to(x[None, :, :, :], (SETS, x.shape[0], x.shape[1], x.shape[2]))
        x = x.reshape(SETS * x.shape[1], x.shape[2], x.shape[3])
    return x


@triton.jit
def _blocks(table, first, end, PAGE: tl.constexpr, TILE: tl.constexpr):
    """The cache block of a whole tile, of each group's keys [GROUPS, 1], or of each key."""
    if PAGE % TILE.TOKENS == 0:
        at = first
    elif PAGE % TILE.KEYS == 0 and TILE.GROUPS > 1:
        at = first + tl.arange(0, TILE.GROUPS)[:, None] * TILE.KEYS
    else:
        at = first + _key_numbers(TILE)
    return tl.load(table + at // PAGE, mask=at < end, other=0)


@triton.jit
def _load_tile(pool, block, first, end, h, MASKED: tl.constexpr, D: tl.constexpr,
               WIDTH: tl.constexpr, SHAPE: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """A tile of keys or values from position `first` on, [GROUPS, k, WIDTH], or [k, WIDTH] for one
    group. MASKED: 0 from `end` on."""
    PAGE: tl.constexpr = SHAPE.PAGE
    n = _key_numbers(TILE)
    d = tl.arange(0, WIDTH)
    # Where tiles and pages share borders, an address is a block's address plus a constant. Without
    # this, half of a tile's instructions computed addresses.
    block = block.to(tl.int64) * (PAGE * SHAPE.H_KV) + h
    if PAGE % TILE.TOKENS == 0:
        p, at = pool + (block + first % PAGE * SHAPE.H_KV) * D, n
    else:
        p, at = pool + tl.expand_dims(block, -1) * D, (first + n) % PAGE
        if TILE.TOKENS % PAGE == 0:
            at = n % PAGE
    p += tl.expand_dims(at.to(tl.int64), -1) * (SHAPE.H_KV * D) + d
    if MASKED:
        x = tl.load(p, mask=tl.expand_dims(first + n < end, -1) & (d < D), other=0.0)
    elif D != WIDTH:
        x = tl.load(p, mask=d < D, other=0.0)
    else:
        x = tl.load(p)
    return x


@triton.jit
def _prefetch_item(table, item, cache: Cache, h, SHAPE: tl.constexpr, AHEAD: tl.constexpr):
    """Prefetch keys and values of an item's first AHEAD tokens to the L2 cache, but no new ones."""
    at = item.begin + tl.arange(0, AHEAD)
    in_cache = at < tl.minimum(item.end, item.start)
    block = tl.load(table + at // SHAPE.PAGE, mask=in_cache, other=0)
    place = (block.to(tl.int64) * SHAPE.PAGE + at % SHAPE.PAGE) * SHAPE.H_KV + h
    _prefetch(cache.key + place * SHAPE.D, in_cache, SHAPE.D)
    _prefetch(cache.value + place * SHAPE.D_V, in_cache, SHAPE.D_V)


@triton.jit
def _prefetch(p, mask, D: tl.constexpr):
    SIZE: tl.constexpr = p.dtype.element_ty.primitive_bitwidth // 8
    for line in tl.static_range(0, D * SIZE, 128):
        tl.inline_asm_elementwise(
            "{.reg .pred w; setp.ne.b32 w, $2, 0; @w prefetch.global.L2 [$1]; mov.b32 $0, 0;}",
            "=r,l,r", [(p + line // SIZE).to(tl.int64), mask.to(tl.int32)], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _write_new(table, rows: TokenRows, heads: HeadInputs, cache: Cache, item, h,
               SHAPE: tl.constexpr, ROTARY: tl.constexpr, NEW: tl.constexpr):  # fmt: skip
    """Write keys and values of the new tokens that lie in an item's piece."""
    t = tl.arange(0, NEW)
    at = item.start + t
    in_piece = (at >= item.begin) & (at < item.end)
    row_p = rows.query + (item.first + t).to(tl.int64) * rows.stride
    angles = load_angles(heads, at, in_piece, SHAPE, ROTARY)
    block = tl.load(table + at // SHAPE.PAGE, mask=in_piece, other=0)
    place = (block.to(tl.int64) * SHAPE.PAGE + at % SHAPE.PAGE) * SHAPE.H_KV + h
    store_key_and_value(row_p, angles, place, in_piece, heads, cache, h, SHAPE, ROTARY)


@triton.jit
def _pass_over_piece(top, total, acc, begin, end, query, position, table, cache: Cache,
                     scores: Scores, h, MASKED: tl.constexpr, SHAPE: tl.constexpr,
                     TILE: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Continue the softmaxes of all warps over the keys begin..end - 1.
    MASKED: some rows do not see all of these keys, or the last tile is not full."""
    SETS: tl.constexpr = TILE.SETS
    W: tl.constexpr = TILE.W
    KEY_AXIS: tl.constexpr = 2 if W > 1 else 1
    block = _blocks(table, begin, end, SHAPE.PAGE, TILE)
    for first in tl.range(begin, end, TILE.TOKENS, num_stages=STAGES):
        key = _load_tile(cache.key, block, first, end, h, MASKED, SHAPE.D, SHAPE.WIDTH, SHAPE, TILE)
        value = _load_tile(cache.value, block, first, end, h, MASKED, SHAPE.D_V, SHAPE.WIDTH_V,
                           SHAPE, TILE)  # fmt: skip
        block = _blocks(table, first + TILE.TOKENS, end, SHAPE.PAGE, TILE)
        key, value = _repeat_for_sets(key, SETS), _repeat_for_sets(value, SETS)
        key = tl.trans(key, (0, 2, 1)) if W > 1 else tl.trans(key)
        s = tl.dot(query, key, input_precision=SHAPE.PRECISION)
        s = score(s, scores)
        if MASKED or SHAPE.WINDOW:
            at = first + tl.expand_dims(_key_numbers(TILE), 0)
            if W > 1:
                at = tl.broadcast_to(at, SETS, TILE.GROUPS, TILE.KEYS).reshape(W, 1, TILE.KEYS)
            seen = at <= position
            if SHAPE.WINDOW:
                seen &= at > position - SHAPE.WINDOW
            s = tl.where(seen, s, UNSEEN)
        top, total, acc = _softmax_step(top, total, acc, s, value, SHAPE, KEY_AXIS)
    return top, total, acc


@triton.jit
def _sum_groups(x, TILE: tl.constexpr):
    """[W, Q, D] -> [R, D], the sum over the groups of each set.
    Pairs of groups are added by an exchange of whole vectors, then pairs of these sums. `tl.sum`
    over warps takes three times as many instructions, in an order that Triton chooses."""
    D: tl.constexpr = x.shape[2]
    x = x.reshape(TILE.SETS, TILE.GROUPS, TILE.Q, D)
    x = tl.permute(x, (0, 2, 3, 1)).reshape(TILE.R, D, TILE.GROUPS)
    for _ in tl.static_range(4):
        if x.shape[2] > 1:
            even, odd = tl.split(x.reshape(TILE.R, D, x.shape[2] // 2, 2))
            x = even + odd
    return x.reshape(TILE.R, D)


@triton.jit
def _store(top, total, acc, item, t, head, live, scores: Scores, partials: Partials, out,
           SHAPE: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Add up the results of each set's warps; store each row's values, or its partial results."""
    highest = top
    if TILE.W > 1:
        highest = tl.max(top.reshape(TILE.SETS, TILE.GROUPS, TILE.Q), 1)
        rescale = tl.broadcast_to(highest[:, None, :], TILE.SETS, TILE.GROUPS, TILE.Q)
        rescale = tl.exp2(top - rescale.reshape(TILE.W, TILE.Q))
        total = _sum_groups((total * rescale)[:, :, None], TILE).reshape(TILE.R)
        acc = _sum_groups(acc * rescale[:, :, None], TILE)
        highest = highest.reshape(TILE.R)
    d_v = tl.arange(0, SHAPE.WIDTH_V)
    inside = live[:, None] & (d_v < SHAPE.D_V)
    if item.piece < 0:
        result = normalized(highest, total, acc, head, live, scores)
        out_p = out + ((item.first + t).to(tl.int64) * SHAPE.H + head)[:, None] * SHAPE.D_V + d_v
        tl.store(out_p, result.to(out.dtype.element_ty), mask=inside)
    else:
        place = ((item.slot + t).to(tl.int64) * SHAPE.H + head) * partials.pieces + item.piece
        tl.store(partials.acc_FHN + place[:, None] * SHAPE.D_V + d_v, acc, mask=inside)
        tl.store(partials.top_FHN + place, highest, mask=live)
        tl.store(partials.sum_FHN + place, total, mask=live)


@triton.jit
def decode_kernel(rows: TokenRows, heads: HeadInputs, cache: Cache, work: Work, partials: Partials,
                  scores: Scores, out, SHAPE: tl.constexpr, TILE: tl.constexpr,
                  ROTARY: tl.constexpr, STAGES: tl.constexpr, NEW: tl.constexpr,
                  AHEAD: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """Program (h, i) takes K/V head h of item i, then of further items if there are more.

    ROTARY: rotated dimensions of rows of qkv. 0: the rows are finished queries, and their K/V are
    in the cache. (Triton 3.6 cannot ask whether `heads` is None if a field of it is None.)
    NEW: bound of the new tokens of a request, a power of 2.
    AHEAD: tokens of an item that are prefetched to the L2 cache while the previous kernel runs.
    """
    let_next_start(OVERLAP)
    rows, cache, partials = rows, cache, partials  # makes values of 1s, see `triton/records.py`
    G: tl.constexpr = SHAPE.G
    R: tl.constexpr = TILE.R
    LIVE: tl.constexpr = TILE.LIVE
    Q: tl.constexpr = TILE.Q
    W: tl.constexpr = TILE.W
    WIDTH_V: tl.constexpr = SHAPE.WIDTH_V
    h, i, programs = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    items = tl.load(work.totals)
    item = load_item(work.few_I, i)
    while i < items:
        # Before the wait nothing is read that the previous kernel writes.
        table = cache.block_BL + item.request.to(tl.int64) * cache.columns
        r = item.row + tl.arange(0, LIVE)
        t, head = r // G, h * G + r % G
        live = t < item.count
        position = item.start + t
        if AHEAD and OVERLAP:
            _prefetch_item(table, item, cache, h, SHAPE, AHEAD)
        row_p = rows.query + (item.first + t).to(tl.int64) * rows.stride + head * rows.head_stride
        if ROTARY:
            angles = load_angles(heads, position, live, SHAPE, ROTARY)
            wait_for_writes(OVERLAP)
            if item.end > item.start:
                _write_new(table, rows, heads, cache, item, h, SHAPE, ROTARY, NEW)
            query = rotated_heads(row_p, angles, live, heads.q_norm_D, heads, SHAPE, ROTARY)
            query = query.to(out.dtype.element_ty)
        else:
            wait_for_writes(OVERLAP)
            query = load_heads(row_p, live, SHAPE.D, SHAPE.WIDTH)
        if LIVE < R:
            query = _spread(query, R)
            lane = tl.arange(0, R)
            r = item.row + lane // (R // LIVE)
            t, head = r // G, h * G + r % G
            live = (t < item.count) & (lane % (R // LIVE) == 0)
            position = item.start + t
        query = _repeat_for_groups(query, TILE)
        position = _repeat_for_groups(position[:, None], TILE)
        if W > 1:
            top = tl.full((W, Q), UNSEEN, tl.float32)
            acc = tl.zeros((W, Q, WIDTH_V), tl.float32)
        else:
            top = tl.full((R,), UNSEEN, tl.float32)
            acc = tl.zeros((R, WIDTH_V), tl.float32)
        total = tl.zeros_like(top)
        # Tiles below `seen_by_all` need no mask: each row sees all of their keys.
        seen_by_all = tl.minimum(item.end, item.start) // TILE.TOKENS * TILE.TOKENS
        seen_by_all = tl.maximum(item.begin, seen_by_all)
        top, total, acc = _pass_over_piece(top, total, acc, item.begin, seen_by_all, query,
                                           position, table, cache, scores, h, False, SHAPE, TILE,
                                           STAGES)  # fmt: skip
        if ROTARY:
            tl.debug_barrier()  # threads read K/V that other threads wrote in `_write_new`
        top, total, acc = _pass_over_piece(top, total, acc, seen_by_all, item.end, query, position,
                                           table, cache, scores, h, True, SHAPE, TILE,
                                           1)  # fmt: skip
        _store(top, total, acc, item, t, head, live, scores, partials, out, SHAPE, TILE)
        # The first items are the longest, so a program that had one takes a late item next.
        i = tl.where(i < programs, 2 * programs - 1 - i, i + programs)
        item = load_item(work.few_I, tl.minimum(i, items - 1))
    wait_for_writes(OVERLAP)  # for programs without an item


@triton.jit
def merge_kernel(work: Work, partials: Partials, scores: Scores, out, H: tl.constexpr,
                 D_V: tl.constexpr, WIDTH_V: tl.constexpr, HEADS: tl.constexpr,
                 PIECES: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """Program (j, f) merges the pieces of HEADS heads of rows f, f + programs, ..., in order.
    PIECES: how many pieces are loaded together."""
    let_next_start(OVERLAP)
    partials = partials  # makes values of 1s, see `triton/records.py`
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
                new_top = tl.maximum(top, tl.max(tops, 1))
                rescale, rescale_old = tl.exp2(tops - new_top[:, None]), tl.exp2(top - new_top)
                total = total * rescale_old + tl.sum(sums * rescale, 1)
                acc = acc * rescale_old[:, None] + tl.sum(accs * rescale[:, :, None], 1)
                top = new_top
            result = normalized(top, total, acc, h, h < H, scores)
            out_p = out + (row.row.to(tl.int64) * H + h)[:, None] * D_V + d_v
            tl.store(out_p, result.to(out.dtype.element_ty), mask=d_v < D_V)
        f += tl.num_programs(1)
        row = load_merge_row(work.merge_F, tl.minimum(f, rows - 1))


@triton.jit
def _pass_over_context(top, total, acc, query, position, begin, end, request, cache: Cache,
                       scores: Scores, h, MASKED: tl.constexpr, SHAPE: tl.constexpr,
                       KEYS: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Continue the softmax of rows over the keys begin..end - 1. MASKED: see `_pass_over_piece`."""
    D: tl.constexpr = SHAPE.D
    D_V: tl.constexpr = SHAPE.D_V
    n = tl.arange(0, KEYS)
    d, d_v = tl.arange(0, SHAPE.WIDTH)[None, :], tl.arange(0, SHAPE.WIDTH_V)[None, :]
    table = cache.block_BL + request.to(tl.int64) * cache.columns
    at = begin + n
    block = tl.load(table + at // SHAPE.PAGE, mask=at < end, other=0)
    for first in tl.range(begin, end, KEYS, num_stages=STAGES):
        at = first + n
        place = ((block * SHAPE.PAGE + at % SHAPE.PAGE) * SHAPE.H_KV + h)[:, None]
        block = tl.load(table + (at + KEYS) // SHAPE.PAGE, mask=at + KEYS < end, other=0)
        key_p, value_p = cache.key + place * D + d, cache.value + place * D_V + d_v
        if MASKED or D != SHAPE.WIDTH or D_V != SHAPE.WIDTH_V:
            exists = (at < end)[:, None]
            key = tl.load(key_p, mask=exists & (d < D), other=0.0)
            value = tl.load(value_p, mask=exists & (d_v < D_V), other=0.0)
        else:
            key, value = tl.load(key_p), tl.load(value_p)
        s = score(tl.dot(query, tl.trans(key), input_precision=SHAPE.PRECISION), scores)
        if MASKED:
            seen = at[None, :] <= position[:, None]
            if SHAPE.WINDOW:
                seen &= at[None, :] > position[:, None] - SHAPE.WINDOW
            s = tl.where(seen, s, UNSEEN)
        top, total, acc = _softmax_step(top, total, acc, s, value, SHAPE, 1)
    return top, total, acc


@triton.jit
def prefill_kernel(rows: TokenRows, cache: Cache, work: Work, scores: Scores, out,
                   SHAPE: tl.constexpr, R: tl.constexpr, KEYS: tl.constexpr,
                   STAGES: tl.constexpr):  # fmt: skip
    """Program h + H_KV * i takes K/V head h of tile i."""
    rows, cache = rows, cache  # makes values of 1s, see `triton/records.py`
    G: tl.constexpr = SHAPE.G
    WIDTH_V: tl.constexpr = SHAPE.WIDTH_V
    WINDOW: tl.constexpr = SHAPE.WINDOW
    h, i = tl.program_id(0) % SHAPE.H_KV, tl.program_id(0) // SHAPE.H_KV
    if i < tl.load(work.totals + 2):
        item = load_item(work.many_I, i)
        r = item.row + tl.arange(0, R)
        t, head = r // G, h * G + r % G
        live = t < item.count
        position = item.start + t
        row_p = rows.query + (item.first + t).to(tl.int64) * rows.stride + head * rows.head_stride
        query = load_heads(row_p, live, SHAPE.D, SHAPE.WIDTH)
        top = tl.full((R,), UNSEEN, tl.float32)
        total = tl.zeros((R,), tl.float32)
        acc = tl.zeros((R, WIDTH_V), tl.float32)
        lowest = item.start + item.row // G
        highest = tl.minimum(item.start + (item.row + R - 1) // G, item.end - 1)
        begin, seen_by_all = 0, (lowest + 1) // KEYS * KEYS  # below it every row sees every key
        if WINDOW:
            begin = tl.maximum(lowest - WINDOW + 1, 0) // KEYS * KEYS
            # From `in_windows` on, every key is within every row's window.
            in_windows = tl.cdiv(tl.maximum(highest - WINDOW + 1, 0), KEYS) * KEYS
            in_windows = tl.minimum(in_windows, seen_by_all)
            top, total, acc = _pass_over_context(top, total, acc, query, position, begin,
                                                 in_windows, item.request, cache, scores, h, True,
                                                 SHAPE, KEYS, STAGES)  # fmt: skip
            begin = tl.maximum(begin, in_windows)
        top, total, acc = _pass_over_context(top, total, acc, query, position, begin, seen_by_all,
                                             item.request, cache, scores, h, False, SHAPE, KEYS,
                                             STAGES)  # fmt: skip
        begin = tl.maximum(begin, seen_by_all)
        top, total, acc = _pass_over_context(top, total, acc, query, position, begin, highest + 1,
                                             item.request, cache, scores, h, True, SHAPE, KEYS,
                                             STAGES)  # fmt: skip
        result = normalized(top, total, acc, head, live, scores)
        d_v = tl.arange(0, WIDTH_V)
        place = ((item.first + t).to(tl.int64) * SHAPE.H + head)[:, None] * SHAPE.D_V
        inside_v = live[:, None] & (d_v < SHAPE.D_V)
        tl.store(out + place + d_v, result.to(out.dtype.element_ty), mask=inside_v)

"""Attention of many queries: a tile of rows passes over all the keys that it sees.

As FlashAttention-2 (Dao 2023). Rows are (token, head of the K/V head) pairs as in `decode.py`.
Letters: R rows of a tile, k keys of one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foretoken.ops.backends.triton.attention.plan import load_item
from foretoken.ops.backends.triton.attention.records import Cache, Scores, TokenRows, Work
from foretoken.ops.backends.triton.attention.rows import UNSEEN, load_heads, normalized, score


@triton.jit
def _pass_over(
    top, total, acc, query, position, begin, end, request, cache: Cache, scores: Scores, h,
    MASKED: tl.constexpr, SHAPE: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Continue the softmax of rows over the keys begin..end - 1.

    MASKED: some rows do not see all of these keys, or the last tile is not full.
    """
    D: tl.constexpr = SHAPE.D
    D_V: tl.constexpr = SHAPE.D_V
    PAGE: tl.constexpr = SHAPE.PAGE
    lane = tl.arange(0, KEYS)
    d, d_v = tl.arange(0, SHAPE.WIDTH)[None, :], tl.arange(0, SHAPE.WIDTH_V)[None, :]
    table = cache.block_BL + request.to(tl.int64) * cache.columns
    at = begin + lane
    block = tl.load(table + at // PAGE, mask=at < end, other=0)
    for first in tl.range(begin, end, KEYS, num_stages=STAGES):
        at = first + lane
        place = ((block * PAGE + at % PAGE) * SHAPE.H_KV + h)[:, None]
        block = tl.load(table + (at + KEYS) // PAGE, mask=at + KEYS < end, other=0)
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
        higher = tl.maximum(top, tl.max(s, 1))
        weight = tl.exp2(s - higher[:, None])
        old = tl.exp2(top - higher)
        total = total * old + tl.sum(weight, 1)
        acc = acc * old[:, None]
        acc = tl.dot(weight.to(value.dtype), value, acc, input_precision=SHAPE.PRECISION)
        top = higher
    return top, total, acc


@triton.jit
def prefill_kernel(
    rows: TokenRows, cache: Cache, work: Work, scores: Scores, out, SHAPE: tl.constexpr,
    R: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program h + H_KV * i takes K/V head h of tile i."""
    rows, cache = rows, cache  # see `triton/records.py`
    G: tl.constexpr = SHAPE.G
    D_V: tl.constexpr = SHAPE.D_V
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
        begin, whole = 0, (lowest + 1) // KEYS * KEYS  # below `whole` every row sees every key
        if WINDOW:
            begin = tl.maximum(lowest - WINDOW + 1, 0) // KEYS * KEYS
            # From `inside` on, every key is within every row's window.
            inside = tl.cdiv(tl.maximum(highest - WINDOW + 1, 0), KEYS) * KEYS
            inside = tl.minimum(inside, whole)
            top, total, acc = _pass_over(
                top, total, acc, query, position, begin, inside, item.request, cache, scores, h,
                True, SHAPE, KEYS, STAGES,
            )  # fmt: skip
            begin = tl.maximum(begin, inside)
        top, total, acc = _pass_over(
            top, total, acc, query, position, begin, whole, item.request, cache, scores, h,
            False, SHAPE, KEYS, STAGES,
        )  # fmt: skip
        top, total, acc = _pass_over(
            top, total, acc, query, position, tl.maximum(begin, whole), highest + 1, item.request,
            cache, scores, h, True, SHAPE, KEYS, STAGES,
        )  # fmt: skip
        result = normalized(top, total, acc, head, live, scores)
        d_v = tl.arange(0, WIDTH_V)
        place = ((item.first + t).to(tl.int64) * SHAPE.H + head)[:, None] * D_V
        inside_v = live[:, None] & (d_v < D_V)[None, :]
        tl.store(out + place + d_v[None, :], result.to(out.dtype.element_ty), mask=inside_v)

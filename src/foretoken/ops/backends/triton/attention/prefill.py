"""Attention of many queries: a tile of rows passes over all the keys that it sees.

As FlashAttention-2 (Dao 2023). Rows are (token, head of the K/V head) pairs as in `decode.py`.
Letters: R rows of a tile, k keys of one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foretoken.ops.backends.triton.attention.plan import load_item
from foretoken.ops.backends.triton.attention.records import Cache, Rows, Scores, Work
from foretoken.ops.backends.triton.attention.rows import UNSEEN, load_heads, score, settled


@triton.jit
def _pass_over(
    top, total, acc, query, position, begin, end, request, cache: Cache, scores: Scores, h,
    MASKED: tl.constexpr, H_KV: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    KEYS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The softmax of rows, taken on over the keys begin..end - 1.

    MASKED: not every row sees each of these keys, or the last tile is not full.
    """
    lane = tl.arange(0, KEYS)
    d, d_v = tl.arange(0, WIDTH)[None, :], tl.arange(0, WIDTH_V)[None, :]
    table = cache.block_BL + request.to(tl.int64) * cache.columns
    at = begin + lane
    block = tl.load(table + at // PAGE, mask=at < end, other=0)
    for first in tl.range(begin, end, KEYS, num_stages=STAGES):
        at = first + lane
        place = ((block * PAGE + at % PAGE) * H_KV + h)[:, None]
        block = tl.load(table + (at + KEYS) // PAGE, mask=at + KEYS < end, other=0)
        key_p, value_p = cache.key + place * D + d, cache.value + place * D_V + d_v
        if MASKED or D != WIDTH or D_V != WIDTH_V:
            exists = (at < end)[:, None]
            key = tl.load(key_p, mask=exists & (d < D), other=0.0)
            value = tl.load(value_p, mask=exists & (d_v < D_V), other=0.0)
        else:
            key, value = tl.load(key_p), tl.load(value_p)
        s = score(tl.dot(query, tl.trans(key), input_precision=PRECISION), scores)
        if MASKED:
            seen = at[None, :] <= position[:, None]
            if WINDOW:
                seen &= at[None, :] > position[:, None] - WINDOW
            s = tl.where(seen, s, UNSEEN)
        higher = tl.maximum(top, tl.max(s, 1))
        weight = tl.exp2(s - higher[:, None])
        old = tl.exp2(top - higher)
        total = total * old + tl.sum(weight, 1)
        acc = tl.dot(weight.to(value.dtype), value, acc * old[:, None], input_precision=PRECISION)
        top = higher
    return top, total, acc


@triton.jit
def prefill_kernel(
    rows: Rows, cache: Cache, work: Work, scores: Scores, out,
    H: tl.constexpr, H_KV: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    R: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program h + H_KV * i takes K/V head h of tile i."""
    rows, cache = rows, cache  # see `triton/records.py`
    G: tl.constexpr = H // H_KV
    h, i = tl.program_id(0) % H_KV, tl.program_id(0) // H_KV
    if i < tl.load(work.totals + 2):
        item = load_item(work.many_I, i)
        r = item.row + tl.arange(0, R)
        t, head = r // G, h * G + r % G
        live = t < item.count
        position = item.start + t
        row_p = rows.query + (item.first + t).to(tl.int64) * rows.stride + head * rows.head_stride
        query = load_heads(row_p, live, D, WIDTH)
        top = tl.full((R,), UNSEEN, tl.float32)
        total = tl.zeros((R,), tl.float32)
        acc = tl.zeros((R, WIDTH_V), tl.float32)
        lowest = item.start + item.row // G
        highest = tl.minimum(item.start + (item.row + R - 1) // G, item.end - 1)
        begin, whole = 0, (lowest + 1) // KEYS * KEYS  # tiles below `whole`: no row is before them
        if WINDOW:
            begin = tl.maximum(lowest - WINDOW + 1, 0) // KEYS * KEYS
            # From `inside` on, no row has left a key behind.
            inside = tl.cdiv(tl.maximum(highest - WINDOW + 1, 0), KEYS) * KEYS
            inside = tl.minimum(inside, whole)
            top, total, acc = _pass_over(
                top, total, acc, query, position, begin, inside, item.request, cache, scores, h,
                True, H_KV, D, D_V, WIDTH, WIDTH_V, PAGE, WINDOW, KEYS, STAGES, PRECISION,
            )  # fmt: skip
            begin = tl.maximum(begin, inside)
        top, total, acc = _pass_over(
            top, total, acc, query, position, begin, whole, item.request, cache, scores, h,
            False, H_KV, D, D_V, WIDTH, WIDTH_V, PAGE, WINDOW, KEYS, STAGES, PRECISION,
        )  # fmt: skip
        top, total, acc = _pass_over(
            top, total, acc, query, position, tl.maximum(begin, whole), highest + 1, item.request,
            cache, scores, h,
            True, H_KV, D, D_V, WIDTH, WIDTH_V, PAGE, WINDOW, KEYS, STAGES, PRECISION,
        )  # fmt: skip
        result = settled(top, total, acc, head, live, scores)
        d_v = tl.arange(0, WIDTH_V)
        to = out + ((item.first + t).to(tl.int64) * H + head)[:, None] * D_V + d_v[None, :]
        tl.store(to, result.to(out.dtype.element_ty), mask=live[:, None] & (d_v < D_V)[None, :])

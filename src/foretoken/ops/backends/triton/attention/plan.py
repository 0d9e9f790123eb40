"""The work of a pass, listed on the device: which queries meet which piece of which context.

A context is cut at fixed positions: the first COUNT pieces have SIZE tokens, the next 3/4 COUNT
four times as many, and so on. Where it is cut depends on the position alone, so that what a row's
pieces come to does too; growing, they are so few that partial results of the longest contexts fit
in memory (176 at 131072 tokens from SIZE 64 and COUNT 64 on, not 2048).

A request with up to `FEW` queries is cut into items (tile of rows x piece); row r of a request is
head r % G of its token r // G, for each K/V head alike. One with more is cut into tiles only, each
over all the keys that it sees.
"""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from foretoken.ops.backends.triton.attention.records import Work

FEW = tl.constexpr(16)  # queries: more make a request one of many
GROWTH = tl.constexpr(4)  # of pieces, from one level to the next
FIELDS = tl.constexpr(16)  # integers of an item: one load of 64 bytes
MERGE_FIELDS = tl.constexpr(4)

Item = namedtuple("Item", "request row begin end piece first start count slot")
"""A tile of rows over a piece of a context.

row:        the tile's first row
begin, end: the piece's tokens; for a request of many, `end` is its length
piece:      its number, or -1 if the request has no other: no merge follows
first:      the packed index of the request's first new token
start:      the position of it
count:      of new tokens
slot:       where rows of the request begin in `merge_F` and partial results
"""

MergeRow = namedtuple("MergeRow", "row first last")
"""A packed row and the pieces that it sees; none if last < first: it needs no merge."""

Pieces = namedtuple("Pieces", "size count levels")
"""How contexts are cut: SIZE, COUNT, and how often pieces grow up to the longest length."""


def pieces_for(size: int, count: int, longest: int) -> Pieces:
    """The cut of contexts of up to `longest` tokens."""
    levels, reach = 0, size * count
    while reach < longest:
        levels, reach = levels + 1, reach * GROWTH.value
    return Pieces(size, count, levels)


def most_pieces(pieces: Pieces, longest: int) -> int:
    """How many pieces a context of `longest` tokens has."""
    size, count, levels = pieces
    number, end = min(count, -(-longest // size)), size * count
    for _ in range(levels):
        size *= GROWTH.value
        number += max(0, -(-(min(longest, end * GROWTH.value) - end) // size))
        end *= GROWTH.value
    return int(number)


@triton.jit
def piece_of(position, SIZE: tl.constexpr, COUNT: tl.constexpr, LEVELS: tl.constexpr):
    """The number of the piece that holds a position."""
    piece = position // SIZE
    for level in tl.static_range(LEVELS):
        end: tl.constexpr = SIZE * COUNT * GROWTH**level
        before: tl.constexpr = COUNT + level * (COUNT * (GROWTH - 1) // GROWTH)
        further = before + (position - end) // (SIZE * GROWTH ** (level + 1))
        piece = tl.where(position >= end, further, piece)
    return piece


@triton.jit
def piece_start(piece, SIZE: tl.constexpr, COUNT: tl.constexpr, LEVELS: tl.constexpr):
    """The first position of a piece."""
    start = piece * SIZE
    for level in tl.static_range(LEVELS):
        end: tl.constexpr = SIZE * COUNT * GROWTH**level
        before: tl.constexpr = COUNT + level * (COUNT * (GROWTH - 1) // GROWTH)
        further = end + (piece - before) * (SIZE * GROWTH ** (level + 1))
        start = tl.where(piece >= before, further, start)
    return start


_Share = namedtuple("_Share", "first count length low high tiles few")


@triton.jit
def _share(
    query_start_B1, length_B, b, valid, G: tl.constexpr, WINDOW: tl.constexpr,
    SIZE: tl.constexpr, COUNT: tl.constexpr, LEVELS: tl.constexpr,
    FEW_ROWS: tl.constexpr, MANY_ROWS: tl.constexpr,
):  # fmt: skip
    """What there is to do for requests b: their pieces low..high, their tiles of rows."""
    first = tl.load(query_start_B1 + b, mask=valid, other=0).to(tl.int32)
    count = tl.load(query_start_B1 + b + 1, mask=valid, other=0).to(tl.int32) - first
    length = tl.load(length_B + b, mask=valid, other=1).to(tl.int32)
    oldest = tl.zeros_like(length)
    if WINDOW:
        oldest = tl.maximum(length - count - WINDOW + 1, 0)
    low = piece_of(oldest, SIZE, COUNT, LEVELS)
    high = piece_of(length - 1, SIZE, COUNT, LEVELS)
    few = count <= FEW
    tiles = tl.cdiv(count * G, tl.where(few, FEW_ROWS, MANY_ROWS))
    return _Share(first, count, length, low, high, tiles, few)


@triton.jit
def plan_kernel(
    query_start_B1, length_B, work: Work, B, G: tl.constexpr, WINDOW: tl.constexpr,
    SIZE: tl.constexpr, COUNT: tl.constexpr, LEVELS: tl.constexpr,
    FEW_ROWS: tl.constexpr, MANY_ROWS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Program b lists the items of request b; program B writes the totals.

    FEW_ROWS, MANY_ROWS: rows of a tile of a request with few, with many queries. AT_ONCE: how many
    requests, items or rows a program looks at in a round.
    """
    b = tl.program_id(0)
    few_items = tl.zeros((AT_ONCE,), tl.int32)
    few_rows, many_items = few_items, few_items
    for chunk in range(0, b, AT_ONCE):
        other = chunk + tl.arange(0, AT_ONCE)
        share = _share(
            query_start_B1, length_B, other, other < b, G, WINDOW, SIZE, COUNT, LEVELS,
            FEW_ROWS, MANY_ROWS,
        )  # fmt: skip
        few_items += tl.where(share.few, share.tiles * (share.high - share.low + 1), 0)
        few_rows += tl.where(share.few, share.count, 0)
        many_items += tl.where(share.few, 0, share.tiles)
    few_item, slot = tl.sum(few_items, 0), tl.sum(few_rows, 0)
    many_item = tl.sum(many_items, 0)
    if b == B:
        tl.store(work.totals, few_item)
        tl.store(work.totals + 1, slot)
        tl.store(work.totals + 2, many_item)
    else:
        share = _share(
            query_start_B1, length_B, b, b < B, G, WINDOW, SIZE, COUNT, LEVELS,
            FEW_ROWS, MANY_ROWS,
        )  # fmt: skip
        start, single = share.length - share.count, share.high == share.low
        lanes = tl.arange(0, AT_ONCE)
        if share.few:
            number = share.tiles * (share.high - share.low + 1)
            for chunk in range(0, number, AT_ONCE):
                e = chunk + lanes
                piece = share.high - e // share.tiles  # the longest first
                begin = piece_start(piece, SIZE, COUNT, LEVELS)
                end = piece_start(piece + 1, SIZE, COUNT, LEVELS)
                item = Item(
                    b, e % share.tiles * FEW_ROWS, begin, tl.minimum(end, share.length),
                    tl.where(single, -1, piece), share.first, start, share.count, slot,
                )  # fmt: skip
                _store_item(work.few_I, few_item + e, item, e < number)
            for chunk in range(0, share.count, AT_ONCE):
                t = chunk + lanes
                oldest = tl.zeros_like(t)
                if WINDOW:
                    oldest = tl.maximum(start + t - WINDOW + 1, 0)
                low = piece_of(oldest, SIZE, COUNT, LEVELS)
                high = piece_of(start + t, SIZE, COUNT, LEVELS)
                place = work.merge_F + (slot + t) * MERGE_FIELDS
                valid = t < share.count
                tl.store(place, share.first + t, mask=valid)
                tl.store(place + 1, low, mask=valid)
                tl.store(place + 2, tl.where(single, low - 1, high), mask=valid)
        else:
            for chunk in range(0, share.tiles, AT_ONCE):
                e = chunk + lanes
                row = (share.tiles - 1 - e) * MANY_ROWS  # the longest first
                item = Item(
                    b, row, 0, share.length, -1, share.first, start, share.count, slot
                )  # fmt: skip
                _store_item(work.many_I, many_item + e, item, e < share.tiles)


@triton.jit
def _store_item(item_I, i, item, valid):
    place = item_I + i * FIELDS
    tl.store(place, item.request, mask=valid)
    tl.store(place + 1, item.row, mask=valid)
    tl.store(place + 2, item.begin, mask=valid)
    tl.store(place + 3, item.end, mask=valid)
    tl.store(place + 4, item.piece, mask=valid)
    tl.store(place + 5, item.first, mask=valid)
    tl.store(place + 6, item.start, mask=valid)
    tl.store(place + 7, item.count, mask=valid)
    tl.store(place + 8, item.slot, mask=valid)


@triton.jit
def load_item(item_I, i):
    """Item i; its fields are scalars."""
    place = item_I + i * FIELDS
    return Item(
        tl.load(place), tl.load(place + 1), tl.load(place + 2), tl.load(place + 3),
        tl.load(place + 4), tl.load(place + 5), tl.load(place + 6), tl.load(place + 7),
        tl.load(place + 8),
    )  # fmt: skip


@triton.jit
def load_merge_row(merge_F, f):
    """Row f of those that a merge may follow for."""
    place = merge_F + f * MERGE_FIELDS
    return MergeRow(tl.load(place), tl.load(place + 1), tl.load(place + 2))

"""The work of a pass, listed on the device: which queries attend to which piece of which context.

A row's context is cut into pieces of SIZE tokens, from its start on. If there would be more than
COUNT pieces, all are made longer, by multiples of STEP. (An item costs about 5 us in addition to
its keys: one item per program that a GPU holds is best.) The cut depends only on a row's own
context, and so do the results of the pieces. If a context outgrows COUNT pieces within a step, its
request has two segments of rows with different cuts, each with its own items.

A request with up to `FEW` queries is cut into items (tile of rows x piece). For each K/V head, row
r of a request is query head r % G of its token r // G. A request with more queries is cut only into
tiles, each over all the keys that its rows see.
"""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from foretoken.ops.backends.triton.attention.records import Work

FEW = tl.constexpr(16)  # a request with up to so many queries has "few", with more "many"
FIELDS = tl.constexpr(16)  # integers per item, so that one load of 64 bytes reads it
MERGE_FIELDS = tl.constexpr(4)

Item = namedtuple("Item", "request row begin end piece first start count slot")
"""A tile of rows over a piece of a context.

row:        the tile's first row
begin, end: the piece's tokens; for a request with many queries, `end` is its length
piece:      the piece's number in its segment; -1 if there is no other to merge
first, start: the packed index and the position of the request's first new token
count:      the number of new tokens from `first` to the end of the segment
slot:       where the request's rows begin in `merge_F` and in partial results
"""

MergeRow = namedtuple("MergeRow", "row first last")
"""A packed row and the first and last piece that it sees; no merge is needed if last < first."""

_Segment = namedtuple("_Segment", "token end size low high tiles")
"""New tokens token..end - 1 of a request, their pieces low..high, and the number of their tiles."""

_Request = namedtuple("_Request", "first count length early late tiles few")
"""A request, or a vector of requests, as the plan cuts it.

first, count, length: packed index of its first new token, number of new tokens, of all tokens
early, late: its segments if it has few queries; the early one is often empty
tiles:       the number of tiles of its rows if it has many queries
few:         whether it has few queries
"""


def most_pieces(size: int, count: int, longest: int, window: int) -> int:
    """The largest number of pieces of a segment, for contexts of up to `longest` tokens."""
    # A window can begin and end inside of a piece.
    return min(-(-longest // size), count + 2 * bool(window))


@triton.jit
def _piece_size(length, CUT: tl.constexpr):
    if CUT.WINDOW:
        length = tl.minimum(length, CUT.WINDOW)
    over = tl.maximum(length - CUT.SIZE * CUT.COUNT, 0)
    return CUT.SIZE + tl.cdiv(over, CUT.STEP * CUT.COUNT) * CUT.STEP


@triton.jit
def _first_seen(position, CUT: tl.constexpr):
    """The first position that a row at `position` sees."""
    return tl.maximum(position - CUT.WINDOW + 1, 0) if CUT.WINDOW else tl.zeros_like(position)


@triton.jit
def _segment(start, token, end, size, CUT: tl.constexpr):
    """The `_Segment` of new tokens token..end - 1 after `start` known ones."""
    low, high = _first_seen(start + token, CUT) // size, (start + end - 1) // size
    return _Segment(token, end, size, low, high, tl.cdiv((end - token) * CUT.G, CUT.FEW_ROWS))


@triton.jit
def _num_items(segment):
    return segment.tiles * (segment.high - segment.low + 1)


@triton.jit
def _read_request(query_start_B1, length_B, b, valid, CUT: tl.constexpr):
    first = tl.load(query_start_B1 + b, mask=valid, other=0).to(tl.int32)
    count = tl.load(query_start_B1 + b + 1, mask=valid, other=0).to(tl.int32) - first
    length = tl.load(length_B + b, mask=valid, other=1).to(tl.int32)
    start = length - count
    size = _piece_size(start + 1, CUT)
    last_size = _piece_size(length, CUT)
    split = tl.where(size == last_size, 0, size * CUT.COUNT - start)
    early = _segment(start, tl.zeros_like(split), split, size, CUT)
    late = _segment(start, split, count, last_size, CUT)
    tiles = tl.cdiv(count * CUT.G, CUT.MANY_ROWS)
    return _Request(first, count, length, early, late, tiles, count <= FEW)


@triton.jit(do_not_specialize=["B"])
def plan_kernel(query_start_B1, length_B, work: Work, B, CUT: tl.constexpr,
                CHUNK: tl.constexpr):  # fmt: skip
    """Program b lists the items of request b; program B writes the totals.
    CHUNK: how many requests, items or rows a program handles in one iteration of a loop."""
    b = tl.program_id(0)
    few_items = tl.zeros((CHUNK,), tl.int32)
    few_rows, many_items = few_items, few_items
    for begin in range(0, b, CHUNK):
        e = begin + tl.arange(0, CHUNK)
        earlier = _read_request(query_start_B1, length_B, e, e < b, CUT)
        num_items = _num_items(earlier.early) + _num_items(earlier.late)
        few_items += tl.where(earlier.few, num_items, 0)
        few_rows += tl.where(earlier.few, earlier.count, 0)
        many_items += tl.where(earlier.few, 0, earlier.tiles)
    few_item, slot = tl.sum(few_items, 0), tl.sum(few_rows, 0)
    many_item = tl.sum(many_items, 0)
    if b == B:
        tl.store(work.totals, few_item)
        tl.store(work.totals + 1, slot)
        tl.store(work.totals + 2, many_item)
    else:
        request = _read_request(query_start_B1, length_B, b, b < B, CUT)
        first, count, length, early, late, tiles, few = request
        start, lanes = length - count, tl.arange(0, CHUNK)
        if few:
            _store_items(work.few_I, few_item, request, early, b, slot, CUT, CHUNK)
            few_item += _num_items(early)
            _store_items(work.few_I, few_item, request, late, b, slot, CUT, CHUNK)
            for begin in range(0, count, CHUNK):
                t = begin + lanes
                is_early, valid = t < late.token, t < count
                size = tl.where(is_early, early.size, late.size)
                first_piece = tl.where(is_early, early.low, late.low)
                single = tl.where(is_early, early.high, late.high) == first_piece
                low, high = _first_seen(start + t, CUT) // size, (start + t) // size
                place = work.merge_F + (slot + t) * MERGE_FIELDS
                tl.store(place, first + t, mask=valid)
                tl.store(place + 1, low - first_piece, mask=valid)
                tl.store(place + 2, tl.where(single, low - 1, high) - first_piece, mask=valid)
        else:
            for begin in range(0, tiles, CHUNK):
                e = begin + lanes
                row = (tiles - 1 - e) * CUT.MANY_ROWS  # rows with the longest contexts first
                item = Item(b, row, 0, length, -1, first, start, count, slot)
                _store_item(work.many_I, many_item + e, item, e < tiles)


@triton.jit
def _store_items(item_I, i, request, segment, b, slot, CUT: tl.constexpr,
                 CHUNK: tl.constexpr):  # fmt: skip
    """Store a segment's items from item i on. Its last piece, with the new tokens, comes first."""
    start, num_items = request.length - request.count, _num_items(segment)
    for first in range(0, num_items, CHUNK):
        e = first + tl.arange(0, CHUNK)
        piece = segment.high - e // segment.tiles
        begin = piece * segment.size
        item = Item(
            b, segment.token * CUT.G + e % segment.tiles * CUT.FEW_ROWS, begin,
            tl.minimum(begin + segment.size, start + segment.end),
            tl.where(segment.high == segment.low, -1, piece - segment.low),
            request.first, start, segment.end, slot,
        )  # fmt: skip
        _store_item(item_I, i + e, item, e < num_items)


@triton.jit
def _store_item(item_I, i, item, valid):
    place = item_I + i * FIELDS
    for field in tl.static_range(len(item)):
        tl.store(place + field, item[field], mask=valid)


@triton.jit
def load_item(item_I, i):
    """The `Item` i; its fields are scalars."""
    p = item_I + i * FIELDS
    return Item(tl.load(p), tl.load(p + 1), tl.load(p + 2), tl.load(p + 3), tl.load(p + 4),
                tl.load(p + 5), tl.load(p + 6), tl.load(p + 7), tl.load(p + 8))  # fmt: skip


@triton.jit
def load_merge_row(merge_F, f):
    """The `MergeRow` f."""
    place = merge_F + f * MERGE_FIELDS
    return MergeRow(tl.load(place), tl.load(place + 1), tl.load(place + 2))

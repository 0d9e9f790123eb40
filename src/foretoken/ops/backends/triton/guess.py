"""Where the threshold of a wide row probably lies: two keys, from a sample of the row.

What is sought is the largest t such that the weight W(x >= t) reaches what is needed. For top-k
every finite logit weighs 1; for top-p a logit that reaches min-p's floor weighs its mass relative
to the row's maximum. Keys order logits as integers (`rows.py: key_of`).

Shapes: V vocabulary.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any, NamedTuple

import triton
import triton.language as tl

from foretoken.ops.backends.triton.records import RawRows
from foretoken.ops.backends.triton.rows import key_of, load_at, value_of

SAMPLE = tl.constexpr(4096)
LIST = tl.constexpr(4096)  # most entries of a list, if its room is larger
LOWEST = tl.constexpr(0x00800000)  # the key of the lowest finite float
GUESSES = tl.constexpr(6)
_CHUNK = tl.constexpr(8)  # neighbours in the sample: memory is read by sectors
_SPREAD = tl.constexpr(3.0)  # standard deviations on either side of a guess
_FILL = tl.constexpr(0.9)  # of the list's room, by the sample, between two guesses

Weighting = namedtuple("Weighting", "maximum scale floor")
"""What a logit x weighs: 2^((x - maximum) scale) if it reaches the floor, else 0.

If logits are counted, maximum and scale are 0 and the floor is the lowest finite float.
"""


class Search(NamedTuple):
    """What is sought in a row. goal: if `counted` top-k's k, else the share top_p of its weight."""

    weighting: Weighting
    counted: Any
    goal: Any
    top: Any


Guess = namedtuple("Guess", "a b")
"""Keys a <= b, the threshold probably in [a, b)."""

Bracket = namedtuple("Bracket", "low high w_low w_high")
"""Keys low < high with the threshold in [low, high), and W from each of them on."""


@triton.jit
def search_for(counted, goal, top, scale, floor):
    """The search for top-k's threshold (`counted`) or for top-p's."""
    lowest = value_of(tl.full((), LOWEST, tl.uint32))
    zero = tl.full((), 0.0, tl.float32)
    weighting = Weighting(
        tl.where(counted, zero, top),
        tl.where(counted, zero, scale),
        tl.where(counted, lowest, floor),
    )
    return Search(weighting, counted, goal, top)


@triton.jit
def weight_of(x, weighting: Weighting):
    """What a logit weighs; 0 if it is -inf."""
    weight = tl.exp2((x - weighting.maximum) * weighting.scale)
    return tl.where(x >= weighting.floor, weight, 0.0)


@triton.jit
def needed(search: Search, mass):
    """The weight to be reached, in a row that weighs `mass`."""
    return tl.where(search.counted, search.goal, tl.maximum(search.goal * mass, 1e-30))


@triton.jit
def bisect(key, weight, low, high, need, step):
    """The largest t in [low, high) such that the weight of keys >= t reaches `need`, else low.

    To less than `step` below it: 1 is exact.
    """
    while high - low > step:
        middle = low + ((high - low) >> 1)
        if tl.sum(tl.where(key >= middle, weight, tl.zeros_like(weight)), axis=0) >= need:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def room_for_list(rows: RawRows):
    """How many logits a row's list may hold: it lies where the maxima of groups were."""
    return tl.minimum(rows.NG, LIST)


@triton.jit
def sample_of(rows: RawRows, row, turn):
    """SAMPLE logits in chunks spread over the row, others each turn; -inf if it has fewer."""
    i = tl.arange(0, SAMPLE)
    apart = tl.maximum(rows.V // (SAMPLE // _CHUNK), _CHUNK)
    off = i // _CHUNK * apart + i % _CHUNK + (apart - _CHUNK) * turn // GUESSES
    return load_at(rows, row, off, off < rows.V)


@triton.jit
def guess_from(x, unit, bracket: Bracket, need, room, weighting: Weighting):
    """The `Guess` inside a bracket that a sample x of its row suggests.

    W is known at both ends of the bracket, so that W(t) can be summed from either end: of the
    sample above t, or of that below it. The best mix of both weighs them by their variances: a few
    heavy logits, sampled or not, do not blur a threshold far below them. unit: logits that a
    sampled one stands for. room: of the list.
    """
    low, high = bracket.low, bracket.high
    a, b = low, high
    key = key_of(x)
    weight = tl.where((key >= low) & (key < high), weight_of(x, weighting), 0.0)
    sampled = tl.sum(weight, axis=0)
    if sampled > 0:
        one = tl.where(weight > 0, 1.0, 0.0)
        first = tl.min(tl.where(weight > 0, key, high), axis=0)
        last = tl.max(tl.where(weight > 0, key, low), axis=0) + 1
        step = tl.maximum((last - first) >> 18, 1)
        mass = bracket.w_low - bracket.w_high
        t = bisect(key, weight, first, last, sampled * (need - bracket.w_high) / mass, step)
        above = tl.sum(tl.where(key >= t, weight * weight, 0.0), axis=0)
        below = tl.sum(weight * weight, axis=0) - above
        both = tl.maximum(above + below, 1e-37)
        wanted = (need - bracket.w_high) / unit + above / both * (sampled - mass / unit)
        t = bisect(key, weight, first, last, wanted, step)
        t = tl.min(tl.where((weight > 0) & (key >= t), key, last), axis=0)
        near = tl.maximum(weight_of(value_of(t), weighting), 1e-18)
        ties = tl.sum(tl.where(key == t, one, 0.0), axis=0)
        count = tl.sum(tl.where(key > t, one, 0.0), axis=0)
        aside = tl.sqrt(above * tl.maximum(below, 0.0) / both / (near * near) + 1) * _SPREAD
        most = (room * _FILL / unit - ties) / 2
        aside = tl.minimum(aside, most)
        if most < 0:
            a, b = t, t + 1
        else:
            if count + ties + aside < tl.sum(one, axis=0):
                a = bisect(key, one, first, last, count + ties + aside, step)
            if count - aside >= 1:
                b = tl.minimum(bisect(key, one, first, last, count - aside, step) + step, high)
    return Guess(a, b)

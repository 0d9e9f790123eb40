"""Where the threshold of a wide row probably lies: two keys, from a sample of the row.

What is sought is the largest t such that the weight W(x >= t) reaches `need`. The weight of a logit
is its mass relative to the row's maximum, 2^((x - maximum) scale), if it reaches `floor`; top-k
counts, so that its law is (0, 0, the lowest finite float): every weight is 2^0.

Tuples: source = (logits, stride, row, V, edits), law = (maximum, scale, floor).
"""

from __future__ import annotations

import triton
import triton.language as tl

from foretoken.ops.backends.triton.rows import key_of, load_at, value_of

SAMPLE = tl.constexpr(4096)
LIST = tl.constexpr(4096)  # most entries of a list, if its room is larger
LOWEST = tl.constexpr(0x00800000)  # the key of the lowest finite float
GUESSES = tl.constexpr(6)
_CHUNK = tl.constexpr(8)  # neighbours in the sample: memory is read by sectors
_SPREAD = tl.constexpr(3.0)  # standard deviations on either side of a guess
_FILL = tl.constexpr(0.9)  # of the list's room, by the sample, between two guesses


@triton.jit
def weight_of(x, law):
    """What a logit counts; 0 of -inf."""
    return tl.where(x >= law[2], tl.exp2((x - law[0]) * law[1]), 0.0)


@triton.jit
def law_of(counts, top, scale, floor):
    """The law of a search for top-k's threshold (`counts`) or for top-p's."""
    lowest = value_of(tl.full((), LOWEST, tl.uint32))
    zero = tl.full((), 0.0, tl.float32)
    return (
        tl.where(counts, zero, top),
        tl.where(counts, zero, scale),
        tl.where(counts, lowest, floor),
    )


@triton.jit
def needed(counts, goal, mass):
    """The weight that a search must reach: `goal` itself or that share of the row's `mass`."""
    return tl.where(counts, goal, tl.maximum(goal * mass, 1e-30))


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
def sample_of(source, turn, MASKS: tl.constexpr, ENTRIES: tl.constexpr):
    """SAMPLE logits in chunks spread over the row, others each turn; -inf if it has fewer."""
    logits, stride, row, V, edits = source
    i = tl.arange(0, SAMPLE)
    apart = tl.maximum(V // (SAMPLE // _CHUNK), _CHUNK)
    off = i // _CHUNK * apart + i % _CHUNK + (apart - _CHUNK) * turn // GUESSES
    return load_at(logits, stride, row, off, off < V, edits, MASKS, ENTRIES)


@triton.jit
def guess(x, unit, low, high, w_low, w_high, need, few, law):
    """Keys a < b in [low, high], the threshold probably between them, from a sample x of the row.

    W(low) = w_low and W(high) = w_high are known, so that W(t) can be summed from either end: of
    the sample above t, or of that below it. The best mix of both weighs them by their variances: a
    few heavy logits, sampled or not, do not blur a threshold far below them. unit: logits that a
    sampled one stands for. few: the room of the list.
    """
    a, b = low, high
    key = key_of(x)
    weight = tl.where((key >= low) & (key < high), weight_of(x, law), 0.0)
    sampled = tl.sum(weight, axis=0)
    if sampled > 0:
        one = tl.where(weight > 0, 1.0, 0.0)
        first = tl.min(tl.where(weight > 0, key, high), axis=0)
        last = tl.max(tl.where(weight > 0, key, low), axis=0) + 1
        step = tl.maximum((last - first) >> 18, 1)
        mass = w_low - w_high
        t = bisect(key, weight, first, last, sampled * (need - w_high) / mass, step)
        above = tl.sum(tl.where(key >= t, weight * weight, 0.0), axis=0)
        below = tl.sum(weight * weight, axis=0) - above
        both = tl.maximum(above + below, 1e-37)
        wanted = (need - w_high) / unit + above / both * (sampled - mass / unit)
        t = bisect(key, weight, first, last, wanted, step)
        t = tl.min(tl.where((weight > 0) & (key >= t), key, last), axis=0)
        near = tl.maximum(weight_of(value_of(t), law), 1e-18)
        ties = tl.sum(tl.where(key == t, one, 0.0), axis=0)
        count = tl.sum(tl.where(key > t, one, 0.0), axis=0)
        aside = tl.sqrt(above * tl.maximum(below, 0.0) / both / (near * near) + 1) * _SPREAD
        most = (few * _FILL / unit - ties) / 2
        aside = tl.minimum(aside, most)
        if most < 0:
            a, b = t, t + 1
        else:
            if count + ties + aside < tl.sum(one, axis=0):
                a = bisect(key, one, first, last, count + ties + aside, step)
            if count - aside >= 1:
                b = tl.minimum(bisect(key, one, first, last, count - aside, step) + step, high)
    return a, b

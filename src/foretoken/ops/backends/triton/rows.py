"""What every kernel does first: find its row, read its slot's parameters, load edited logits.

Logits are loaded raw in any float dtype, edited on load, and held in float32.
"""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from foretoken.ops.backends.triton.noise import LOG2E, log2
from foretoken.ops.backends.triton.records import Entries, Mask, RawRows, Requests, Slots
from foretoken.ops.backends.triton.rules import COUPLED

BLOCK = tl.constexpr(1024)  # ids per block of the hierarchical draw
GROUP = tl.constexpr(64)  # ids per group; the maximum of each group is kept
GROUPS = tl.constexpr(BLOCK.value // GROUP.value)  # groups per block
CAPACITY = tl.constexpr(128)  # entries of a row's short list
FIXED = tl.constexpr(1099511627776.0)  # 2^40, a weight of 1: integer sums are exact in any order
REQUEST_CHUNK = tl.constexpr(128)  # usual CHUNK of `first_row`
_ENTRY_CHUNK = tl.constexpr(512)  # entries that `edit_kernel` handles together

Settings = namedtuple(
    "Settings", "slot key rule greedy scale top_k top_p min_p counted flat filtered"
)
"""The parameters of a slot.

greedy:   T=0
scale:    factor from logits to log2 of unnormalised probabilities
counted:  whether top-k is active, which counts logits instead of summing weights
flat:     whether draws are by flat noise (`draw.py`): top-k is active, or the rule is COUPLED
filtered: whether top-k, top-p or min-p is active; never at T=0
"""


@triton.jit
def zero_like(x):
    """0 of the type and shape of x, for a variable that starts at 0."""
    return x * 0


@triton.jit
def false_like(x):
    """False in the shape of x (x >= 0), for a variable that starts as False."""
    return x < 0


@triton.jit
def read_settings(slots: Slots, slot, V):
    """The `Settings` of a slot for rows of V logits. The compiler drops loads that are not used."""
    temperature = tl.load(slots.temperature_S + slot)
    rule = tl.load(slots.rule_S + slot)
    top_k, top_p = tl.load(slots.top_k_S + slot), tl.load(slots.top_p_S + slot)
    min_p = tl.load(slots.min_p_S + slot)
    greedy, counted = temperature == 0, (top_k > 0) & (top_k < V)
    dropping = counted | (top_p < 1) | (min_p > 0)
    scale = LOG2E / tl.where(greedy, 1.0, temperature)
    key = tl.load(slots.key_S + slot)
    flat, filtered = counted | (rule == COUPLED), dropping & (temperature > 0)
    return Settings(slot, key, rule, greedy, scale, top_k, top_p, min_p, counted, flat, filtered)


@triton.jit
def let_next_start(OVERLAP: tl.constexpr):
    """Let the kernel launched after this one start, once every program has called this."""
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def wait_for_writes(OVERLAP: tl.constexpr):
    """Wait until the kernel launched before this one has ended, and its results can be read."""
    if OVERLAP:
        gdc_wait()


@triton.jit
def first_row(requests: Requests, b, RAGGED: tl.constexpr, CHUNK: tl.constexpr = REQUEST_CHUNK):
    """The row that decides request b's first token: the sum of K + 1 over earlier requests.
    CHUNK: how many requests are summed together; up to 4 need no exchange between warps."""
    if RAGGED:
        total = tl.zeros((CHUNK,), tl.int64)
        for start in range(0, b, CHUNK):
            before = start + tl.arange(0, CHUNK)
            num = tl.load(requests.num_B + before, mask=before < b, other=0)
            total += tl.where(before < b, num + 1, 0)
        return tl.sum(total, axis=0)
    else:
        return b.to(tl.int64)


@triton.jit
def edit_kernel(rows: RawRows, entries: Entries, start_N1, bias_M, repetition_M, subtract_M,
                WIDTH: tl.constexpr):  # fmt: skip
    """A program per row fills `value_M` and `begin_NJ`, so that later kernels can look edits up.
    `rows.entries` is None here. A masked token's value is -inf, since the mask is applied first.
    `_first_entry` runs last: by then the tokens that it reads are in the L1 cache."""
    row = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(start_N1 + row), tl.load(start_N1 + row + 1)
    for first in range(begin, end, _ENTRY_CHUNK):
        e = first + tl.arange(0, _ENTRY_CHUNK)
        valid = e < end
        token = tl.load(entries.token_M + e, mask=valid, other=0)
        x = load_at(rows, row, token, valid)
        x = x + tl.load(bias_M + e, mask=valid, other=0.0)
        repetition = tl.load(repetition_M + e, mask=valid, other=1.0)
        x = tl.where(x > 0, x / repetition, x * repetition)
        x = x - tl.load(subtract_M + e, mask=valid, other=0.0)
        tl.store(entries.value_M + e, x, mask=valid)
    j = tl.arange(0, WIDTH)
    zeros = tl.zeros((WIDTH,), tl.int64)
    e = _first_entry(entries, begin + zeros, end + zeros, j * BLOCK)
    begin_p = entries.begin_NJ + row * entries.columns + j
    tl.store(begin_p, e.to(tl.int32), mask=j < entries.columns)


@triton.jit
def _first_entry(entries: Entries, low, high, id_):
    """In each lane, the first of entries low..high - 1 with a token >= id_; else high."""
    size = tl.max(high - low, axis=0)
    while size > 0:
        open_ = low < high
        middle = (low + high) // 2
        below = open_ & (tl.load(entries.token_M + middle, mask=open_, other=0) < id_)
        high = tl.where(open_ & ~below, middle, high)
        low = tl.where(below, middle + 1, low)
        size = size // 2
    return low


@triton.jit
def _allowed(mask: Mask, index, off, valid):
    """Whether mask `index` allows the ids `off`; True where not `valid`."""
    word = tl.load(mask.bits_RW + index * mask.words + off // 32, mask=valid, other=-1)
    return ((word >> (off % 32).to(tl.int32)) & 1) == 1


@triton.jit
def load_span(rows: RawRows, row, first, WIDTH: tl.constexpr, evict: tl.constexpr):
    """Edited logits first..first + WIDTH - 1 of a row, float32; -inf after the row's end."""
    begin, end = 0, 0
    if rows.entries is not None:  # before the logits: both loads are in flight together
        begin_p = rows.entries.begin_NJ + row * rows.entries.columns + first // BLOCK
        begin, end = tl.load(begin_p), tl.load(begin_p + (WIDTH + BLOCK - 1) // BLOCK)
    off = first + tl.arange(0, WIDTH)
    valid, place = off < rows.V, rows.logits_NV + row * rows.stride + off
    x = tl.load(place, mask=valid, other=float("-inf"), eviction_policy=evict).to(tl.float32)
    if rows.mask is not None:
        index = tl.load(rows.mask.index_N + row)
        if index >= 0:
            x = tl.where(_allowed(rows.mask, index, off, valid), x, float("-inf"))
    if rows.entries is not None:
        token_M, value_M = rows.entries.token_M, rows.entries.value_M
        for e in range(begin, end, 2):  # two entries: twice as many loads in flight
            second = tl.minimum(e + 1, end - 1)  # of an odd number the last entry is taken twice
            token, value = tl.load(token_M + e).to(tl.int32), tl.load(value_M + e)
            second_token = tl.load(token_M + second).to(tl.int32)
            second_value = tl.load(value_M + second)
            x = tl.where(off == token, value, x)
            x = tl.where(off == second_token, second_value, x)
    return x


@triton.jit
def load_at(rows: RawRows, row, off, valid):
    """Edited logits at ids `off`; `row`: one row, or a block like `off`. -inf where not `valid`.
    Each lane finds its entry by a binary search among those of the id's block."""
    row = row + tl.zeros_like(off)
    place = rows.logits_NV + row * rows.stride + off
    x = tl.load(place, mask=valid, other=float("-inf")).to(tl.float32)
    if rows.mask is not None:
        index = tl.load(rows.mask.index_N + row)
        masked = valid & (index >= 0)
        x = tl.where(_allowed(rows.mask, index, off, masked), x, float("-inf"))
    if rows.entries is not None:
        entries = rows.entries
        begin = entries.begin_NJ + row * entries.columns + off // BLOCK
        end = tl.load(begin + 1, mask=valid, other=0)
        e = _first_entry(entries, tl.load(begin, mask=valid, other=0), end, off)
        edited = e < end
        edited = edited & (tl.load(entries.token_M + e, mask=edited, other=-1) == off)
        x = tl.where(edited, tl.load(entries.value_M + e, mask=edited, other=0.0), x)
    return x


@triton.jit
def key_of(x):
    """Order-preserving uint32 key of a float32; 0 and -0 have the same key."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def value_of(key):
    """Inverse of `key_of`."""
    bits = tl.where(key >> 31 == 1, key & 0x7FFFFFFF, key ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def log2_sum(x):
    """log2 of the sum of 2^x over a block; -inf if all x are, not finite if one x is NaN or inf."""
    top = tl.max(x, axis=0)
    base = tl.where(top == float("-inf"), 0.0, top)
    return base + log2(tl.sum(tl.exp2(x - base), axis=0))


@triton.jit
def log2_sum_exactly(x):
    """`log2_sum` with integers, in units of largest / FIXED: equal for any number of warps."""
    top = tl.max(x, axis=0)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum((tl.exp2(x - base) * FIXED).to(tl.int64), axis=0)
    return base + log2(total.to(tl.float32)) - 40  # log2 of FIXED


@triton.jit
def log2_sum_rows(x):
    """`log2_sum` of each row of a two-dimensional block."""
    top = tl.max(x, axis=1)
    base = tl.where(top == float("-inf"), 0.0, top)
    return base + log2(tl.sum(tl.exp2(x - base[:, None]), axis=1))


@triton.jit
def load_blocks(per_block_NJ, row, NB, NBP: tl.constexpr):
    """The values of a row's blocks [NBP], -inf after the last block."""
    j = tl.arange(0, NBP)  # `.cg` bypasses the L1 cache: other multiprocessors wrote the values
    place = per_block_NJ + row * NB + j
    return tl.load(place, mask=j < NB, other=float("-inf"), cache_modifier=".cg")

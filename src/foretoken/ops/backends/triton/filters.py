"""Exact min-p, top-k and top-p by the group-maximum bound: a threshold per row, few survivors read.

k blocks (or groups) whose maxima reach t hold k logits >= t: the k-th largest maximum is a lower
bound of the k-th largest logit. So only groups whose maximum reaches the bound are looked into, and
what reaches it there, a little more than k values, makes a short list in which the exact thresholds
are found by bisection over order-preserving keys. Ties are kept, whatever their number.

Integers are counted, in one instruction a warp. Whole calls of 1024 rows take 173 us with programs
of one warp, which need no barriers, and 184 with those of four; one row 23 and 17 (decision 010).

A row leaves here in one of two states: *compact*, its survivors in a list of up to CAPACITY
entries; or *dense* (count -1), to be read through its threshold, because nothing is dropped, or
because its list would overflow: then the whole row is searched by `sweep.py` and `wide.py`. Until
then its count is UNDECIDED and its number in the queue.

Tuple `found` = (threshold_N raw, lse_N in log2, count_N, list_id_NC, list_x_NC raw, queue_N1): the
queue begins with its length, which the scan sets to 0.
Shapes: N rows, V vocabulary, NB blocks, NG groups, C list entries.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foretoken.ops.backends.triton.guess import law_of
from foretoken.ops.backends.triton.noise import LOG2E
from foretoken.ops.backends.triton.rows import (
    BLOCK,
    CAPACITY,
    GROUP,
    first_row,
    is_filtered,
    is_flat,
    key_of,
    let_next_start,
    load_at,
    load_masses,
    log2_sum_exactly,
    value_of,
    wait_for_writes,
)
from foretoken.ops.backends.triton.sweep import queue_row

DENSE = tl.constexpr(-1)
UNDECIDED = tl.constexpr(-2)
NOTHING = tl.constexpr(0x007FFFFF)  # the key of -inf
_ENOUGH = tl.constexpr(64)  # values that a nucleus is first sought among, if top-k bounds it not
_BLOCKS = tl.constexpr(32)  # blocks whose groups are looked at together
_GROUPS = tl.constexpr(16)  # groups loaded at a time
_SOME = tl.constexpr(512)  # group maxima counted at a time
_UNIT = tl.constexpr(8388608.0)  # 2^23: 128 weights of at most 1 add up to no more than 2^30


@triton.jit
def largest_key(key, weight, need, COUNTS: tl.constexpr):
    """The largest t such that the integer weight of keys >= t reaches `need`.

    The key of -inf if all of them do not reach it: fewer than k logits may be above min-p's floor.
    Keys of 0 count nothing. COUNTS: every weight is 1 or the key 0. What brackets t is halved until
    a single key is left: 5 to 9 rounds of most rows of 151 936 logits, 32 at the most.
    """
    valid = key > 0
    low, high = tl.min(tl.where(valid, key, 0xFFFFFFFF), axis=0), tl.max(key, axis=0) + 1
    below, above = tl.sum(valid.to(tl.int32), axis=0), tl.full((), 0, tl.int32)
    reached = below
    if not COUNTS:
        reached = tl.sum(tl.where(valid, weight, 0), axis=0)
    possible = reached >= need
    while possible & (below - above > 1) & (high - low > 1):
        middle = low + ((high - low) >> 1)
        count = tl.sum((key >= middle).to(tl.int32), axis=0)
        reached = count
        if not COUNTS:
            reached = tl.sum(tl.where(key >= middle, weight, 0), axis=0)
        if reached >= need:
            low, below = middle, count
        else:
            high, above = middle, count
    found = tl.max(tl.where(key < high, key, 0), axis=0)
    return tl.where(possible, found, NOTHING)


@triton.jit
def _largest_group_key(groups, NG, need):
    """The same of a row's group maxima, each counting 1: read in every round."""
    low, high = tl.full((), NOTHING, tl.uint32), tl.full((), 0xFF800001, tl.uint32)
    while high - low > 1:
        middle = low + ((high - low) >> 1)
        reached = tl.full((), 0, tl.int32)
        for first in range(0, NG, _SOME):
            g = first + tl.arange(0, _SOME)
            key = key_of(tl.load(groups + g, mask=g < NG, other=float("-inf")))
            reached += tl.sum((key >= middle).to(tl.int32), axis=0)
        if reached >= need:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _bound(top_J, groups, k, V, NB, NG):
    """A value that at least the wanted number of logits reach; -inf if a list has no room."""
    wanted = tl.where((k > 0) & (k < V), k, tl.minimum(_ENOUGH, NB)).to(tl.int32)
    key = tl.full((), NOTHING, tl.uint32)
    if wanted <= CAPACITY:
        if wanted <= NB:
            key = largest_key(key_of(top_J), 1, wanted, True)
        elif wanted <= NG:
            key = _largest_group_key(groups, NG, wanted)
    return value_of(key)


@triton.jit
def _pick_groups(top_J, bound, groups, blocks, NG, NBP: tl.constexpr):
    """Write the groups whose maxima reach the bound over their maxima, by rising number; how many.

    More than CAPACITY if there are: each holds a logit that reaches it. `blocks`: room for
    CAPACITY numbers. No maximum is overwritten before it is read: a group's rank is not above it.
    """
    per_block: tl.constexpr = BLOCK // GROUP
    chosen = (top_J >= bound) & (top_J > float("-inf"))
    n = tl.sum(chosen.to(tl.int32), axis=0)
    count = n
    if n <= CAPACITY:
        rank = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
        tl.store(blocks + rank, tl.arange(0, NBP), mask=chosen)
        tl.debug_barrier()
        count = n * 0
        for first in range(0, n, _BLOCKS):
            r = first + tl.arange(0, _BLOCKS)
            block = tl.load(blocks + r, mask=r < n, other=NBP)  # behind the last group, as padding
            g = tl.reshape(
                block[:, None] * per_block + tl.arange(0, per_block)[None, :],
                (_BLOCKS * per_block,),
            )
            top_G = tl.load(groups + g, mask=g < NG, other=float("-inf"))
            chosen_G = (top_G >= bound) & (top_G > float("-inf"))
            rank_G = count + tl.cumsum(chosen_G.to(tl.int32), axis=0) - 1
            tl.debug_barrier()
            tl.store(groups + rank_G, g.to(tl.float32), mask=chosen_G)
            count += tl.sum(chosen_G.to(tl.int32), axis=0)
        tl.debug_barrier()
    return count


@triton.jit
def _load_groups(source, groups, first, n, MASKS: tl.constexpr, ENTRIES: tl.constexpr):
    """(ids, logits) of _GROUPS of the n picked groups, -inf behind the last."""
    logits, stride, row, V, edits = source
    g = first + tl.arange(0, _GROUPS)
    group = tl.load(groups + g, mask=g < n, other=0).to(tl.int32)
    off = tl.reshape(group[:, None] * GROUP + tl.arange(0, GROUP)[None, :], (_GROUPS * GROUP,))
    inside = tl.reshape(tl.broadcast_to((g < n)[:, None], (_GROUPS, GROUP)), (_GROUPS * GROUP,))
    return off, load_at(logits, stride, row, off, inside & (off < V), edits, MASKS, ENTRIES)


@triton.jit
def _collect(source, bound, groups, n, list_id, list_x, MASKS: tl.constexpr, ENTRIES: tl.constexpr):
    """Write the ids and values >= bound of the groups, in rising order; returns their number."""
    count = tl.full((), 0, tl.int32)
    next_off, next_x = _load_groups(source, groups, 0, n, MASKS, ENTRIES)
    for first in range(0, n, _GROUPS):
        off, x = next_off, next_x
        next_off, next_x = _load_groups(source, groups, first + _GROUPS, n, MASKS, ENTRIES)
        chosen = (x >= bound) & (x > float("-inf"))
        rank = count + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
        tl.store(list_id + rank, off, mask=chosen & (rank < CAPACITY))
        tl.store(list_x + rank, x, mask=chosen & (rank < CAPACITY))
        count += tl.sum(chosen.to(tl.int32), axis=0)
    return count


@triton.jit
def _cut(x, valid, scale, top, k, top_p, floor, total, V):
    """(threshold, whether it is exact) from a short list that holds every logit >= its bound.

    `total`: log2 mass of the whole row, which is what top-p cuts if neither top-k nor min-p (whose
    list holds all that it keeps) came before. Weights are integers: exact in any order.
    """
    key = tl.where(valid, key_of(x), 0)
    threshold = floor
    bounded = (k > 0) & (k < V)
    if bounded:
        kth = value_of(largest_key(key, 1, k.to(tl.int32), True))
        threshold = tl.maximum(threshold, kth)
    exact = bounded | (top_p == 1)
    if top_p < 1:
        weight = tl.where(valid & (x >= threshold), tl.exp2((x - top) * scale), 0.0)
        rough = tl.sum((weight * _UNIT).to(tl.int32), axis=0)
        unit = _UNIT * (1073741824 // rough).to(tl.float32)  # few heavy ones leave room for digits
        weight = (weight * unit + 0.5).to(tl.int32)
        mass = tl.sum(weight, axis=0)
        whole = mass.to(tl.float32)
        if (not bounded) & (floor == float("-inf")):
            whole = tl.exp2(total - top * scale) * unit
        need = tl.maximum(top_p * whole, 1.0)
        exact = exact | (mass >= need)
        need = tl.minimum(need, 2147483520.0)  # not reached by a list
        nucleus = value_of(largest_key(key, weight, tl.ceil(need).to(tl.int32), False))
        threshold = tl.maximum(threshold, nucleus)
    return threshold, exact


@triton.jit
def min_p_floor(min_p, top, scale):
    """The raw logit at which p = min_p p_max."""
    return tl.where(min_p > 0, top + tl.log2(min_p) / scale, float("-inf"))


@triton.jit
def filter_kernel(
    logits, stride, num_ptr, slot_ptr, state, edits, out, found, V, NB, NG,
    K1: tl.constexpr, MASKS: tl.constexpr, ENTRIES: tl.constexpr, NBP: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Programs: (request, row of it). `out` as the scan left it: its group maxima are used up."""
    let_next_start(OVERLAP)
    wait_for_writes(OVERLAP)
    pid = tl.program_id(0)
    b, i = pid // K1, pid % K1
    if K1 > 1:
        if i > tl.load(num_ptr + b):
            return
    row = first_row(num_ptr, b, K1 > 1) + i
    slot = tl.load(slot_ptr + b)
    tl.store(found[0] + row, float("-inf"))
    tl.store(found[2] + row, DENSE)
    if not is_filtered(state, slot, V):
        return
    scale = LOG2E / tl.load(state[1] + slot)
    k, top_p = tl.load(state[2] + slot), tl.load(state[3] + slot)
    groups = out[2] + row * NG
    top_J = load_masses(out[1], row, NB, NBP)
    top = tl.max(top_J, axis=0)
    broken = tl.sum((top_J != top_J).to(tl.int32), axis=0) > 0
    if broken | (top == float("-inf")) | (top == float("inf")):
        j = tl.arange(0, NBP)
        tl.store(out[0] + row * NB + j, float("nan"), mask=j < NB)
        return  # dense, and reported by its masses
    floor = min_p_floor(tl.load(state[4] + slot), top, scale)
    counts = (k > 0) & (k < V)
    bound = floor
    if counts | (floor == float("-inf")):
        bound = tl.maximum(floor, _bound(top_J, groups, k, V, NB, NG))
    list_id, list_x = found[3] + row * CAPACITY, found[4] + row * CAPACITY
    n = _pick_groups(top_J, bound, groups, list_id, NG, NBP)
    decided = n <= CAPACITY
    if decided:
        source = (logits, stride, row, V, edits)
        count = _collect(source, bound, groups, n, list_id, list_x, MASKS, ENTRIES)
        decided = count <= CAPACITY
        if decided:
            tl.debug_barrier()
            c = tl.arange(0, CAPACITY)
            x = tl.load(list_x + c, mask=c < count, other=float("-inf"))
            total = 0.0
            if not counts:
                total = log2_sum_exactly(load_masses(out[0], row, NB, NBP))
            threshold, decided = _cut(x, c < count, scale, top, k, top_p, floor, total, V)
            if decided:
                kept = tl.where(x >= threshold, x * scale, float("-inf"))
                tl.store(found[0] + row, threshold)
                tl.store(found[1] + row, log2_sum_exactly(kept))
                tl.store(found[2] + row, count)
    if not decided:
        tl.store(found[1] + row, top)  # for `wide.py`
        tl.store(found[2] + row, UNDECIDED)
        # of min-p alone only masses are wanted, and none if they come with flat noise
        if counts | (top_p < 1) | (not is_flat(state, slot, V)):
            tl.debug_barrier()  # the row's list may have been written
            goal = tl.where(counts, k.to(tl.float32), top_p)
            queue_row(row, law_of(counts, top, scale, floor), counts, goal, top, found)

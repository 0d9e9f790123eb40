"""Exact min-p, top-k and top-p by the group-maximum bound: a threshold per row, few survivors read.

k blocks (or groups) whose maxima reach t hold k logits >= t: the k-th largest maximum is a lower
bound of the k-th largest logit. So only groups whose maximum reaches the bound are looked into, and
what reaches it there, a little more than k values, makes a short list in which the exact thresholds
are found, four bits of an order-preserving key at a time. Ties are kept, whatever their number.

A row leaves here in one of two states: *compact*, its survivors in a list of up to CAPACITY
entries; or *dense* (count -1), to be read through its threshold, because nothing is dropped, or
because its list would overflow: then the whole row is searched, from a guess made here, by
`sweep.py` and `wide.py`. Until then its count is UNDECIDED and its number in the queue.

Tuple `found` = (threshold_N raw, lse_N in log2, count_N, list_id_NC, list_x_NC raw, queue_N1): the
queue begins with its length, which the scan sets to 0.
Shapes: N rows, V vocabulary, NB blocks, NG groups, C list entries.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foretoken.ops.backends.triton.guess import (
    LIST,
    LOWEST,
    SAMPLE,
    guess,
    law_of,
    needed,
    sample_of,
    weight_of,
)
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
    log2_sum,
    value_of,
    wait_for_writes,
)
from foretoken.ops.backends.triton.sweep import put_guess

DENSE = tl.constexpr(-1)
UNDECIDED = tl.constexpr(-2)
NOTHING = tl.constexpr(0x007FFFFF)  # the key of -inf
_ENOUGH = tl.constexpr(64)  # values that a nucleus is first sought among, if top-k bounds it not
_GROUPS = tl.constexpr(16)  # groups loaded at a time


@triton.jit
def largest_key(keys, weight, need):
    """The largest t such that the weight of keys >= t reaches `need`; four bits a round.

    The key of -inf if all of them do not reach it: fewer than k logits may be above min-p's floor.
    """
    base = tl.zeros((1,), tl.uint32)
    for r in tl.static_range(8):
        step = tl.arange(0, 16).to(tl.uint32) << (28 - 4 * r)
        reached = tl.where(keys[:, None] >= (base + step)[None, :], weight[:, None], 0.0)
        digits = (tl.sum(reached, axis=0) >= need).to(tl.int32)
        digit = tl.maximum(tl.sum(digits, axis=0) - 1, 0)
        base = base + (digit.to(tl.uint32) << (28 - 4 * r))
    return tl.maximum(tl.max(base, axis=0), NOTHING)


@triton.jit
def largest_key_by_bits(keys, weight, need):
    """As `largest_key` for many keys: a bit a round, so that few registers hold them."""
    base = tl.full((), 0, tl.uint32)
    bit = tl.full((), 0x80000000, tl.uint32)
    while bit > 0:
        candidate = base + bit
        if tl.sum(tl.where(keys >= candidate, weight, 0.0), axis=0) >= need:
            base = candidate
        bit = bit >> 1
    return tl.maximum(base, NOTHING)


@triton.jit
def _bound(top_G, k, top_p, V, NB, NG, NGP: tl.constexpr):
    """A value that at least the wanted number of logits reach; -inf if that is not known."""
    key_G = tl.where(top_G == top_G, key_of(top_G), 0)
    per_block: tl.constexpr = BLOCK // GROUP
    key_J = tl.max(tl.reshape(key_G, (NGP // per_block, per_block)), axis=1)
    wanted = tl.where((k > 0) & (k < V), k, tl.minimum(_ENOUGH, NB)).to(tl.int32)
    key = tl.full((), NOTHING, tl.uint32)
    if wanted <= NB:
        one = tl.full((NGP // per_block,), 1.0, tl.float32)
        key = largest_key(key_J, one, wanted.to(tl.float32))
    elif wanted <= NG:
        key = largest_key_by_bits(key_G, 1.0, wanted.to(tl.float32))
    return value_of(key)


@triton.jit
def _collect(
    logits,
    stride,
    row,
    V,
    edits,
    bound,
    groups,
    n,
    list_id,
    list_x,
    MASKS: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """Write the ids and values >= bound of `n` groups, in rising order; returns their number."""
    count = tl.full((), 0, tl.int32)
    for start in range(0, n, _GROUPS):
        g = start + tl.arange(0, _GROUPS)
        group = tl.load(groups + g, mask=g < n, other=0).to(tl.int32)
        off = tl.reshape(group[:, None] * GROUP + tl.arange(0, GROUP)[None, :], (_GROUPS * GROUP,))
        inside = tl.broadcast_to((g < n)[:, None], (_GROUPS, GROUP))
        valid = tl.reshape(inside, (_GROUPS * GROUP,)) & (off < V)
        x = load_at(logits, stride, row, off, valid, V, edits, MASKS, ENTRIES)
        chosen = valid & (x >= bound) & (x > float("-inf"))
        rank = count + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
        tl.store(list_id + rank, off, mask=chosen & (rank < CAPACITY))
        tl.store(list_x + rank, x, mask=chosen & (rank < CAPACITY))
        count += tl.sum(chosen.to(tl.int32), axis=0)
    return count


@triton.jit
def _cut(x, valid, scale, top, k, top_p, floor, total, V):
    """(threshold, whether it is exact) from a short list that holds every logit >= its bound.

    `total`: log2 mass of the whole row, which is what top-p cuts if neither top-k nor min-p (whose
    list holds all that it keeps) came before.
    """
    key = tl.where(valid, key_of(x), 0)
    threshold = floor
    bounded = (k > 0) & (k < V)
    if bounded:
        kth = value_of(largest_key(key, tl.where(valid, 1.0, 0.0), k.to(tl.float32)))
        threshold = tl.maximum(threshold, kth)
    exact = bounded | (top_p == 1)
    if top_p < 1:
        weight = tl.where(valid & (x >= threshold), tl.exp2((x - top) * scale), 0.0)
        mass = tl.sum(weight, axis=0)
        whole = tl.where(bounded | (floor > float("-inf")), mass, tl.exp2(total - top * scale))
        nucleus = value_of(largest_key(key, weight, top_p * whole))
        threshold = tl.maximum(threshold, nucleus)
        exact = exact | (mass >= top_p * whole)
    return threshold, exact


@triton.jit
def min_p_floor(min_p, top, scale):
    """The raw logit at which p = min_p p_max."""
    return tl.where(min_p > 0, top + tl.log2(min_p) / scale, float("-inf"))


@triton.jit
def _search_wide(
    source, k, top_p, top, scale, floor, flat, out, found, NB, NG, MASKS: tl.constexpr,
    ENTRIES: tl.constexpr, NBP: tl.constexpr,
):  # fmt: skip
    """Leave a row to `sweep.py`, with a guess at what is sought first: by top-k, else by top-p.

    Of a row with min-p alone only the masses are wanted; none if they come with flat noise.
    """
    row, V = source[2], source[3]
    tl.store(found[2] + row, UNDECIDED)
    counts = (k > 0) & (k < V)
    law = law_of(counts, top, scale, floor)
    goal = tl.where(counts, k.to(tl.float32), top_p)
    a = key_of(floor)
    b = a
    if counts | (top_p < 1):
        x = sample_of(source, 0, MASKS, ENTRIES)
        unit = tl.maximum(V / SAMPLE, 1.0)
        mass = unit * tl.sum(weight_of(x, law), axis=0)
        if (floor == float("-inf")) & (not counts):
            mass = tl.exp2(log2_sum(load_masses(out[0], row, NB, NBP)) - top * scale)
        need = needed(counts, goal, mass)
        low, high = tl.full((), LOWEST, tl.uint32), key_of(top) + 1
        a, b = guess(x, unit, low, high, mass, mass * 0, need, tl.minimum(NG, LIST), law)
    if counts | (top_p < 1) | (not flat):
        tl.debug_barrier()  # the row's list may have been written
        put_guess(row, law, a, b, counts, goal, top, found)


@triton.jit
def filter_kernel(
    logits, stride, num_ptr, slot_ptr, state, edits, out, found, V, NB, NG,
    K1: tl.constexpr, MASKS: tl.constexpr, ENTRIES: tl.constexpr, NGP: tl.constexpr,
    NBP: tl.constexpr, OVERLAP: tl.constexpr,
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
    g = tl.arange(0, NGP)
    groups = out[2] + row * NG
    top_G = tl.load(groups + g, mask=g < NG, other=float("-inf"))
    top = tl.max(top_G, axis=0)
    broken = tl.sum((top_G != top_G).to(tl.int32), axis=0) > 0
    if broken | (top == float("-inf")) | (top == float("inf")):
        j = tl.arange(0, NBP)
        tl.store(out[0] + row * NB + j, float("nan"), mask=j < NB)
        return  # dense, and reported by its masses
    tl.store(found[1] + row, top)  # for `wide.py`: the lists may overwrite the maxima
    floor = min_p_floor(tl.load(state[4] + slot), top, scale)
    bound = floor
    if ((k > 0) & (k < V)) | (floor == float("-inf")):
        bound = tl.maximum(floor, _bound(top_G, k, top_p, V, NB, NG, NGP))
    chosen = (top_G >= bound) & (top_G > float("-inf"))
    n = tl.sum(chosen.to(tl.int32), axis=0)
    decided = n <= CAPACITY
    if decided:
        rank = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
        tl.debug_barrier()
        tl.store(groups + rank, g.to(tl.float32), mask=chosen)
        tl.debug_barrier()
        list_id, list_x = found[3] + row * CAPACITY, found[4] + row * CAPACITY
        count = _collect(
            logits, stride, row, V, edits, bound, groups, n, list_id, list_x, MASKS, ENTRIES
        )
        decided = count <= CAPACITY
        if decided:
            tl.debug_barrier()
            c = tl.arange(0, CAPACITY)
            x = tl.load(list_x + c, mask=c < count, other=float("-inf"))
            total = 0.0
            if (k <= 0) | (k >= V):
                total = log2_sum(load_masses(out[0], row, NB, NBP))
            threshold, decided = _cut(x, c < count, scale, top, k, top_p, floor, total, V)
            if decided:
                kept = tl.where(x >= threshold, x * scale, float("-inf"))
                tl.store(found[0] + row, threshold)
                tl.store(found[1] + row, log2_sum(kept))
                tl.store(found[2] + row, count)
    if not decided:
        source = (logits, stride, row, V, edits)
        _search_wide(source, k, top_p, top, scale, floor, is_flat(state, slot, V), out, found, NB,
                     NG, MASKS, ENTRIES, NBP)  # fmt: skip

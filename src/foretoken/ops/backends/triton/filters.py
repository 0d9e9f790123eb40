"""Exact min-p, top-k and top-p: a threshold per row, found from few logits by maxima of groups.

If the maxima of k blocks (or groups) reach t, these hold k logits >= t: the k-th largest maximum is
a lower bound of the k-th largest logit. So only groups with a maximum that reaches the bound are
read. Their logits that reach it, a little more than k, make a short list. In this list the exact
thresholds are found by bisection over order-preserving keys. Ties are kept, whatever their number.

A *compact* row ends with its kept tokens in a short list of up to CAPACITY entries. A *dense* row
(count DENSE) drops no token, or its list would overflow: later kernels compare all its logits with
its threshold. Until `sweep.py` and `wide.py` have found that threshold, the count is UNDECIDED.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foretoken.ops.backends.triton.records import Batch, RawRows

from foretoken.ops.backends.triton.rows import (  # isort: skip
    CAPACITY, GROUP, GROUPS, Settings, first_row, key_of, let_next_start, load_at, load_blocks,
    log2_sum_exactly, read_settings, value_of, wait_for_writes, zero_like,
)  # fmt: skip
from foretoken.ops.backends.triton.sweep import queue_row, search_for

DENSE = tl.constexpr(-1)
UNDECIDED = tl.constexpr(-2)
_KEY_OF_MINUS_INF = tl.constexpr(0x007FFFFF)
_LEAST = tl.constexpr(64)  # without top-k, so many logits (or NB) reach the list's bound
_BLOCK_CHUNK = tl.constexpr(32)  # the groups of so many blocks are examined together
_GROUP_CHUNK = tl.constexpr(16)  # the logits of so many groups are loaded together
_MAXIMUM_CHUNK = tl.constexpr(512)  # so many maxima of groups are counted together
_UNIT = tl.constexpr(8388608.0)  # 2^23: 128 weights of at most 1 add up to no more than 2^30


@triton.jit
def filter_kernel(batch: Batch, K1: tl.constexpr, NBP: tl.constexpr, OVERLAP: tl.constexpr):
    """Find each row's threshold or queue the row. Programs: (request, row of it)."""
    let_next_start(OVERLAP)
    wait_for_writes(OVERLAP)
    batch = batch  # makes values of fields that are 1: Triton 3.6 loses constants in branches
    rows, scratch, filtered = batch.rows, batch.scratch, batch.scratch.filtered
    pid = tl.program_id(0)
    b, i = pid // K1, pid % K1
    if K1 > 1:
        if i > tl.load(batch.requests.num_B + b):
            return
    row = first_row(batch.requests, b, K1 > 1) + i
    tl.store(filtered.threshold_N + row, float("-inf"))
    tl.store(filtered.count_N + row, DENSE)
    settings = read_settings(batch.slots, tl.load(batch.requests.slot_B + b), rows.V)
    if not settings.filtered:
        return
    top_J = load_blocks(scratch.best_NJ, row, rows.NB, NBP)  # maxima here, see `Scratch`
    top = tl.max(top_J, axis=0)
    has_nan = tl.sum((top_J != top_J).to(tl.int32), axis=0) > 0
    if has_nan | (top == float("-inf")) | (top == float("inf")):
        j = tl.arange(0, NBP)
        tl.store(scratch.mass_NJ + row * rows.NB + j, float("nan"), mask=j < rows.NB)
        return  # a dense row; later kernels see by its masses that it is not finite
    group_top = filtered.group_top_NG + row * rows.NG
    list_id = filtered.list_id_NC + row * CAPACITY
    list_x = filtered.list_x_NC + row * CAPACITY
    floor = min_p_floor(settings, top)
    bound = floor
    if settings.counted | (floor == float("-inf")):
        bound = tl.maximum(floor, _bound(top_J, group_top, settings, rows))
    # The list is still empty: its memory takes the numbers of blocks for a while.
    picked = _pick_groups(top_J, bound, group_top, list_id, rows.NG, NBP)
    decided = picked <= CAPACITY
    if decided:
        count = _fill_list(rows, row, bound, group_top, picked, list_id, list_x)
        decided = count <= CAPACITY
        if decided:
            tl.debug_barrier()
            c = tl.arange(0, CAPACITY)
            x = tl.load(list_x + c, mask=c < count, other=float("-inf"))
            total = 0.0
            if not settings.counted:
                total = log2_sum_exactly(load_blocks(scratch.mass_NJ, row, rows.NB, NBP))
            threshold, decided = _threshold(x, c < count, settings, top, floor, total)
            if decided:
                kept = tl.where(x >= threshold, x * settings.scale, float("-inf"))
                tl.store(filtered.threshold_N + row, threshold)
                tl.store(scratch.lse_N + row, log2_sum_exactly(kept))
                tl.store(filtered.count_N + row, count)
    if not decided:
        tl.store(scratch.lse_N + row, top)
        tl.store(filtered.count_N + row, UNDECIDED)
        # With only min-p the threshold is known, not the masses; `wide.py` computes the masses
        # of rows with flat noise.
        if settings.counted | (settings.top_p < 1) | (not settings.flat):
            tl.debug_barrier()  # the search's notes replace the row's list
            goal = tl.where(settings.counted, settings.top_k.to(tl.float32), settings.top_p)
            search = search_for(settings.counted, goal, top, settings.scale, floor)
            queue_row(filtered, row, search)


@triton.jit
def largest_key(key, weight, need, COUNTS: tl.constexpr):
    """The largest t such that the integer weight of keys >= t reaches `need`.

    If all keys together do not reach `need`, because min-p's floor leaves fewer than k logits, the
    result is the key of -inf. A key of 0 has no weight. COUNTS: each key above 0 weighs 1. The
    bracket of t is halved until it has a single key: 5 to 9 times for most rows of 151 936 logits.
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
    largest = tl.max(tl.where(key < high, key, 0), axis=0)
    return tl.where(possible, largest, _KEY_OF_MINUS_INF)


@triton.jit
def _largest_group_key(group_top, NG, need):
    """`largest_key` of a row's group maxima, with weights of 1; reads all maxima for every bit."""
    low, high = tl.full((), _KEY_OF_MINUS_INF, tl.uint32), tl.full((), 0xFF800001, tl.uint32)
    while high - low > 1:
        middle = low + ((high - low) >> 1)
        reached = tl.full((), 0, tl.int32)
        for first in range(0, NG, _MAXIMUM_CHUNK):
            g = first + tl.arange(0, _MAXIMUM_CHUNK)
            key = key_of(tl.load(group_top + g, mask=g < NG, other=float("-inf")))
            reached += tl.sum((key >= middle).to(tl.int32), axis=0)
        if reached >= need:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _bound(top_J, group_top, settings: Settings, rows: RawRows):
    """A value that at least top_k (or _LEAST) logits reach; -inf if CAPACITY or NG is less."""
    need = tl.where(settings.counted, settings.top_k, tl.minimum(_LEAST, rows.NB)).to(tl.int32)
    key = tl.full((), _KEY_OF_MINUS_INF, tl.uint32)
    if need <= CAPACITY:
        if need <= rows.NB:
            key = largest_key(key_of(top_J), 1, need, True)
        elif need <= rows.NG:
            key = _largest_group_key(group_top, rows.NG, need)
    return value_of(key)


@triton.jit
def _pick_groups(top_J, bound, group_top, blocks, NG, NBP: tl.constexpr):
    """Write the numbers of groups with maxima >= bound to `group_top`, rising; returns how many.
    They overwrite maxima that are already read: a group's rank is at most its number. A result
    above CAPACITY, of groups or only of blocks, means that no short list can hold all logits that
    reach the bound. `blocks`: memory for CAPACITY numbers."""
    chosen = (top_J >= bound) & (top_J > float("-inf"))
    chosen_blocks = tl.sum(chosen.to(tl.int32), axis=0)
    picked = chosen_blocks
    if chosen_blocks <= CAPACITY:
        rank = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
        tl.store(blocks + rank, tl.arange(0, NBP), mask=chosen)
        tl.debug_barrier()
        picked = zero_like(chosen_blocks)
        for first in range(0, chosen_blocks, _BLOCK_CHUNK):
            r = first + tl.arange(0, _BLOCK_CHUNK)
            # padding: a block after the last one
            block = tl.load(blocks + r, mask=r < chosen_blocks, other=NBP)
            g = block[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
            g = tl.reshape(g, (_BLOCK_CHUNK * GROUPS,))
            top_G = tl.load(group_top + g, mask=g < NG, other=float("-inf"))
            chosen_G = (top_G >= bound) & (top_G > float("-inf"))
            rank_G = picked + tl.cumsum(chosen_G.to(tl.int32), axis=0) - 1
            tl.debug_barrier()
            tl.store(group_top + rank_G, g.to(tl.float32), mask=chosen_G)
            picked += tl.sum(chosen_G.to(tl.int32), axis=0)
        tl.debug_barrier()
    return picked


@triton.jit
def _load_groups(rows: RawRows, row, groups, first, picked):
    """(ids, logits) of _GROUP_CHUNK picked groups; -inf after the last group."""
    size: tl.constexpr = _GROUP_CHUNK * GROUP
    g = first + tl.arange(0, _GROUP_CHUNK)
    group = tl.load(groups + g, mask=g < picked, other=0).to(tl.int32)
    off = tl.reshape(group[:, None] * GROUP + tl.arange(0, GROUP)[None, :], (size,))
    inside = tl.broadcast_to((g < picked)[:, None], (_GROUP_CHUNK, GROUP))
    return off, load_at(rows, row, off, tl.reshape(inside, (size,)) & (off < rows.V))


@triton.jit
def _fill_list(rows: RawRows, row, bound, groups, picked, list_id, list_x):
    """List ids and logits >= bound of the picked groups, by rising id; returns how many."""
    count = tl.full((), 0, tl.int32)
    next_off, next_x = _load_groups(rows, row, groups, 0, picked)
    for first in range(0, picked, _GROUP_CHUNK):
        off, x = next_off, next_x
        next_off, next_x = _load_groups(rows, row, groups, first + _GROUP_CHUNK, picked)
        chosen = (x >= bound) & (x > float("-inf"))
        rank = count + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
        tl.store(list_id + rank, off, mask=chosen & (rank < CAPACITY))
        tl.store(list_x + rank, x, mask=chosen & (rank < CAPACITY))
        count += tl.sum(chosen.to(tl.int32), axis=0)
    return count


@triton.jit
def _threshold(x, valid, settings: Settings, top, floor, total):
    """(threshold, whether it is exact) from a short list that holds every logit >= its bound.
    `total`: log2 mass of the whole row; not used after top-k or min-p, since the list holds all
    logits that these keep. Weights are integers: their sums are exact in any order."""
    key = tl.where(valid, key_of(x), 0)
    threshold = floor
    if settings.counted:
        kth = value_of(largest_key(key, 1, settings.top_k.to(tl.int32), True))
        threshold = tl.maximum(threshold, kth)
    exact = settings.counted | (settings.top_p == 1)
    if settings.top_p < 1:
        weight = tl.where(valid & (x >= threshold), tl.exp2((x - top) * settings.scale), 0.0)
        coarse_sum = tl.sum((weight * _UNIT).to(tl.int32), axis=0)
        unit = _UNIT * (1073741824 // coarse_sum).to(tl.float32)  # weights then sum to about 2^30
        weight = (weight * unit + 0.5).to(tl.int32)
        mass = tl.sum(weight, axis=0)
        whole = mass.to(tl.float32)
        if (not settings.counted) & (floor == float("-inf")):
            whole = tl.exp2(total - top * settings.scale) * unit
        need = tl.maximum(settings.top_p * whole, 1.0)
        exact = exact | (mass >= need)
        need = tl.minimum(need, 2147483520.0)  # below 2^31, and above any list
        nucleus = value_of(largest_key(key, weight, tl.ceil(need).to(tl.int32), False))
        threshold = tl.maximum(threshold, nucleus)
    return threshold, exact


@triton.jit
def min_p_floor(settings: Settings, top):
    """The logit (not scaled) at which p = min_p p_max; -inf without min-p."""
    floor = top + tl.log2(settings.min_p) / settings.scale
    return tl.where(settings.min_p > 0, floor, float("-inf"))

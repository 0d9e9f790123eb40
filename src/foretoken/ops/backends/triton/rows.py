"""What every kernel does first: find its row, its slot's parameters, and load edited logits.

Kernels run over requests b and the rows i = 0..K_b of each. Logits are loaded raw in any float
dtype, edited on load, and held in float32; nothing writes them back.

Tuples passed to kernels (device pointers):
    state  = (key_S, temperature_S, top_k_S, top_p_S, min_p_S, rule_S); `params` is a name that
             Triton's launcher keeps to itself
    edits  = (mask_RW, mask_N, words of a mask, token_M, value_M, begin_NJ, columns of that):
              value_M are the entries' edited logits, begin_NJ is where each block's entries begin

Shapes: B requests, N rows, V vocabulary, S slots, M entries, R masks, W words.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from foretoken.ops.backends.triton.noise import log2

BLOCK = tl.constexpr(1024)  # ids per block of the hierarchical draw
GROUP = tl.constexpr(64)  # ids per group whose maximum is kept
CAPACITY = tl.constexpr(128)  # entries of a row's list of survivors
FIXED = tl.constexpr(1099511627776.0)  # 2^40: sums of integers are the same in any order
CHUNK = tl.constexpr(128)  # requests whose rows `first_row` sums at once
_ENTRIES_AT_ONCE = tl.constexpr(512)


@triton.jit
def let_next_start(OVERLAP: tl.constexpr):
    """The kernel launched after this one may start once every program of this one came here."""
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def wait_for_writes(OVERLAP: tl.constexpr):
    """Until the kernel launched before this one has ended, and its results can be read."""
    if OVERLAP:
        gdc_wait()


@triton.jit
def first_row(num_ptr, b, RAGGED: tl.constexpr, CHUNK: tl.constexpr = CHUNK):
    """The row that decides request b's first token: the sum of K + 1 over those before it.

    CHUNK: how many are summed at once; for up to 4 of them a warp needs no other.
    """
    if RAGGED:
        total = tl.zeros((CHUNK,), tl.int64)
        for start in range(0, b, CHUNK):
            index = start + tl.arange(0, CHUNK)
            total += tl.where(index < b, tl.load(num_ptr + index, mask=index < b, other=0) + 1, 0)
        return tl.sum(total, axis=0)
    else:
        return b.to(tl.int64)


@triton.jit
def is_filtered(state, slot, V):
    """Whether top-k, top-p or min-p may drop tokens of this slot's rows."""
    top_k = tl.load(state[2] + slot)
    dropping = ((top_k > 0) & (top_k < V)) | (tl.load(state[3] + slot) < 1)
    dropping = dropping | (tl.load(state[4] + slot) > 0)
    return dropping & (tl.load(state[1] + slot) > 0)


@triton.jit
def is_flat(state, slot, V):
    """Whether this slot draws with flat noise: top-k is active, or its rule is COUPLED (2)."""
    top_k = tl.load(state[2] + slot)
    return ((top_k > 0) & (top_k < V)) | (tl.load(state[5] + slot) == 2)


@triton.jit
def edit_kernel(
    logits, stride, start_ptr, bias_ptr, repetition_ptr, subtract_ptr, edits,
    MASKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A program per row fills `value_M` and `begin_NJ`: an entry is edited once, found at once.

    A masked entry is -inf, as the mask comes first. The search finds its tokens in the L1 cache.
    """
    row = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(start_ptr + row), tl.load(start_ptr + row + 1)
    for first in range(begin, end, _ENTRIES_AT_ONCE):
        e = first + tl.arange(0, _ENTRIES_AT_ONCE)
        own = e < end
        token = tl.load(edits[3] + e, mask=own, other=0)
        x = load_at(logits, stride, row, token, own, edits, MASKS, False)
        x = x + tl.load(bias_ptr + e, mask=own, other=0.0)
        repetition = tl.load(repetition_ptr + e, mask=own, other=1.0)
        x = tl.where(x > 0, x / repetition, x * repetition)
        tl.store(edits[4] + e, x - tl.load(subtract_ptr + e, mask=own, other=0.0), mask=own)
    j = tl.arange(0, WIDTH)
    none = tl.zeros((WIDTH,), tl.int64)
    at = _first_entry(edits[3], begin + none, end + none, j * BLOCK)
    tl.store(edits[5] + row * edits[6] + j, at.to(tl.int32), mask=j < edits[6])


@triton.jit
def _first_entry(token_ptr, low, high, id_):
    """The first of the entries low..high - 1 whose token is >= id_, else high; a lane each."""
    size = tl.max(high - low, axis=0)
    while size > 0:
        open_ = low < high
        middle = (low + high) // 2
        below = open_ & (tl.load(token_ptr + middle, mask=open_, other=0) < id_)
        high = tl.where(open_ & ~below, middle, high)
        low = tl.where(below, middle + 1, low)
        size = size // 2
    return low


@triton.jit
def _masked(x, off, row, V, edits):
    """Drop what the row's mask does not allow."""
    mask = tl.load(edits[1] + row)
    if mask >= 0:
        word = tl.load(edits[0] + mask * edits[2] + off // 32, mask=off < V, other=0)
        x = tl.where(((word >> (off % 32).to(tl.int32)) & 1) == 1, x, float("-inf"))
    return x


@triton.jit
def load_span(
    logits,
    stride,
    row,
    first,
    V,
    edits,
    WIDTH: tl.constexpr,
    MASKS: tl.constexpr,
    ENTRIES: tl.constexpr,
    evict: tl.constexpr,
):
    """Edited logits first..first + WIDTH - 1 of a row, float32; -inf behind the row's end."""
    begin, end = 0, 0
    if ENTRIES:  # loaded before the logits are waited for
        at = edits[5] + row * edits[6] + first // BLOCK
        begin, end = tl.load(at), tl.load(at + (WIDTH + BLOCK - 1) // BLOCK)
    off = first + tl.arange(0, WIDTH)
    x = tl.load(
        logits + row * stride + off, mask=off < V, other=float("-inf"), eviction_policy=evict
    ).to(tl.float32)
    if MASKS:
        x = _masked(x, off, row, V, edits)
    if ENTRIES:
        for one in range(begin, end, 2):  # in pairs: twice as many loads under way
            two = tl.minimum(one + 1, end - 1)  # the last twice, if their number is odd
            token, value = tl.load(edits[3] + one).to(tl.int32), tl.load(edits[4] + one)
            token_two, value_two = tl.load(edits[3] + two).to(tl.int32), tl.load(edits[4] + two)
            x = tl.where(off == token, value, x)
            x = tl.where(off == token_two, value_two, x)
    return x


@triton.jit
def load_at(logits, stride, row, off, valid, edits, MASKS: tl.constexpr, ENTRIES: tl.constexpr):
    """Edited logits at any ids (int block) of a row, or of a row each; -inf where not `valid`.

    Entries are found by a binary search in each lane, among those of the id's block.
    """
    row = row + tl.zeros_like(off)
    x = tl.load(logits + row * stride + off, mask=valid, other=float("-inf")).to(tl.float32)
    if MASKS:
        mask = tl.load(edits[1] + row)
        use = valid & (mask >= 0)
        word = tl.load(edits[0] + mask * edits[2] + off // 32, mask=use, other=-1)
        x = tl.where(((word >> (off % 32).to(tl.int32)) & 1) == 1, x, float("-inf"))
    if ENTRIES:
        at = edits[5] + row * edits[6] + off // BLOCK
        end = tl.load(at + 1, mask=valid, other=0)
        e = _first_entry(edits[3], tl.load(at, mask=valid, other=0), end, off)
        found = e < end
        found = found & (tl.load(edits[3] + e, mask=found, other=-1) == off)
        x = tl.where(found, tl.load(edits[4] + e, mask=found, other=0.0), x)
    return x


@triton.jit
def key_of(x):
    """Order-preserving uint32 key of a float32; 0 and -0 share one."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def value_of(key):
    """Inverse of `key_of`."""
    bits = tl.where(key >> 31 == 1, key & 0x7FFFFFFF, key ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def log2_sum(x):
    """log2 of the sum of 2^x over a block; -inf of an empty one, not finite if a number is not."""
    top = tl.max(x, axis=0)
    base = tl.where(top == float("-inf"), 0.0, top)
    return base + log2(tl.sum(tl.exp2(x - base), axis=0))


@triton.jit
def log2_sum_exactly(x):
    """`log2_sum` in units of 1 / FIXED of the largest: the same whatever the number of warps."""
    top = tl.max(x, axis=0)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum((tl.exp2(x - base) * FIXED).to(tl.int64), axis=0)
    return base + log2(total.to(tl.float32)) - 40


@triton.jit
def log2_sum_rows(x):
    """`log2_sum` of each row of a two-dimensional block."""
    top = tl.max(x, axis=1)
    base = tl.where(top == float("-inf"), 0.0, top)
    return base + log2(tl.sum(tl.exp2(x - base[:, None]), axis=1))


@triton.jit
def load_masses(mass, row, NB, NBP: tl.constexpr):
    """The masses of a row's blocks [NBP], -inf behind the last. Read past L1: others wrote them."""
    j = tl.arange(0, NBP)
    return tl.load(mass + row * NB + j, mask=j < NB, other=float("-inf"), cache_modifier=".cg")

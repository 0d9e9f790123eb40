"""What every kernel does first: find its row, its slot's parameters, and load edited logits.

Kernels run over requests b and the rows i = 0..K_b of each. Logits are loaded raw in any float
dtype, edited on load, and held in float32; nothing writes them back.

Tuples passed to kernels (device pointers):
    state  = (key_S, temperature_S, top_k_S, top_p_S, min_p_S, rule_S); `params` is a name that
             Triton's launcher keeps to itself
    edits  = (mask_RW, mask_N, start_N1, token_M, bias_M, repetition_M, subtract_M, words of a mask,
              begin_NJ, columns of that): begin_NJ is where each block's entries begin

Shapes: B requests, N rows, V vocabulary, S slots, M entries, R masks, W words.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

BLOCK = tl.constexpr(1024)  # ids per block of the hierarchical draw
GROUP = tl.constexpr(64)  # ids per group whose maximum is kept
_CHUNK = tl.constexpr(128)


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
def first_row(num_ptr, b, RAGGED: tl.constexpr):
    """The row that decides request b's first token: the sum of K + 1 over those before it."""
    if RAGGED:
        total = tl.zeros((_CHUNK,), tl.int64)
        for start in range(0, b, _CHUNK):
            index = start + tl.arange(0, _CHUNK)
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
def begin_kernel(start_ptr, token_ptr, begin_ptr, columns, WIDTH: tl.constexpr):
    """A program per row: the first entry at or behind each block's first id, by binary search.

    Without it each of 149 programs a row sought its entries: 200 of them cost 120 us a chain.
    """
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, WIDTH)
    low = tl.load(start_ptr + row) + tl.zeros((WIDTH,), tl.int64)
    high = tl.load(start_ptr + row + 1) + tl.zeros((WIDTH,), tl.int64)
    size = tl.max(high - low, axis=0)
    while size > 0:
        open_ = low < high
        middle = (low + high) // 2
        below = open_ & (tl.load(token_ptr + middle, mask=open_, other=0) < j * BLOCK)
        high = tl.where(open_ & ~below, middle, high)
        low = tl.where(below, middle + 1, low)
        size = size // 2
    tl.store(begin_ptr + row * columns + j, low.to(tl.int32), mask=j < columns)


@triton.jit
def _edit(x, bias, repetition, subtract):
    x = x + bias
    return tl.where(x > 0, x / repetition, x * repetition) - subtract


@triton.jit
def _masked(x, off, row, V, edits):
    """Drop what the row's mask does not allow."""
    mask = tl.load(edits[1] + row)
    if mask >= 0:
        word = tl.load(edits[0] + mask * edits[7] + off // 32, mask=off < V, other=0)
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
    off = first + tl.arange(0, WIDTH)
    x = tl.load(
        logits + row * stride + off, mask=off < V, other=float("-inf"), eviction_policy=evict
    ).to(tl.float32)
    if MASKS:
        x = _masked(x, off, row, V, edits)
    if ENTRIES:
        at = edits[8] + row * edits[9] + first // BLOCK
        begin, end = tl.load(at), tl.load(at + WIDTH // BLOCK)
        for e in range(begin, end):
            edited = _edit(x, tl.load(edits[4] + e), tl.load(edits[5] + e), tl.load(edits[6] + e))
            x = tl.where(off == tl.load(edits[3] + e), edited, x)
    return x


@triton.jit
def load_at(logits, stride, row, off, valid, V, edits, MASKS: tl.constexpr, ENTRIES: tl.constexpr):
    """Edited logits at any ids (int block) of a row, or of a row each; -inf where not `valid`.

    Entries are found by a binary search in each lane: their number costs its logarithm.
    """
    row = row + tl.zeros_like(off)
    x = tl.load(logits + row * stride + off, mask=valid, other=float("-inf")).to(tl.float32)
    if MASKS:
        mask = tl.load(edits[1] + row)
        use = valid & (mask >= 0)
        word = tl.load(edits[0] + mask * edits[7] + off // 32, mask=use, other=-1)
        x = tl.where(((word >> (off % 32).to(tl.int32)) & 1) == 1, x, float("-inf"))
    if ENTRIES:
        low = tl.load(edits[2] + row)
        end = tl.load(edits[2] + row + 1)
        high = end
        size = tl.max(end - low, axis=0)
        while size > 0:
            open_ = low < high
            middle = (low + high) // 2
            below = open_ & (tl.load(edits[3] + middle, mask=open_, other=0) < off)
            high = tl.where(open_ & ~below, middle, high)
            low = tl.where(below, middle + 1, low)
            size = size // 2
        found = valid & (low < end)
        found = found & (tl.load(edits[3] + low, mask=found, other=-1) == off)
        edited = _edit(
            x,
            tl.load(edits[4] + low, mask=found, other=0.0),
            tl.load(edits[5] + low, mask=found, other=1.0),
            tl.load(edits[6] + low, mask=found, other=0.0),
        )
        x = tl.where(found, edited, x)
    return x


@triton.jit
def log2_sum(x):
    """log2 of the sum of 2^x over a block; -inf of an empty one, not finite if a number is not."""
    top = tl.max(x, axis=0)
    base = tl.where(top == float("-inf"), 0.0, top)
    return base + tl.log2(tl.sum(tl.exp2(x - base), axis=0))


@triton.jit
def log2_sum_rows(x):
    """`log2_sum` of each row of a two-dimensional block."""
    top = tl.max(x, axis=1)
    base = tl.where(top == float("-inf"), 0.0, top)
    return base + tl.log2(tl.sum(tl.exp2(x - base[:, None]), axis=1))


@triton.jit
def load_masses(mass, row, NB, NBP: tl.constexpr):
    """The masses of a row's blocks [NBP], -inf behind the last. Read past L1: others wrote them."""
    j = tl.arange(0, NBP)
    return tl.load(mass + row * NB + j, mask=j < NB, other=float("-inf"), cache_modifier=".cg")

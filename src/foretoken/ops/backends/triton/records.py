"""What the host gives to kernels: every tensor under a name. On the device each is a pointer.

How to read the kernels:

- The host gives a `NamedTuple`, its fields typed; kernels make a `namedtuple` of numbers and blocks
  for each other. `values` and `type` are names of Triton's own.
- A kernel is compiled for fields that are None: `if rows.mask is not None` costs nothing when it
  runs.
- Triton also compiles in numbers that are 1. Triton 3.6 forgets such numbers of nested records in
  branches and loops. So kernels begin with `batch = batch`: an assigned field is a value, not a
  constant.
- A variable keeps its type and shape: `zero_like(x)` and `false_like(x)` have those of x,
  `tl.full((), 0, tl.int32)` is a zero that a loop may change.
- Numbers known to the compiler: FP64, noise in FP64; RAGGED, requests may have drafts; K1, most
  rows of a request; PER, blocks per program; KP and NBP, powers of 2 of at least K + 1 and NB;
  OVERLAP, kernels overlap (`launch.py`).
- Indices: b a request, i one of its drafts or rows, j a block, g a group, c an entry of a list.

In all files here names end in the shape of their tensor: N rows, V vocabulary, NB blocks of 1024
ids and NG groups of 64 of a row, J columns of a row of blocks, C entries of a short list, B
requests, K most drafts of one, S slots, R masks, W words of a mask, M entries of edits.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
from torch import Tensor


class Mask(NamedTuple):
    """The masks of `Edits`."""

    bits_RW: Tensor
    index_N: Tensor
    words: int


class Entries(NamedTuple):
    """The entries of `Edits`, as `rows.py: edit_kernel` leaves them.

    value_M:  the edited logit of the entry's token
    begin_NJ: where the entries of each block begin, among those of all rows
    columns:  J
    """

    token_M: Tensor
    value_M: Tensor
    begin_NJ: Tensor
    columns: int


class RawRows(NamedTuple):
    """Raw logits, the edits that are made when they are loaded, and their sizes."""

    logits_NV: Tensor
    stride: int
    V: int
    NB: int
    NG: int
    mask: Mask | None
    entries: Entries | None


class Requests(NamedTuple):
    """B requests of up to K1 rows each.

    num_B:   number of drafts; a request has one row more. Not read if K1 is 1
    index_B: the draft index of each row, where rows are drafts
    """

    num_B: Tensor
    slot_B: Tensor
    position_B: Tensor
    index_B: Tensor


class Slots(NamedTuple):
    """The tensors of `SlotParams`."""

    key_S: Tensor
    temperature_S: Tensor
    top_k_S: Tensor
    top_p_S: Tensor
    min_p_S: Tensor
    rule_S: Tensor


class Filtered(NamedTuple):
    """The result of top-k, top-p and min-p for each row; see `filters.py`.

    threshold_N:    the lowest raw logit that is kept; -inf if all are
    count_N:        the entries of the row's short list; DENSE if it has none; UNDECIDED until
                    `wide_kernel` has decided it
    list_id_NC, list_x_NC: ids and logits of a short list
    queue_N1:       how many rows a short list could not decide, then their numbers
    group_top_NG:   maxima of groups
    """

    threshold_N: Tensor
    count_N: Tensor
    list_id_NC: Tensor
    list_x_NC: Tensor
    queue_N1: Tensor
    group_top_NG: Tensor


class Scratch(NamedTuple):
    """What the kernels of one op leave to each other.

    mass_NJ: log2 masses of blocks; at T=0 maxima of blocks. They are p's masses; in rows that
             `residual_kernel` has summed, a residual's masses
    best_NJ: best scores of blocks under flat noise, of p or a residual as in `mass_NJ`
    lse_N:   log2 of a row's mass
    """

    mass_NJ: Tensor
    lse_N: Tensor
    best_NJ: Tensor | None
    filtered: Filtered | None


# The same memory under other names, for rows with filters while it does not hold what its field
# says. Lists and notes of searches are in `sweep.py`.


@triton.jit
def block_top_NJ(scratch: Scratch):
    """Maxima of blocks, in place of `best_NJ`: from the scan until `filter_kernel` reads them."""
    return scratch.best_NJ


@triton.jit
def picked_NG(filtered: Filtered):
    """Numbers of picked groups, in place of `group_top_NG`: only inside of `filter_kernel`."""
    return filtered.group_top_NG


@triton.jit
def row_top_N(scratch: Scratch):
    """Maxima of rows, in place of `lse_N`: of UNDECIDED rows, from `filter_kernel` to
    `wide_kernel`."""
    return scratch.lse_N


@triton.jit
def above_NJ(scratch: Scratch):
    """W of each block's logits above a sweep's keys, in place of `mass_NJ`: linear masses, or
    counts for top-k. From a sweep until `wide_kernel` makes masses of them, or writes others."""
    return scratch.mass_NJ


@triton.jit
def stretch_NJ(scratch: Scratch):
    """Each block's stretch of a search's list (`sweep.py: packed`), in place of `best_NJ`: as long
    as `above_NJ`."""
    return scratch.best_NJ


class Q(NamedTuple):
    """The tensors of `DraftCache`, whose rows are slot * K + draft index."""

    logits_SKV: Tensor
    threshold_SK: Tensor
    lse_SK: Tensor
    K: int
    V: int


class Batch(NamedTuple):
    """What all kernels of an op get. slots: None for raw logits; q: None without a draft cache."""

    rows: RawRows
    requests: Requests
    slots: Slots | None
    q: Q | None
    scratch: Scratch


class Drafts(NamedTuple):
    """The drafts of all requests. rate_K is None unless a slot may be under SYNTHETIC."""

    token_BK: Tensor
    real_q_B: Tensor
    rate_K: Tensor | None
    K: int


class Agenda(NamedTuple):
    """What the residual pass has to do for each request; `decide.py` says what lies where."""

    integers: Tensor
    floats: Tensor


class Candidates(NamedTuple):
    """Per request: how many of its programs have arrived; for each block a score and a token."""

    arrived_B: Tensor
    score_token_BJ2: Tensor

"""Records of the arguments of kernels. The host gives tensors, which are pointers on the device.

How to read the kernels:

- The host passes a `NamedTuple` with typed fields. Kernels pass each other numbers and blocks in a
  `namedtuple`. No field is called `values` or `type`, which Triton uses itself.
- Triton knows which fields are None when it compiles a kernel, so `if rows.mask is not None` costs
  nothing at run time.
- Triton also compiles in integers that are 1. Triton 3.6 loses such constants of nested records in
  branches and loops. So kernels begin with `batch = batch`, which makes them ordinary values.
- In branches and loops a variable must keep its type and shape. `zero_like(x)` and `false_like(x)`
  have the shape of x; `tl.full((), 0, tl.int32)` is a zero that a loop can change.
- Compile-time constants: FP64, whether noise is in FP64; RAGGED, whether requests can have drafts;
  K1, upper bound of the rows of a request; PER, blocks per program; KP and NBP, powers of 2 of at
  least K + 1 and NB; OVERLAP, whether kernels overlap (`launch.py`).
- Indices: b a request, i a draft or row of it, j a block, g a group, c an entry of a list.

In all files here names end in the shape of their tensor: N rows, V vocabulary, NB blocks (1024 ids)
and NG groups (64 ids) of a row, J columns of which each is a block, C entries of a short list, B
requests, K (upper bound of) drafts of a request, S slots, R masks, W words of a mask, M entries of
edits.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Mask(NamedTuple):
    """The masks of `Edits`."""

    bits_RW: Tensor
    index_N: Tensor
    words: int


class Entries(NamedTuple):
    """The entries of `Edits`, prepared by `rows.py: edit_kernel`.

    value_M:  the edited logit of the entry's token
    begin_NJ: the index in `token_M` of the first entry of each block of each row
    columns:  how many columns a row of `begin_NJ` has: NB and some spare ones
    """

    token_M: Tensor
    value_M: Tensor
    begin_NJ: Tensor
    columns: int


class RawRows(NamedTuple):
    """Raw logits with their sizes, and the edits that kernels make when they load logits."""

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
    index_B: the draft index of each row; read only if rows are drafts
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

    threshold_N:    the lowest logit that is kept, edited but not scaled; -inf if all are kept
    count_N:        how many entries the row's short list has, or DENSE, or UNDECIDED
    list_id_NC, list_x_NC: ids and logits of a short list
    queue_N1:       how many rows need more than a short list, then the numbers of these rows
    group_top_NG:   maxima of groups
    """

    threshold_N: Tensor
    count_N: Tensor
    list_id_NC: Tensor
    list_x_NC: Tensor
    queue_N1: Tensor
    group_top_NG: Tensor


class Scratch(NamedTuple):
    """Results that the kernels of one op pass on to later kernels.

    mass_NJ: log2 masses of blocks, of p or, after `residual_kernel`, of the residual; at T=0 maxima
    best_NJ: best scores of blocks under flat noise, of p or the residual as in `mass_NJ`
    lse_N:   log2 of a row's mass

    For rows with filters a field holds something else before these values are written:

    best_NJ: maxima of blocks, from the scan to `filter_kernel`; then stretches (`sweep.py`)
    mass_NJ: from the first sweep to `wide_kernel`, the weight W(x >= b) of each block, not its log2
    lse_N:   maxima of UNDECIDED rows
    """

    mass_NJ: Tensor
    lse_N: Tensor
    best_NJ: Tensor | None
    filtered: Filtered | None


class Q(NamedTuple):
    """The tensors of `DraftCache`, if there is one. A draft's row is slot * K + draft index."""

    logits_SKV: Tensor
    threshold_SK: Tensor
    lse_SK: Tensor
    K: int
    V: int


class Batch(NamedTuple):
    """Arguments of all kernels of an op. slots is None for raw logits."""

    rows: RawRows
    requests: Requests
    slots: Slots | None
    q: Q | None
    scratch: Scratch


class Drafts(NamedTuple):
    """The drafts of all requests. rate_K is None if no slot is under SYNTHETIC."""

    token_BK: Tensor
    real_q_B: Tensor
    rate_K: Tensor | None
    K: int


class Agenda(NamedTuple):
    """The work of the residual pass for each request. Layout: `decide.py: RequestAgenda`."""

    integers: Tensor
    floats: Tensor


class Candidates(NamedTuple):
    """How many programs of each request have arrived; a score and a token for each block."""

    arrived_B: Tensor
    score_token_BJ2: Tensor

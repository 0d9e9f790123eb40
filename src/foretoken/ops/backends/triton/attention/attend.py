"""Host side of paged attention: which kernel, which configuration, on which plan."""

from __future__ import annotations

from torch import Tensor

from foretoken.ops.backends.triton.attention.records import HeadInputs
from foretoken.ops.types import AttentionBatch, AttentionOptions

MOST_NEW = 16  # new tokens of a request that `attend_new` takes


def attention(
    query_THD: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: AttentionBatch,
    options: AttentionOptions,
) -> Tensor:
    """See `Backend.attention`: causal attention of ragged queries over paged K/V, [T, H, D_v].

    Queries may be strided, with unit stride along D. Rows of no request are not written. The plan
    of a batch is made on the device by its first call and kept for the others: under graph
    capture the batch must be an object made inside the capture.
    """
    raise NotImplementedError


def attend_new(
    qkv_TW: Tensor,
    heads: HeadInputs,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: AttentionBatch,
    options: AttentionOptions,
    out_TC: Tensor,
    overlap: bool = False,
) -> None:
    """Norms, rotary, K/V write and attention of a decode step, in one kernel and a merge.

    Args:
        qkv_TW: [T, (H + H_kv) * D + H_kv * D_v], unit stride along W: query heads, key heads, value
            heads of each new token, biases added. Not changed.
        heads: what is done to q and k.
        key_cache, value_cache: as in `attention`; new tokens are written at their positions.
        batch: with 1 <= most_queries <= MOST_NEW.
        out_TC: gets the attended values, [T, H * D_v], contiguous, in the dtype of the cache.
            Rows of no request are not written.
        overlap: launch the kernels dependently (PDL). Each lets the next kernel start at once
            and waits before it reads `qkv_TW`. The plan and the block table are read before that:
            whichever kernel comes first behind the plan must wait before it lets others start
            (see `prepare`).

    A row's bits depend on its own context alone while T <= 16: not on other requests, nor on the
    rows beside it in its request.
    """
    raise NotImplementedError


def write_new(
    qkv_TW: Tensor,
    heads: HeadInputs,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: AttentionBatch,
    overlap: bool = False,
) -> Tensor:
    """Norms, rotary and K/V write of any number of new tokens, in one kernel.

    The query heads in `qkv_TW` are replaced by what `attention` takes.

    Returns:
        The view [T, H, D] of them, strided.
    """
    raise NotImplementedError


def prepare(
    batch: AttentionBatch,
    query_heads: int,
    key_cache: Tensor,
    value_cache: Tensor,
    options: AttentionOptions,
) -> None:
    """Make the plan of a batch now, for layers of this shape, ahead of a chain that overlaps.

    Without it the first layer's `attention` or `attend_new` makes it. It is launched as an
    ordinary kernel.
    """
    raise NotImplementedError

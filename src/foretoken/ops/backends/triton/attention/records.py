"""Records of the arguments of attention kernels; see `triton/records.py`.

Letters of shapes, in addition to those of `__init__`: F rows of requests with few queries, I items,
L columns of the block table, N pieces of a context.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor


class HeadInputs(NamedTuple):
    """What turns the q and k of a layer's product into queries and keys.

    First RMSNorm of each head, if there are weights; then rotary embedding in the half-split layout
    (Transformers' `rotate_half`) of the first R of D dimensions. All is computed in float32, and
    rounded once, to the dtype of the cache.

    cos_PR, sin_PR: float32 [P, R / 2], contiguous, times any attention scaling; P >= all lengths
    q_norm_D, k_norm_D: factors of the norms (w, or 1 + w), any float dtype, or both None
    """

    cos_PR: Tensor
    sin_PR: Tensor
    q_norm_D: Tensor | None = None
    k_norm_D: Tensor | None = None
    eps: float = 1e-6


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The heads of a layer: its kernels are compiled for them, and its plan depends on them.

    H, H_KV: query heads, key/value heads; each K/V head has G query heads
    D, D_V:  size of a query or key head, of a value head; WIDTH, WIDTH_V: padded for kernels to a
             power of 2, at least 16
    PAGE:    tokens of a cache block
    WINDOW:  how many tokens a row sees at most, itself included; 0: all
    """

    H: int
    H_KV: int
    D: int
    D_V: int
    PAGE: int
    WINDOW: int
    dtype: torch.dtype

    @property
    def G(self) -> int:
        return self.H // self.H_KV

    @property
    def WIDTH(self) -> int:
        return max(16, int(triton.next_power_of_2(self.D)))

    @property
    def WIDTH_V(self) -> int:
        return max(16, int(triton.next_power_of_2(self.D_V)))

    @property
    def PRECISION(self) -> str:
        return "ieee" if self.dtype == torch.float32 else "tf32"  # float32 is not cut to TF32


@dataclass(frozen=True, slots=True)
class Cut:
    """How `plan_kernel` cuts contexts into pieces and requests into tiles; see `plan.py`.

    G, WINDOW: as in `HeadShape`; SIZE, COUNT, STEP: as in `plan.py`
    FEW_ROWS, MANY_ROWS: rows of a tile of a request with few, with many queries
    """

    G: int
    WINDOW: int
    SIZE: int
    COUNT: int
    STEP: int
    FEW_ROWS: int
    MANY_ROWS: int


@dataclass(frozen=True, slots=True)
class Tile:
    """A tile of `decode_kernel`: TOKENS keys in each iteration, KEYS of them per group of warps.

    R, Q:  rows of the tile, rows of a warp
    LIVE:  how many rows a step of this shape can fill, a power of 2
    SETS, GROUPS: W = SETS * GROUPS warps; each of the SETS of rows has GROUPS warps
    """

    R: int
    LIVE: int
    SETS: int
    GROUPS: int
    KEYS: int

    @property
    def TOKENS(self) -> int:
        return self.GROUPS * self.KEYS

    @property
    def W(self) -> int:
        return self.SETS * self.GROUPS

    @property
    def Q(self) -> int:
        return self.R // self.SETS


class TokenRows(NamedTuple):
    """Query heads of packed tokens; in a row of qkv, key and value heads follow them."""

    query: Tensor
    stride: int
    head_stride: int


class Cache(NamedTuple):
    """Paged K/V of a layer, and each request's blocks."""

    key: Tensor
    value: Tensor
    block_BL: Tensor
    columns: int


class Work(NamedTuple):
    """The lists of a plan (`plan.py`): `Item`s of requests with few queries, a `MergeRow` for each
    row of these requests, `Item`s of requests with many queries, and the lengths of the lists."""

    few_I: Tensor
    merge_F: Tensor
    many_I: Tensor
    totals: Tensor


class Partials(NamedTuple):
    """The results of pieces of contexts, before they are merged.

    acc_FHN: sums of weighted values, [F, H, N, D_v]; weights are relative to 2^top
    top_FHN, sum_FHN: the largest score (base 2); the sum of weights
    """

    acc_FHN: Tensor
    top_FHN: Tensor
    sum_FHN: Tensor
    pieces: int


class Scores(NamedTuple):
    """What turns products of q and k into scores in base 2. sink_H: sink scores in base e."""

    scale: float
    softcap: float | None
    sink_H: Tensor | None

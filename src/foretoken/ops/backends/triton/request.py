"""A request to verify: its rows and its slot, helpers on vectors of drafts, and its outcome.

Shapes: B requests, K most drafts, KP a power of 2 above it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from foretoken.ops.backends.triton.noise import ACCEPT, LOG2E, Address, log2, uniform_at
from foretoken.ops.backends.triton.records import Batch, Drafts, Outcome
from foretoken.ops.backends.triton.rows import Settings, first_row, read_settings


class Request(NamedTuple):
    """One request. first: its first row; num: how many drafts it has; position: of row `first`."""

    first: Any
    num: Any
    position: Any
    settings: Settings


@triton.jit
def read_request(batch: Batch, b, RAGGED: tl.constexpr, CHUNK: tl.constexpr):
    """Request b. RAGGED: requests may have drafts; CHUNK: see `first_row`."""
    num = tl.full((), 0, tl.int32)
    if RAGGED:
        num = tl.load(batch.requests.num_B + b).to(tl.int32)
    return Request(
        first_row(batch.requests, b, RAGGED, CHUNK),
        num,
        tl.load(batch.requests.position_B + b),
        read_settings(batch.slots, tl.load(batch.requests.slot_B + b), batch.rows.V),
    )


@triton.jit
def load_masses(batch: Batch, row, mask, NBP: tl.constexpr):
    """Block masses of rows [KP], as [KP, NBP]; -inf where not `mask`, and behind the last block."""
    NB, j = batch.rows.NB, tl.arange(0, NBP)
    return tl.load(
        batch.scratch.mass_NJ + row[:, None] * NB + j[None, :],
        mask=mask[:, None] & (j < NB)[None, :],
        other=float("-inf"),
        cache_modifier=".cg",
    )


@triton.jit
def accept_uniforms(request: Request, i, FP64: tl.constexpr):
    """The uniforms by which drafts are accepted, [KP]."""
    address = Address(request.settings.key, request.position + i, i, ACCEPT)
    return uniform_at(address, i * 0, FP64)


@triton.jit
def log2_of(u, FP64: tl.constexpr):
    """log2 of a uniform, below 0 whatever the hardware's rounding: u < 1 must stay so."""
    if FP64:
        return tl.log(u) * LOG2E
    else:
        return tl.minimum(log2(u), -1e-8)


@triton.jit
def value_at(x, i, k):
    """x_k of a vector."""
    return tl.sum(tl.where(i == k, x, tl.zeros_like(x)), axis=0)


@triton.jit
def shifted(x, i, by, KP: tl.constexpr):
    """x_{i + by} of a vector [KP], 0 where there is none."""
    j = tl.arange(0, KP)
    return tl.sum(tl.where(j[None, :] == i[:, None] + by, x[None, :], 0.0), axis=1)


@triton.jit
def is_finite(x):
    """Whether a number is finite: of infinities and NaN the difference is NaN."""
    return x - x == 0


@triton.jit
def all_finite(lse, i, k):
    """Whether the rows 0..k of a request are finite."""
    return tl.sum(((i <= k) & ~is_finite(lse)).to(tl.int32), axis=0) == 0


@triton.jit
def store_accepted(outcome: Outcome, drafts: Drafts, b, k, finite, KP: tl.constexpr):
    """All of a verdict but the token after the k accepted drafts; behind that comes -1."""
    i, K = tl.arange(0, KP), drafts.K
    token = tl.load(drafts.token_BK + b * K + i, mask=(i < k) & (i < K), other=-1).to(tl.int64)
    mask = (i <= K) & (i != k)
    tl.store(outcome.token_BK1 + b * (K + 1) + i, tl.where(i < k, token, -1), mask=mask)
    tl.store(outcome.n_accept_B + b, k.to(tl.int64))
    tl.store(outcome.finite_B + b, finite)


@triton.jit
def store_token(outcome: Outcome, drafts: Drafts, b, k, token, finite):
    """The token after k accepted drafts; -1 if a row that decided the request is not finite."""
    tl.store(outcome.token_BK1 + b * (drafts.K + 1) + k, tl.where(finite, token, -1))

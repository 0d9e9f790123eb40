"""Philox4x32-10 by name, vectorised over rows and groups. No generator state.

Why numpy under a torch backend: on small arrays its calls cost a third of torch's. The ten rounds
over one block's 256 groups take 41 us here, 124 us in int64 torch ops; over 65 536 groups 1.8 ms
against 3.5 ms (one core, 2026-11).

Shapes: N rows, G groups of four 32-bit words, M draws. Arrays are numpy; `philox` takes tensors.
"""

from __future__ import annotations

from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]

_MULTIPLIER = np.array([0xD2511F53, 0xCD9E8D57], np.uint64).reshape(2, 1, 1)
_WEYL = np.array([0x9E3779B9, 0xBB67AE85], np.uint32)
_WEYL_STEPS = (np.arange(10, dtype=np.uint32)[:, None] * _WEYL).reshape(10, 2, 1, 1)
_FEW = 8  # groups up to which Python integers are faster
_MANY = 256  # draws from which looking for common groups pays
_MAX_FP32 = np.float32(1 - 2.0**-24)
_MAX_FP64 = 1 - 2.0**-53


class Address(NamedTuple):
    """Where a row's noise lives, but for the stream and the group. One entry per row.

    key:   uint32 [2, N], low and high half of the sample's 64 bits
    place: uint32 [2, N], position and draft index
    """

    key: Array
    place: Array

    def take(self, index: Array | slice) -> Address:
        return Address(self.key[:, index], self.place[:, index])


def address(key_N: Array, position_N: Array, draft_index_N: Array | int) -> Address:
    """Split int64 keys in halves and cut positions and draft indices to 32 bits."""
    key = np.empty((2, len(key_N)), np.uint32)
    key[0], key[1] = key_N & 0xFFFFFFFF, key_N >> 32 & 0xFFFFFFFF
    place = np.empty_like(key)
    place[0], place[1] = position_N & 0xFFFFFFFF, draft_index_N
    return Address(key, place)


def _rounds(even: Array, odd: Array, key: Array) -> Array:
    """Ten rounds on counters kept as even words (0, 2) and odd words (1, 3), each [2, N, G].

    A product's halves are read through a uint32 view (little endian: low, high), so that a round
    is three array operations. Returns uint32 [N, G, 4].
    """
    keys = key[None, :, :, None] + _WEYL_STEPS
    products = [np.empty(even.shape, np.uint64) for _ in range(2)]  # alternately written and read
    halves = [p.view(np.uint32).reshape(*even.shape, 2)[::-1] for p in products]
    for i in range(10):
        product, half = products[i & 1], halves[i & 1]
        np.multiply(even, _MULTIPLIER, out=product)
        np.bitwise_xor(half[..., 1], odd, out=even)
        even ^= keys[i]
        odd = half[..., 0]
    words = np.empty((*even.shape[1:], 4), np.uint32)
    words[..., 0], words[..., 2] = even
    words[..., 1], words[..., 3] = odd
    return words


def _scalar_rounds(c0: int, c1: int, c2: int, c3: int, k0: int, k1: int) -> list[int]:
    """The same on Python integers: 3 us a group, while the array form starts at 28."""
    for _ in range(10):
        low, high = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = high >> 32 ^ c1 ^ k0, high & 0xFFFFFFFF
        c2, c3 = low >> 32 ^ c3 ^ k1, low & 0xFFFFFFFF
        k0, k1 = k0 + 0x9E3779B9 & 0xFFFFFFFF, k1 + 0xBB67AE85 & 0xFFFFFFFF
    return [c0, c1, c2, c3]


def words(group_NG: Array, at: Address, stream_N: Array | int) -> Array:
    """The four words of each group: counter = (group, position, draft index, stream)."""
    if group_NG.size <= _FEW:
        streams = stream_N.tolist() if isinstance(stream_N, np.ndarray) else repeat(stream_N)
        each = zip(group_NG.tolist(), *at.place.tolist(), streams, *at.key.tolist(), strict=False)
        few = [[_scalar_rounds(g, p, d, s, k0, k1) for g in gs] for gs, p, d, s, k0, k1 in each]
        return np.array(few, np.uint32).reshape(*group_NG.shape, 4)
    even = np.empty((2, *group_NG.shape), np.uint32)
    odd = np.empty_like(even)
    even[0], even[1] = group_NG, at.place[1, :, None]
    odd[0] = at.place[0, :, None]
    odd[1] = stream_N[:, None] if isinstance(stream_N, np.ndarray) else stream_N
    return _rounds(even, odd, at.key)


def to_uniform(words_NG4: Array, fp64: bool) -> Array:
    """Words to uniforms in (0, 1), open at both ends: [N, 4G] in FP32, [N, 2G] in FP64.

    FP32: (h + 1/2) 2^-32 in FP32 arithmetic, at most 1 - 2^-24. FP64: h = the upper 53 bits of
    two adjacent words, (h + 1/2) 2^-53, at most 1 - 2^-53.
    """
    if not fp64:
        u = words_NG4.reshape(len(words_NG4), -1).astype(np.float32)
        u += np.float32(0.5)
        u *= np.float32(2.0**-32)
        return np.minimum(u, _MAX_FP32, out=u)
    pair = words_NG4.reshape(len(words_NG4), -1, 2)
    h = pair[..., 0].astype(np.uint64) << 21 | pair[..., 1] >> 11
    return np.minimum((h.astype(np.float64) + 0.5) * 2.0**-53, _MAX_FP64)


def to_gumbel(u: Array) -> Array:
    """-log(-log1p(-u)), in place: the winning tail lies at u -> 0, where floats are dense.

    With w = 1 - u rounded, log1p(-u) = log w - (u - (1 - w)) / w but for terms that rounding takes
    anyway: numpy's log is vectorised, its log1p is not (54 against 384 us for 32 768 numbers in
    FP32; one core with AVX2, 2026-11).
    """
    w = 1 - u
    u -= 1 - w
    u /= w
    u -= np.log(w, out=w)
    np.log(u, out=u)
    return np.negative(u, out=u)


def uniform_span(
    first_N: Array, count: int, at: Address, stream_N: Array | int, fp64: bool
) -> Array:
    """Draws first, first + 1, ... of a stream, [N, count]; `first` is a multiple of 4."""
    per_group = 2 if fp64 else 4
    group_NG = first_N[:, None] // per_group + np.arange(-(-count // per_group))
    u: Array = to_uniform(words(group_NG, at, stream_N), fp64)[:, :count]
    return u


def uniform_at(index_M: Array, at: Address, stream_M: Array | int, fp64: bool) -> Array:
    """Draw index_M[m] of row m's stream, [M]; draws of one group next to each other share it."""
    per_group = 2 if fp64 else 4
    group_M, unit_M = index_M // per_group, np.arange(len(index_M))
    if len(index_M) >= _MANY:
        named = (group_M, *at.key, *at.place, stream_M)
        differs = [x[1:] != x[:-1] for x in named if isinstance(x, np.ndarray)]
        first = np.flatnonzero(np.concatenate([[True], np.logical_or.reduce(differs)]))
        unit_M = np.repeat(np.arange(len(first)), np.diff(first, append=len(index_M)))
        group_M, at = group_M[first], at.take(first)
        stream_M = stream_M[first] if isinstance(stream_M, np.ndarray) else stream_M
    u = to_uniform(words(group_M[:, None], at, stream_M), fp64)
    u_M: Array = u[unit_M, index_M % per_group]
    return u_M


def philox(counter_N4: Tensor, key_N2: Tensor) -> Tensor:
    """Philox4x32-10 of whole counters: int64 tensors of 32-bit words, [N, 4] and [N, 2] -> [N, 4].

    Salmon et al. 2011, with the round constants of Random123.
    """
    counter = counter_N4.numpy().astype(np.uint32)[:, None]  # [N, G=1, 4]
    even, odd = (np.ascontiguousarray(np.moveaxis(counter[..., i::2], -1, 0)) for i in (0, 1))
    key = np.ascontiguousarray(key_N2.numpy().astype(np.uint32).T)
    return torch.from_numpy(_rounds(even, odd, key)[:, 0].astype(np.int64))


def uniform(
    index_M: Tensor,
    key_M: Tensor,
    position_M: Tensor,
    draft_index_M: Tensor,
    stream: int,
    fp64: bool = False,
) -> Tensor:
    """Draw index_M[m] of the stream named by (key, position, draft index): [M] in (0, 1).

    All int64 [M]; float32, or float64 with `fp64`.
    """
    at = address(key_M.numpy(), position_M.numpy(), draft_index_M.numpy())
    return torch.from_numpy(uniform_at(index_M.numpy(), at, stream, fp64))

"""Philox4x32-10 noise, written from its definition: one counter, ten rounds, four 32-bit words.

Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011). Counter = (group,
position, draft index, stream); key = low and high half of the sample's 64-bit noise key.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_MASK = 0xFFFFFFFF


def philox4x32_10(counter: list[Array], key: list[Array]) -> list[Array]:
    """The four output words for a counter of four 32-bit words; each is an array of uint64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & _MASK,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return [c0, c1, c2, c3]


def uniforms(
    index_M: Array, key: int, position: int, draft_index: int, stream: int, fp64: int
) -> Array:
    """The uniforms with indices `index_M` of a stream, in the open interval (0, 1).

    float32: h = word (index mod 4) of group (index div 4); u = (h + 1/2) 2^-32 in FP32 arithmetic,
    at most 1 - 2^-24. float64, with `fp64`: h = the upper 53 bits of word pair (index mod 2) of
    group (index div 2), with the first word in the upper half of the pair; u = (h + 1/2) 2^-53 in
    FP64 arithmetic, at most 1 - 2^-53.
    """
    group_M, place_M = np.divmod(index_M, 2 if fp64 else 4)
    coordinates = (group_M, position, draft_index, int(stream))
    counter = [np.asarray(number, np.int64) & _MASK for number in coordinates]
    halves = [np.asarray(half & _MASK, np.uint64) for half in (key, key >> 32)]
    words = philox4x32_10([c.astype(np.uint64) for c in counter], halves)
    word_M4 = np.stack(np.broadcast_arrays(*words), axis=-1)
    if fp64:
        pair_M2 = word_M4.reshape(-1, 2, 2)[np.arange(len(index_M)), place_M]
        h_M = (pair_M2[:, 0] << 32 | pair_M2[:, 1]) >> 11
        return np.asarray(np.minimum((h_M.astype(np.float64) + 0.5) * 2.0**-53, 1 - 2.0**-53))
    h_M = word_M4[np.arange(len(index_M)), place_M]
    u_M = (h_M.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    return np.asarray(np.minimum(u_M, np.float32(1 - 2.0**-24)))


def uniform_of(index: int, *rest: int) -> float:
    """One draw of `uniforms`; `rest`: the arguments of `uniforms` after the first."""
    return float(uniforms(np.array([index]), *rest)[0])


def gumbels(index_M: Array, *rest: int) -> Array:
    """Standard Gumbel noise -log(-log(1 - u)) in float64; u are `uniforms(index_M, *rest)`."""
    u_M = uniforms(index_M, *rest).astype(np.float64)
    return np.asarray(-np.log(-np.log1p(-u_M)))

"""Noise by name, written from the definition: one counter, ten rounds, four words.

Philox4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011).
Counter = (group, position, draft index, stream); key = low and high half of the sample's 64 bits.
Nothing here is shared with another backend: equal bits come from an equal definition.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


@functools.lru_cache(maxsize=1024)  # a group's four words are asked for one by one
def philox4x32_10(
    counter: tuple[int, int, int, int], key: tuple[int, int]
) -> tuple[int, int, int, int]:
    """The block cipher on plain integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & _MASK,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def uniform_of(
    index: int, key: int, position: int, draft_index: int, stream: int, fp64: bool
) -> float:
    """Draw `index` of a stream, in the open interval (0, 1).

    FP32: h = word (index mod 4) of group (index div 4); (h + 1/2) 2^-32 in FP32 arithmetic, at most
    1 - 2^-24. FP64: h = the upper 53 bits of word pair (index mod 2) of group (index div 2), the
    first word above the second; (h + 1/2) 2^-53 in FP64 arithmetic, at most 1 - 2^-53.
    """
    halves = (key & _MASK, key >> 32 & _MASK)
    per_group = 2 if fp64 else 4
    group, place = divmod(index, per_group)
    word = philox4x32_10((group & _MASK, position & _MASK, draft_index & _MASK, stream), halves)
    if fp64:
        h = (word[2 * place] << 32 | word[2 * place + 1]) >> 11
        return min((float(h) + 0.5) * 2.0**-53, 1 - 2.0**-53)
    u = (np.float32(word[place]) + np.float32(0.5)) * np.float32(2.0**-32)
    return float(min(u, np.float32(1 - 2.0**-24)))


def gumbel_of(
    index: int, key: int, position: int, draft_index: int, stream: int, fp64: bool
) -> float:
    """Standard Gumbel noise -log(-log(1 - u)): large values come from u -> 0."""
    return -math.log(-math.log1p(-uniform_of(index, key, position, draft_index, stream, fp64)))


def philox(counter_N4: Tensor, key_N2: Tensor) -> Tensor:
    """`philox4x32_10` of int64 tensors of 32-bit words: [N, 4] and [N, 2] -> [N, 4]."""
    words = [
        philox4x32_10((c[0], c[1], c[2], c[3]), (k[0], k[1]))
        for c, k in zip(counter_N4.tolist(), key_N2.tolist(), strict=True)
    ]
    return torch.tensor(words, dtype=torch.int64).reshape(-1, 4)


def uniform(
    index_M: Tensor,
    key_M: Tensor,
    position_M: Tensor,
    draft_index_M: Tensor,
    stream: int,
    fp64: bool = False,
) -> Tensor:
    """`uniform_of` of int64 tensors [M]; float32, or float64 with `fp64`."""
    each = zip(
        index_M.tolist(),
        key_M.tolist(),
        position_M.tolist(),
        draft_index_M.tolist(),
        strict=True,
    )
    dtype = torch.float64 if fp64 else torch.float32
    return torch.tensor([uniform_of(*one, int(stream), fp64) for one in each], dtype=dtype)

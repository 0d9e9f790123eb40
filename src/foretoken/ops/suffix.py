"""Where the last tokens of a text occurred before, and what followed; for native kernels only.

Belongs here: the memory of `backends/native/csrc/suffix.cpp`, as numpy arrays, and its calls.

Shapes: N texts, W tokens of a text, S slots, B requests, K drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretoken.ops.backends.native import library
from foretoken.ops.backends.native.arguments import struct
from foretoken.ops.steps import DraftRequests

Array = NDArray[Any]

LINKS = 3  # per token: one for each of `kLengths`, to where as many last tokens occurred before
_END, _SIZE = 5, 6  # fields of `SuffixIndex`
_BREAK = -1


class SuffixOptions(NamedTuple):
    """How far a draft may go.

    depth: most tokens of a match that are compared; a longer match counts as this long.
    factor: most drafts per token of the match.
    least: lower bound of the product of the drafts' frequencies.
    """

    depth: int
    factor: float
    least: float


class SuffixIndexes:
    """An index of each of N rings, which hold the latest tokens, in arrays that never grow.

    Attributes:
        field_NF: `SuffixIndex` of the C++ side, int64 [N, 7], at `address`.
    """

    def __init__(self, rings: Sequence[Array]) -> None:
        """rings: int32 [W] each, contiguous, at least one token."""
        self._rings, self._kept = rings, []
        fields = []
        for ring in rings:
            capacity, buckets = len(ring), _buckets(len(ring))
            latest = np.empty((LINKS, buckets), dtype=np.int32)
            before = np.empty((LINKS, capacity), dtype=np.int32)
            self._kept.append((latest, before))
            arrays = (ring, latest, before)
            fields.append([*(array.ctypes.data for array in arrays), capacity, buckets, 0, 0])
        self.field_NF: Array = np.array(fields, dtype=np.int64).reshape(len(rings), 7)
        self.address = self.field_NF.ctypes.data  # kept: to ask for it takes 9 us

    @staticmethod
    def num_bytes(capacity: int) -> int:
        """Memory of an index over a ring of `capacity` tokens, without the ring itself."""
        return 4 * LINKS * (capacity + _buckets(capacity))

    @property
    def size_N(self) -> Array:
        """How many tokens of each ring are indexed."""
        sizes: Array = self.field_NF[:, _SIZE]
        return sizes

    def resize(self, i: int, size: int) -> None:
        """Forget all but the latest `size` tokens of a ring; 0 empties it."""
        self.field_NF[i, _SIZE] = size
        if not size:
            self.field_NF[i, _END] = 0

    def room(self, i: int, text: Array) -> int:
        """How many other tokens a ring has room for next to this text."""
        return max(len(self._rings[i]) - len(text) - 1, 0)

    def append(self, i: int, text: Array) -> int:
        """Index a finished text, or the end of one that is too long for the ring.

        Returns how many tokens of the ring it takes, the separator after it included.
        """
        ring, end = self._rings[i], int(self.field_NF[i, _END])
        text = np.append(text[max(len(text) + 1 - len(ring), 0) :], np.int32(_BREAK))
        ring.put(np.arange(end, end + len(text)), text, mode="wrap")
        library.load().foretoken_suffix_append(self.field_NF[i].ctypes.data, len(text))
        return len(text)


def _buckets(capacity: int) -> int:
    """A power of 2, at least half as many as there are tokens."""
    return 1 << (capacity.bit_length() - 1)


def propose(
    own: SuffixIndexes,
    others: SuffixIndexes,
    num_others_B: Tensor,
    asked: DraftRequests,
    options: SuffixOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Drafts after the known tokens of each slot, in one call.

    Each draft follows the commonest continuation of the longest suffix that occurred before: in the
    request's own text or in one of the first `num_others_B` other texts, whichever promises most
    accepted drafts.

    Args:
        own: over the slots' rows of tokens [S]; new tokens are indexed first, except the last.

    Returns:
        int64 [B, asked.most], -1 after a request's last; int64 [B], how many there are; and float64
        [B], how many would be accepted if tokens followed as often as they did before.
    """
    count = len(asked.slot_B)
    token_BK = torch.empty((count, asked.most), dtype=torch.int64)
    num_B = torch.empty(count, dtype=torch.int64)
    expected_B = torch.empty(count, dtype=torch.float64)
    inputs = asked.slot_B, asked.position_B, asked.num_B, num_others_B
    requests = struct((*inputs, token_BK, num_B, expected_B), count, asked.most)
    library.load().foretoken_suffix_propose(own.address, others.address, requests, *options)
    return token_BK, num_B, expected_B

"""Where the last tokens of a text occurred before, and what followed: native kernels alone.

Belongs here: the memory of `backends/native/csrc/suffix.cpp`, which is all numpy's, and its calls.

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

LINKS = 3  # of each token, to the places where as many last tokens as `kLengths` occurred before
_END, _SIZE = 5, 6  # fields of `SuffixIndex`
_BREAK = -1


class SuffixOptions(NamedTuple):
    """How far a draft may go.

    depth: tokens of a match that are compared at most; a longer one counts as so long.
    factor: most drafts per token of the match.
    least: what the product of the drafts' frequencies must reach.
    """

    depth: int
    factor: float
    least: float


class SuffixIndexes:
    """An index of each of N rings of tokens: the latest ones, in arrays that never grow.

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
        self.address = self.field_NF.ctypes.data  # asked each time, it takes 9 us

    @staticmethod
    def num_bytes(capacity: int) -> int:
        """Memory of an index over a ring of so many tokens, the ring not counted."""
        return 4 * LINKS * (capacity + _buckets(capacity))

    @property
    def size_N(self) -> Array:
        """How many tokens of each ring count."""
        sizes: Array = self.field_NF[:, _SIZE]
        return sizes

    def resize(self, i: int, size: int) -> None:
        """Forget all but the latest `size` tokens of a ring; of 0, begin anew."""
        self.field_NF[i, _SIZE] = size
        if not size:
            self.field_NF[i, _END] = 0

    def room(self, i: int, text: Array) -> int:
        """Tokens that a ring still holds besides this text."""
        return max(len(self._rings[i]) - len(text) - 1, 0)

    def append(self, i: int, text: Array) -> int:
        """Index a text that has ended; how many tokens of the ring it takes, one after it too.

        Of a text that is too long for the ring, its end.
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
    rows: DraftRequests,
    options: SuffixOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Drafts after the known tokens of each slot, in one call.

    Each follows the commonest continuation of the longest suffix that occurred before, in its own
    text or in the first `num_others_B` of the others: where the most of them are to be expected.

    Args:
        own: over the slots' rows of tokens [S]; takes in what is new, the last token excepted.

    Returns:
        int64 [B, rows.most], -1 after a request's last; int64 [B], how many there are; and float64
        [B], how many would be accepted if tokens followed as often as they did before.
    """
    count = len(rows.slot_B)
    token_BK = torch.empty((count, rows.most), dtype=torch.int64)
    num_B = torch.empty(count, dtype=torch.int64)
    expected_B = torch.empty(count, dtype=torch.float64)
    tensors = (rows.slot_B, rows.position_B, rows.num_B, num_others_B, token_BK, num_B, expected_B)
    requests = struct(tensors, count, rows.most)
    library.load().foretoken_suffix_propose(own.address, others.address, requests, *options)
    return token_BK, num_B, expected_B

"""Indexes by which the last tokens of a text are found in earlier text: their numpy arrays, and the
calls of `backends/native/csrc/suffix.cpp`, which reads and writes the arrays.

Shapes: N rings, W tokens of a ring, B requests, K drafts.
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

# Links per token, one for each length n of `kLengths` in `suffix.cpp`: a link leads to the latest
# earlier token that ends n tokens with the same hash.
LINKS = 3
_END, _SIZE = 5, 6  # the numbers of these fields of `SuffixIndex`
_SEPARATOR = -1  # after each text of a ring


class SuffixOptions(NamedTuple):
    """Limits of drafts.

    depth: upper bound of the tokens that are compared for a match
    max_factor: upper bound of the number of drafts per token of the match
    min_product: lower bound of the product of the drafts' frequencies
    """

    depth: int
    max_factor: float
    min_product: float


class SuffixIndexes:
    """Indexes of N rings. A ring is an array of fixed size with the latest tokens of some texts.

    Args:
        rings: int32 [W] each, contiguous, at least one token.

    Attributes:
        field_NF: the C++ side's `SuffixIndex` of each ring, int64 [N, 7], at `address`.
    """

    def __init__(self, rings: Sequence[Array]) -> None:
        self._rings = rings
        self._memory: list[tuple[Array, Array]] = []  # `field_NF` points to these arrays
        fields = []
        for ring in rings:
            capacity, buckets = len(ring), _num_buckets(len(ring))
            latest = np.empty((LINKS, buckets), dtype=np.int32)
            before = np.empty((LINKS, capacity), dtype=np.int32)
            self._memory.append((latest, before))
            arrays = (ring, latest, before)
            fields.append([*(array.ctypes.data for array in arrays), capacity, buckets, 0, 0])
        self.field_NF: Array = np.array(fields, dtype=np.int64).reshape(len(rings), 7)
        self.address = self.field_NF.ctypes.data  # stored, since looking it up takes 9 us

    @staticmethod
    def num_bytes(capacity: int) -> int:
        """Bytes of the index of a ring of `capacity` tokens, without the ring."""
        return 4 * LINKS * (capacity + _num_buckets(capacity))

    @property
    def size_N(self) -> Array:
        """The number of indexed tokens of each ring."""
        sizes: Array = self.field_NF[:, _SIZE]
        return sizes

    def resize(self, i: int, size: int) -> None:
        """Forget all but the latest `size` tokens of a ring; 0 empties it."""
        self.field_NF[i, _SIZE] = size
        if not size:
            self.field_NF[i, _END] = 0

    def room(self, i: int, text: Array) -> int:
        """How many tokens of other texts fit into ring i together with this text."""
        return max(len(self._rings[i]) - len(text) - 1, 0)

    def append(self, i: int, text: Array) -> int:
        """Index a finished text in ring i, without the beginning if it is too long for the ring.
        Returns how many places of the ring the text and a separator take."""
        ring, end = self._rings[i], int(self.field_NF[i, _END])
        text = np.append(text[max(len(text) + 1 - len(ring), 0) :], np.int32(_SEPARATOR))
        ring.put(np.arange(end, end + len(text)), text, mode="wrap")
        library.load().foretoken_suffix_append(self.field_NF[i].ctypes.data, len(text))
        return len(text)


def _num_buckets(capacity: int) -> int:
    return 1 << (capacity.bit_length() - 1)  # a power of 2, more than half of the capacity


def propose(
    slot_indexes: SuffixIndexes,
    shared_indexes: SuffixIndexes,
    num_shared_B: Tensor,
    requests: DraftRequests,
    options: SuffixOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Drafts after the known tokens of each request, in one call.

    Each index that a request reads, that of its slot and the first `num_shared_B` shared indexes,
    gives one candidate: the commonest continuation of the longest suffix of the request's text that
    the index has. The drafts are the candidate with the largest expected number of accepted drafts.

    New tokens of a slot, except the last one, are first added to `slot_indexes`.

    Returns:
        The drafts, int64 [B, requests.most], -1 after a request's last draft; the number of drafts,
        int64 [B]; and the number of accepted drafts to expect by the frequencies in the index,
        float64 [B].
    """
    count = len(requests.slot_B)
    token_BK = torch.empty((count, requests.most), dtype=torch.int64)
    num_B = torch.empty(count, dtype=torch.int64)
    expected_B = torch.empty(count, dtype=torch.float64)
    inputs = requests.slot_B, requests.position_B, requests.num_B, num_shared_B
    native = struct((*inputs, token_BK, num_B, expected_B), count, requests.most)
    addresses = slot_indexes.address, shared_indexes.address
    library.load().foretoken_suffix_propose(*addresses, native, *options)
    return token_BK, num_B, expected_B

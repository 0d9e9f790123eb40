"""Edits of a step's logits: packed on the host as a message, unpacked on the logits' device.

Row j of a request is edited as if its drafts before row j were accepted.

Shape suffixes: D deciding requests, G deciding requests with a grammar, K drafts, N rows of the
batch, E edited rows, M entries, X masks of one request, R masks of all requests, W mask words, U
tokens with entries; in `HistoryRows` R rows of one request.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from foretoken.ops import Edits
from foretoken.ops.pinned import to_device
from foretoken.sampling.grammar import fill_masks
from foretoken.sampling.history import Array, EditHistory, HistoryRows


class PackedEdits(NamedTuple):
    """`ops.Edits` as arrays on the host. Rows are numbered within their request, because row
    numbers in the batch depend on the numbers of drafts.

    row_4E: int64, for each edited row: the index d of the deciding request, the row within this
        request, its number of entries, and the index of its mask (-1: no mask).
    mask_RW: int32; None: no row has a mask.
    token_M, bias_M, repetition_M, subtract_M: entries, row by row.
    """

    row_4E: Array
    mask_RW: Array | None
    token_M: Array
    bias_M: Array
    repetition_M: Array
    subtract_M: Array

    def unpack(self, num_D: Tensor, most_drafts: int) -> Edits:
        """The edits on the device of `num_D`: the number of drafts, up to `most_drafts`, of each
        deciding request. A request has one row more than drafts."""
        count_D, device = num_D + 1, num_D.device
        on_host = device.type == "cpu"
        num_rows = int(count_D.sum()) if on_host else len(count_D) * (most_drafts + 1)
        d_E, i_E, size_E, mask_E = to_device(self.row_4E, device)
        row_E = (count_D.cumsum(0) - count_D)[d_E] + i_E
        size_N = torch.zeros(num_rows, dtype=torch.int64, device=device)
        size_N.index_copy_(0, row_E, size_E)
        mask_N = None
        if self.mask_RW is not None:
            mask_N = torch.full_like(size_N, -1).index_copy_(0, row_E, mask_E)
        entries = (self.token_M, self.bias_M, self.repetition_M, self.subtract_M)
        return Edits(
            None if self.mask_RW is None else to_device(self.mask_RW, device),
            mask_N,
            torch.cat([size_N.new_zeros(1), size_N.cumsum(0)]),
            *(to_device(column, device) for column in entries),
        )


def pack_edits(
    histories: Mapping[int, EditHistory], drafts: Mapping[int, Sequence[int]], vocab_size: int
) -> tuple[PackedEdits | None, dict[int, Exception]]:
    """The edits of a step (None if no row has any), and errors by the index d of the request.

    The rows of a request with an error are not edited. Tokens drawn from them must not be used.

    Args:
        histories: of the deciding requests that have edits, by rising d.
        drafts: the drafts of each of these requests, by d.
        vocab_size: larger ids are ignored (they cannot be drawn anyway).
    """
    faults: dict[int, Exception] = {}
    edits: list[_RequestEdits] = []
    matchers = {d: h.matcher for d, h in histories.items() if h.matcher is not None}
    drafts_G = [drafts[d] for d in matchers]
    masks_G = fill_masks([*matchers.values()], drafts_G, -(-vocab_size // 32))
    grammar_masks = dict(zip(matchers, masks_G, strict=True))
    for d, history in histories.items():
        if history.is_spent:
            continue
        try:
            allowed_W = history.mask(vocab_size)
            masks = [] if allowed_W is None else [allowed_W]
            if history.matcher is not None:
                history.matcher.check()
                masks.append(grammar_masks[d])
            mask_XW = np.atleast_2d(functools.reduce(np.bitwise_and, masks)) if masks else None
            entries = history.rows(drafts[d], vocab_size)
            edits.append(_RequestEdits(d, len(drafts[d]) + 1, mask_XW, entries))
        except Exception as error:
            faults[d] = error
    return (_pack(edits) if edits else None), faults


class _RequestEdits(NamedTuple):
    """The edits of deciding request d. All rows of the request have entries for the same tokens.

    mask_XW: one mask for each row, or a single mask for all rows; None: no mask
    """

    d: int
    num_rows: int
    mask_XW: Array | None
    entries: HistoryRows


def _pack(edits: list[_RequestEdits]) -> PackedEdits:
    masks: list[Array] = []
    rows: list[tuple[int, int, int, int]] = []
    for request in edits:
        first_mask, num_masks = -1, 0
        if request.mask_XW is not None:
            first_mask, num_masks = len(masks), len(request.mask_XW)
            masks.extend(request.mask_XW)
        size = len(request.entries.token_U)
        stride = int(num_masks > 1)  # 0: all rows of the request share a mask, or have none
        rows += [(request.d, i, size, first_mask + stride * i) for i in range(request.num_rows)]
    entries = [request.entries for request in edits]
    return PackedEdits(
        np.array(rows, dtype=np.int64).T.copy(),
        np.stack(masks) if masks else None,
        np.concatenate([np.tile(e.token_U, len(e.bias_RU)) for e in entries]),
        np.concatenate([e.bias_RU.ravel() for e in entries]),
        np.concatenate([e.repetition_RU.ravel() for e in entries]),
        np.concatenate([e.subtract_RU.ravel() for e in entries]),
    )

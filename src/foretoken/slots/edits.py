"""Builds `ops.Edits` for the rows of a batch from the histories of its requests.

Row j of a request sees its history as if the drafts before it in the block were accepted.

Shape suffixes: B requests, D those that decide, A those with a grammar, K drafts, N rows of the
batch, E rows that are edited, M entries, X masks of one request, W mask words; U and R of one
request (`history.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from foretoken.ops import DraftBlock, Edits
from foretoken.ops.pinned import to_device
from foretoken.sampling.grammar import fill_masks
from foretoken.slots.history import Array, HistoryRows, SlotHistory


def build_edits(
    histories: Mapping[int, SlotHistory],
    slot_D: Sequence[int],
    drafts: DraftBlock,
    vocab_size: int,
    *,
    without_drafts: bool = False,
) -> tuple[Edits | None, dict[int, Exception]]:
    """Edits of K_b + 1 rows per request, None if nobody has any; and what was raised, by slot.

    The rows of a request whose history could not be read are not edited: what is drawn there must
    not be used.

    Args:
        histories: by slot; requests without one have no edits.
        vocab_size: ids at or past it are ignored (they cannot be drawn anyway).
        without_drafts: who edits has none; so drafts are not looked at, nor the device waited for.
    """
    if not any(slot in histories for slot in slot_D):
        return None, {}
    drafts_D: list[list[int]] = [[] for _ in slot_D]
    if not without_drafts:
        columns = zip(drafts.token_BK.tolist(), drafts.num_B.tolist(), strict=True)
        drafts_D = [token_K[:num] for token_K, num in columns]
    faults: dict[int, Exception] = {}
    found: list[_Found] = []
    grammar_RW = _grammar_masks(histories, dict(zip(slot_D, drafts_D, strict=True)), vocab_size)
    for d, (slot, drafted) in enumerate(zip(slot_D, drafts_D, strict=True)):
        history = histories.get(slot)
        if history is not None and not history.is_spent:
            try:
                masks = [mask for mask in (history.mask(vocab_size),) if mask is not None]
                if history.matcher is not None:
                    history.matcher.check()
                    masks.append(grammar_RW[slot])
                mask_XW = np.atleast_2d(functools.reduce(np.bitwise_and, masks)) if masks else None
                entries = history.rows(drafted, vocab_size)
                found.append(_Found(d, len(drafted) + 1, mask_XW, entries))
            except Exception as error:
                faults[slot] = error
    return (_pack(found, drafts) if found else None), faults


def _grammar_masks(
    histories: Mapping[int, SlotHistory], drafts: Mapping[int, Sequence[int]], vocab_size: int
) -> dict[int, Array]:
    """By slot of a request with a grammar: int32 [drafts + 1, W]."""
    asked = {
        slot: matcher
        for slot in drafts
        if slot in histories and (matcher := histories[slot].matcher) is not None
    }
    drafts_A = [drafts[slot] for slot in asked]
    masks = fill_masks([*asked.values()], drafts_A, -(-vocab_size // 32))
    return dict(zip(asked, masks, strict=True))


class _Found(NamedTuple):
    """The edits of deciding request d: entries for the same tokens in each of its rows.

    mask_XW: of each row, or one for all.
    """

    d: int
    num_rows: int
    mask_XW: Array | None
    entries: HistoryRows


def _pack(found: list[_Found], drafts: DraftBlock) -> Edits:
    """One tensor for each part; where rows begin is found where drafts are."""
    device, width = drafts.num_B.device, drafts.token_BK.shape[1] + 1

    def tensor(array: Array) -> Tensor:
        return to_device(array, device)

    count_D = drafts.num_B + 1
    num_rows = int(count_D.sum()) if device.type == "cpu" else len(count_D) * width
    masks: list[Array] = []
    of_rows: list[tuple[int, int, int, int]] = []
    for d, rows, mask_XW, its_entries in found:
        at, num_masks = -1, 0
        if mask_XW is not None:
            at, num_masks = len(masks), len(mask_XW)
            masks.extend(mask_XW)
        size, step = len(its_entries.token_U), int(num_masks > 1)
        of_rows += [(d, i, size, at + step * i) for i in range(rows)]
    d_E, i_E, size_E, mask_E = tensor(np.array(of_rows, dtype=np.int64).T.copy())
    row_E = (count_D.cumsum(0) - count_D)[d_E] + i_E
    size_N = torch.zeros(num_rows, dtype=torch.int64, device=device).index_copy(0, row_E, size_E)
    start_N1 = torch.cat([size_N.new_zeros(1), size_N.cumsum(0)])
    entries = [f.entries for f in found]
    return Edits(
        mask_RW=tensor(np.stack(masks)) if masks else None,
        mask_N=torch.full_like(size_N, -1).index_copy(0, row_E, mask_E) if masks else None,
        start_N1=start_N1,
        token_M=tensor(np.concatenate([np.tile(e.token_U, len(e.bias_RU)) for e in entries])),
        bias_M=tensor(np.concatenate([e.bias_RU.ravel() for e in entries])),
        repetition_M=tensor(np.concatenate([e.repetition_RU.ravel() for e in entries])),
        subtract_M=tensor(np.concatenate([e.subtract_RU.ravel() for e in entries])),
    )

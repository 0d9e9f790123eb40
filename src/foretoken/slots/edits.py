"""Builds `ops.Edits` for the rows of a batch from the histories of its requests.

Row j of a request sees its history as if the drafts before it in the block were accepted.

Shape suffixes: B requests, K drafts, N rows of the batch, M entries, W mask words; U and R of one
request (`history.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from foretoken.ops import DraftBlock, Edits
from foretoken.slots.history import Array, HistoryRows, SlotHistory


def build_edits(
    histories: Mapping[int, SlotHistory], slot_B: Sequence[int], drafts: DraftBlock, vocab_size: int
) -> tuple[Edits | None, dict[int, Exception]]:
    """Edits of K_b + 1 rows per request, None if nobody has any; and what was raised, by slot.

    The rows of a request whose history could not be read are not edited: what is drawn there must
    not be used.

    Args:
        histories: by slot; requests without one have no edits.
        vocab_size: ids at or past it are ignored (they cannot be drawn anyway).
    """
    if not histories:
        return None, {}
    faults: dict[int, Exception] = {}
    found: list[HistoryRows] = []
    masks: list[Array] = []
    sizes: list[int] = []  # entries of each row
    mask_of: list[int] = []  # of each row
    blocks = zip(slot_B, drafts.token_BK.tolist(), drafts.num_B.tolist(), strict=True)
    for slot, token_K, num_drafts in blocks:
        history, size, at = histories.get(slot), 0, -1
        if history is not None and not history.is_spent:
            try:
                mask = history.mask(vocab_size)
                found.append(history.rows(token_K[:num_drafts], vocab_size))
                size = len(found[-1].token_U)
                if mask is not None:
                    at = len(masks)
                    masks.append(mask)
            except Exception as error:
                faults[slot] = error
        sizes += [size] * (num_drafts + 1)
        mask_of += [at] * (num_drafts + 1)
    if not found:
        return None, faults

    def tensor(array: Array) -> Tensor:
        return torch.from_numpy(array).to(drafts.num_B.device)

    edits = Edits(
        mask_RW=tensor(np.stack(masks)) if masks else None,
        mask_N=tensor(np.array(mask_of, dtype=np.int64)) if masks else None,
        start_N1=tensor(np.cumsum([0, *sizes], dtype=np.int64)),
        token_M=tensor(np.concatenate([np.tile(r.token_U, len(r.bias_RU)) for r in found])),
        bias_M=tensor(np.concatenate([r.bias_RU.ravel() for r in found])),
        repetition_M=tensor(np.concatenate([r.repetition_RU.ravel() for r in found])),
        subtract_M=tensor(np.concatenate([r.subtract_RU.ravel() for r in found])),
    )
    return edits, faults

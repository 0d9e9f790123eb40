"""Builds `ops.Edits` for the rows of a batch from the histories of its requests.

Row j of a request sees its history as if the drafts before it in the block were accepted.

Shape suffixes: N rows of the batch, M entries, U and R of one request (`history.py`), W mask words.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from foretoken.ops import Edits
from foretoken.slots.history import Array, HistoryRows, SlotHistory


def build_edits(
    requests: Iterable[tuple[SlotHistory | None, Sequence[int]]],
    vocab_size: int,
    device: torch.device,
) -> tuple[Edits | None, dict[int, Exception]]:
    """Edits of a batch, None if no request has any; and what was raised, by index of the request.

    The rows of a request whose history could not be read are not edited: what is drawn there must
    not be used.

    Args:
        requests: per request in batch order: its history (None: no edits), its drafts.
        vocab_size: ids at or past it are ignored (they cannot be drawn anyway).
    """
    faults: dict[int, Exception] = {}
    found: list[HistoryRows] = []
    sizes: list[int] = []  # entries of each row
    masks: list[Array] = []
    mask_of: list[int] = []  # of each row
    for index, (history, drafts) in enumerate(requests):
        count = len(drafts) + 1
        rows = mask = None
        if history is not None and not history.is_spent:
            try:
                rows, mask = history.rows(drafts, vocab_size), history.mask(vocab_size)
            except Exception as error:
                faults[index] = error
        if rows is not None:
            found.append(rows)
        sizes += [0 if rows is None else len(rows.token_U)] * count
        mask_of += [-1 if mask is None else len(masks)] * count
        if mask is not None:
            masks.append(mask)
    if not found:
        return None, faults

    def tensor(array: Array) -> Tensor:
        return torch.from_numpy(array).to(device)

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

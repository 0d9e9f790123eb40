"""Builds `ops.Edits` for the rows of a batch from the histories of its requests.

Row j of a request sees its history as if the drafts before it in the block were accepted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from foretoken.ops import Edits
from foretoken.sampling.slots import SlotHistory


class EditFault(Exception):
    """Building the edits of the request at `index` of the batch raised `cause`."""

    def __init__(self, index: int, cause: Exception) -> None:
        super().__init__(index, cause)
        self.index, self.cause = index, cause


@dataclass(slots=True)
class _Entries:
    """One growing list per field of `Edits`."""

    bias: list[tuple[int, int, float]] = field(default_factory=list)
    allow: list[tuple[int, int]] = field(default_factory=list)
    ban_early: list[tuple[int, int]] = field(default_factory=list)
    penalty: list[tuple[int, int, int, float, float, float]] = field(default_factory=list)
    ban_late: list[tuple[int, int]] = field(default_factory=list)


def build_edits(
    rows: Iterable[tuple[int, SlotHistory | None, Sequence[int]]],
    vocab_size: int,
    device: torch.device,
) -> Edits | None:
    """Edits of a batch, or None if no request has any.

    Args:
        rows: per request in batch order: its first row, its history (None: no edits), its drafts.
        vocab_size: ids at or past it are ignored (they cannot be drawn anyway).

    Raises:
        EditFault: naming the request whose history could not be read.
    """
    entries = _Entries()
    found = False
    for index, (first_row, history, drafts) in enumerate(rows):
        if history is None:
            continue
        found = True
        try:
            for j in range(len(drafts) + 1):
                _edit_row(entries, first_row + j, history, drafts[:j], vocab_size)
        except Exception as error:
            raise EditFault(index, error) from error
    return _to_tensors(entries, device) if found else None


def _edit_row(
    entries: _Entries, row: int, history: SlotHistory, before: Sequence[int], vocab_size: int
) -> None:
    params = history.params
    for token, value in (params.logit_bias or {}).items():
        if token < vocab_size:
            entries.bias.append((row, token, value))
    for token in params.allowed_token_ids or ():
        if token < vocab_size:
            entries.allow.append((row, token))
    num_output = len(history.output_ids) + len(before)
    if num_output < params.min_tokens:
        entries.ban_early.extend((row, token) for token in history.stop_ids)
    if params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty:
        _penalize_row(entries, row, history, before)
    for word in history.bad_word_ids:
        if _ends_with(history.output_ids, before, word[:-1]):
            entries.ban_late.append((row, word[-1]))


def _penalize_row(entries: _Entries, row: int, history: SlotHistory, before: Sequence[int]) -> None:
    params = history.params
    counts = history.counts + Counter(before) if before else history.counts
    strength = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    entries.penalty.extend((row, token, count, *strength) for token, count in counts.items())
    if params.repetition_penalty != 1.0:
        unseen = (token for token in history.prompt_tokens if token not in counts)
        entries.penalty.extend((row, token, 0, *strength) for token in unseen)


def _ends_with(output: Sequence[int], before: Sequence[int], tail: Sequence[int]) -> bool:
    """Whether output + before ends with `tail`; an empty tail always matches."""
    if not tail:
        return True
    need = len(tail) - len(before)
    if need > len(output):
        return False
    last = (*output[len(output) - need :], *before) if need > 0 else tuple(before[-len(tail) :])
    return last == tuple(tail)


def _to_tensors(entries: _Entries, device: torch.device) -> Edits:
    def ints(rows: Sequence[tuple[float, ...]], column: int) -> torch.Tensor:
        return torch.tensor([row[column] for row in rows], dtype=torch.int64, device=device)

    def floats(rows: Sequence[tuple[float, ...]], column: int) -> torch.Tensor:
        return torch.tensor([row[column] for row in rows], dtype=torch.float32, device=device)

    return Edits(
        bias_row_M=ints(entries.bias, 0),
        bias_token_M=ints(entries.bias, 1),
        bias_value_M=floats(entries.bias, 2),
        allow_row_M=ints(entries.allow, 0),
        allow_token_M=ints(entries.allow, 1),
        ban_early_row_M=ints(entries.ban_early, 0),
        ban_early_token_M=ints(entries.ban_early, 1),
        penalty_row_M=ints(entries.penalty, 0),
        penalty_token_M=ints(entries.penalty, 1),
        penalty_count_M=ints(entries.penalty, 2),
        penalty_repetition_M=floats(entries.penalty, 3),
        penalty_frequency_M=floats(entries.penalty, 4),
        penalty_presence_M=floats(entries.penalty, 5),
        ban_late_row_M=ints(entries.ban_late, 0),
        ban_late_token_M=ints(entries.ban_late, 1),
    )

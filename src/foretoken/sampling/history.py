"""The edits of one request's logits, kept as arrays so that a new token needs no scan of the text.

Every edit concerns one of the request's *touched* tokens. These are the tokens of its bias, stops
and bad words; with a penalty also the tokens of its output; with a repetition penalty also the
tokens of its prompt. `edits.py` packs the edits of a batch.

Shape suffixes: U touched tokens, R rows of the request (its drafts + 1), W mask words.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretoken.sampling.params import SamplingParams

Array = NDArray[Any]


class HistoryRows(NamedTuple):
    """Entries of `ops.Edits` for R rows of one request: the same U tokens in every row.

    token_U: int64, rising
    bias_RU, repetition_RU, subtract_RU: float32; an entry with 0, 1 and 0 changes nothing
    """

    token_U: Array
    bias_RU: Array
    repetition_RU: Array
    subtract_RU: Array


class EditHistory:
    """The edits of one request and the state that they depend on.

    A generated token costs a binary search, at its first occurrence also a copy of U entries. Rows
    cost a few numpy passes over R x U numbers.

    Args:
        stop_ids: tokens that are banned while the output is shorter than `min_tokens`.
        bad_word_ids: the token ids of each of `bad_words`.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int] = (),
        stop_ids: Sequence[int] = (),
        bad_word_ids: Sequence[Sequence[int]] = (),
    ) -> None:
        self.params = params
        self.output_ids: list[int] = []
        self.matcher = params.grammar.matcher() if params.grammar else None
        self._penalizes = bool(
            params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty
        )
        bias = params.logit_bias or {}
        prompt = prompt_ids if params.repetition_penalty != 1.0 else ()
        words = [tuple(word) for word in bad_word_ids]
        stops = stop_ids if params.min_tokens else ()
        last_ids = [word[-1] for word in words]
        self._token_U = np.unique(np.array([*bias, *prompt, *stops, *last_ids], dtype=np.int64))
        size = len(self._token_U)
        self._count_U = np.zeros(size, dtype=np.int64)  # occurrences in the output
        self._in_prompt_U = np.zeros(size, dtype=bool)
        self._in_prompt_U[self._find(prompt)] = True
        self._bias_U = np.zeros(size, dtype=np.float32)
        self._bias_U[self._find(bias)] = list(bias.values())
        self._bias_U[self._find([word[0] for word in words if len(word) == 1])] = -np.inf
        self._stop_ids = np.array(stops, dtype=np.int64)
        # Bad words of two tokens or more, by their second to last token.
        self._longer_words: dict[int, list[tuple[int, ...]]] = {}
        for word in words:
            if len(word) > 1:
                self._longer_words.setdefault(word[-2], []).append(word)
        self._mask_W: Array | None = None

    @property
    def is_spent(self) -> bool:
        """Whether no later row has edits: only `min_tokens` caused edits, and it is reached."""
        has_entries = self._penalizes or self._longer_words or self._bias_U.any()
        is_long = len(self.output_ids) >= self.params.min_tokens
        has_masks = self.matcher is not None or self.params.allowed_token_ids is not None
        return is_long and not has_entries and not has_masks

    def append(self, token_ids: Sequence[int]) -> None:
        self.output_ids += token_ids
        if self.matcher is not None:
            self.matcher.append(token_ids)
        if self._penalizes:
            self._touch(token_ids)
            np.add.at(self._count_U, self._find(token_ids), 1)

    def mask(self, vocab_size: int) -> Array | None:
        """The bits of `allowed_token_ids`, int32 [W]; None if it is not set."""
        if self.params.allowed_token_ids is None:
            return None
        if self._mask_W is None:
            allowed = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
            allowed[[token for token in self.params.allowed_token_ids if token < vocab_size]] = 1
            self._mask_W = np.packbits(allowed, bitorder="little").view("<i4")
        return self._mask_W

    def rows(self, drafts: Sequence[int], vocab_size: int) -> HistoryRows:
        """The entries of the request's rows: one row for each draft, and one after the last draft.

        Row j assumes that the drafts before it were accepted; a placeholder of -1 changes nothing.
        Tokens from `vocab_size` on have no entries (they cannot be drawn anyway).
        """
        num_rows = len(drafts) + 1
        if self._penalizes:  # a rejected draft stays touched, with entries that change nothing
            self._touch([draft for draft in drafts if draft >= 0])
        bias_RU = np.repeat(self._bias_U[None], num_rows, axis=0)
        num_without_stop = min(max(self.params.min_tokens - len(self.output_ids), 0), num_rows)
        if num_without_stop and len(self._stop_ids):
            bias_RU[:num_without_stop, self._find(self._stop_ids)] = -np.inf
        if self._longer_words:
            self._ban_words(bias_RU, drafts)
        subtract_RU = np.zeros(bias_RU.shape, dtype=np.float32)
        repetition_RU = np.ones(bias_RU.shape, dtype=np.float32)
        if self._penalizes:
            self._penalize(repetition_RU, subtract_RU, drafts)
        end = int(np.searchsorted(self._token_U, vocab_size))
        return HistoryRows(
            self._token_U[:end], bias_RU[:, :end], repetition_RU[:, :end], subtract_RU[:, :end]
        )

    def _penalize(self, repetition_RU: Array, subtract_RU: Array, drafts: Sequence[int]) -> None:
        params = self.params
        count_RU = np.repeat(self._count_U[None], len(drafts) + 1, axis=0)
        for j, draft in enumerate(drafts):
            if draft >= 0:
                count_RU[j + 1 :, self._find([draft])] += 1
        repetition_RU[(count_RU > 0) | self._in_prompt_U] = params.repetition_penalty
        frequency, presence = params.frequency_penalty, params.presence_penalty
        if frequency or presence:
            subtract_RU[:] = frequency * count_RU + presence * (count_RU > 0)

    def _ban_words(self, bias_RU: Array, drafts: Sequence[int]) -> None:
        """Ban the last token of a bad word in each row that follows the word's other tokens."""
        longest = max(len(word) for words in self._longer_words.values() for word in words)
        recent = [*self.output_ids[-longest:], *drafts]
        for j in range(len(drafts) + 1):
            before = recent[: len(recent) - len(drafts) + j]
            for word in self._longer_words.get(before[-1], ()) if before else ():
                if tuple(before[1 - len(word) :]) == word[:-1]:
                    bias_RU[j, self._find(word[-1:])] = -np.inf

    def _find(self, token_ids: Iterable[int]) -> Array:
        """The indices of touched tokens; for other tokens the indices to insert them at."""
        return np.searchsorted(self._token_U, np.array([*token_ids], dtype=np.int64))

    def _touch(self, token_ids: Sequence[int]) -> None:
        """Add the tokens that are not yet touched, with entries that change nothing."""
        index = self._find(token_ids).clip(max=len(self._token_U) - 1)
        touched = set(self._token_U[index].tolist()) if len(self._token_U) else set()
        new = np.array(sorted({*token_ids} - touched), dtype=np.int64)
        if not len(new):
            return
        index = self._find(new)
        self._token_U = np.insert(self._token_U, index, new)
        self._count_U = np.insert(self._count_U, index, 0)
        self._in_prompt_U = np.insert(self._in_prompt_U, index, False)
        self._bias_U = np.insert(self._bias_U, index, 0.0)

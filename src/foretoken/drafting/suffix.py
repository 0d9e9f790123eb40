"""Suffix decoding: draft the tokens that most often followed the longest suffix seen before.

The suffix is looked up in the request's own tokens, in the outputs of finished requests, and in a
corpus (Oliaro et al. 2024, "SuffixDecoding"). Drafts continue as long as they are likely, judged by
how often each token followed. There is no model and no q: drafts are verified as one-hot. The
algorithm is in `ops/backends/native/csrc/suffix.cpp`.

Shape suffixes: S slots, N indexes that all requests share.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from foretoken.drafting.base import Drafter, DrafterSetup, q_flags
from foretoken.errors import ConfigError
from foretoken.ops import DraftBlock, unavailable
from foretoken.ops.steps import DraftRequests
from foretoken.ops.suffix import Array, SuffixIndexes, SuffixOptions, propose
from foretoken.slots.table import SlotTable


class Suffix(Drafter):
    """Drafts by looking up the request's own tokens and other requests' outputs.

    A request with its own seed that draws at random does not use other requests' outputs, because
    its text would depend on these. The output would even be biased if another request had the same
    seed: the noise that verifies the drafts would be the noise with which they were drawn. At T=0
    and under `coupled` drafts change no text, so such requests use other requests' outputs.
    """

    options = frozenset({
        "suffix_corpus", "suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests",
        "suffix_decoding_max_cached_tokens", "suffix_decoding_max_spec_factor",
        "suffix_decoding_min_token_prob",
    })  # fmt: skip
    looks_up = True

    def __init__(self, setup: DrafterSetup) -> None:
        if (reason := unavailable("native")) is not None:
            remedy = f"It needs the native kernels: {reason}. `ngram` does not."
            raise ConfigError("speculative_config.method", "suffix", "another drafter", remedy)
        options = setup.speculation
        self._limits = SuffixOptions(
            options.suffix_decoding_max_tree_depth,
            options.suffix_decoding_max_spec_factor,
            options.suffix_decoding_min_token_prob,
        )
        path = options.suffix_corpus
        corpora = [] if path is None else [_read_corpus(path, setup)]
        self._max_finished = options.suffix_decoding_max_cached_requests
        size = options.suffix_decoding_max_cached_tokens if self._max_finished else 0
        rings = [np.empty(len(ids) + 1, dtype=np.int32) for ids in corpora]
        rings += [np.empty(size, dtype=np.int32)] if size else []
        # First the index of the corpus, if there is one, then that of finished outputs.
        self._shared_indexes = SuffixIndexes(rings)
        for i, ids in enumerate(corpora):
            self._shared_indexes.append(i, ids)
        self._num_corpora = len(corpora)
        self._finished_lengths = deque[int]()  # of the indexed outputs, the oldest first
        self.bytes_shared = sum(
            ring.nbytes + self._shared_indexes.num_bytes(len(ring)) for ring in rings
        )
        width = setup.max_model_len + options.num_drafts
        self.bytes_per_slot = SuffixIndexes.num_bytes(width)

    def allocate(self, slots: SlotTable, num_blocks: int) -> None:
        self.slots = slots
        if self._max_finished:
            self._shared_indexes.resize(self._num_corpora, 0)
            self._finished_lengths.clear()
        self._slot_indexes = SuffixIndexes(list(slots.token_SL)[: slots.num_slots])
        self._output_start_S = [0] * slots.num_slots
        self._num_shared: dict[int, int] = {}  # by slot: usable shared indexes
        self._salted = set[int]()  # slots of requests with a `cache_salt`

    def propose(self, requests: DraftRequests) -> DraftBlock:
        num_shared = [self._usable_indexes(slot) for slot in requests.slot_B.tolist()]
        num_shared_B = torch.from_numpy(np.array(num_shared, dtype=np.int64))
        token_BK, num_B, expected_B = propose(
            self._slot_indexes, self._shared_indexes, num_shared_B, requests, self._limits
        )
        no_q_B = q_flags(len(num_B), num_B.device, real=False)
        return DraftBlock(token_BK, num_B, None, no_q_B, expected_B=expected_B)

    def _usable_indexes(self, slot: int) -> int:
        """How many of the shared indexes the slot's request may use; also record where the output
        of a new request begins. Only the corpus serves requests that draw at random with a seed
        (see the class), or with a `cache_salt`: a trace would show text of other requests."""
        if (count := self._num_shared.get(slot)) is None:
            request, length = self.slots.admitted[slot], int(self.slots.length_S[slot])
            self._output_start_S[slot] = max(request.num_prompt, length - 1)
            needs_fixed_drafts = request.depends_on_drafts and request.params.seed is not None
            if request.params.cache_salt is not None:
                self._salted.add(slot)
            uses_outputs = not needs_fixed_drafts and slot not in self._salted
            count = len(self._shared_indexes.size_N) if uses_outputs else self._num_corpora
            self._num_shared[slot] = count
        return count

    def release(self, slot: int) -> None:
        """Forget the request; index its output if outputs are kept and it has no `cache_salt`."""
        if self._num_shared.pop(slot, None) is not None:
            self._slot_indexes.resize(slot, 0)
            if slot in self._salted:
                self._salted.remove(slot)
            elif self._max_finished:
                self._index_output(self.slots.text(slot, self._output_start_S[slot]))

    def held_slots(self) -> Iterable[int]:
        return self._num_shared

    def _index_output(self, text: Array) -> None:
        """Index a finished output; first drop old outputs until number and size allow it."""
        lengths, index = self._finished_lengths, self._num_corpora
        size, room = int(self._shared_indexes.size_N[index]), self._shared_indexes.room(index, text)
        while lengths and (len(lengths) == self._max_finished or size > room):
            size -= lengths.popleft()
        self._shared_indexes.resize(index, size)
        lengths.append(self._shared_indexes.append(index, text))


def _read_corpus(path: str, setup: DrafterSetup) -> Array:
    """Token ids of a file of UTF-8 text; `ConfigError` if file, tokens or tokenizer are missing."""
    field, bound = "speculative_config.suffix_corpus", "a file of UTF-8 text"
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(field, path, bound, f"Byte {error.start} is not UTF-8.") from None
    except OSError as error:
        raise ConfigError(field, path, bound, f"{error.strerror}.") from None
    if setup.tokenizer is None:
        raise ConfigError(field, path, "left out", "The target has no tokenizer to read it with.")
    ids = setup.tokenizer.encode(text, add_special_tokens=False, verbose=False)
    if not ids:
        raise ConfigError(field, path, f"{bound} with a token", "It is empty.")
    return np.array(ids, dtype=np.int32)

"""Draft the tokens that a request's parameters force, or that the caller expects: for example, a
file that is to be edited, as in OpenAI's predicted outputs.

There is no model and no q: drafts are verified as one-hot, so a wrong draft only costs time.

Shape suffix: N places in the prediction after a token equal to the output's last token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from foretoken.config import MAX_SPECULATIVE_TOKENS
from foretoken.drafting.base import Drafter, DrafterSetup, one_hot_block
from foretoken.ops import DraftBlock
from foretoken.ops.steps import DraftRequests
from foretoken.sampling.history import Array
from foretoken.sampling.params import SamplingParams
from foretoken.slots.table import SlotTable

_MAX_RUN = 8  # longer runs of equal tokens count as runs of this length
_MAX_EDIT = 10  # the most points that an edit costs: 3 equal tokens are followed at any distance

Continuation = Callable[[Array], Sequence[int] | Array]
"""A function that takes a sample's output, int32, and returns the ids that must follow, or that a
prediction expects; no ids if neither is known.

Each sample has its own function. It may keep state, because the output only grows from call to
call. After a preemption a new function gets the whole output at once and must return the same ids.
"""


def only_allowed(params: SamplingParams) -> Continuation | None:
    """Repeat the token of a request that allows only one token."""
    allowed = set(params.allowed_token_ids or ())
    if len(allowed) != 1:
        return None
    repeated = [*allowed] * MAX_SPECULATIVE_TOKENS
    return lambda output: repeated


def by_grammar(params: SamplingParams) -> Continuation | None:
    """Follow the grammar of a request."""
    if params.grammar is None:
        return None
    matcher, num_read = params.grammar.matcher(), 0

    def forced_tokens(output: Array) -> Sequence[int]:
        nonlocal num_read
        matcher.append(output[num_read:].tolist())
        num_read = len(output)
        return matcher.forced_tokens()

    return forced_tokens


FORCING: list[Callable[[SamplingParams], Continuation | None]] = [only_allowed, by_grammar]
"""Functions that make the continuation for one parameter, or None if a request does not set it."""


class Forced(Drafter):
    """Drafts the tokens of the request's first continuation that returns any tokens."""

    looks_up = True

    def __init__(self, setup: DrafterSetup) -> None:
        pass  # nothing is loaded

    def allocate(self, slots: SlotTable, num_blocks: int) -> None:
        self.slots = slots
        self._continuations: dict[int, list[Continuation]] = {}

    def continuations(self, params: SamplingParams) -> list[Continuation]:
        """The continuations of a sample with these parameters, in the order of trial."""
        candidates = (make(params) for make in FORCING)
        return [continuation for continuation in candidates if continuation is not None]

    def propose(self, requests: DraftRequests) -> DraftBlock:
        drafts, faults = list[list[int]](), dict[int, Exception]()
        for slot, num in zip(requests.slot_B.tolist(), requests.num_B.tolist(), strict=True):
            try:
                drafts.append(self._draft(slot, num))
            except Exception as error:  # of a continuation; only this request ends
                drafts.append([])
                faults[slot] = error
        return replace(one_hot_block(drafts, self.slots.device), faults=faults)

    def _draft(self, slot: int, max_drafts: int) -> list[int]:
        request = self.slots.admitted[slot]
        if slot not in self._continuations:
            self._continuations[slot] = self.continuations(request.params)
        output = self.slots.text(slot, request.num_prompt)
        output.flags.writeable = False
        for continuation in self._continuations[slot]:
            if drafts := [int(token) for token in continuation(output)[:max_drafts]]:
                return drafts
        return []

    def release(self, slot: int) -> None:
        self._continuations.pop(slot, None)

    def held_slots(self) -> Iterable[int]:
        return self._continuations


class Alignment:
    """Follows a prediction while the output agrees with it, and finds the place again after an
    edit. The state depends only on the tokens of the two texts, not on rounds or preemption.

    Args:
        prediction: token ids; 4 bytes of memory each.
    """

    def __init__(self, prediction: Sequence[int]) -> None:
        self._bytes = np.array(prediction, dtype=np.int32).tobytes()
        self.text: Array = np.frombuffer(self._bytes, dtype=np.int32)
        self._num_read = 0
        self._next = 0  # index of the predicted next token; the length of `text`: no prediction
        self._sure_end = 0  # index in the prediction up to which the output surely followed it
        self._num_unsure = 0  # tokens of the output after that point
        self._doubts = 0  # tokens that must still agree until the output surely follows again

    def __call__(self, output: Array) -> Array:
        """The predicted tokens after this output: the rest of the prediction, or no tokens."""
        for end in range(self._num_read, len(output)):
            self._read(output[: end + 1])
        self._num_read = len(output)
        return self.text[self._next :]

    def _read(self, output: Array) -> None:
        self._num_unsure += 1
        if self._next == len(self.text) or self.text[self._next] != output[-1]:
            self._resume(output)
            return
        self._next += 1
        self._doubts -= 1
        if self._doubts <= 0:
            self._sure_end, self._num_unsure = self._next, 0

    def _resume(self, output: Array) -> None:
        """Find where the prediction continues after an unexpected token, and set `_next`.

        Candidates are all places of the prediction after a token equal to the output's last token.
        A candidate has 4 points for each token of the run of equal tokens before it, minus the size
        of the edit that it implies (at most `_MAX_EDIT`): the number of inserted or of deleted
        tokens, whichever is larger. The best is followed if it has -1 points or more. Otherwise the
        first unexpected token is assumed to replace one predicted token, and after further
        unexpected tokens nothing is predicted.
        """
        if self._num_unsure >= _MAX_EDIT + 3 and output[-3:].tobytes() not in self._bytes:
            # A shortcut: now every edit costs `_MAX_EDIT`, so a candidate needs a run of 3 equal
            # tokens, and the prediction has no such run.
            self._next = len(self.text)
            return
        end_N = np.flatnonzero(self.text == output[-1]) + 1
        run_N = np.ones_like(end_N)  # lengths of the runs of equal tokens before `end_N`
        for back in range(1, min(_MAX_RUN, len(output))):
            before_N = self.text[np.maximum(end_N - 1 - back, 0)]
            is_longer_N = (run_N == back) & (end_N > back) & (before_N == output[-1 - back])
            if not is_longer_N.any():
                break
            run_N += is_longer_N
        distance_N = np.abs(end_N - self._sure_end)
        edit_N = (np.maximum(distance_N, self._num_unsure) - run_N).clip(0, _MAX_EDIT)
        point_N = 4 * run_N - edit_N
        best = np.lexsort((distance_N, -point_N))[:1]  # empty if there is no candidate
        if (point_N[best] >= -1).any():
            self._next = int(end_N[best[0]])
            is_near = edit_N[best[0]] < _MAX_EDIT
            self._doubts = 1 if is_near else _MAX_RUN - int(run_N[best[0]])
        else:
            replaces_one = self._num_unsure == 1
            self._next = min(self._sure_end + 1, len(self.text)) if replaces_one else len(self.text)
            self._doubts = 1


class Prediction(Forced):
    """Drafts forced tokens, else the rest of a request's `prediction`."""

    prediction_readers = ("prediction",)

    def __init__(self, setup: DrafterSetup) -> None:
        super().__init__(setup)
        self.bytes_per_slot = 4 * setup.max_model_len

    def continuations(self, params: SamplingParams) -> list[Continuation]:
        prediction = cast(Sequence[int], params.prediction)  # a text is encoded at admission
        aligned = [Alignment(prediction)] if prediction else []
        return [*super().continuations(params), *aligned]

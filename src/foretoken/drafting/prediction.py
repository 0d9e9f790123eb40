"""Draft from a text that the caller expects, as in OpenAI's predicted outputs: for example, a file
that is to be edited. Tokens that the request's parameters force are drafted before it.

No model and no q: drafts are verified as one-hot.

Shape suffix: N places in the prediction after a token equal to the output's last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from foretoken.drafting.base import DrafterSetup
from foretoken.drafting.forced import Continuation, Forced
from foretoken.sampling.history import Array
from foretoken.sampling.params import SamplingParams

_MAX_RUN = 8  # equal tokens that are counted; among runs of this length the nearest place wins
_MAX_EDIT = 10  # the most points that an edit costs, so that 3 equal tokens are followed anywhere


class Alignment:
    """Follows a prediction while the output agrees with it, and finds the place again after an
    edit.

    The state depends only on the tokens of the two texts. It does not depend on where rounds of
    drafting end, on the rest of the batch, or on preemption.

    Args:
        prediction: token ids; 4 bytes of memory each.
    """

    def __init__(self, prediction: Sequence[int]) -> None:
        self._bytes = np.array(prediction, dtype=np.int32).tobytes()
        self.text: Array = np.frombuffer(self._bytes, dtype=np.int32)
        self._num_read = 0
        self._next = 0  # index of the predicted next token; the text's length: none is predicted
        self._left_at = 0  # index in the prediction up to which the output surely followed it
        self._since = 0  # tokens of the output after that point
        self._doubts = 0  # tokens that must still agree before the output surely follows again

    def __call__(self, output: Array) -> Array:
        """The predicted tokens after this output: the rest of the prediction, or none."""
        for end in range(self._num_read, len(output)):
            self._read(output[: end + 1])
        self._num_read = len(output)
        return self.text[self._next :]

    def _read(self, output: Array) -> None:
        """Update the state with the output's last token."""
        self._since += 1
        if self._next == len(self.text) or self.text[self._next] != output[-1]:
            self._resume(output)
            return
        self._next += 1
        self._doubts -= 1
        if self._doubts <= 0:
            self._left_at, self._since = self._next, 0

    def _resume(self, output: Array) -> None:
        """Find where the prediction continues after an unexpected token, and set `_next`.

        Candidates are all places of the prediction after a token equal to the output's last one. A
        candidate has 4 points for each token of the run of equal tokens before it, less the size of
        the edit that it implies: the number of inserted or of deleted tokens, whichever is larger.
        The best candidate is followed unless it has less than -1 points. If there is no such
        candidate, the first unexpected token is assumed to replace one predicted token, and after
        further unexpected tokens nothing is predicted.
        """
        if self._since >= _MAX_EDIT + 3 and output[-3:].tobytes() not in self._bytes:
            # A shortcut: by now every edit costs `_MAX_EDIT`, so a candidate needs a run of 3 equal
            # tokens, and the prediction has no such run.
            self._next = len(self.text)
            return
        end_N = np.flatnonzero(self.text == output[-1]) + 1
        run_N = np.ones_like(end_N)  # lengths of the runs of equal tokens that end there
        for back in range(1, min(_MAX_RUN, len(output))):
            before_N = self.text[np.maximum(end_N - 1 - back, 0)]
            is_longer_N = (run_N == back) & (end_N > back) & (before_N == output[-1 - back])
            if not is_longer_N.any():
                break
            run_N += is_longer_N
        distance_N = np.abs(end_N - self._left_at)
        edit_N = (np.maximum(distance_N, self._since) - run_N).clip(0, _MAX_EDIT)
        point_N = 4 * run_N - edit_N
        best = np.lexsort((distance_N, -point_N))[:1]  # empty if there is no candidate
        if (point_N[best] >= -1).any():
            self._next = int(end_N[best[0]])
            is_near = edit_N[best[0]] < _MAX_EDIT
            self._doubts = 1 if is_near else _MAX_RUN - int(run_N[best[0]])
        else:
            replaces_one = self._since == 1
            self._next = min(self._left_at + 1, len(self.text)) if replaces_one else len(self.text)
            self._doubts = 1


class Prediction(Forced):
    """Drafts the rest of a request's `prediction`."""

    prediction_readers = ("prediction",)

    def __init__(self, setup: DrafterSetup) -> None:
        super().__init__(setup)
        self.bytes_per_slot = 4 * setup.max_model_len

    def continuations(self, params: SamplingParams) -> list[Continuation]:
        """Forced tokens, then the prediction."""
        prediction = cast(Sequence[int], params.prediction)  # a text is encoded at admission
        aligned = [Alignment(prediction)] if prediction else []
        return [*super().continuations(params), *aligned]

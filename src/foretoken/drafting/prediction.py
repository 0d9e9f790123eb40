"""Draft from a text that the caller expects, as in OpenAI's predicted outputs; for example a file
that is to be edited. Forced tokens go first.

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

_LONGEST = 8  # tokens that are compared; among longer runs the nearest place wins
_FAR = 10  # the most that an edit can cost, so that 3 equal tokens in a row are followed anywhere


class Alignment:
    """Follows a prediction while the output agrees with it, and finds it again after an edit.

    The state depends only on the two texts, token by token: not on where rounds of drafting end,
    on the rest of the batch, or on preemption.

    Args:
        prediction: token ids; 4 bytes of memory each.
    """

    def __init__(self, prediction: Sequence[int]) -> None:
        self._bytes = np.array(prediction, dtype=np.int32).tobytes()
        self.text: Array = np.frombuffer(self._bytes, dtype=np.int32)
        self._num_read = 0
        self._next = 0  # the place in the prediction that comes next; its end: it is not followed
        self._left = 0  # how far the output surely followed it
        self._since = 0  # tokens of the output since then
        self._doubts = 0  # tokens that must agree before it surely follows again

    def __call__(self, output: Array) -> Array:
        """The rest of the prediction after this output."""
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
            self._left, self._since = self._next, 0

    def _resume(self, output: Array) -> None:
        """Find where the prediction goes on after an unexpected token.

        Candidates are all places after an equal token. A candidate has 4 points for each token of
        the run of equal tokens before it, less the size of the edit that it implies: inserted or
        deleted tokens, whichever are more. The best one is followed unless it has less than -1
        points. If there is none, the first unexpected token is assumed to replace one token.
        """
        if self._since >= _FAR + 3 and output[-3:].tobytes() not in self._bytes:
            # A shortcut: this far away it takes three equal tokens in a row.
            self._next = len(self.text)
            return
        end_N = np.flatnonzero(self.text == output[-1]) + 1
        run_N = np.ones_like(end_N)
        for back in range(1, min(_LONGEST, len(output))):
            before_N = self.text[np.maximum(end_N - 1 - back, 0)]
            goes_on_N = (run_N == back) & (end_N > back) & (before_N == output[-1 - back])
            if not goes_on_N.any():
                break
            run_N += goes_on_N
        away_N = np.abs(end_N - self._left)
        edit_N = (np.maximum(away_N, self._since) - run_N).clip(0, _FAR)
        point_N = 4 * run_N - edit_N
        best = np.lexsort((away_N, -point_N))[:1]
        if (point_N[best] >= -1).any():
            self._next = int(end_N[best[0]])
            is_near = edit_N[best[0]] < _FAR
            self._doubts = 1 if is_near else _LONGEST - int(run_N[best[0]])
        else:
            self._next = min(self._left + 1, len(self.text)) if self._since == 1 else len(self.text)
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

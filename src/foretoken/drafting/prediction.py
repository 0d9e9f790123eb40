"""Draft from a text that the caller expects, as in OpenAI's predicted outputs: most of a file that
is edited, say. Forced tokens go first.

No model and no q: drafts are verified as one-hot.

Shape suffix: N places of the prediction behind a token like the output's last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from foretoken.drafting.base import DrafterSetup
from foretoken.drafting.forced import Forced
from foretoken.sampling.forced import Continuation
from foretoken.sampling.history import Array
from foretoken.sampling.params import SamplingParams

_LONGEST = 8  # tokens that are compared; of more, nearness decides
_FAR = 10  # tokens of an edit; more of them cost no more, so that 3 in a row are followed anywhere


class Alignment:
    """Follows a prediction while the output is like it, and finds the way back after an edit.

    A function of the two texts alone, token by token: where rounds of drafting end, what else is in
    the batch, and preemption change nothing.

    Args:
        prediction: token ids; 4 bytes of memory each.
    """

    def __init__(self, prediction: Sequence[int]) -> None:
        self._bytes = np.array(prediction, dtype=np.int32).tobytes()
        self.text: Array = np.frombuffer(self._bytes, dtype=np.int32)
        self._num_read = 0
        self._next = 0  # where it is followed; its end, while nothing is alike
        self._left = 0  # how far it was surely followed, and how many tokens came since
        self._since = 0
        self._doubts = 0  # tokens that have to agree before it surely is

    def __call__(self, output: Array) -> Array:
        """What the prediction goes on with behind this output."""
        for end in range(self._num_read, len(output)):
            self._read(output[: end + 1])
        self._num_read = len(output)
        return self.text[self._next :]

    def _read(self, output: Array) -> None:
        """Take in the last token."""
        self._since += 1
        if self._next == len(self.text) or self.text[self._next] != output[-1]:
            self._resume(output)
            return
        self._next += 1
        self._doubts -= 1
        if self._doubts <= 0:
            self._left, self._since = self._next, 0

    def _resume(self, output: Array) -> None:
        """Find where the prediction goes on behind a token that was not expected.

        Of all places behind such a token the best has the longest run of equal tokens before it, at
        4 points each, less the tokens of the edit that it makes of the difference: inserted or
        deleted ones, whichever are more. One with less than -1 points is not followed. Where there
        is none, the first token off the text is taken to stand in the place of another.
        """
        if self._since >= _FAR + 3 and output[-3:].tobytes() not in self._bytes:
            self._next = len(self.text)  # so far away three in a row are the least: seen at once
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
    """Drafts what a request's `prediction` goes on with."""

    prediction_readers = ("prediction",)

    def __init__(self, setup: DrafterSetup) -> None:
        super().__init__(setup)
        self.bytes_per_slot = 4 * setup.max_model_len

    def continuations(self, params: SamplingParams) -> list[Continuation]:
        """Forced tokens, then the prediction."""
        prediction = cast(Sequence[int], params.prediction)  # a text was encoded at admission
        aligned = [Alignment(prediction)] if prediction else []
        return [*super().continuations(params), *aligned]

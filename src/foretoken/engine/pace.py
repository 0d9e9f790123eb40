"""How many tokens of prompts fit into a step, by costs measured at start. No torch.

Charter: a step in which requests decode stays within `max_step_seconds`, prompts included. The size
of a chunk follows from the requests of the step and from costs measured before the first request,
never from the times of recent steps: a busy machine changes no chunk.

The time of a step is the sum of three parts: the decode step without prompts; the rows of prompt
tokens; and a time for each pair of a prompt token and an earlier token of the same prompt. On two
AVX2 cores a chunk of 64 tokens of the embedded target takes 23 ms at the beginning of a prompt and
94 ms after 1 900 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foretoken.drafting.control import Curve, StepCosts, StepTable


@dataclass(frozen=True, slots=True)
class PromptCosts:
    """Costs of steps that compute only prompts.

    Attributes:
        tokens: sizes of at least two measured steps, rising.
        seconds: their times, without the time that `pair` accounts for.
        pair: seconds for each pair of a token and an earlier token of the same prompt.
    """

    tokens: Sequence[int]
    seconds: Sequence[float]
    pair: float = 0.0

    def shown(self) -> str:
        """The costs as a text: milliseconds by number of tokens."""
        pairs = zip(self.tokens, self.seconds, strict=True)
        steps = ", ".join(f"{tokens}: {1e3 * seconds:.2f}" for tokens, seconds in pairs)
        return f"{steps} ms; and {1e6 * self.pair:.3f} us for each pair of tokens"

    def of_tokens(self, tokens: Any) -> Any:
        """Seconds of a step of `tokens` prompt tokens, without `pair`; 0 for no tokens.

        Interpolated between measured steps, and extrapolated beyond the largest.
        """
        x, y = np.asarray(self.tokens, dtype=float), np.asarray(self.seconds, dtype=float)
        beyond = np.maximum(tokens - x[-1], 0) * (y[-1] - y[-2]) / (x[-1] - x[-2])
        return np.where(tokens > 0, np.interp(tokens, x, y) + beyond, 0.0)

    def mixed_step(self, decoding: Any, rows: Any, tokens: Any, pairs: Any) -> Any:
        """Seconds of a step that decodes some requests and computes tokens of prompts.

        Prompt tokens add the difference between two prompt steps, of `rows + tokens` and of `rows`
        tokens: the decode step has read the weights already. But the step takes no less than a
        prompt step of `rows + tokens` tokens, because on a GPU only steps without prompts are
        replayed as graphs (12 ms instead of 5 next to eight requests of an 8B shape).

        Args:
            decoding: seconds of the step without prompts.
            rows: decoding requests and their drafts.
            tokens: prompt tokens.
            pairs: pairs of a prompt token and an earlier token of the same prompt.
        """
        prompt_step = self.of_tokens(rows + tokens)
        seconds = np.maximum(decoding + prompt_step - self.of_tokens(rows), prompt_step)
        return np.where(tokens > 0, seconds + self.pair * pairs, decoding)


@dataclass(slots=True)
class Room:
    """The room for prompts in a step in which requests decode.

    All attributes except `costs` are numbers, or arrays of one shape.

    Attributes:
        decoding: seconds that the step takes without prompts.
        rows: number of decoding requests and their drafts.
        most: seconds that the step may take.
        tokens, pairs: prompt tokens in the step so far, and their pairs (`PromptCosts.pair`).
    """

    costs: PromptCosts
    decoding: Any
    rows: Any
    most: Any
    tokens: Any = 0
    pairs: Any = 0.0

    @classmethod
    def of_step(cls, costs: PromptCosts, max_seconds: float, decoding: Any, rows: Any) -> Room:
        """The room in a step that may take `max_seconds`.

        If twice the time of the step with one prompt token is longer, then that is the limit. So
        prompts get at least half of a step.
        """
        least = costs.mixed_step(decoding, rows, 1, 0.0)
        return cls(costs, decoding, rows, np.maximum(max_seconds, 2 * least))

    def fitting(self, start: Any, wanted: Any, part: float = 1.0) -> Any:
        """How many tokens of a prompt's next chunk fit into the room, by bisection.

        Args:
            start: tokens before the chunk in its prompt.
            wanted: the most tokens of the chunk.
            part: the part of the room, 0..1, that prompts may take, this chunk included.
        """
        most = self.decoding + part * (self.most - self.decoding)
        low, high = np.zeros_like(wanted), np.asarray(wanted)
        while np.any(low < high):
            count = (low + high + 1) // 2
            tokens, pairs = self.tokens + count, self.pairs + count * (start + count / 2)
            fits = self.costs.mixed_step(self.decoding, self.rows, tokens, pairs) <= most
            low, high = np.where(fits, count, low), np.where(fits, high, count - 1)
        return low

    def take(self, start: int, wanted: int, part: float) -> int:
        """As `fitting`, and add the chunk to the step. The first chunk of a step is never empty."""
        count = max(int(self.fitting(start, wanted, part)), int(not self.tokens))
        self.tokens += count
        self.pairs += count * (start + count / 2)
        return count


class DecodeCosts:
    """Predicts the seconds of decode steps from measured times; later steps change nothing."""

    def __init__(self, table: StepTable, *, lockstep: bool) -> None:
        """lockstep: every request costs as many drafts as the request with the most drafts."""
        self._costs, self._lockstep = StepCosts(table), lockstep
        self._curves: dict[int, Curve] = {}
        self._index_K = np.arange(table.rest_JK1.shape[1] - 1)

    def seconds(self, drafts: Sequence[int], context: int) -> float:
        """Seconds of a step.

        Args:
            drafts: number of drafts of each request.
            context: tokens of all requests together.
        """
        batch, most = len(drafts), max(drafts, default=0)
        if not batch:
            return 0.0
        if batch not in self._curves:
            self._curves[batch] = self._costs.curve(batch)
        curve = self._curves[batch]
        counts = [most] * batch if self._lockstep else drafts
        live_K = (np.array(counts)[:, None] > self._index_K).sum(axis=0)
        return float(curve.seconds(sum(counts) / batch, curve.drafting(live_K), context))


class Pace:
    """Bounds the time of steps in which requests decode, by the prompt tokens in them."""

    def __init__(
        self, table: StepTable, prompts: PromptCosts, max_seconds: float, *, lockstep: bool
    ) -> None:
        self.prompts, self.max_seconds = prompts, max_seconds
        self._decode = DecodeCosts(table, lockstep=lockstep)

    def room(self, drafts: Sequence[int], context: int) -> Room:
        """The room for prompts in a step; `drafts` and `context` as in `DecodeCosts.seconds`."""
        decoding, rows = self._decode.seconds(drafts, context), len(drafts) + sum(drafts)
        return Room.of_step(self.prompts, self.max_seconds, decoding, rows)

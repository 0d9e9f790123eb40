"""How many tokens of prompts fit into a step, by costs measured at start. No torch.

A step in which requests decode stays within `max_step_seconds`, prompts included. Chunks depend
only on costs measured before the first request, not on recent steps: a busy machine changes no
chunk.

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
        pairs = zip(self.tokens, self.seconds, strict=True)
        steps = ", ".join(f"{tokens}: {1e3 * seconds:.2f}" for tokens, seconds in pairs)
        return f"{steps} ms; and {1e6 * self.pair:.3f} us for each pair of tokens"

    def prompt_step(self, tokens: Any) -> Any:
        """Seconds of a step of `tokens` prompt tokens, without `pair`; 0 for no tokens."""
        x, y = np.asarray(self.tokens, dtype=float), np.asarray(self.seconds, dtype=float)
        beyond = np.maximum(tokens - x[-1], 0) * (y[-1] - y[-2]) / (x[-1] - x[-2])
        return np.where(tokens > 0, np.interp(tokens, x, y) + beyond, 0.0)

    def mixed_step(self, decoding: Any, rows: Any, tokens: Any, pairs: Any) -> Any:
        """Seconds of a step that decodes some requests and computes tokens of prompts.

        Args:
            decoding: seconds of the step without prompts.
            rows: number of decoding requests and their drafts.
            tokens: number of prompt tokens.
            pairs: number of pairs of a prompt token and an earlier token of the same prompt.
        """
        # The rows of prompts add the difference between two prompt steps: the decode step has read
        # the weights already. But on a GPU only steps without prompts are replayed as graphs, so
        # the step takes no less than a prompt step of all rows (12 ms instead of 5 next to eight
        # requests of an 8B shape).
        all_rows = self.prompt_step(rows + tokens)
        seconds = np.maximum(decoding + all_rows - self.prompt_step(rows), all_rows)
        return np.where(tokens > 0, seconds + self.pair * pairs, decoding)


@dataclass(slots=True)
class Room:
    """The time for prompts in a step in which requests decode.

    All attributes except `costs` are numbers, or arrays of one shape.

    Attributes:
        decoding: seconds that the step takes without prompts.
        rows: number of decoding requests and their drafts.
        max_seconds: seconds that the step may take.
        tokens, pairs: prompt tokens added to the step, and their pairs (`PromptCosts.pair`).
    """

    costs: PromptCosts
    decoding: Any
    rows: Any
    max_seconds: Any
    tokens: Any = 0
    pairs: Any = 0.0

    @classmethod
    def of_step(cls, costs: PromptCosts, max_seconds: float, decoding: Any, rows: Any) -> Room:
        """The room in a step that may take `max_seconds`, or twice the time of the step with one
        prompt token if that is longer: so prompts get at least half of a step."""
        least = costs.mixed_step(decoding, rows, 1, 0.0)
        return cls(costs, decoding, rows, np.maximum(max_seconds, 2 * least))

    def fitting(self, start: Any, max_tokens: Any, part: float = 1.0) -> Any:
        """How many tokens of a prompt's next chunk fit into the room, by bisection.

        Args:
            start: number of tokens before the chunk in the same prompt.
            max_tokens: the most tokens of the chunk.
            part: the part of the room, 0..1, that prompts may take, this chunk included.
        """
        limit = self.decoding + part * (self.max_seconds - self.decoding)
        low, high = np.zeros_like(max_tokens), np.asarray(max_tokens)
        while np.any(low < high):
            count = (low + high + 1) // 2
            tokens, pairs = self.tokens + count, self.pairs + count * (start + count / 2)
            fits = self.costs.mixed_step(self.decoding, self.rows, tokens, pairs) <= limit
            low, high = np.where(fits, count, low), np.where(fits, high, count - 1)
        return low

    def take(self, start: int, max_tokens: int, part: float) -> int:
        """As `fitting`, and add the chunk to the step. The first chunk of a step is never empty."""
        count = max(int(self.fitting(start, max_tokens, part)), int(not self.tokens))
        self.tokens += count
        self.pairs += count * (start + count / 2)
        return count


class DecodeCosts:
    """Predicts the seconds of decode steps from times measured at start.

    Args:
        lockstep: every request costs as many drafts as the request with the most drafts.
    """

    def __init__(self, table: StepTable, *, lockstep: bool) -> None:
        self._costs, self._lockstep = StepCosts(table), lockstep
        self._curves: dict[int, Curve] = {}
        self._index_K = np.arange(table.rest_JK1.shape[1] - 1)

    def seconds(self, drafts: Sequence[int], context: int) -> float:
        """Seconds of a step; `drafts`: of each request; `context`: tokens of all requests."""
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

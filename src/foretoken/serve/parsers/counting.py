"""How many of a choice's tokens are its reasoning."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from foretoken.outputs import CompletionDelta


class ReasoningCount:
    """Counts tokens up to the mark that ends the reasoning, that mark included.

    Args:
        decode: the text of token ids as the answer has it.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._text = ""

    def add(self, sample: CompletionDelta) -> int:
        """Take in a delta; how many tokens there are so far."""
        self._ids.extend(sample.token_ids)
        self._text += sample.text
        return len(self._ids)

    def end(self, num_behind: int) -> int:
        """The count, where so many characters lie behind the mark: a delta may go on there.

        White space in front is left aside: a decoder may drop that of its first token.
        """
        size = len(self._text[: len(self._text) - num_behind].lstrip())
        counts = range(len(self._ids) if num_behind else 0)
        if not counts:
            return len(self._ids)
        return bisect_left(counts, size, key=lambda n: len(self._decode(self._ids[:n]).lstrip()))

"""Tokens to text as they come, stop strings included. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_INCOMPLETE = "\ufffd"  # what a byte-level tokenizer decodes half a UTF-8 character to
_CONTEXT = 5  # prompt tokens decoded along, for tokenizers that drop a leading space
_PATIENCE = 8  # tokens that may wait for one character, which has at most four bytes


class Detokenizer:
    """Text of one sample. A character appears once all its bytes have.

    Only the tokens since the last complete character are decoded again, so the cost of a token does
    not grow with the output, even where no character is ever complete: of tokens that say
    nothing `_PATIENCE` wait, and of those that are no UTF-8 at most twice as many.
    """

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int], stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt_ids[-_CONTEXT:])
        self._start = 0
        self._shown = len(self._ids)
        self._stop = tuple(stop)
        self.text = ""

    def append(self, token_id: int) -> None:
        """Add a generated token to the text, or to the bytes that wait for their character."""
        self._ids.append(token_id)
        before = self._decode(self._start, self._shown)
        now = self._decode(self._start, len(self._ids))
        waiting = len(self._ids) - self._shown
        if now != before and not now.endswith(_INCOMPLETE):
            self._show(before, now, len(self._ids))
        elif waiting >= _PATIENCE and now == before:
            del self._ids[self._shown :]  # special tokens: no text, and none to come from them
        elif waiting >= _PATIENCE:
            self._show_invalid(before, now)

    def flush(self) -> None:
        """The output ended: show what waited, incomplete characters as U+FFFD."""
        end = len(self._ids)
        self._show(self._decode(self._start, self._shown), self._decode(self._start, end), end)

    def find_stop(self, length_before: int, include: bool) -> str | None:
        """Cut the text at the earliest stop string that the last token completed, if any did.

        Args:
            length_before: length of `text` before the last token.
            include: keep the stop string itself.
        """
        found: tuple[int, str] | None = None
        for stop in self._stop:
            at = self.text.find(stop, max(0, length_before - len(stop) + 1))
            if at >= 0 and (found is None or at < found[0]):
                found = at, stop
        if found is None:
            return None
        at, stop = found
        self.text = self.text[: at + len(stop)] if include else self.text[:at]
        return stop

    @property
    def settled_text(self) -> str:
        """Text that no later token can take back: without a possible beginning of a stop string."""
        held = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self.text)), held, -1):
                if self.text.endswith(stop[:size]):
                    held = size
                    break
        return self.text[: len(self.text) - held]

    def _show(self, before: str, now: str, end: int) -> None:
        """Add what the tokens before `end` say: `now`, of which `before` has been said."""
        self.text += _added(before, now)
        self._start, self._shown = self._shown, end

    def _show_invalid(self, before: str, now: str) -> None:
        """Too much waits to be one character: show it up to a border between characters.

        Cutting there changes nothing: both parts decode to what the whole does. Invalid bytes that
        have no such border are shown as they decode now.
        """
        end = len(self._ids)
        for cut in range(end - 1, self._shown, -1):
            head = self._decode(self._start, cut)
            if head + self._decode(cut, end) == now:
                return self._show(before, head, cut)
        if end - self._shown >= 2 * _PATIENCE:
            self._show(before, now, end)
        return None

    def _decode(self, start: int, end: int) -> str:
        return str(self._tokenizer.decode(self._ids[start:end], skip_special_tokens=True))


def _added(before: str, now: str) -> str:
    """What `now` has after what both begin with: a prompt may end within a character."""
    pairs = enumerate(zip(before, now, strict=False))
    same = next((i for i, (a, b) in pairs if a != b), min(len(before), len(now)))
    return now[same:]

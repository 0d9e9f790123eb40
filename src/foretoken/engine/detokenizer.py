"""From tokens to text, one step at a time, and stop strings in it. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_INCOMPLETE = "\ufffd"  # a byte-level tokenizer decodes half a UTF-8 character to this
_CONTEXT = 5  # prompt tokens decoded with the output: some tokenizers drop a leading space
_DECODED_TOGETHER = 64  # tokens per call of the tokenizer when the text is read
_MAX_WAITING = 8  # tokens that may wait for one character, which has at most four bytes


class Detokenizer:
    """Text of one sample. A character appears once all its bytes are generated.

    Only the tokens since the last complete character are decoded again, so the cost of a token does
    not grow with the output. This holds even if no character is ever complete: at most
    `_MAX_WAITING` tokens without text wait, and at most twice as many tokens that are not UTF-8.

    Without stop strings, tokens are decoded only when the text is read, many in one call (decoding
    in each step of 16 requests took 0.2 ms of 7).
    """

    def __init__(
        self, tokenizer: Any, prompt_ids: Sequence[int], stop: Sequence[str], *,
        include_stop: bool = False, skip_special_tokens: bool = True,
    ) -> None:  # fmt: skip
        self._tokenizer, self._skips_special = tokenizer, skip_special_tokens
        # A tokenizer that drops spaces before punctuation decodes several tokens together to
        # another text than one by one; but text that is decoded late must equal streamed text.
        cleans_up = getattr(tokenizer, "clean_up_tokenization_spaces", False)
        self._decoded_together = 1 if cleans_up else _DECODED_TOGETHER
        self._ids = list(prompt_ids[-_CONTEXT:])
        self._start = 0  # tokens from here on are decoded together with the next token
        self._num_shown = len(self._ids)  # of `_ids`: prompt, and tokens shown; later tokens wait
        self._stop, self._includes_stop = tuple(stop), include_stop
        self._unread: list[int] = []  # tokens that follow `_ids` and were not decoded yet
        self._text = ""
        self._num_before = 0  # characters of `_text` before the text of the last token

    @property
    def text(self) -> str:
        """The text up to the last complete character, without the part that `take` has returned."""
        unread, self._unread = self._unread, []
        for i in range(0, len(unread), self._decoded_together):
            self._read(unread[i : i + self._decoded_together])
        return self._text

    def append(self, token_id: int) -> None:
        if self._stop:
            self._num_before = len(self._text)
            self._read([token_id])
        else:
            self._unread.append(token_id)

    def _read(self, token_ids: list[int]) -> None:
        """Append the tokens' text, or let the tokens wait if their last character is incomplete."""
        self._ids += token_ids
        shown_text = self._decode(self._start, self._num_shown)
        full_text = self._decode(self._start, len(self._ids))
        num_waiting = len(self._ids) - self._num_shown
        if full_text != shown_text and not full_text.endswith(_INCOMPLETE):
            self._show(shown_text, full_text, len(self._ids))
        elif len(token_ids) > 1:
            del self._ids[-len(token_ids) :]
            for token_id in token_ids:
                self._read([token_id])
        elif num_waiting >= _MAX_WAITING and full_text == shown_text:
            del self._ids[self._num_shown :]  # special tokens, which have no text
        elif num_waiting >= _MAX_WAITING:
            self._show_invalid(shown_text, full_text)

    def flush(self) -> None:
        """Append the text of waiting tokens; incomplete characters become U+FFFD."""
        self._num_before, end = len(self.text), len(self._ids)
        self._show(self._decode(self._start, self._num_shown), self._decode(self._start, end), end)

    def find_stop(self) -> str | None:
        """Cut the text at the first stop string that the last `append` or `flush` has completed.

        Returns:
            The stop string; None if no stop string was completed.
        """
        text, earliest = self._text, None
        for stop in self._stop:
            begin = text.find(stop, max(0, self._num_before - len(stop) + 1))
            if begin >= 0 and (earliest is None or begin < earliest[0]):
                earliest = begin, stop
        if earliest is None:
            return None
        begin, stop = earliest
        self._text = text[: begin + len(stop)] if self._includes_stop else text[:begin]
        return stop

    @property
    def stable_text(self) -> str:
        """The text that no later token can change: without an end that may begin a stop string."""
        num_unstable, text = 0, self.text
        for stop in self._stop:
            sizes = range(min(len(stop) - 1, len(text)), num_unstable, -1)
            matching = (size for size in sizes if text.endswith(stop[:size]))
            num_unstable = next(matching, num_unstable)
        return text[: len(text) - num_unstable]

    def take(self) -> str:
        """Remove and return the stable text, so that the cost does not grow with the output."""
        stable = self.stable_text
        self._text = self._text[len(stable) :]
        return stable

    def _show(self, shown_text: str, full_text: str, end: int) -> None:
        """Append to `_text` the new part of `full_text`, the text of tokens `_start` to `end`."""
        pairs = enumerate(zip(shown_text, full_text, strict=False))
        shorter = min(len(shown_text), len(full_text))
        # `full_text` may not begin with `shown_text`: a prompt may end within a character.
        num_same = next((i for i, (a, b) in pairs if a != b), shorter)
        self._text += full_text[num_same:]
        self._start, self._num_shown = self._num_shown, end

    def _show_invalid(self, shown_text: str, full_text: str) -> None:
        """Show waiting tokens that are more than any valid character needs.

        The tokens are shown up to the last boundary of characters: both sides, decoded separately,
        give the same text as together. Without a boundary, all tokens are shown once twice
        `_MAX_WAITING` tokens wait.
        """
        end = len(self._ids)
        for boundary in range(end - 1, self._num_shown, -1):
            before_boundary = self._decode(self._start, boundary)
            if before_boundary + self._decode(boundary, end) == full_text:
                self._show(shown_text, before_boundary, boundary)
                return
        if end - self._num_shown >= 2 * _MAX_WAITING:
            self._show(shown_text, full_text, end)

    def _decode(self, start: int, end: int) -> str:
        ids = self._ids[start:end]
        return str(self._tokenizer.decode(ids, skip_special_tokens=self._skips_special))

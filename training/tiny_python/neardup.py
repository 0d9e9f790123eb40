"""Near-duplicate detection by shingles: runs of consecutive units (lines or words), hashed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b

LINES_PER_SHINGLE = 8
WORDS_PER_SHINGLE = 16


def _hash64(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "big")


def shingles(units: Sequence[str], size: int) -> set[int]:
    """Hashes of every run of `size` consecutive units; a shorter sequence is one shingle.

    Example: `len(shingles(["a", "b", "c"], 2)) == 2`.
    """
    if not units:
        return set()
    last = max(1, len(units) - size + 1)
    return {_hash64("\n".join(units[i : i + size])) for i in range(last)}


def line_shingles(text: str) -> set[int]:
    """Shingles of stripped, non-blank lines: insensitive to indentation and blank lines."""
    return shingles(
        [s for s in (line.strip() for line in text.splitlines()) if s], LINES_PER_SHINGLE
    )


def word_shingles(text: str) -> set[int]:
    """Shingles of whitespace-separated words, one start in four to save memory."""
    words = text.split()
    if len(words) <= WORDS_PER_SHINGLE:
        return shingles(words, WORDS_PER_SHINGLE)
    return {
        h
        for i in range(len(words) - WORDS_PER_SHINGLE + 1)
        if (h := _hash64(" ".join(words[i : i + WORDS_PER_SHINGLE]))) % 4 == 0
    }


def overlap(own: set[int], known: set[int]) -> float:
    """Share of `own` found in `known`; 0.0 for an empty `own`."""
    return len(own & known) / len(own) if own else 0.0


class SeenShingles:
    """Shingles of everything accepted so far, by lines and by words."""

    def __init__(self) -> None:
        self._lines: set[int] = set()
        self._words: set[int] = set()

    def overlap(self, text: str) -> float:
        """The larger of the line and the word overlap of `text` with what was added."""
        return max(
            overlap(line_shingles(text), self._lines), overlap(word_shingles(text), self._words)
        )

    def add(self, text: str) -> None:
        self._lines |= line_shingles(text)
        self._words |= word_shingles(text)


def drop_near_duplicates(
    texts: Iterable[tuple[str, str]], seen: SeenShingles, limit: float, grow: bool
) -> list[str]:
    """Keys of the texts whose overlap with `seen` is at most `limit`.

    With `grow`, every kept text joins `seen`, so later texts are compared with it too.
    """
    kept = []
    for key, text in texts:
        if seen.overlap(text) > limit:
            continue
        kept.append(key)
        if grow:
            seen.add(text)
    return kept

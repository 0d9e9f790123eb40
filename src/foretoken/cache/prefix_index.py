"""Cached blocks by content: exact, without hashes that could collide. No torch.

Charter: which block holds the keys and values of which tokens. It owns no block and counts no
reference (block pool), and never decides what is worth keeping (least recently used, there).
"""

from __future__ import annotations

from collections.abc import Sequence

from foretoken.errors import IntegrityError

ROOT = 0
"""What stands before a request's first block: a serial that no block has."""

Before = int | str
"""What stands before a block: the serial of the block before it, `ROOT`, or in the place of `ROOT`
a salt, so that what was cached under one salt is found under that one alone."""

Entry = tuple[int, int]
"""A cached block: (block id, serial)."""


class PrefixIndex:
    """Maps (what stands before, the block's own tokens) to a cached block.

    Every entry gets a serial of its own, which is never used again: a serial stands for all tokens
    up to the end of its block. When an entry is removed, those that name it as the block before
    cannot be found any more; they can never be found for other tokens.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[Before, tuple[int, ...]], Entry] = {}
        self._keys: dict[int, tuple[Before, tuple[int, ...]]] = {}
        self._last_serial = ROOT

    def __contains__(self, block: int) -> bool:
        return block in self._keys

    def find(self, before: Before, tokens: Sequence[int]) -> Entry | None:
        """The block of these tokens after what stands `before`, if it is cached."""
        return self._entries.get((before, tuple(tokens)))

    def add(self, before: Before, tokens: Sequence[int], block: int) -> int:
        """Enter a block; returns the serial of its content, which another block may have already.

        Then the other block stays the one to be found, and this one is not entered.
        """
        key = (before, tuple(tokens))
        found = self._entries.get(key)
        if found is not None:
            return found[1]
        if block in self._keys:
            raise IntegrityError(f"block {block} is cached already, for other tokens")
        self._last_serial += 1
        self._entries[key] = (block, self._last_serial)
        self._keys[block] = key
        return self._last_serial

    def remove(self, block: int) -> None:
        """Forget what a cached block holds."""
        del self._entries[self._keys.pop(block)]

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless entries and blocks name each other, serials once each."""
        if {key: block for block, key in self._keys.items()} != {
            key: block for key, (block, _) in self._entries.items()
        }:
            raise IntegrityError("entries and blocks of the prefix index disagree")
        serials = {serial for _, serial in self._entries.values()}
        if len(serials) != len(self._entries) or not all(
            ROOT < serial <= self._last_serial for serial in serials
        ):
            raise IntegrityError("serials of the prefix index are not unique")

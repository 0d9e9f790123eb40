"""Blocks of the cache: allocation, reference counts, reuse by content, eviction. No torch.

The pool knows tokens and blocks, not requests.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from foretoken.errors import IntegrityError

ROOT = 0  # no block has this serial

Parent = int | str
"""The parent of a block is the serial of the block before it. The parent of a request's first block
is `ROOT` or the request's salt: blocks cached under a salt are found only under that salt."""

Entry = tuple[int, int]
"""A cached block: (block id, serial)."""

_Key = tuple[Parent, tuple[int, ...]]


class BlockPool:
    """Reference-counted blocks 0..num_blocks-1 of `block_size` tokens each.

    A block without references is *empty*, or *cached*: its content is in the prefix index, and may
    be shared until the block is allocated again. Empty blocks are allocated first, then the least
    recently used cached blocks. The empty block that was freed last is used first (its memory is
    warm); a new pool hands out 0, 1, 2, ... so that one request's blocks are adjacent in memory.

    The prefix index maps (parent, tokens of the block) to the block; tokens are compared, not
    hashes. Every entry gets a serial that is never used again: it stands for all tokens up to the
    end of the block. Once an entry is removed, its child entries are never found again.

    Args:
        lookahead: how many tokens after a block the block's content also depends on. The key has
            these tokens, too: a block can be cached, and found, only once they are known.
    """

    def __init__(self, num_blocks: int, block_size: int, lookahead: int = 0) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.lookahead = lookahead
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._refs = [0] * num_blocks
        self._entries: dict[_Key, Entry] = {}
        self._keys: dict[int, _Key] = {}  # by block: its key in the index
        self._last_serial = ROOT

    @property
    def num_free(self) -> int:
        """Number of blocks without references."""
        return len(self._empty) + len(self._cached)

    def num_unheld(self, blocks: Iterable[int]) -> int:
        """How many of these blocks have no references."""
        return sum(not self._refs[block] for block in blocks)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, one reference each; the caller has checked `num_free`."""
        if count > self.num_free:
            raise IntegrityError(f"{count} blocks asked of a pool with {self.num_free} free")
        blocks = [self._empty.pop() if self._empty else self._evict() for _ in range(count)]
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each of a request's blocks, which are in order of position. The
        last block is freed and evicted first, since the fewest requests can share it. No block is
        evicted before its child blocks."""
        for block in reversed(blocks):
            if self._refs[block] <= 0:
                raise IntegrityError(f"block {block} freed more often than it was taken")
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            if block in self._keys:
                self._cached[block] = None
            else:
                self._empty.append(block)

    def key(self, token_ids: Sequence[int], column: int) -> Sequence[int]:
        """The tokens in the key of a request's block `column`, as far as it has them."""
        start = column * self.block_size
        return token_ids[start : start + self.block_size + self.lookahead]

    def match(self, token_ids: Sequence[int], num_blocks: int, root: Parent = ROOT) -> list[Entry]:
        """The cached blocks of the first tokens, up to `num_blocks` or to the first block that is
        not cached; `root` is the parent of the first block."""
        entries: list[Entry] = []
        parent = root
        for column in range(num_blocks):
            entry = self._entries.get((parent, tuple(self.key(token_ids, column))))
            if entry is None:
                break
            entries.append(entry)
            parent = entry[1]
        return entries

    def take(self, blocks: Iterable[int]) -> None:
        """Add one reference to each of these blocks, which must be in the prefix index."""
        for block in blocks:
            if block not in self._keys:
                raise IntegrityError(f"block {block} is not cached and cannot be shared")
            self._refs[block] += 1
            self._cached.pop(block, None)

    def enter(self, parent: Parent, tokens: Sequence[int], block: int) -> int:
        """Enter a full, computed block into the prefix index, unless the index has another block
        with this content; returns the serial of the content.

        Args:
            parent: the serial of the request's block before this one, or the request's root.
            tokens: the result of `key` for this block.
        """
        if len(tokens) != self.block_size + self.lookahead or not self._refs[block]:
            raise IntegrityError(f"block {block} cannot be cached: not full, or without an owner")
        key = (parent, tuple(tokens))
        if (entry := self._entries.get(key)) is not None:
            return entry[1]
        if block in self._keys:
            raise IntegrityError(f"block {block} is cached already, for other tokens")
        self._last_serial += 1
        self._entries[key] = (block, self._last_serial)
        self._keys[block] = key
        return self._last_serial

    def forget(self, blocks: Iterable[int]) -> None:
        """Remove these blocks from the prefix index; other classes must hold the blocks."""
        for block in blocks:
            if (key := self._keys.pop(block, None)) is not None:
                del self._entries[key]

    def reset(self) -> None:
        """Empty the prefix index; running requests keep their blocks."""
        self.forget(range(self.num_blocks))
        self._empty += reversed(self._cached)
        self._cached.clear()

    def check_integrity(self, owners: Iterable[Sequence[int]]) -> None:
        """Raise `IntegrityError` unless the prefix index is consistent, and each block is empty,
        cached, or as often in `owners`, the block tables of all requests, as it has references."""
        by_key = {key: block for block, key in self._keys.items()}
        if by_key != {key: block for key, (block, _) in self._entries.items()}:
            raise IntegrityError("entries and blocks of the prefix index disagree")
        serials = sorted(serial for _, serial in self._entries.values())
        if len({*serials}) != len(serials) or (serials and serials[-1] > self._last_serial):
            raise IntegrityError("serials of the prefix index are not unique")
        num_owners = Counter(block for table in owners for block in table)
        num_empty = Counter(self._empty)
        for block in range(self.num_blocks):
            refs, owned = self._refs[block], num_owners[block]
            if owned != refs:
                raise IntegrityError(f"block {block} has {refs} references, {owned} owners")
            is_empty = not refs and block not in self._keys
            if num_empty[block] != is_empty:
                raise IntegrityError(f"block {block} is listed as empty {num_empty[block]} times")
            if (block in self._cached) != (not refs and not is_empty):
                raise IntegrityError(f"block {block} is wrongly in, or missing from, `_cached`")

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self.forget([block])
        return block

"""Fixed-size cache blocks: who holds which, and what unheld ones still hold. No torch.

Charter: allocation, reference counts, reuse by content, eviction, and the integrity of all of it.
It knows tokens and blocks, not requests; scheduling policy is the scheduler's.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from foretoken.cache.prefix_index import ROOT, Before, Entry, PrefixIndex
from foretoken.errors import IntegrityError


class BlockPool:
    """Reference-counted blocks 0..num_blocks-1 of `block_size` tokens each.

    A block that no request holds is either *empty* or *cached*: its content is in the prefix index
    and may be taken again until the block is handed out anew. Empty blocks come first (last in
    first out, so that a block just freed is used while it is warm; a fresh pool hands out 0, 1,
    2, ... so that one request's blocks are adjacent in memory), then the least recently used
    cached ones.

    Args:
        lookahead: tokens after a block that what it holds depends on, too, and that it is found
            by; a block can be cached and found only once they are known.
    """

    def __init__(self, num_blocks: int, block_size: int, lookahead: int = 0) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.lookahead = lookahead
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._refs = [0] * num_blocks
        self._index = PrefixIndex()

    @property
    def num_free(self) -> int:
        """Blocks that no request holds, cached ones too."""
        return len(self._empty) + len(self._cached)

    def num_unheld(self, blocks: Iterable[int]) -> int:
        """How many of these blocks no request holds."""
        return sum(not self._refs[block] for block in blocks)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens: the quotient, rounded up."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks with one reference each; the caller has checked `num_free`."""
        if count > self.num_free:
            raise IntegrityError(f"{count} blocks asked of a pool with {self.num_free} free")
        taken = [self._empty.pop() if self._empty else self._evict() for _ in range(count)]
        for block in taken:
            self._refs[block] = 1
        return taken

    def free(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each block; the last reference returns it to the pool.

        The last block goes first: of one request's cached blocks, those that fewest others can
        share are evicted first, and none before the blocks that are found through it.
        """
        for block in reversed(blocks):
            if self._refs[block] <= 0:
                raise IntegrityError(f"block {block} freed more often than it was taken")
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            if block in self._index:
                self._cached[block] = None
            else:
                self._empty.append(block)

    def key(self, token_ids: Sequence[int], column: int) -> Sequence[int]:
        """The tokens that a request's block at this column is found by, fewer at its end."""
        start = column * self.block_size
        return token_ids[start : start + self.block_size + self.lookahead]

    def match(self, token_ids: Sequence[int], num_blocks: int, root: Before = ROOT) -> list[Entry]:
        """The cached blocks that hold the first tokens: as many as follow, at most `num_blocks`.

        Args:
            root: what stands before the first of them: `ROOT`, or a salt.
        """
        found: list[Entry] = []
        before = root
        for column in range(num_blocks):
            entry = self._index.find(before, self.key(token_ids, column))
            if entry is None:
                break
            found.append(entry)
            before = entry[1]
        return found

    def take(self, blocks: Iterable[int]) -> None:
        """Add one reference to each of these cached or held blocks, to share what they hold."""
        for block in blocks:
            if block not in self._index:
                raise IntegrityError(f"block {block} is not cached and cannot be shared")
            self._refs[block] += 1
            self._cached.pop(block, None)

    def enter(self, before: Before, tokens: Sequence[int], block: int) -> int:
        """Make a full, computed block one that can be found; returns its content's serial.

        Args:
            before: the serial of the request's block before it, or its root.
            tokens: its `key`: the `block_size` tokens whose K/V it holds, and those after.
        """
        if len(tokens) != self.block_size + self.lookahead or not self._refs[block]:
            raise IntegrityError(f"block {block} cannot be cached: not full, or held by nobody")
        return self._index.add(before, tokens, block)

    def forget(self, blocks: Iterable[int]) -> None:
        """Make sure that these held blocks are not found any more."""
        for block in blocks:
            if block in self._index:
                self._index.remove(block)

    def reset(self) -> None:
        """Empty the prefix index; running requests keep the blocks that they hold."""
        self.forget(range(self.num_blocks))
        self._empty += reversed(self._cached)
        self._cached.clear()

    def check_integrity(self, owners: Iterable[Sequence[int]]) -> None:
        """Raise `IntegrityError` unless every block is held as counted, cached or empty.

        Args:
            owners: the block tables of all live requests.
        """
        self._index.check_integrity()
        held = Counter(block for table in owners for block in table)
        empty = Counter(self._empty)
        for block in range(self.num_blocks):
            refs = self._refs[block]
            if held[block] != refs:
                raise IntegrityError(f"block {block} has {refs} references, {held[block]} owners")
            unheld_empty = not refs and block not in self._index
            if empty[block] != unheld_empty:
                raise IntegrityError(f"block {block} is in the free list {empty[block]} times")
            if (block in self._cached) != (not refs and not unheld_empty):
                raise IntegrityError(f"block {block} is held or not cached, yet can be evicted")

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self._index.remove(block)
        return block

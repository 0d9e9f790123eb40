"""Fixed-size cache blocks: who owns which. No torch, no knowledge of requests.

Charter: allocation, reference counts and their integrity. Prefix reuse (finding a block by its
content) belongs here too when it comes; scheduling policy does not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from foretoken.errors import IntegrityError


class BlockPool:
    """Reference-counted blocks 0..num_blocks-1 of `block_size` tokens each.

    The free list is last-in first-out, so a block just freed is reused while it is warm; a fresh
    pool hands out 0, 1, 2, ... so that a single request's blocks are adjacent in memory.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._refs = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks nobody holds."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens: the quotient, rounded up."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks with one reference each; the caller has checked `num_free`."""
        if count > len(self._free):
            raise IntegrityError(f"{count} blocks asked of a pool with {len(self._free)} free")
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._refs[block] = 1
        return taken

    def free(self, blocks: Iterable[int]) -> None:
        """Drop one reference of each block; the last reference returns it to the pool."""
        for block in reversed(list(blocks)):
            if self._refs[block] <= 0:
                raise IntegrityError(f"block {block} freed more often than it was taken")
            self._refs[block] -= 1
            if not self._refs[block]:
                self._free.append(block)

    def check_integrity(self, owners: Iterable[Sequence[int]]) -> None:
        """Raise `IntegrityError` unless every block is either free or held as often as counted.

        Args:
            owners: the block tables of all live requests.
        """
        held = Counter(block for table in owners for block in table)
        free = Counter(self._free)
        for block in range(self.num_blocks):
            if held[block] != self._refs[block]:
                raise IntegrityError(
                    f"block {block} has {self._refs[block]} references, {held[block]} owners"
                )
            if free[block] != (0 if self._refs[block] else 1):
                raise IntegrityError(f"block {block} is in the free list {free[block]} times")

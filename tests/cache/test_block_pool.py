"""The block pool against a naive model: sets of owned blocks."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from foretoken.cache.block_pool import BlockPool
from foretoken.errors import IntegrityError


class PoolMachine(RuleBasedStateMachine):
    """Owners allocate and free in any order; the pool must agree with their tables."""

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, 16)
        self.tables: list[list[int]] = []

    @rule(count=st.integers(0, 5))
    def allocate(self, count: int) -> None:
        owned = sum(len(t) for t in self.tables)
        if count > self.pool.num_blocks - owned:
            with pytest.raises(IntegrityError, match="free"):
                self.pool.allocate(count)
        else:
            self.tables.append(self.pool.allocate(count))

    @rule(pick=st.integers(0, 100))
    def free(self, pick: int) -> None:
        if self.tables:
            self.pool.free(self.tables.pop(pick % len(self.tables)))

    @invariant()
    def agrees(self) -> None:
        owned = [block for table in self.tables for block in table]
        assert len(set(owned)) == len(owned)
        assert self.pool.num_free == self.pool.num_blocks - len(owned)
        self.pool.check_integrity(self.tables)


TestPool = PoolMachine.TestCase


def test_a_fresh_pool_hands_out_adjacent_blocks_in_order() -> None:
    pool = BlockPool(8, 4)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.blocks_for(9) == 3
    pool.free([0, 1, 2])
    assert pool.allocate(3) == [0, 1, 2]


@pytest.mark.parametrize("damage", ["leak", "double owner", "double free"])
def test_integrity_check_sees_each_kind_of_damage(damage: str) -> None:
    pool = BlockPool(4, 16)
    table = pool.allocate(2)
    if damage == "leak":
        with pytest.raises(IntegrityError, match="references"):
            pool.check_integrity([])
    elif damage == "double owner":
        with pytest.raises(IntegrityError, match="references"):
            pool.check_integrity([table, table])
    else:
        pool.free(table)
        with pytest.raises(IntegrityError, match="freed more often"):
            pool.free(table)

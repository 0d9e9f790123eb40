"""The block pool and its index against a naive model: lists that are searched from the start."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from foretoken.cache.block_pool import ROOT, BlockPool
from foretoken.errors import IntegrityError

SIZE = 2
SALTS = st.sampled_from([None, None, "a", "b"])
TEXTS = st.lists(st.integers(0, 1), min_size=1, max_size=11)


@dataclass(eq=False)
class Cached:
    """A block that can be found by `tokens`, after the block `before`.
    `before` is a salt for the first block of a request. With a lookahead, the last of `tokens` are
    those after the tokens that the block holds.
    """

    before: Cached | str | None
    tokens: list[int]
    block: int


@dataclass(eq=False)
class Owner:
    """What one request holds; the first blocks are filled, and known to the index."""

    tokens: list[int]
    salt: str | None
    blocks: list[int]
    chain: list[Cached] = field(default_factory=list)
    serials: list[int] = field(default_factory=list)


class PoolMachine(RuleBasedStateMachine):
    """Owners come, find what is cached, fill their blocks, and go, in any order."""

    @initialize(num_blocks=st.integers(1, 14), lookahead=st.integers(0, 2))
    def start(self, num_blocks: int, lookahead: int) -> None:
        self.pool = BlockPool(num_blocks, SIZE, lookahead)
        self.lookahead = lookahead
        self.owners: list[Owner] = []
        self.entries: list[Cached] = []
        self.empty = list(range(num_blocks - 1, -1, -1))
        self.unheld: list[Cached] = []  # least recently used first
        # By block: the salt of who filled it, and all tokens that its K/V depend on.
        self.content: dict[int, tuple[str | None, list[int]]] = {}

    def held(self, block: int) -> bool:
        return any(block in owner.blocks for owner in self.owners)

    def find(self, before: Cached | str | None, tokens: list[int]) -> Cached | None:
        return next((e for e in self.entries if (e.before, e.tokens) == (before, tokens)), None)

    def match(self, tokens: list[int], most: int, salt: str | None) -> list[Cached]:
        chain: list[Cached] = []
        for i in range(most):
            before = chain[-1] if chain else salt
            entry = self.find(before, tokens[i * SIZE : (i + 1) * SIZE + self.lookahead])
            if entry is None:
                break
            chain.append(entry)
        return chain

    @rule(tokens=TEXTS, salt=SALTS)
    def come(self, tokens: list[int], salt: str | None) -> None:
        chain = self.match(tokens, len(tokens) // SIZE, salt)
        found = self.pool.match(tokens, len(tokens) // SIZE, salt or ROOT)
        assert [block for block, _ in found] == [entry.block for entry in chain]
        for i, (block, _) in enumerate(found):
            end = (i + 1) * SIZE + self.lookahead
            assert self.content[block] == (salt, tokens[:end]), "another text's K/V"
        missing = self.pool.blocks_for(len(tokens)) - len(found)
        shared = [block for block, _ in found]
        room = self.pool.num_free - self.pool.num_unheld(shared)
        assert room == len(self.empty) + sum(e not in chain for e in self.unheld)
        self.pool.take(shared)
        owner = Owner(tokens, salt, shared, chain, [serial for _, serial in found])
        self.unheld = [entry for entry in self.unheld if entry not in chain]
        self.owners.append(owner)
        if missing > room:
            with pytest.raises(IntegrityError, match="free"):
                self.pool.allocate(missing)
            owner.tokens = tokens[: len(found) * SIZE]
            return
        expected = [self.empty.pop() if self.empty else self.evict() for _ in range(missing)]
        assert self.pool.allocate(missing) == expected
        owner.blocks += expected

    def evict(self) -> int:
        entry = self.unheld.pop(0)
        self.entries.remove(entry)
        del self.content[entry.block]
        return entry.block

    @rule(pick=st.integers(0, 100), count=st.integers(1, 5))
    def fill(self, pick: int, count: int) -> None:
        if not self.owners:
            return
        owner = self.owners[pick % len(self.owners)]
        most = (len(owner.tokens) - self.lookahead) // SIZE
        for i in range(len(owner.chain), min(len(owner.chain) + count, most)):
            end = (i + 1) * SIZE + self.lookahead
            own, block = owner.tokens[i * SIZE : end], owner.blocks[i]
            before = owner.chain[-1] if owner.chain else owner.salt
            serial = owner.serials[-1] if owner.serials else owner.salt or ROOT
            entry = self.find(before, own)
            if entry is None:
                entry = Cached(before, own, block)
                self.entries.append(entry)
                self.content[block] = owner.salt, owner.tokens[:end]
            owner.chain.append(entry)
            owner.serials.append(self.pool.enter(serial, own, block))

    @rule(pick=st.integers(0, 100), trusted=st.sampled_from([True, True, True, False]))
    def go(self, pick: int, trusted: bool) -> None:
        if not self.owners:
            return
        owner = self.owners.pop(pick % len(self.owners))
        if not trusted:
            self.pool.forget(owner.blocks)
            self.entries = [e for e in self.entries if e.block not in owner.blocks]
            for block in owner.blocks:
                self.content.pop(block, None)
        self.pool.free(owner.blocks)
        by_block = {entry.block: entry for entry in self.entries}
        for block in reversed(owner.blocks):
            if self.held(block):
                continue
            if block in by_block:
                self.unheld.append(by_block[block])
            else:
                self.empty.append(block)

    @rule(really=st.sampled_from([True, False, False, False]))
    def reset(self, really: bool) -> None:
        if really:
            self.pool.reset()
            self.empty += [entry.block for entry in reversed(self.unheld)]
            self.entries, self.unheld, self.content = [], [], {}

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert self.pool.num_free == len(self.empty) + len(self.unheld)
        self.pool.check_integrity([owner.blocks for owner in self.owners])
        for owner in self.owners:
            for entry, serial in zip(owner.chain, owner.serials, strict=True):
                alike = [o for o in self.owners for e in o.chain if e is entry]
                assert all(o.serials[o.chain.index(entry)] == serial for o in alike)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=40)


@pytest.mark.parametrize("damage", ["leak", "double owner", "double free", "unfit to cache"])
def test_integrity_check_sees_each_kind_of_damage(damage: str) -> None:
    pool = BlockPool(4, 16)
    table = pool.allocate(2)
    if damage == "leak":
        with pytest.raises(IntegrityError, match="references"):
            pool.check_integrity([])
    elif damage == "double owner":
        with pytest.raises(IntegrityError, match="references"):
            pool.check_integrity([table, table])
    elif damage == "double free":
        pool.free(table)
        with pytest.raises(IntegrityError, match="freed more often"):
            pool.free(table)
    else:
        with pytest.raises(IntegrityError, match="not full"):
            pool.enter(ROOT, [1] * 15, table[0])
        with pytest.raises(IntegrityError, match="without an owner"):
            pool.enter(ROOT, [1] * 16, 3)
        with pytest.raises(IntegrityError, match="not cached"):
            pool.take(table)


@pytest.mark.parametrize("damage", ["empty and cached", "evictable and held", "two serials"])
def test_integrity_check_sees_a_cached_block_in_the_wrong_place(damage: str) -> None:
    pool = BlockPool(4, 1)
    table = pool.allocate(2)
    for i, block in enumerate(table):
        pool.enter(ROOT, [i], block)
    if damage == "empty and cached":
        pool.free(table)
        pool._empty.append(table[0])
        owners = []
    else:
        owners = [table]
    pool.check_integrity(owners) if damage != "empty and cached" else None
    if damage == "evictable and held":
        pool._cached[table[0]] = None
    elif damage == "two serials":
        pool._entries[ROOT, (0,)] = pool._entries[ROOT, (1,)]
    with pytest.raises(IntegrityError):
        pool.check_integrity(owners)


def test_a_block_is_entered_for_one_content() -> None:
    pool = BlockPool(3, 2)
    first, second = pool.allocate(2)
    assert pool.enter(ROOT, [1, 2], first) == pool.enter(ROOT, [1, 2], second)
    assert [block for block, _ in pool.match([1, 2], 1)] == [first]
    with pytest.raises(IntegrityError, match="other tokens"):
        pool.enter(ROOT, [3, 4], first)
    pool.forget([first])
    assert not pool.match([1, 2], 1)

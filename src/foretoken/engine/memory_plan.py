"""How memory is divided: what an engine must have, and the K/V cache of the rest. No torch.

Charter: arithmetic on numbers that `gauge.py` measured or that follow from shapes. A plan never
exceeds what may be used. What to change where none fits is found by the same arithmetic
(`remedies.py`).

Between the steps that were measured, the memory of a step is taken to be linear in its tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, NamedTuple

from foretoken.errors import ConfigError

_RESERVE = 0.03  # of what is free: fragments of the allocator, and kernels that are loaded later
# Steps are captured when they first occur, by the kernels that their parameters ask for: without
# filters and with them, say. A draft step and a plain one are counted apart anyway.
_VARIANTS = 2


@dataclass(frozen=True, slots=True)
class Sizes:
    """Options that memory depends on.

    num_drafts: K; 0 without speculation.
    num_blocks: of the cache; None: as many as fit, enough for one request of `max_model_len`.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_drafts: int = 0
    num_blocks: int | None = None

    @property
    def rows(self) -> int:
        """Most rows of logits that decide in one step."""
        return self.max_num_seqs * (1 + self.num_drafts)

    @property
    def tokens(self) -> int:
        """Most tokens in one step; the last of a context is never computed."""
        return min(self.max_num_batched_tokens, self.max_num_seqs * (self.max_model_len - 1))


class StepPeak(NamedTuple):
    """Bytes that a step takes while it runs, and how many tokens and deciding rows it has."""

    tokens: int
    rows: int
    num_bytes: int


_NO_STEP = StepPeak(1, 1, 0)


@dataclass(frozen=True, slots=True)
class StepCost:
    """What steps take while they run: linear in tokens and deciding rows, and `least` at least.

    per_token: of a prompt's token
    per_row:   of a decode step's row, which is a token, too
    """

    least: int = 0
    largest: StepPeak = _NO_STEP
    per_token: float = 0.0
    per_row: float = 0.0

    @classmethod
    def of(cls, least: StepPeak, decode: StepPeak, largest: StepPeak) -> StepCost:
        """Through three that were measured.

        Args:
            least: one request decodes.
            decode: as many as may run decode, as far as memory suffices.
            largest: as many tokens as there may be beside them; `decode`, if there are no others.
        """
        per_row = least.num_bytes / least.rows
        if decode.rows > least.rows:
            more = max(decode.num_bytes - least.num_bytes, 0)
            per_row = more / (decode.rows - least.rows)
        per_token = per_row
        if largest.tokens > decode.tokens:
            more = max(largest.num_bytes - decode.num_bytes, 0)
            per_token = more / (largest.tokens - decode.tokens)
        return cls(least.num_bytes, largest, per_token, per_row)

    def at(self, tokens: int, rows: int) -> int:
        """Bytes of a step of this size, larger or smaller than those that were measured."""
        more = self.per_token * (tokens - self.largest.tokens)
        more += max(self.per_row - self.per_token, 0) * (rows - self.largest.rows)
        return max(self.least, ceil(self.largest.num_bytes + more))


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Numbers of requests that decode steps are padded to when they are captured."""
    sizes = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, *range(96, 257, 32), *range(320, 1025, 64)]
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


@dataclass(frozen=True, slots=True)
class Costs:
    """Bytes of everything that is allocated.

    block, draft_block: K/V of a cache block of `block_size` tokens
    slot_block:  tokens and block id of a slot, by cache block
    draft:       what the drafter keeps for a slot, the q of its drafts above all, by draft
    spare:       slots and blocks that no request is given
    copied:      what attention copies of a block while it runs, as stock operators do
    weights, draft_weights: as loading took them
    libraries:   what kernels and libraries take beside PyTorch's allocator
    steps:       what steps take while they run
    graph:       of a captured step, beside its tensors; 0: none are captured
    """

    block_size: int
    block: int
    draft_block: int = 0
    slot_block: int = 0
    draft: float = 0.0
    spare: int = 0
    copied: int = 0
    weights: int = 0
    draft_weights: int = 0
    libraries: int = 0
    steps: StepCost = StepCost()
    graph: int = 0

    def columns(self, sizes: Sizes) -> int:
        """Blocks of a request of `max_model_len`."""
        return -(-sizes.max_model_len // self.block_size)

    def most_blocks(self, sizes: Sizes) -> int:
        """Blocks of as many such requests as may run: more are never used at a time."""
        return sizes.max_num_seqs * self.columns(sizes)

    def parts(self, sizes: Sizes, num_blocks: int) -> dict[str, int]:
        """Bytes by name, with a cache of so many blocks."""
        copied = (num_blocks + self.spare) * self.copied
        parts = {
            "weights": self.weights,
            "weights of the draft": self.draft_weights,
            "kernels and libraries": self.libraries,
            "activations": self.steps.at(sizes.tokens, sizes.rows) + copied,
            "CUDA graphs": self._graphs(sizes),
            **self.cache(sizes, num_blocks),
        }
        return {name: size for name, size in parts.items() if size}

    def cache(self, sizes: Sizes, num_blocks: int) -> dict[str, int]:
        """Of the parts those that `kv_cache_gib` bounds."""
        slots, blocks = sizes.max_num_seqs + self.spare, num_blocks + self.spare
        return {
            "slots": slots * min(self.columns(sizes), num_blocks) * self.slot_block,
            "drafts of slots": ceil(slots * sizes.num_drafts * self.draft),
            "K/V cache": blocks * self.block,
            "K/V cache of the draft": blocks * self.draft_block,
        }

    def total(self, sizes: Sizes, num_blocks: int) -> int:
        """Bytes of all parts."""
        return sum(self.parts(sizes, num_blocks).values())

    def _graphs(self, sizes: Sizes) -> int:
        """Captured steps keep what they return; plain ones and those with drafts are apart."""
        if not self.graph:
            return 0
        captured, kinds = graph_sizes(sizes.max_num_seqs), {1, 1 + sizes.num_drafts}
        rows, number = sum(captured) * sum(kinds), len(captured) * len(kinds)
        return _VARIANTS * (number * self.graph + ceil(rows * self.steps.per_row))


@dataclass(frozen=True, slots=True)
class Budget:
    """Memory of a device: of `total` bytes so many are free when the engine starts.

    The engine takes `fraction` of the total at most, and never all that is free.
    """

    total: int
    free: int
    fraction: float

    @property
    def free_for_use(self) -> int:
        """All but a reserve of what is free."""
        return int(self.free * (1 - _RESERVE))

    def usable(self, sizes: Sizes) -> int:
        """What may be used; if the size of the cache was asked for, the fraction plays no part."""
        bound = self.total if sizes.num_blocks is not None else int(self.fraction * self.total)
        return min(bound, self.free_for_use)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What an engine allocates.

    Attributes:
        parts: bytes by name, of everything that takes any.
        num_blocks: blocks of the cache.
        max_model_len: longest request: where nobody asked for one, maybe less than the
            checkpoint's.
        usable: bytes that the engine may take; None on a CPU, where nothing is measured.
    """

    parts: dict[str, int]
    num_blocks: int
    max_model_len: int
    usable: int | None = None

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())

    def measured(self, name: str, num_bytes: int) -> MemoryPlan:
        """The same with what a part really takes in place of what was planned; 0: not known yet."""
        return replace(self, parts={**self.parts, name: num_bytes}) if num_bytes else self

    def table(self) -> str:
        """One line per part."""
        rows = {**self.parts, "together": self.total}
        if self.usable is not None:
            rows["left of what may be used"] = self.usable - self.total
        return "\n".join(f"  {name:<26}{size / 2**30:9.3f} GiB" for name, size in rows.items())


@dataclass(frozen=True, slots=True)
class Demand:
    """What is asked of a device, and what it has."""

    costs: Costs
    sizes: Sizes
    budget: Budget

    def resized(self, **sizes: Any) -> Demand:
        """The same with other sizes."""
        return replace(self, sizes=replace(self.sizes, **sizes))

    @property
    def least_blocks(self) -> int:
        """Blocks of the smallest cache that serves: one request of `max_model_len`."""
        asked = self.sizes.num_blocks
        return self.costs.columns(self.sizes) if asked is None else asked

    @property
    def least(self) -> int:
        """Bytes with that cache."""
        return self.costs.total(self.sizes, self.least_blocks)

    @property
    def missing(self) -> int:
        """Bytes that the device has too few, if more than 0."""
        return self.least - self.budget.usable(self.sizes)

    def largest(self, name: str, low: int, high: int) -> int | None:
        """The largest value in [low, high] of a size with which nothing is missing, if any."""
        return most_fitting(low, high, lambda value: self.resized(**{name: value}).missing <= 0)

    def plan(self) -> MemoryPlan:
        """The largest cache of use; to be asked for if nothing is missing."""
        costs, sizes, usable = self.costs, self.sizes, self.budget.usable(self.sizes)
        num_blocks, most = self.least_blocks, costs.most_blocks(sizes)
        if sizes.num_blocks is None:
            fitting = most_fitting(num_blocks, most, lambda n: costs.total(sizes, n) <= usable)
            num_blocks = fitting or num_blocks
        return MemoryPlan(costs.parts(sizes, num_blocks), num_blocks, sizes.max_model_len, usable)


def most_fitting(low: int, high: int, fits: Callable[[int], bool]) -> int | None:
    """The largest number in [low, high] that fits, as all smaller ones do; None: not even `low`."""
    if low > high or not fits(low):
        return None
    return low + bisect_left(range(low + 1, high + 1), True, key=lambda n: not fits(n))


def blocks_within(gib: float, costs: Costs, sizes: Sizes) -> int:
    """Blocks of a cache that takes so many GiB together with the slots and their drafts.

    Raises:
        ConfigError: there is not one.
    """

    def taken(num_blocks: int) -> float:
        return sum(costs.cache(sizes, num_blocks).values()) / 2**30

    num_blocks = most_fitting(1, costs.most_blocks(sizes), lambda n: taken(n) <= gib)
    if num_blocks is None:
        bound = f"at least {taken(1):.3g}: one block of this model, and what every slot keeps"
        remedy = "Raise it, or lower `max_num_seqs` or `block_size`."
        raise ConfigError("kv_cache_gib", gib, bound, remedy)
    return num_blocks

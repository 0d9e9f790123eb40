"""How memory is divided, and what to change where it does not suffice. No torch.

Charter: arithmetic on numbers that `gauge.py` measured or that follow from shapes, and the errors
of memory that ran out. A plan never exceeds what may be used; every remedy that it names was tried
in the same arithmetic and suffices there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, NamedTuple

from foretoken.config.machine import machine_bytes
from foretoken.drafting.control import draft_widths
from foretoken.errors import ConfigError, EngineMemoryError, ForetokenError

LEAST_CONTEXT = 1024
"""A context is not shortened below this, nor is it advised."""

# Sizes under their names as options, where K is fixed and where it is `auto`.
_OPTIONS = {"num_drafts": ("num_speculative_tokens", "max_speculative_tokens")}
_LEAST_TOKENS = 256  # of `max_num_batched_tokens`: prompts in smaller chunks are slow
_RESERVE = 0.03  # of what is free: fragments of the allocator, and kernels that are loaded later
# Steps are captured when they first occur, by the kernels that their parameters ask for: without
# filters and with them, say. A draft step and a plain one are counted apart anyway.
_VARIANTS = 2

_REMEDY = (
    "Lower `kv_cache_gib` (or `num_blocks`), `max_num_seqs`, `max_num_batched_tokens` or "
    "`max_model_len`."
)
_GPU_REMEDY = (
    "Lower `memory_fraction`, so that the cache leaves more to steps, `max_num_batched_tokens` or "
    "`max_num_seqs`; and see that no other process takes the GPU's memory."
)
_SAID = (  # how PyTorch, its libraries and the C++ library say it, all as RuntimeError
    "alloc_failed",
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "bad_alloc",
    "size calculation overflowed",
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Options that memory depends on.

    num_drafts: K; 0 without speculation.
    num_blocks: of the cache; None: as many as fit, enough for one request of `max_model_len`.
    adapts: whether K is `auto`, and `num_drafts` the most.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_drafts: int = 0
    num_blocks: int | None = None
    adapts: bool = False

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


@dataclass(frozen=True, slots=True)
class StepCost:
    """Bytes that steps take while they run: linear in tokens and deciding rows, or `least`.

    A decode step's row, which is a token, too, takes `per_row`; another token `per_token`.
    """

    least: int = 0
    base: int = 0
    per_row: float = 0.0
    per_token: float = 0.0

    @classmethod
    def of(cls, least: StepPeak, decode: StepPeak, largest: StepPeak) -> StepCost:
        """Through three that were measured.

        Args:
            least: one request decodes.
            decode: as many as may run decode, as far as memory suffices.
            largest: as many tokens as there may be next to them; `decode`, if there are no others.
        """
        rows, tokens = decode.rows - least.rows, largest.tokens - decode.tokens
        more = (max(decode.num_bytes - least.num_bytes, 0), largest.num_bytes - decode.num_bytes)
        per_row = more[0] / rows if rows else least.num_bytes / least.rows
        per_token = max(more[1], 0) / tokens if tokens else per_row
        linear = cls(per_row=per_row, per_token=per_token).at(largest.tokens, largest.rows)
        return cls(least.num_bytes, largest.num_bytes - linear, per_row, per_token)

    def at(self, tokens: int, rows: int) -> int:
        """Bytes of a step of this size, larger or smaller than those that were measured."""
        more = self.per_token * tokens + max(self.per_row - self.per_token, 0) * rows
        return max(self.least, self.base + round(more))


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
    draft_texts: what the drafter keeps of texts for all requests together
    spare:       slots and blocks that no request is given
    copied:      what attention copies of a block while it runs, as stock operators do
    weights, draft_weights: as loading took them
    libraries:   what kernels and libraries take outside PyTorch's allocator
    steps:       what steps take while they run
    graph:       of a captured step, without its tensors; 0: none are captured
    """

    block_size: int
    block: int
    draft_block: int = 0
    slot_block: int = 0
    draft: float = 0.0
    draft_texts: int = 0
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
            "texts to draft from": self.draft_texts,
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
        captured = graph_sizes(sizes.max_num_seqs)
        kinds = [1 + width for width in draft_widths(sizes.num_drafts, adapts=sizes.adapts)]
        rows, number = sum(captured) * sum(kinds), len(captured) * len(kinds)
        return _VARIANTS * (number * self.graph + ceil(rows * self.steps.per_row))


@dataclass(frozen=True, slots=True)
class Budget:
    """Memory of a device: of `total` bytes an engine takes `fraction` at most, and never all that
    is `free` when it starts."""

    total: int
    free: int
    fraction: float


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What an engine allocates.

    Attributes:
        parts: bytes by name, of everything that takes any.
        num_blocks: blocks of the cache.
        max_model_len: longest request: maybe less than the checkpoint's, if no option asked for it.
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
    def usable(self) -> int:
        """Bytes that may be used; if the size of the cache was asked for, whatever the fraction."""
        fraction = self.budget.fraction if self.sizes.num_blocks is None else 1
        free = int(self.budget.free * (1 - _RESERVE))
        return min(int(fraction * self.budget.total), free)

    @property
    def missing(self) -> int:
        """Bytes that the device has too few, if more than 0."""
        return self.least - self.usable

    def largest(self, name: str, low: int, high: int) -> int | None:
        """The largest value in [low, high] of a size with which nothing is missing, if any."""
        return most_fitting(low, high, lambda value: self.resized(**{name: value}).missing <= 0)


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


class Remedy(NamedTuple):
    """Options to change together, by name: from, to; and the demand that results."""

    changes: dict[str, tuple[object, object]]
    result: Demand

    def described(self, before: Demand) -> str:
        """For a message."""
        listed = (f"`{name}` {old} -> {new}" for name, (old, new) in self.changes.items())
        freed = before.least - self.result.least
        return " with ".join(listed) + (f" (frees {shown(freed)})" if freed > 0 else "")


def shown(num_bytes: float) -> str:
    """A number of bytes as users read it."""
    gib = num_bytes / 2**30
    return f"{gib:.1f} GiB" if gib >= 0.95 else f"{num_bytes / 2**20:.3g} MiB"


def fitting_plan(demand: Demand, *, may_shorten: bool) -> MemoryPlan:
    """The plan with the largest cache of use, if there is one.

    Args:
        may_shorten: lower `max_model_len`, which no option asked for, where the cache is too small.

    Raises:
        EngineMemoryError: memory does not suffice.
    """
    if may_shorten and demand.missing > 0:
        longest = demand.sizes.max_model_len
        context = demand.largest("max_model_len", min(longest, LEAST_CONTEXT), longest)
        if context is not None:
            demand = demand.resized(max_model_len=context)
    costs, sizes, usable, least = demand.costs, demand.sizes, demand.usable, demand.least_blocks
    most = costs.most_blocks(sizes) if sizes.num_blocks is None else least
    num_blocks = most_fitting(least, most, lambda n: costs.total(sizes, n) <= usable)
    if num_blocks is None:
        raise EngineMemoryError(shortage(demand))
    return MemoryPlan(costs.parts(sizes, num_blocks), num_blocks, sizes.max_model_len, usable)


def shortage(demand: Demand) -> str:
    """How much is missing, for what, and what would do instead."""
    budget, num_blocks, usable = demand.budget, demand.sizes.num_blocks, demand.usable
    source = f"{shown(budget.free)} of {shown(budget.total)} are free"
    if num_blocks is None and usable == int(budget.fraction * budget.total):
        source = f"`memory_fraction` is {budget.fraction:g} of {shown(budget.total)}"
    parts = demand.costs.parts(demand.sizes, demand.least_blocks)
    listed = ", ".join(f"{name} {shown(size)}" for name, size in parts.items())
    held = f"{num_blocks} blocks" if num_blocks else "one request of `max_model_len`"
    found = [remedy.described(demand) for remedy in remedies(demand)]
    advice = "Take a smaller checkpoint, a smaller `dtype`, or a GPU with more memory."
    if found:
        advice = f"Enough would be: {'; or '.join(found)}."
    return (
        f"The GPU's memory does not suffice: {shown(demand.least)} are needed and {shown(usable)} "
        f"may be used ({source}), so {shown(demand.missing)} are missing. {advice} Needed are "
        f"{listed}, with a cache for {held}."
    )


def remedies(demand: Demand) -> list[Remedy]:
    """Each option that would do alone; else the sizes, halved together; [] if nothing does."""
    alone = [remedy for remedy in _single(demand) if remedy.result.missing <= 0]
    halved = (_halved(demand, times) for times in range(1, 32))
    return alone or [remedy for remedy in halved if remedy.result.missing <= 0][:1]


def _single(demand: Demand) -> Iterator[Remedy]:
    """Each option by itself; of those that are as they were already none suffices either."""
    sizes, budget = demand.sizes, demand.budget
    left_out = demand.resized(num_blocks=None)
    yield Remedy({"num_blocks or kv_cache_gib": ("given", "left out")}, left_out)
    for name, low in {**_least(sizes), "num_drafts": 1}.items():
        new = demand.largest(name, low, getattr(sizes, name) - 1)
        if new is not None:
            yield _lowered(demand, {name: new})
    costs = replace(demand.costs, draft_weights=0, draft_block=0)
    plain = replace(demand, costs=costs).resized(num_drafts=0)
    yield Remedy({"speculative_config": ("given", None)}, plain)
    fraction = (100 * demand.least // budget.total + 1) / 100
    more = replace(demand, budget=replace(budget, fraction=fraction))
    yield Remedy({"memory_fraction": (f"{budget.fraction:g}", f"{fraction:g}")}, more)


def _halved(demand: Demand, times: int) -> Remedy:
    """All sizes halved so many times, as far as each may be lowered."""
    before = demand.sizes
    least = _least(replace(before, max_num_seqs=max(1, before.max_num_seqs >> times)))
    halves = {name: max(low, getattr(before, name) >> times) for name, low in least.items()}
    return _lowered(demand, halves)


def _lowered(demand: Demand, sizes: dict[str, int]) -> Remedy:
    """Other sizes, those that are as they were left out of what is said."""
    changes: dict[str, tuple[object, object]] = {}
    for name, new in sizes.items():
        if (old := getattr(demand.sizes, name)) != new:
            changes[_OPTIONS.get(name, (name, name))[demand.sizes.adapts]] = old, new
    return Remedy(changes, demand.resized(**sizes))


def _least(sizes: Sizes) -> dict[str, int]:
    """The least that each size may be, the others being as they are."""
    return {
        "max_num_seqs": 1,
        "max_num_batched_tokens": max(sizes.rows, min(_LEAST_TOKENS, sizes.max_num_batched_tokens)),
        "max_model_len": min(LEAST_CONTEXT, sizes.max_model_len),
    }


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory could not be had."""
    says_so = any(said in str(error).lower() for said in _SAID)
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and says_so)


@contextmanager
def reserving(doing: str, remedy: str | Callable[[], str] = "") -> Iterator[None]:
    """What runs out of memory inside says so by an `EngineMemoryError`."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ForetokenError) or not is_out_of_memory(error):
            raise
        said = remedy if isinstance(remedy, str) else remedy()
        raise memory_error(doing, error, said) from error


def memory_error(doing: str, cause: BaseException, remedy: str = "") -> EngineMemoryError:
    """The typed form of an allocation that failed while `doing` something."""
    said = str(cause).partition(" Including non-PyTorch memory")[0].rstrip(". \n")
    remedy = remedy or (_GPU_REMEDY if "cuda" in said.lower() else _REMEDY)
    error = EngineMemoryError(f"Out of memory while {doing}: {said}. {remedy}")
    error.__cause__ = cause
    return error


def check_fits(num_bytes: int) -> None:
    """Raise `EngineMemoryError` for a cache that this machine can never hold.

    Linux grants memory that it does not have, and kills the process once it is used.
    """
    limit = machine_bytes()
    if limit is not None and num_bytes > limit:
        raise EngineMemoryError(
            f"The cache asked for takes {num_bytes / 2**30:.3g} GiB, and this machine has "
            f"{limit / 2**30:.3g} GiB of memory. {_REMEDY}"
        )

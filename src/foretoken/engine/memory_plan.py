"""Plans how memory is divided, and which options to change if it does not suffice. No torch.

Bytes follow from shapes or were measured (`step_costs.py`). A plan never exceeds the usable memory,
and every remedy in an error was checked by the same arithmetic.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, NamedTuple

from foretoken.config.checks import machine_bytes
from foretoken.drafting.control import draft_widths
from foretoken.errors import ConfigError, EngineMemoryError, ForetokenError

LEAST_CONTEXT = 1024  # a context is never shortened below this; no remedy advises less

# Fields of `Sizes` with other names than their options: under a fixed K, and under K = `auto`.
_OPTIONS = {"num_drafts": ("num_speculative_tokens", "max_speculative_tokens")}
_LEAST_TOKENS = 256  # remedies lower `max_num_batched_tokens` no further: small chunks are slow
_RESERVE = 0.03  # share of free memory for the allocator's fragments and kernels loaded later
_VARIANTS = 2  # captures of one size and width of a step: for example with and without filters

_REMEDY = (
    "Lower `kv_cache_gib` (or `num_blocks`), `max_num_seqs`, `max_num_batched_tokens` or "
    "`max_model_len`."
)
_GPU_REMEDY = (
    "Lower `memory_fraction`, so that the cache leaves more to steps, `max_num_batched_tokens` or "
    "`max_num_seqs`; and see that no other process takes the GPU's memory."
)
# Texts in RuntimeErrors of PyTorch, its libraries and the C++ library when memory ran out.
_MESSAGES = ("alloc_failed", "can't allocate memory", "not enough memory", "out of memory",
             "bad_alloc", "size calculation overflowed")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sizes:
    """Options that memory depends on.

    num_drafts: K, under K = `auto` the largest; 0 without speculation
    num_blocks: blocks of the cache; None: as many as fit, at least for one longest request
    adapts: whether K is `auto`
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_drafts: int = 0
    num_blocks: int | None = None
    adapts: bool = False

    @property
    def rows(self) -> int:
        """Most deciding rows of logits in one step."""
        return self.max_num_seqs * (1 + self.num_drafts)

    @property
    def tokens(self) -> int:
        """Most tokens in one step; the last token of a full context is never computed."""
        return min(self.max_num_batched_tokens, self.max_num_seqs * (self.max_model_len - 1))


class StepPeak(NamedTuple):
    """A measured step: its tokens, its deciding rows, and the bytes that it takes while it runs."""

    tokens: int
    rows: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Bytes that steps take while they run: linear in tokens and deciding rows, at least `least`.

    A deciding row and its token take `per_row`; any other token takes `per_token`.
    """

    least: int = 0
    base: int = 0
    per_row: float = 0.0
    per_token: float = 0.0

    @classmethod
    def through(cls, smallest: StepPeak, decode: StepPeak, largest: StepPeak) -> StepBytes:
        """The linear function through three measured steps.

        Args:
            smallest: one request decodes.
            decode: as many requests decode as memory allows.
            largest: as `decode`, with as many prompt tokens as memory allows, maybe none.
        """
        rows, tokens = decode.rows - smallest.rows, largest.tokens - decode.tokens
        row_bytes = max(decode.num_bytes - smallest.num_bytes, 0)
        token_bytes = max(largest.num_bytes - decode.num_bytes, 0)
        per_row = row_bytes / rows if rows else smallest.num_bytes / smallest.rows
        per_token = token_bytes / tokens if tokens else per_row
        linear = cls(per_row=per_row, per_token=per_token).at(largest.tokens, largest.rows)
        return cls(smallest.num_bytes, largest.num_bytes - linear, per_row, per_token)

    def at(self, tokens: int, rows: int) -> int:
        """Bytes of a step of this size."""
        more = self.per_token * tokens + max(self.per_row - self.per_token, 0) * rows
        return max(self.least, self.base + round(more))


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Numbers of requests to which captured decode steps are padded, rising to `max_num_seqs`."""
    sizes = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, *range(96, 257, 32), *range(320, 1025, 64)]
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


@dataclass(frozen=True, slots=True)
class MemoryCosts:
    """Bytes of everything that is allocated.

    block, draft_block: K/V of a cache block of `block_size` tokens
    slot_block:  tokens and block id of a slot, per cache block
    draft:       the drafter's memory for one draft of a slot, mostly the draft's q
    draft_texts: the drafter's memory for texts, shared by all requests
    spare:       number of slots, and of blocks, that no request gets
    copied:      copies that attention in stock operators makes of a block while it runs
    libraries:   memory of kernels and libraries outside PyTorch's allocator
    graph:       memory of a captured step, without its tensors; 0: no step is captured
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
    steps: StepBytes = StepBytes()
    graph: int = 0

    def columns(self, sizes: Sizes) -> int:
        """How many blocks a request of `max_model_len` has."""
        return -(-sizes.max_model_len // self.block_size)

    def most_blocks(self, sizes: Sizes) -> int:
        """How many blocks `max_num_seqs` requests of `max_model_len` have: the most ever in use."""
        return sizes.max_num_seqs * self.columns(sizes)

    def parts(self, sizes: Sizes, num_blocks: int) -> dict[str, int]:
        """Bytes by name of part, with a cache of `num_blocks`."""
        copies = (num_blocks + self.spare) * self.copied
        parts = {
            "weights": self.weights,
            "weights of the draft": self.draft_weights,
            "texts to draft from": self.draft_texts,
            "kernels and libraries": self.libraries,
            "activations": self.steps.at(sizes.tokens, sizes.rows) + copies,
            "CUDA graphs": self._graphs(sizes),
            **self.cache(sizes, num_blocks),
        }
        return {name: size for name, size in parts.items() if size}

    def cache(self, sizes: Sizes, num_blocks: int) -> dict[str, int]:
        """Bytes of the parts that `kv_cache_gib` bounds."""
        slots, blocks = sizes.max_num_seqs + self.spare, num_blocks + self.spare
        return {
            "slots": slots * min(self.columns(sizes), num_blocks) * self.slot_block,
            "drafts of slots": ceil(slots * sizes.num_drafts * self.draft),
            "K/V cache": blocks * self.block,
            "K/V cache of the draft": blocks * self.draft_block,
        }

    def total(self, sizes: Sizes, num_blocks: int) -> int:
        return sum(self.parts(sizes, num_blocks).values())

    def _graphs(self, sizes: Sizes) -> int:
        """Bytes of the captured steps for all batches and numbers of drafts, with their outputs."""
        if not self.graph:
            return 0
        batches = graph_sizes(sizes.max_num_seqs)
        rows_each = [1 + width for width in draft_widths(sizes.num_drafts, adapts=sizes.adapts)]
        rows, count = sum(batches) * sum(rows_each), len(batches) * len(rows_each)
        return _VARIANTS * (count * self.graph + ceil(rows * self.steps.per_row))


@dataclass(frozen=True, slots=True)
class Budget:
    """The memory of a device, in bytes; an engine takes at most `fraction` of `total`."""

    total: int
    free: int
    fraction: float


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What an engine allocates.

    parts: bytes by name of part; no part is 0
    usable: bytes that the engine may take; None on a CPU, where nothing is measured
    """

    parts: dict[str, int]
    num_blocks: int
    max_model_len: int
    usable: int | None = None

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def with_measured(self, name: str, num_bytes: int) -> MemoryPlan:
        """The plan with a part's measured bytes; unchanged if these are 0, not known yet."""
        return replace(self, parts={**self.parts, name: num_bytes}) if num_bytes else self

    def table(self) -> str:
        """The plan as a text, one line per part."""
        rows = {**self.parts, "together": self.total}
        if self.usable is not None:
            rows["left of what may be used"] = self.usable - self.total
        return "\n".join(f"  {name:<26}{size / 2**30:9.3f} GiB" for name, size in rows.items())


@dataclass(frozen=True, slots=True)
class Demand:
    """The memory that an engine needs on a device, and the memory there is."""

    costs: MemoryCosts
    sizes: Sizes
    budget: Budget

    def resized(self, **sizes: Any) -> Demand:
        """The demand with these fields of `sizes` changed."""
        return replace(self, sizes=replace(self.sizes, **sizes))

    @property
    def least_blocks(self) -> int:
        """Blocks of the smallest possible cache: as configured, or for one longest request."""
        num_blocks = self.sizes.num_blocks
        return self.costs.columns(self.sizes) if num_blocks is None else num_blocks

    @property
    def least(self) -> int:
        """Bytes of everything with the smallest cache."""
        return self.costs.total(self.sizes, self.least_blocks)

    @property
    def usable(self) -> int:
        """Bytes that may be used. The fraction plays no part if the number of blocks is set."""
        fraction = self.budget.fraction if self.sizes.num_blocks is None else 1
        free = int(self.budget.free * (1 - _RESERVE))
        return min(int(fraction * self.budget.total), free)

    @property
    def missing(self) -> int:
        """How many bytes are lacking; 0 or negative if memory suffices."""
        return self.least - self.usable

    def largest(self, name: str, low: int, high: int) -> int | None:
        """As `largest_fitting`, for a value of the field `name` of `sizes`."""
        return largest_fitting(low, high, lambda value: self.resized(**{name: value}).missing <= 0)


def largest_fitting(low: int, high: int, fits: Callable[[int], bool]) -> int | None:
    """The largest number in [low, high] that fits, by bisection; None: not even `low` fits."""
    if low > high or not fits(low):
        return None
    return low + bisect_left(range(low + 1, high + 1), True, key=lambda n: not fits(n))


def blocks_within(gib: float, costs: MemoryCosts, sizes: Sizes) -> int:
    """How many blocks fit into `gib` GiB together with the slots and the slots' drafts;
    `ConfigError` if not even one block fits."""

    def cache_gib(num_blocks: int) -> float:
        return sum(costs.cache(sizes, num_blocks).values()) / 2**30

    num_blocks = largest_fitting(1, costs.most_blocks(sizes), lambda n: cache_gib(n) <= gib)
    if num_blocks is None:
        bound = f"at least {cache_gib(1):.3g}: one block of this model and the slots' memory"
        remedy = "Raise it, or lower `max_num_seqs` or `block_size`."
        raise ConfigError("kv_cache_gib", gib, bound, remedy)
    return num_blocks


class Remedy(NamedTuple):
    """Options to change together, as {name: (old, new)}, and the demand that results."""

    changes: dict[str, tuple[object, object]]
    result: Demand

    def described(self, before: Demand) -> str:
        """The text for a message; `before`: the demand without the changes."""
        changes = (f"`{name}` {old} -> {new}" for name, (old, new) in self.changes.items())
        freed = before.least - self.result.least
        return " with ".join(changes) + (f" (frees {format_bytes(freed)})" if freed > 0 else "")


def format_bytes(num_bytes: float) -> str:
    """A number of bytes in GiB or MiB."""
    gib = num_bytes / 2**30
    return f"{gib:.1f} GiB" if gib >= 0.95 else f"{num_bytes / 2**20:.3g} MiB"


def fitting_plan(demand: Demand, *, may_shorten: bool) -> MemoryPlan:
    """The plan with the largest cache that fits and that requests can use.

    Args:
        may_shorten: whether to lower `max_model_len` if one request of that length does not fit.

    Raises:
        EngineMemoryError: memory does not suffice.
    """
    if may_shorten and demand.missing > 0:
        longest = demand.sizes.max_model_len
        context = demand.largest("max_model_len", min(longest, LEAST_CONTEXT), longest)
        if context is not None:
            demand = demand.resized(max_model_len=context)
    costs, sizes, usable, low = demand.costs, demand.sizes, demand.usable, demand.least_blocks
    high = costs.most_blocks(sizes) if sizes.num_blocks is None else low
    num_blocks = largest_fitting(low, high, lambda n: costs.total(sizes, n) <= usable)
    if num_blocks is None:
        raise EngineMemoryError(shortage(demand))
    return MemoryPlan(costs.parts(sizes, num_blocks), num_blocks, sizes.max_model_len, usable)


def shortage(demand: Demand) -> str:
    """The message of the error that memory does not suffice."""
    budget, num_blocks, usable = demand.budget, demand.sizes.num_blocks, demand.usable
    bound = f"{format_bytes(budget.free)} of {format_bytes(budget.total)} are free"
    if num_blocks is None and usable == int(budget.fraction * budget.total):
        bound = f"`memory_fraction` is {budget.fraction:g} of {format_bytes(budget.total)}"
    parts = demand.costs.parts(demand.sizes, demand.least_blocks)
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
    cache = f"{num_blocks} blocks" if num_blocks else "one request of `max_model_len`"
    changes = [remedy.described(demand) for remedy in remedies(demand)]
    advice = "Take a smaller checkpoint, a smaller `dtype`, or a GPU with more memory."
    if changes:
        advice = f"Enough would be: {'; or '.join(changes)}."
    return (
        f"The GPU's memory does not suffice: {format_bytes(demand.least)} are needed and "
        f"{format_bytes(usable)} may be used ({bound}), so {format_bytes(demand.missing)} are "
        f"missing. {advice} Needed are {listed}, with a cache for {cache}."
    )


def remedies(demand: Demand) -> list[Remedy]:
    """All changes of a single option that suffice; if no such change does, the first change that
    halves all sizes once or more and suffices; else []."""
    single = [remedy for remedy in _single_changes(demand) if remedy.result.missing <= 0]
    halved = (_halved(demand, times) for times in range(1, 32))
    return single or [remedy for remedy in halved if remedy.result.missing <= 0][:1]


def _single_changes(demand: Demand) -> Iterator[Remedy]:
    """Changes of a single option: a size, lowered only as far as necessary; or another option (this
    change may not suffice)."""
    sizes, budget = demand.sizes, demand.budget
    any_blocks = demand.resized(num_blocks=None)
    yield Remedy({"num_blocks or kv_cache_gib": ("given", "left out")}, any_blocks)
    for name, low in {**_least(sizes), "num_drafts": 1}.items():
        new = demand.largest(name, low, getattr(sizes, name) - 1)
        if new is not None:
            yield _lowered(demand, {name: new})
    costs = replace(demand.costs, draft_weights=0, draft_block=0)
    plain = replace(demand, costs=costs).resized(num_drafts=0)
    yield Remedy({"speculative_config": ("given", None)}, plain)
    fraction = (100 * demand.least // budget.total + 1) / 100
    raised = replace(demand, budget=replace(budget, fraction=fraction))
    yield Remedy({"memory_fraction": (f"{budget.fraction:g}", f"{fraction:g}")}, raised)


def _halved(demand: Demand, times: int) -> Remedy:
    """The remedy that halves all sizes `times` times, but no size below its least value."""
    before = demand.sizes
    least = _least(replace(before, max_num_seqs=max(1, before.max_num_seqs >> times)))
    halved = {name: max(low, getattr(before, name) >> times) for name, low in least.items()}
    return _lowered(demand, halved)


def _lowered(demand: Demand, sizes: dict[str, int]) -> Remedy:
    """The remedy that sets these sizes; it names only the sizes that change."""
    changes: dict[str, tuple[object, object]] = {}
    for name, new in sizes.items():
        if (old := getattr(demand.sizes, name)) != new:
            option = _OPTIONS.get(name, (name, name))[demand.sizes.adapts]
            changes[option] = old, new
    return Remedy(changes, demand.resized(**sizes))


def _least(sizes: Sizes) -> dict[str, int]:
    """The least value that a remedy may give each size while the other sizes stay."""
    return {
        "max_num_seqs": 1,
        "max_num_batched_tokens": max(sizes.rows, min(_LEAST_TOKENS, sizes.max_num_batched_tokens)),
        "max_model_len": min(LEAST_CONTEXT, sizes.max_model_len),
    }


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out."""
    has_message = any(text in str(error).lower() for text in _MESSAGES)
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and has_message)


@contextmanager
def explaining_memory_errors(doing: str, remedy: str | Callable[[], str] = "") -> Iterator[None]:
    """Inside, running out of memory raises `EngineMemoryError`.

    Args:
        doing: completes the message "Out of memory while ...".
        remedy: the last sentence of the message, or a function that returns it; "": a default.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, ForetokenError) or not is_out_of_memory(error):
            raise
        advice = remedy if isinstance(remedy, str) else remedy()
        raise memory_error(doing, error, advice) from error


def memory_error(doing: str, cause: BaseException, remedy: str = "") -> EngineMemoryError:
    """The error of an allocation that failed with `cause`; see `explaining_memory_errors`."""
    reason = str(cause).partition(" Including non-PyTorch memory")[0].rstrip(". \n")
    remedy = remedy or (_GPU_REMEDY if "cuda" in reason.lower() else _REMEDY)
    return EngineMemoryError(f"Out of memory while {doing}: {reason}. {remedy}").caused_by(cause)


def check_fits(num_bytes: int) -> None:
    """Raise `EngineMemoryError` for a cache larger than this machine's memory."""
    limit = machine_bytes()
    if limit is not None and num_bytes > limit:  # Linux would kill the process later
        raise EngineMemoryError(
            f"The cache and the slots take {num_bytes / 2**30:.3g} GiB, and this machine has "
            f"{limit / 2**30:.3g} GiB of memory. {_REMEDY}"
        )

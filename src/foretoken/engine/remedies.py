"""What to say when memory does not suffice: how much is missing, and which change makes up for it.

Charter: every remedy named was tried in the plan's own arithmetic and suffices there. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from foretoken.engine.memory_plan import Demand, MemoryPlan, Sizes
from foretoken.errors import EngineMemoryError

LEAST_CONTEXT = 1024
"""A context is not shortened below this, nor is it advised."""

_LEAST_TOKENS = 256  # of `max_num_batched_tokens`: prompts in smaller chunks are slow


@dataclass(frozen=True, slots=True)
class Remedy:
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
    """The plan, if there is one.

    Args:
        may_shorten: lower `max_model_len`, which nobody asked for, where the cache is too small.

    Raises:
        EngineMemoryError: memory does not suffice.
    """
    if may_shorten and demand.missing > 0:
        longest = demand.sizes.max_model_len
        context = demand.largest("max_model_len", min(longest, LEAST_CONTEXT), longest)
        if context is not None:
            demand = demand.resized(max_model_len=context)
    if demand.missing > 0:
        raise EngineMemoryError(shortage(demand))
    return demand.plan()


def shortage(demand: Demand) -> str:
    """How much is missing, for what, and what would do instead."""
    sizes, budget = demand.sizes, demand.budget
    usable = budget.usable(sizes)
    source = f"{shown(budget.free)} of {shown(budget.total)} are free"
    if sizes.num_blocks is None and usable < budget.free_for_use:
        source = f"`memory_fraction` is {budget.fraction:g} of {shown(budget.total)}"
    parts = demand.costs.parts(sizes, demand.least_blocks)
    listed = ", ".join(f"{name} {shown(size)}" for name, size in parts.items())
    held = f"{sizes.num_blocks} blocks" if sizes.num_blocks else "one request of `max_model_len`"
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
        old = getattr(sizes, name)
        new = demand.largest(name, low, old - 1)
        if new is not None:
            shown_name = "num_speculative_tokens" if name == "num_drafts" else name
            yield Remedy({shown_name: (old, new)}, demand.resized(**{name: new}))
    costs = replace(demand.costs, draft_weights=0, draft_block=0)
    plain = replace(demand, costs=costs).resized(num_drafts=0)
    yield Remedy({"speculative_config": ("given", None)}, plain)
    fraction = (100 * demand.least // budget.total + 1) / 100
    more = replace(demand, budget=replace(budget, fraction=fraction))
    yield Remedy({"memory_fraction": (f"{budget.fraction:g}", f"{fraction:g}")}, more)


def _halved(demand: Demand, times: int) -> Remedy:
    """All sizes halved so many times, as far as each may be lowered."""
    before = demand.sizes
    seqs = max(1, before.max_num_seqs >> times)
    least = _least(replace(before, max_num_seqs=seqs))
    sizes = {name: max(low, getattr(before, name) >> times) for name, low in least.items()}
    changes = {name: (getattr(before, name), size) for name, size in sizes.items()}
    changes = {name: pair for name, pair in changes.items() if pair[0] != pair[1]}
    return Remedy({**changes}, demand.resized(**sizes))


def _least(sizes: Sizes) -> dict[str, int]:
    """The least that each size may be, the others being as they are."""
    return {
        "max_num_seqs": 1,
        "max_num_batched_tokens": max(sizes.rows, min(_LEAST_TOKENS, sizes.max_num_batched_tokens)),
        "max_model_len": min(LEAST_CONTEXT, sizes.max_model_len),
    }

"""A plan never exceeds what may be used, and what is advised where none fits does fit.

Devices, models and options are made up; the plan is arithmetic.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from foretoken.engine.memory_plan import (
    LEAST_CONTEXT,
    Budget,
    Demand,
    MemoryCosts,
    Sizes,
    StepBytes,
    StepPeak,
    blocks_within,
    fitting_plan,
    graph_sizes,
    largest_fitting,
    remedies,
    shortage,
)
from foretoken.errors import ConfigError, EngineMemoryError

GIB = 2**30
STEPS = StepBytes.through(
    StepPeak(5, 5, 20 << 20), StepPeak(320, 320, 400 << 20), StepPeak(2048, 320, 1600 << 20)
)
# Llama-3.1-8B in bfloat16 with a head that drafts, blocks of 64 tokens.
COSTS = MemoryCosts(
    block_size=64, block=8 << 20, draft_block=256 << 10, slot_block=264, draft=64000.0, spare=1,
    weights=15 * GIB, draft_weights=800 << 20, libraries=300 << 20, steps=STEPS, graph=4 << 20,
)  # fmt: skip
SIZES = Sizes(64, 2048, 131072, 4)
H200 = Budget(139 * GIB, 138 * GIB, 0.9)


def of(gib: float, fraction: float = 0.9, **sizes: Any) -> Demand:
    device = Budget(int(gib * GIB), int(gib * GIB), fraction)
    return Demand(COSTS, replace(SIZES, **sizes), device)


@st.composite
def demands(draw: st.DrawFn) -> Demand:
    def size(most: int) -> int:
        return draw(st.integers(0, most))

    drafts = draw(st.sampled_from([0, 0, 1, 4, 16]))
    seqs = draw(st.sampled_from([1, 2, 8, 64, 256, 1000]))
    rows = seqs * (1 + drafts)
    tokens = max(rows, draw(st.sampled_from([64, 512, 8192])))
    least = size(1 << 28)
    decode = least + (size(1 << 32) if seqs > 1 else 0)
    largest = decode + (size(1 << 33) if tokens > rows else 0)
    steps = StepBytes.through(
        StepPeak(1 + drafts, 1 + drafts, least),
        StepPeak(rows, rows, decode),
        StepPeak(tokens, rows, largest),
    )
    block_size = draw(st.sampled_from([1, 16, 64]))
    costs = MemoryCosts(
        block_size=block_size, block=block_size * (1 + size(1 << 17)),
        draft_block=block_size * size(1 << 14) if drafts else 0, slot_block=4 * block_size + 8,
        draft=float(size(1 << 20)) if drafts else 0.0, spare=size(1),
        copied=draw(st.sampled_from([0, 5000])), weights=size(4 * GIB),
        draft_weights=size(GIB) if drafts else 0, libraries=size(GIB), steps=steps,
        graph=draw(st.sampled_from([0, 4 << 20])),
    )  # fmt: skip
    blocks = draw(st.one_of(st.none(), st.none(), st.integers(1, 100_000)))
    sizes = Sizes(seqs, tokens, draw(st.integers(2, 200_000)), drafts, blocks)
    fraction = draw(st.sampled_from([0.5, 0.9, 1.0]))
    need = Demand(costs, sizes, H200).least
    total = int(need * draw(st.floats(0.5, 4.0)))
    free = int(total * draw(st.sampled_from([1.0, 0.99, 0.6])))
    return Demand(costs, sizes, Budget(total, free, fraction))


@settings(max_examples=300)
@given(demands(), st.booleans())
def test_a_plan_fits_and_serves_or_the_error_says_what_would(
    demand: Demand, may_shorten: bool
) -> None:
    sizes, costs = demand.sizes, demand.costs
    try:
        plan = fitting_plan(demand, may_shorten=may_shorten)
    except EngineMemoryError as error:
        assert demand.missing > 0
        check_remedies(demand, str(error))
        return
    assert plan.total == sum(plan.parts.values()) <= demand.usable
    assert demand.usable < max(demand.budget.free, 1)
    assert plan.max_model_len <= sizes.max_model_len
    if plan.max_model_len < sizes.max_model_len:
        assert may_shorten
        assert plan.max_model_len >= LEAST_CONTEXT
        longer = demand.resized(max_model_len=plan.max_model_len + 1)
        assert longer.missing > 0, "the longest that fits"
    shortened = replace(sizes, max_model_len=plan.max_model_len)
    if sizes.num_blocks is not None:
        assert plan.num_blocks == sizes.num_blocks
        return
    assert costs.columns(shortened) <= plan.num_blocks <= costs.most_blocks(shortened)
    if plan.num_blocks < costs.most_blocks(shortened):
        one_more = costs.total(shortened, plan.num_blocks + 1)
        assert one_more > demand.usable, "the largest cache"


def check_remedies(demand: Demand, message: str) -> None:
    for remedy in remedies(demand):
        assert remedy.result.missing <= 0
        plan = fitting_plan(remedy.result, may_shorten=False)
        assert plan.total <= remedy.result.usable
        for name, (old, new) in remedy.changes.items():
            assert f"`{name}` {old} -> {new}" in message
        seqs, rows = remedy.result.sizes.max_num_seqs, remedy.result.sizes.rows
        assert seqs >= 1
        assert remedy.result.sizes.max_num_batched_tokens >= rows, "which a configuration needs"


@given(demands())
def test_what_is_advised_is_the_least_change(demand: Demand) -> None:
    assume(demand.missing > 0)
    for remedy in remedies(demand):
        for name, (_, new) in remedy.changes.items():
            if name in ("max_num_seqs", "max_model_len") and len(remedy.changes) == 1:
                assert isinstance(new, int)
                assert demand.resized(**{name: new + 1}).missing > 0


@given(demands())
def test_every_size_costs(demand: Demand) -> None:
    """What bisection rests on: less of anything never takes more memory."""
    for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "num_drafts"):
        value = getattr(demand.sizes, name)
        if value > 2:
            assert demand.resized(**{name: value - 1}).least <= demand.least
            assert demand.resized(**{name: value // 2}).least <= demand.least


@given(st.integers(-5, 50), st.integers(-5, 50), st.integers(-5, 50))
def test_the_most_that_fits_is_that_of_a_search_one_by_one(low: int, high: int, last: int) -> None:
    expected = max((n for n in range(low, high + 1) if n <= last), default=None)
    assert largest_fitting(low, high, lambda n: n <= last) == expected


def test_a_large_gpu_gives_the_rest_to_the_cache() -> None:
    demand = Demand(COSTS, SIZES, H200)
    plan = fitting_plan(demand, may_shorten=True)
    assert plan.max_model_len == 131072
    per_block = COSTS.block + COSTS.draft_block
    assert 0 <= 0.9 * 139 * GIB - plan.total < per_block
    assert plan.parts["K/V cache"] == (plan.num_blocks + 1) * COSTS.block
    assert plan.parts["weights"] == 15 * GIB
    table = plan.table().splitlines()
    assert len(table) == len(plan.parts) + 2
    assert table[0].split() == ["weights", "15.000", "GiB"]
    assert plan.with_measured("CUDA graphs", 7).parts["CUDA graphs"] == 7
    assert plan.with_measured("CUDA graphs", 0) is plan


def test_a_small_model_takes_no_more_than_it_can_use() -> None:
    small = Demand(replace(COSTS, weights=1000), replace(SIZES, max_model_len=256), H200)
    assert fitting_plan(small, may_shorten=True).num_blocks == 64 * 4


def test_a_shortage_is_told_with_what_would_do() -> None:
    """20.0 GiB next to the cache, 16.5 of it for one context of 131072 tokens."""
    demand = of(24)
    with pytest.raises(EngineMemoryError) as caught:
        fitting_plan(demand, may_shorten=False)
    message = str(caught.value)
    missing = demand.least - int(0.9 * 24 * GIB)
    assert f"{missing / GIB:.1f} GiB are missing" in message
    assert "`memory_fraction` is 0.9 of 24.0 GiB" in message
    (context,) = (r for r in remedies(demand) if "max_model_len" in r.changes)
    old, new = context.changes["max_model_len"]
    assert f"`max_model_len` {old} -> {new} (frees" in message
    assert fitting_plan(demand, may_shorten=True).max_model_len == new
    assert "weights 15.0 GiB" in message


def test_a_fraction_that_could_be_larger_is_a_remedy() -> None:
    demand = of(48, fraction=0.7)
    assert demand.missing > 0
    assert any("memory_fraction" in remedy.changes for remedy in remedies(demand))
    taken = replace(demand, budget=replace(demand.budget, free=30 * GIB))
    assert taken.missing > 0
    assert not any("memory_fraction" in remedy.changes for remedy in remedies(taken))
    assert "30.0 GiB of 48.0 GiB are free" in shortage(taken)


def test_several_options_together_if_none_does_alone() -> None:
    demand = of(22.5, max_num_seqs=256, max_num_batched_tokens=8192, fraction=1.0)
    (remedy,) = remedies(demand)
    assert len(remedy.changes) > 1
    assert " with `max_model_len` 131072 ->" in shortage(demand)


def test_weights_that_do_not_fit_have_no_remedy_here() -> None:
    demand = of(12)
    assert remedies(demand) == []
    assert "smaller checkpoint" in shortage(demand)


def test_a_cache_of_given_size_is_not_bounded_by_the_fraction() -> None:
    plan = fitting_plan(of(24, fraction=0.1, num_blocks=20, max_model_len=2048), may_shorten=False)
    assert plan.num_blocks == 20
    demand = of(24, num_blocks=2000, max_model_len=2048)
    message = shortage(demand)
    assert "`num_blocks or kv_cache_gib` given -> left out" in message
    assert "2000 blocks" in message


def test_a_cache_in_gib_holds_slots_and_drafts_too() -> None:
    sizes = replace(SIZES, max_model_len=4096)
    blocks = blocks_within(4.0, COSTS, sizes)
    within = ("slots", "drafts of slots", "K/V cache", "K/V cache of the draft")
    of_cache = [sum(COSTS.parts(sizes, n)[name] for name in within) for n in (blocks, blocks + 1)]
    assert of_cache[0] <= 4 * GIB < of_cache[1]
    with pytest.raises(ConfigError, match="one block") as caught:
        blocks_within(0.01, COSTS, sizes)
    least = float(str(caught.value.bound).split()[2].rstrip(":"))
    assert blocks_within(1.01 * least, COSTS, sizes) >= 1
    assert blocks_within(1e6, COSTS, sizes) == 64 * 64, "more are of no use"


def test_steps_between_those_that_were_measured() -> None:
    assert STEPS.at(2048, 320) == 1600 << 20
    assert STEPS.at(5, 5) == STEPS.least == 20 << 20
    assert STEPS.at(320, 320) == pytest.approx(400 << 20)
    assert STEPS.at(320 + 864, 320) == pytest.approx(1000 << 20, rel=1e-6), "halfway"
    # Measured where memory sufficed, and extended from there.
    half = StepBytes.through(
        StepPeak(5, 5, 20 << 20), StepPeak(160, 160, 208 << 20), StepPeak(1024, 160, 808 << 20)
    )
    per_row, per_token = (188 << 20) / 155, (600 << 20) / 864
    decode = (208 << 20) + 160 * per_row
    assert half.at(320, 320) == pytest.approx(decode)
    assert half.at(2048, 320) == pytest.approx(decode + 1728 * per_token)
    assert replace(SIZES, max_model_len=10).tokens == 64 * 9, "contexts too short for 2048"


def test_graphs_are_counted_by_their_rows() -> None:
    plain = replace(SIZES, num_drafts=0)
    eager = replace(COSTS, graph=0)
    assert "CUDA graphs" not in eager.parts(plain, 10)
    captured = graph_sizes(64)
    each = len(captured) * COSTS.graph + sum(captured) * STEPS.per_row
    assert COSTS.parts(plain, 10)["CUDA graphs"] == pytest.approx(2 * each, abs=2)
    assert graph_sizes(1) == (1,)
    assert graph_sizes(65)[-2:] == (64, 65)

"""K = `auto` through the engine: which texts it may change, blocks, metrics, costs at start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foretoken import LLM, ConfigError, RequestError, SamplingParams, SpeculativeConfig
from foretoken.engine.build import EngineParts
from foretoken.engine.graphs import Graphs
from foretoken.engine.request import Request
from foretoken.engine.scheduler import Schedule
from foretoken.engine.step_costs import SECONDS
from foretoken.engine.trace import StepTrace
from foretoken.outputs import RequestOutput
from foretoken.slots.step import StepRequests
from tests.engine.doubles import ON_DEVICE, ON_HOST, double, llm_of

PROMPTS = ["def add(a, b):", "x", "import os\nimport sys\n" * 4, "for i in range(10): print(i)"]


@pytest.fixture
def auto(draft: Path) -> dict[str, Any]:
    return {"model": str(draft), "num_speculative_tokens": "auto", "max_speculative_tokens": 6}


@pytest.fixture(autouse=True)
def _quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SECONDS, "cpu", 0.05)


def build(
    target: Path, speculation: dict[str, Any] | None, parts: EngineParts = ON_HOST, **options: Any
) -> LLM:
    sizes = {"block_size": 4, "max_num_seqs": 3, "max_num_batched_tokens": 32, "threads": 1}
    return llm_of(parts, target, speculation, **sizes | options)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    assert all(output.error is None for output in outputs)
    return [sample.token_ids for output in outputs for sample in output.outputs]


def erratic(llm: LLM, most: int = 6) -> list[int]:
    """K of what adapts is another in every step; each that was chosen."""
    control, chosen = llm.engine.scheduler.control, list[int]()
    assert control is not None

    def choose(decoding: list[Request]) -> None:
        for request in decoding:
            if request.adapts:
                chosen.append(3 * len(chosen) % (most + 1))
                request.num_speculative_tokens = chosen[-1]

    control.choose = choose  # type: ignore[method-assign,assignment]
    return chosen


@pytest.mark.parametrize("method", ["draft_model", "ngram"])
@pytest.mark.parametrize("options", [{}, {"num_blocks": 34}, {"async_scheduling": True}])
def test_texts_that_do_not_depend_on_k_are_those_of_plain_decoding(
    target: Path, auto: dict[str, Any], method: str, options: dict[str, Any]
) -> None:
    if method == "ngram":
        auto = {**auto, "method": "ngram", "model": None, "prompt_lookup_min": 1}
    params = [
        SamplingParams(temperature=0, max_tokens=40),
        SamplingParams(temperature=0.9, seed=3, max_tokens=40, rejection_sample_method="coupled"),
    ] * 2
    expected = tokens(build(target, None).generate(PROMPTS, params))
    for is_erratic in (False, True):
        llm = build(target, auto, **options)
        chosen = erratic(llm) if is_erratic else []
        outputs = llm.generate(PROMPTS, params)
        assert tokens(outputs) == expected
        assert is_erratic == bool(chosen)
        if options == {"num_blocks": 34}:
            assert sum(output.metrics.num_preemptions for output in outputs) > 0


class Noted(Graphs):
    """Captures that are noted, and run as they come."""

    def stage(self, name: str, run: Callable[..., Any], rows: StepRequests, *given: Any) -> Any:
        if self._recording is not None:
            self._recording[name] = Any, None
        elif rows.shape is not None and not self._is_warming_up:
            assert name in self._captured[rows.shape]
        return run(rows, *given)


@pytest.mark.parametrize("rule", ["standard", "synthetic"])
def test_a_device_measures_the_steps_that_it_captures_and_will_replay(
    target: Path, auto: dict[str, Any], rule: str
) -> None:
    most = {"max_speculative_tokens": 4, "rejection_sample_method": rule}
    if rule == "synthetic":
        most["synthetic_acceptance_rates"] = [0.9, 0.8, 0.6, 0.4]

    parts = replace(ON_DEVICE, graphs=Noted)
    llm = build(target, {**auto, **most}, parts, backend="torch", num_blocks=60)
    captured, widths = llm.engine.runner.graphs._captured, range(5)
    assert {(shape.size, shape.most_drafts) for shape in captured} == {
        (size, width) for size in (1, 3) for width in widths
    }
    before = set(captured)
    erratic(llm, 4)  # what the measured costs would choose on a busy machine may be always 0
    outputs = llm.generate(
        PROMPTS[0], SamplingParams(max_tokens=60, temperature=1, ignore_eos=True)
    )
    assert set(captured) == before, "what is served was captured at the start"
    assert len(outputs[0].metrics.steps_per_k) > 1
    if rule == "standard":
        params = SamplingParams(temperature=0, max_tokens=40)
        expected = tokens(build(target, None, backend="torch").generate(PROMPTS, params))
        assert tokens(llm.generate(PROMPTS, params)) == expected


def test_blocks_are_reserved_for_what_was_chosen(target: Path, auto: dict[str, Any]) -> None:
    llm = build(target, auto, enable_prefix_caching=False)
    erratic(llm)
    engine, pool = llm.engine, llm.engine.scheduler.pool
    for prompt in PROMPTS:
        engine.add(prompt, list(prompt.encode()), SamplingParams(max_tokens=30, temperature=0))
    most_held: dict[Request, int] = {}
    while engine.has_work:
        before = {r: len(r.token_ids) for r in engine.scheduler.running if r.decodes}
        engine.step()
        for request, known in before.items():
            if request.block_ids:
                reach = min(known + request.num_speculative_tokens, request.limit - 1)
                needed = max(pool.blocks_for(reach), most_held.get(request, 0))
                assert len(request.block_ids) <= max(needed, pool.blocks_for(known))
                most_held[request] = len(request.block_ids)
        engine.check_integrity()
    assert most_held


def test_a_seeded_text_is_the_same_alone_and_in_a_crowd_unless_it_asks_for_auto(
    target: Path, auto: dict[str, Any]
) -> None:
    kept = SamplingParams(temperature=0.9, seed=5, max_tokens=40, ignore_eos=True)
    alone = build(target, auto).generate(PROMPTS[0], kept)
    asking = SamplingParams(
        temperature=0.9, seed=5, max_tokens=40, ignore_eos=True, num_speculative_tokens="auto"
    )
    other = SamplingParams(temperature=1.1, max_tokens=40, ignore_eos=True)
    llm = build(target, auto)
    erratic(llm)
    crowd = llm.generate([PROMPTS[0], PROMPTS[0], PROMPTS[3]], [kept, asking, other])
    assert tokens(crowd[:1]) == tokens(alone)
    fixed, adapting, unseeded = (output.metrics for output in crowd)
    assert fixed.steps_per_k == alone[0].metrics.steps_per_k
    assert len(fixed.drafted_per_position) == 4, "a fixed K, whatever is chosen for others"
    assert len(adapting.drafted_per_position) == len(unseeded.drafted_per_position) == 6
    assert tokens(crowd[1:2]) != tokens(alone), "where drafts end decides which noise is used"


def test_decisions_are_told(target: Path, auto: dict[str, Any]) -> None:
    llm, traces = build(target, auto), list[StepTrace]()
    assert llm.metrics.estimated_speedup is llm.metrics.realised_speedup is None
    llm.engine.on_step = traces.append
    llm.generate(PROMPTS, SamplingParams(max_tokens=60, temperature=0, ignore_eos=True))
    metrics = llm.metrics
    assert sum(metrics.steps_per_k) == metrics.num_steps
    assert sum(k * n for k, n in enumerate(metrics.steps_per_k)) == metrics.num_draft_tokens
    assert metrics.mean_k == metrics.num_draft_tokens / metrics.num_steps
    assert metrics.estimated_speedup > 0.5
    assert metrics.realised_speedup > 0
    asked = [sum(trace.asked_drafts) for trace in traces]
    assert sum(asked) == metrics.num_steps


def test_prompts_that_join_play_no_part_and_no_request_is_kept(
    target: Path, auto: dict[str, Any]
) -> None:
    llm, seen = build(target, auto), list[int]()

    def watched(choose: Callable[[list[Request]], None], decoding: list[Request]) -> None:
        assert all(request.decodes for request in decoding)
        choose(decoding)
        seen.append(len(decoding))

    with double(llm.engine.scheduler, "control", choose=watched):
        llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    assert seen[0] == 0 < max(seen) <= 3
    control = llm.engine.scheduler.control
    assert control is not None
    assert control._adapting == control._probed == control.acceptance.held_slots() == []


def test_slots_on_a_device_take_one_of_few_widths(target: Path, auto: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0, max_tokens=40)
    expected = tokens(build(target, None, backend="torch").generate(PROMPTS, params))
    llm = build(target, auto, ON_DEVICE, backend="torch")
    asked = set[int]()

    def watched(schedule: Callable[[], Schedule]) -> Schedule:
        plan = schedule()
        asked.update(share.request.num_speculative_tokens for share in plan.shares)
        return plan

    with double(llm.engine, "scheduler", schedule=watched):
        assert tokens(llm.generate(PROMPTS, params)) == expected
    assert asked <= {0, 1, 2, 3, 4, 6}
    llm.engine.check_integrity()


def test_what_was_measured_is_plausible(target: Path, auto: dict[str, Any]) -> None:
    llm = build(target, auto)
    control = llm.engine.scheduler.control
    assert control is not None
    costs = control.costs.table
    assert costs.batches[0] == 1
    assert costs.rest_JK1.shape == costs.draft_JK1.shape == (len(costs.batches), 7)
    assert (costs.rest_JK1 > 0).all()
    assert (np.diff(costs.rest_JK1, axis=1) >= 0).all()
    assert costs.context_K1.shape == (7,)
    assert min(*costs.context_K1, costs.missed) >= 0
    assert llm.engine.runner.slots.admitted == {}
    assert build(target, {**auto, "num_speculative_tokens": 2, "max_speculative_tokens": None}
                 ).engine.scheduler.control is None  # fmt: skip


def test_the_shortest_of_contexts_is_measured_too(target: Path, auto: dict[str, Any]) -> None:
    for length in (2, 9, 65, 70, 80, 128):
        llm = build(target, auto, max_model_len=length)
        params = SamplingParams(temperature=0, max_tokens=length - 1)
        (output,) = llm.generate("a", params)
        assert len(output.outputs[0].token_ids) == length - 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"num_speculative_tokens": 3, "max_speculative_tokens": 8}, "8.*num_speculative_tokens=3"),
        ({"num_speculative_tokens": "auto", "max_speculative_tokens": 0}, r"\[1, 64\]"),
        ({"num_speculative_tokens": "Auto"}, "`auto` or an integer"),
        ({"num_speculative_tokens": "auto", "rejection_sample_method": "synthetic",
          "synthetic_acceptance_length": 9.5}, r"\[1, 9\]"),
    ],
)  # fmt: skip
def test_contradictory_settings_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        SpeculativeConfig(method="ngram", **given)


def test_a_request_is_refused_what_the_engine_has_not(target: Path, auto: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"at most the engine's 6"):
        build(target, auto).generate("a", SamplingParams(num_speculative_tokens=7))
    asking = SamplingParams(num_speculative_tokens="auto")
    with pytest.raises(RequestError, match=r"this engine's K is fixed.*`auto`"):
        build(target, {**auto, "num_speculative_tokens": 2, "max_speculative_tokens": None}
              ).generate("a", asking)  # fmt: skip
    with pytest.raises(RequestError, match="or `auto`"):
        SamplingParams(num_speculative_tokens="all")

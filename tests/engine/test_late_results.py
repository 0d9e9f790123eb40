"""Each step is launched before the one before it is committed: nothing changes but the order.

The same requests, arriving and leaving at the same steps, in both orders: tokens, texts, log-
probabilities and finish reasons are equal. On a naive machine that also checks every cell, slot and
prefix entry, and that mutants of the engine fail; then on small checkpoints at T > 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from foretoken import LLM, SamplingParams
from foretoken.cache.block_pool import ROOT
from foretoken.engine.boundary import build_output, prepare
from foretoken.engine.engine import Engine, Launched
from foretoken.engine.request import Request, RequestGroup
from foretoken.engine.scheduler import Schedule
from foretoken.errors import ForetokenError
from foretoken.ops import Verdict, unavailable
from foretoken.ops.steps import StepTokens
from foretoken.outputs import RequestOutput
from foretoken.slots.table import SlotTable
from tests.engine.naive import MOST_DRAFTS
from tests.engine.paged_machine import PagedMachine, Parts, WatchedScheduler
from tests.engine.predictions import with_predictions
from tests.engine.same import check_same, check_sample
from tests.engine.workload import mixed, prompt_of

TEXT = [0, 0, 1, 0, 2, 0, 1, 1, 2, 0, 0, 1] * 3


@dataclass(frozen=True)
class Visit:
    comes: int
    leaves: int | None
    prompt: list[int]
    params: dict[str, Any]
    leaves_within: bool = False


@st.composite
def visits(draw: st.DrawFn) -> Visit:
    comes = draw(st.integers(0, 12))
    params: dict[str, Any] = {
        "max_tokens": draw(st.integers(1, 20)),
        "key": draw(st.integers(0, 2)),
        "temperature": draw(st.sampled_from([0.0, 1.0])),
        "n": draw(st.sampled_from([1, 1, 2])),
        "num_speculative_tokens": draw(st.sampled_from([None, None, 0, 1, MOST_DRAFTS])),
        "logprobs": draw(st.sampled_from([None, 2])),
        "prompt_logprobs": draw(st.sampled_from([None, None, 1])),
        "stop": draw(st.sampled_from([[], [], ["ab", "c"], ["da"]])),
        "stop_token_ids": draw(st.sampled_from([[], [], [3]])),
        "frequency_penalty": draw(st.sampled_from([0.0, 0.5])),
        "logit_bias": draw(st.sampled_from([None, {1: 1.5}])),
    }
    params["min_tokens"] = draw(st.integers(0, min(3, params["max_tokens"])))
    leaves = draw(st.one_of(st.none(), st.integers(comes + 1, comes + 15)))
    prompt = TEXT[: draw(st.integers(1, 30))] + draw(st.lists(st.integers(0, 3), max_size=3))
    return Visit(comes, leaves, prompt, params, draw(st.booleans()))


@st.composite
def pools(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "num_blocks": draw(st.integers(14, 30)),
        "max_num_seqs": draw(st.integers(2, 5)),
        "max_num_batched_tokens": draw(st.integers(30, 50)),
        "enable_prefix_caching": draw(st.sampled_from([True, True, False])),
    }


CROWDS = st.lists(visits(), min_size=1, max_size=8)


def play(crowd: list[Visit], pool: dict[str, Any], **order: Any) -> list[RequestOutput]:
    """What each of them is given by a machine that checks itself at every step."""
    machine = PagedMachine(**pool, **order)
    groups: dict[int, RequestGroup] = {}

    def leave(step: int, within: bool) -> None:
        for i, group in groups.items():
            if crowd[i].leaves == step and crowd[i].leaves_within == within:
                machine.finish(*group.samples)

    last = max(visit.comes for visit in crowd)
    for step in range(2000):
        for i, visit in enumerate(crowd):
            if visit.comes == step:
                groups[i] = machine.add(str(i), visit.prompt, **visit.params)
        leave(step, within=False)
        if step > last and not machine.steps.has_work:
            break
        if machine.late:
            machine.steps.meanwhile = lambda step=step: leave(step, within=True)
        machine.step()
    assert not machine.steps.has_work, "requests are left over"
    free = machine.scheduler.pool.num_free
    assert free == machine.scheduler.pool.num_blocks
    return [build_output(machine.engine, groups[i]) for i in range(len(crowd))]


def check_equal(late: RequestOutput, in_turn: RequestOutput, tolerance: float = 0.0) -> None:
    if all(sample.finish_reason != "abort" for o in (late, in_turn) for sample in o.outputs):
        check_same(late, in_turn, tolerance)
        assert late.metrics.num_steps == in_turn.metrics.num_steps
        return
    assert late.error is in_turn.error is None
    for mine, theirs in zip(late.outputs, in_turn.outputs, strict=True):
        if "abort" in (mine.finish_reason, theirs.finish_reason):
            # The result of a launched step is known a step later: one may have more tokens.
            shorter, longer = sorted((mine.token_ids, theirs.token_ids), key=len)
            assert longer[: len(shorter)] == shorter
        else:
            check_sample(mine, theirs, tolerance)


@settings(max_examples=150)
@given(crowd=CROWDS, pool=pools())
def test_results_that_arrive_a_step_late_change_nothing(
    crowd: list[Visit], pool: dict[str, Any]
) -> None:
    in_turn, late = play(crowd, pool), play(crowd, pool, late=True)
    for mine, theirs in zip(late, in_turn, strict=True):
        check_equal(mine, theirs)


class KeepsRejected(SlotTable):
    """K/V of drafts that were not accepted count as computed."""

    def advance(self, tokens: StepTokens, verdict: Verdict) -> Tensor:
        packet, slot_B = super().advance(tokens, verdict), tokens.slot_B
        slot_D = slot_B if tokens.decider_B is None else slot_B[tokens.decider_B >= 0]
        self.state.computed_S[slot_D] += tokens.num_D - verdict.n_accept_B
        return packet


class AdmitsTheUncommitted(WatchedScheduler):
    """What was preempted may run again before the host has seen its latest tokens."""

    def preempt(self, request: Request) -> None:
        super().preempt(request)
        request.launched_share = None


class EntersTheUncommitted(WatchedScheduler):
    """A launched step is taken for done where prefix entries are made."""

    def schedule(self) -> Schedule:
        size = self.pool.block_size
        for request in self.running:
            for i in range(len(request.block_serials), request.num_scheduled // size):
                before = request.block_serials[-1] if request.block_serials else ROOT
                tokens = request.token_ids[i * size : (i + 1) * size]
                serial = self.pool.enter(before, tokens, request.block_ids[i])
                request.block_serials.append(serial)
        return super().schedule()


class ForgetsTheLatest(Engine):
    """A commit takes the step that was launched since for committed, too."""

    def commit(self, launched: Launched) -> list[RequestGroup]:
        for share in launched.shares:
            share.request.launched_share = None
        return super().commit(launched)


class ReservesForOneStep(WatchedScheduler):
    """The unresolved step's drafts are forgotten when blocks are reserved for this one."""

    def schedule(self) -> Schedule:
        shares = {r: r.launched_share for r in self.running}
        launched = {r: share for r, share in shares.items() if share and share.decides}
        for request, share in launched.items():
            request.launched_share = share._replace(max_drafts=0)
        try:
            return super().schedule()
        finally:
            for request, share in launched.items():
                request.launched_share = share


MUTANTS = [
    (Parts(slots=KeepsRejected), "more is computed than known|other tokens"),
    (Parts(scheduler=AdmitsTheUncommitted), "more is computed than known|no block for"),
    (Parts(scheduler=EntersTheUncommitted), "entered before its step was committed"),
    (Parts(engine=ForgetsTheLatest), "no block for these tokens|K/V of other tokens|never written"),
    (Parts(scheduler=ReservesForOneStep), "no block for these tokens"),
]


@pytest.mark.parametrize(("parts", "message"), MUTANTS)
def test_mutants_fail_the_same_property(parts: Parts, message: str) -> None:
    @settings(max_examples=400, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(crowd=CROWDS, pool=pools())
    def property_of_the_mutant(crowd: list[Visit], pool: dict[str, Any]) -> None:
        play(crowd, pool, late=True, parts=parts)

    with pytest.raises((AssertionError, ForetokenError), match=message):
        property_of_the_mutant()


def test_a_request_may_be_aborted_between_schedule_and_launch() -> None:
    """It has lost its slot by then: no slot is written."""
    machine = PagedMachine(40, max_num_seqs=3, max_num_batched_tokens=60)
    engine, slots = machine.engine, machine.engine.runner.slots
    stays = [machine.add(f"stays {i}", TEXT[:9], 8, key=i) for i in range(2)]
    machine.step()
    leaves = machine.add("leaves", TEXT[:20], 8, key=9)
    plan = engine.scheduler.schedule()
    assert [request.group for request in plan.admitted] == [leaves]
    engine.abort(leaves)
    lengths = slots.length_S.copy()
    engine.commit(engine.launch(plan))
    assert slots.length_S[2] == lengths[2] == 1, "a request was admitted there"
    machine.run()
    assert [group.samples[0].finish_reason for group in stays] == ["length"] * 2


def test_a_launched_step_of_ended_requests_is_no_work() -> None:
    machine = PagedMachine(40, max_num_seqs=3, max_num_batched_tokens=60)
    engine, group = machine.engine, machine.add("ends", TEXT[:9], 8)
    launched = engine.launch(engine.scheduler.schedule())
    assert engine.has_work
    engine.abort(group)
    assert not engine.has_work
    engine.check_integrity()
    next_group = machine.add("follows", TEXT[:5], 8)  # in the same slot
    assert engine.launch(engine.scheduler.schedule()).groups == [next_group]
    assert engine.commit(launched) == [group]
    assert (group.samples[0].num_output, group.samples[0].finish_reason) == (0, "abort")
    assert not next_group.samples[0].num_output


def crowd_of(number: int, *, drafts: bool) -> list[Visit]:
    """Requests that come one after another; some leave."""
    return [
        Visit(2 * i // 3, 2 * i + 5 if i % 5 == 3 else None, prompt_of(i), mixed(i, drafts=drafts))
        for i in range(number)
    ]


def serve(llm: LLM, crowd: list[Visit]) -> list[RequestOutput]:
    engine = llm.engine
    groups: list[RequestGroup] = []
    _kept = engine.grammars.wait(visit.params.get("structured_outputs") for visit in crowd)
    for step in range(1000):
        for i, visit in enumerate(crowd):
            if visit.comes == step:
                params = SamplingParams(**visit.params)
                groups.append(engine.add(*prepare(engine, str(i), visit.prompt, params)))
            if visit.leaves == step:
                engine.abort(groups[i])
        if len(groups) == len(crowd) and not engine.has_work:
            break
        engine.step()
        engine.check_integrity()
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks
    return [build_output(engine, group) for group in groups]


@pytest.mark.parametrize(
    "kind", ["plain", "draft_model", "greedy", "ngram", "suffix", "prediction", "draft_text"]
)
def test_a_checkpoint_serves_the_same_a_step_late(target: Path, draft: Path, kind: str) -> None:
    speculation: dict[str, Any] | None = {
        "plain": None,
        "draft_model": {"model": str(draft)},
        "greedy": {"model": str(draft), "draft_sample_method": "greedy"},
        "ngram": {"method": "ngram", "prompt_lookup_min": 1},
        "suffix": {"method": "suffix", "suffix_decoding_max_cached_requests": 0},
        "prediction": {"method": "prediction"},
        "draft_text": {"method": "draft_text", "model": str(target)},
    }[kind]
    crowd = crowd_of(24, drafts=kind != "plain")
    if kind == "prediction":
        asked = [SamplingParams(**visit.params) for visit in crowd]
        asked = with_predictions(LLM(str(target)), [visit.prompt for visit in crowd], asked)
        for visit, params in zip(crowd, asked, strict=True):
            visit.params["prediction"] = params.prediction
    options: dict[str, Any] = {"block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 40}
    outputs = []
    for late in (False, True):
        options["async_scheduling"] = late
        llm = LLM(str(target), speculation, num_blocks=34, max_model_len=128, **options)
        outputs.append(serve(llm, crowd))
    in_turn, late_ones = outputs
    for mine, theirs in zip(late_ones, in_turn, strict=True):
        # The native decoder's logits do not depend on what else is in the batch, not by a bit.
        check_equal(mine, theirs, tolerance=1e-4 if unavailable("native") else 0.0)
    for served in outputs:
        assert sum(o.metrics.num_preemptions for o in served) >= 5
        assert sum(o.metrics.num_cached_tokens for o in served) > 50
        reasons = {sample.finish_reason for o in served for sample in o.outputs}
        assert reasons == {"length", "stop", "abort"}
        # Random bytes are no text: they cannot be drafted by their text.
        count = "num_draft_tokens" if kind == "draft_text" else "num_accepted_tokens"
        assert any(getattr(o.metrics, count) for o in served) == (kind != "plain")

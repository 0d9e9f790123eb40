"""`foretoken plan`: the scheduler that it drives, the profiles that it reads, its conclusions."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from benchmarks.tables.plans import PUBLISHED, published_outlook
from foretoken import LLM, SamplingParams
from foretoken.cli import app as cli
from foretoken.engine.pace import PromptCosts
from foretoken.errors import CapacityError, ConfigError
from foretoken.lab.plan.calibrate import (
    Calibration,
    EngineRun,
    PromptStep,
    nearest_rising,
    seconds_per_pair,
    seconds_without_pairs,
)
from foretoken.lab.plan.command import Planner, charts, figures, sentences, tables
from foretoken.lab.plan.options import PlanOptions
from foretoken.lab.plan.profile import Acceptance, EngineLimits, smooth
from foretoken.lab.plan.simulate import Fleet, Outlook, RequestSpec, Simulation, Step, StepClock
from foretoken.lab.results import read
from tests.lab.profiles import PROFILE, SHAPES, changed

SVG = "{http://www.w3.org/2000/svg}"

DEAR = PromptCosts((1, 64, 512), (4e-3, 16e-3, 100e-3), 1e-6)  # steps of prompts

pytestmark = pytest.mark.usefixtures("known_memory")


@pytest.mark.parametrize("ahead", [False, True])
def test_the_simulation_takes_the_steps_of_the_engine(
    target: Path, draft: Path, ahead: bool
) -> None:
    """Acceptance is fixed; there are chunked prompts, queues and preemption."""
    speculation = {
        "model": str(draft), "num_speculative_tokens": 4, "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [1.0, 1.0, 0.0, 0.0],
    }  # fmt: skip
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "num_blocks": 15, "block_size": 4}
    preempted = 0
    with LLM(
        target, speculation, **sizes, enable_prefix_caching=False, async_scheduling=ahead
    ) as llm:
        limits = EngineLimits(4, 32, llm.engine.limits.max_model_len, 4, 15)
        profile = changed(limits=limits, runs_ahead=ahead)
        for drafts, concurrency in ((0, 1), (4, 1), (2, 3), (4, 4), (3, 6)):
            specs = [RequestSpec(0.0, 3 + 5 * (i % 4), 9 + i % 5) for i in range(9)]
            steps = list[Step]()
            joint = (1.0, 1.0, 0.0, 0.0)[:drafts]
            simulation = Simulation(profile, joint, drafts, concurrency, on_step=steps.append)
            predicted = simulation.run(specs)
            params = SamplingParams(num_speculative_tokens=drafts)
            engine_run = EngineRun(llm.engine, params, concurrency)
            served = engine_run.run(specs)
            assert [step[1:] for step in steps] == [one.step[1:] for one in engine_run.timed]
            assert [one.tokens for one in predicted] == [one.tokens for one in served]
            simulation.scheduler.check_integrity()
            ideal = sum(ask.input_len for ask in specs)
            preempted += sum(s.num_tokens - s.num_decoding - s.num_drafts for s in steps) - ideal
    assert preempted > 0  # some prompts were computed twice


def test_chunks_next_to_decode_steps_are_those_of_the_engine(target: Path) -> None:
    """By the same costs, which spread a prompt over several steps though one has room for it."""
    with LLM(
        target, max_num_seqs=4, max_num_batched_tokens=64, num_blocks=200, block_size=16,
        enable_prefix_caching=False,
    ) as llm:  # fmt: skip
        limits = EngineLimits(4, 64, llm.engine.limits.max_model_len, 16, 200, 0.01)
        specs = [RequestSpec(0.0, 20 + 30 * (i % 3), 9 + i) for i in range(8)]
        counts = dict[float | None, int]()
        for bound in (None, 0.01):
            profile = changed(limits=replace(limits, max_step_seconds=bound), prompts=DEAR)
            steps = list[Step]()
            simulation = Simulation(profile, (), 0, 3, on_step=steps.append)
            simulation.run(specs)
            llm.engine.scheduler.pace = simulation.scheduler.pace
            engine_run = EngineRun(llm.engine, SamplingParams(), 3)
            engine_run.run(specs)
            assert [step[1:] for step in steps] == [one.step[1:] for one in engine_run.timed]
            both = [s for s in steps if 0 < s.num_decoding < s.num_requests]
            counts[bound] = len(both)
        assert max(step.seconds for step in both) <= 0.011  # or twice a decode step of three
        assert counts[0.01] > counts[None] > 0


@pytest.mark.parametrize("ahead", [False, True])
def test_steps_take_all_the_time_of_a_run(target: Path, draft: Path, ahead: bool) -> None:
    """By a clock that moves by one whenever it is read; a step ahead is known a call later."""
    speculation = {"model": str(draft), "num_speculative_tokens": 2}
    with LLM(target, speculation, max_num_seqs=2, async_scheduling=ahead) as llm:
        for drafts, count in ((0, 1), (2, 1), (0, 5), (2, 5)):
            params = SamplingParams(num_speculative_tokens=drafts)
            ticks = itertools.count()
            engine_run = EngineRun(
                llm.engine, params, 2, seed=drafts, clock=lambda t=ticks: float(next(t))
            )
            served = engine_run.run([RequestSpec(0.0, 9, 12)] * count)
            seconds = [one.step.seconds for one in engine_run.timed]
            assert sum(seconds) == max(one.end for one in served)
            assert seconds[0] == min(one.first for one in served)
            assert min(seconds) >= 1


def test_chance_accepts_as_often_as_stated() -> None:
    steps = list[Step]()
    served = Simulation(PROFILE, PROFILE.acceptance or (), 4, 8, on_step=steps.append).run(
        [RequestSpec(0.0, 16, 200)] * 64
    )
    full = [step for step in steps if step.num_drafts == 4 * step.num_decoding]
    mean = sum(s.num_accepted for s in full) / sum(s.num_decoding for s in full)
    assert mean == pytest.approx(2.1, rel=0.03)
    assert {one.tokens for one in served} == {200}


def test_auto_drafts_where_it_pays() -> None:
    """K=4 doubles the speed of one request, and costs more than it gives with eight."""
    for batch, wanted in ((1, 4), (8, 0)):
        counts = dict[int | None, float]()
        for drafts in (0, 4, None):
            run = Simulation(PROFILE, PROFILE.acceptance or (), drafts, batch)
            found = figures(run.run([RequestSpec(0.0, 16, 300)] * 2 * batch), {})
            counts[drafts] = found["output_tokens_per_second"]
        assert counts[wanted] == max(counts[0], counts[4])
        assert counts[None] > 0.93 * counts[wanted]


def test_a_request_that_is_too_long_is_refused() -> None:
    with pytest.raises(CapacityError, match="at most 512"):
        Simulation(PROFILE, ()).run([RequestSpec(0.0, 500, 13)])


def test_a_published_table_follows_from_three_of_its_rows() -> None:
    outlook = published_outlook()
    for k, (_, ms) in PUBLISHED.items():
        assert 1e3 / outlook.rate(1, k, 1000) == pytest.approx(ms, rel=0.03)
    assert max(PUBLISHED, key=lambda k: outlook.rate(1, k, 1000)) == 4
    steps = list[Step]()
    run = Simulation(outlook.profile, outlook.acceptance.joint(4), 4, on_step=steps.append)
    run.run([RequestSpec(0.0, 16, 4000)])
    assert 1e3 * run.now / 4000 == pytest.approx(4.05, rel=0.03)


def test_what_pays_is_told_by_the_costs_alone() -> None:
    outlook = Outlook(PROFILE, Acceptance((0.8, 0.6, 0.4, 0.3)))
    need = outlook.break_even_length(1, 4, 100)
    assert need == pytest.approx((7e-3 + 1e-4) / (4e-3 + 1e-4))
    exact = Acceptance.stated(4, length=need)
    at = Outlook(PROFILE, exact)
    assert at.rate(1, 4, 100) == pytest.approx(at.rate(1, 0, 100))
    last = outlook.largest_paying_batch(100)
    assert 0 < last < PROFILE.limits.max_num_seqs
    assert outlook.best(last, 100) > 0 == max(outlook.best(b, 100) for b in range(last + 1, 9))


def test_drafts_may_pay_again_beyond_a_batch_at_which_they_do_not() -> None:
    """As where the next size of a step is free: K=4 costs most at 2 requests, and little at 8."""
    costs = ((4e-3, 5e-3), (5e-3, 30e-3), (30e-3, 31e-3))
    again = changed(drafts=(0, 4), batches=(1, 2, 8), rest=costs, draft=((0.0, 0.0),) * 3,
                    context=(0.0, 0.0))  # fmt: skip
    outlook = Outlook(again, Acceptance((0.8, 0.6, 0.4, 0.3)))
    assert [outlook.best(b, 100) for b in (1, 2, 8)] == [4, 0, 4]
    assert outlook.largest_paying_batch(100) == 8
    assert Outlook(again, Acceptance((0.0,) * 4)).largest_paying_batch(100) == 0


@pytest.mark.parametrize("bound", [None, 0.01])
@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("joint", [(1.0, 1.0, 0.0, 0.0), (0.8, 0.6, 0.4, 0.3), ()])
def test_fleets_agree_with_the_scheduler(
    joint: tuple[float, ...], on_gpu: bool, bound: float | None
) -> None:
    limits, prompts = replace(PROFILE.limits, max_step_seconds=bound), PROFILE.prompts
    profile = changed(
        runs_ahead=on_gpu, lockstep=on_gpu, limits=limits, prompts=DEAR if bound else prompts
    )
    fleet = Fleet(profile, joint, 40, 48)
    gaps = np.random.default_rng(3).exponential(size=(2, 70)) / [[2.0], [8.0]]
    times = fleet.run(np.cumsum(gaps, axis=1), seed=3)
    for e, arrivals in enumerate(times.arrival_EN):
        run = Simulation(profile, joint, len(joint), seed=7)
        served = run.run([RequestSpec(t, 40, 48) for t in arrivals.tolist()])
        exact = figures(served, {})
        assert 1e3 * times.ttft()[e].mean() == pytest.approx(exact["ttft_ms"], rel=0.08)
        assert 1e3 * times.tpot(48)[e].mean() == pytest.approx(exact["tpot_ms"], rel=0.05)
        assert times.end_EN[e].max() == pytest.approx(run.now, rel=0.02)
    assert np.isfinite(times.end_EN).all()
    assert (times.ttft() > 0).all()


@pytest.mark.parametrize(("ttft", "output", "joint"), [(150.0, 24, ()), (300.0, 12, (0.8, 0.6))])
def test_a_capacity_is_kept_for_good(ttft: float, output: int, joint: tuple[float, ...]) -> None:
    """By the scheduler itself, over 2 000 requests after 400 that fill its queue. A rate 1.2 times
    as high is not kept."""
    lengths = {"input_len": 16, "output_len": output}
    options = PlanOptions(slo_ttft_ms=ttft, slo_tpot_ms=30.0, batch_size="1", **lengths)  # type: ignore[arg-type]
    capacity = Planner(PROFILE, Acceptance((0.8, 0.6)), options).capacity(len(joint))

    def met(rate: float, count: int) -> float:
        times = np.cumsum(np.random.default_rng(7).exponential(1 / rate, 400 + count)).tolist()
        specs = [RequestSpec(time, 16, output) for time in times]
        served = Simulation(PROFILE, joint, len(joint), seed=1).run(specs)[400:]
        return figures(served, {"ttft_ms": ttft, "tpot_ms": 30.0})["slo_met"]

    assert met(capacity, 2000) >= 0.93
    assert met(1.2 * capacity, 800) < 0.95


def test_curves_go_through_their_points_and_turn_nowhere_else() -> None:
    x, y = (0, 1, 4, 8), np.array([[1.0, 2.0, 2.5, 9.0], [3.0, 1.0, 1.0, 2.0]])
    found = smooth(x, y, np.arange(9))
    assert np.allclose(found[:, x], y)
    assert (np.diff(found[0]) >= -1e-12).all()
    assert found[1].min() >= 1.0 - 1e-12


def test_disturbed_costs_rise_at_their_means() -> None:
    assert nearest_rising([1.0, 3.0, 2.0, 2.5, 9.0, 8.0]) == [1.0, 2.5, 2.5, 2.5, 8.5, 8.5]
    assert nearest_rising([3.0, 2.0, 1.0]) == [2.0, 2.0, 2.0]


def test_pairs_of_tokens_are_told_from_tokens() -> None:
    """Beside a least time of a step, which most steps take on a GPU."""
    sizes = ((16, 48), (1, 240), (2, 240), (8, 512), (32, 256), (8, 1000), (1, 512), (1, 4))
    steps = [
        PromptStep(n * m, n * m**2 / 2, max(0.011, 2e-5 * n * m) + 1.5e-9 * n * m**2 / 2, 1)
        for n, m in sizes
    ]
    assert seconds_per_pair(steps) == pytest.approx(1.5e-9)


def test_a_step_with_a_prompt_takes_no_less_than_without_a_graph() -> None:
    """8 requests decode in 5 ms by a graph; with a prompt the step takes what prompts take."""
    prompts = PromptCosts((4, 480, 960), (9e-3, 12e-3, 24e-3))
    assert prompts.mixed_step(5e-3, 8, 0, 0) == 5e-3
    assert prompts.mixed_step(5e-3, 8, 232, 0) == pytest.approx(prompts.prompt_step(240))
    assert prompts.mixed_step(11e-3, 8, 232, 0) == pytest.approx(
        11e-3 + prompts.prompt_step(240) - prompts.prompt_step(8)
    )
    assert PROFILE.prompts is not None
    assert PROFILE.prompts.mixed_step(4e-3, 1, 64, 640) > PROFILE.prompts.mixed_step(4e-3, 1, 64, 0)


def test_a_gpu_ends_the_step_that_was_launched_for_a_request_that_is_over() -> None:
    """All drafts are accepted, so one request ends in a step after which another was launched. The
    next request waits for that step, and for nothing if it comes later."""
    served = {}
    for lockstep in (False, True):
        profile = changed(runs_ahead=True, lockstep=lockstep, missed=5e-5)
        simulation = Simulation(profile, (1.0,) * 4, 4, concurrency=1)
        served[lockstep] = simulation.run([RequestSpec(0.0, 200, 11)] * 2)
    (first, without), (other, after) = served[False], served[True]
    assert first == other
    wait = (after.first - after.arrival) - (without.first - without.arrival)
    # Launched when five tokens were to come, one of them under way: for three drafts at most.
    assert wait == pytest.approx(StepClock(profile).decoding([3], 208), abs=1e-5)
    assert after.end - after.first == pytest.approx(without.end - without.first)
    specs = [RequestSpec(0.0, 200, 11), RequestSpec(9.0, 200, 11)]
    late = Simulation(profile, (1.0,) * 4, 4).run(specs)
    assert late[1].first - late[1].arrival == pytest.approx(late[0].first)


@pytest.mark.parametrize("lengths", [(240,) * 5, (240, 240, 300, 300, 350)])
def test_of_prompts_of_about_one_length_all_time_is_their_tokens(lengths: tuple[int, ...]) -> None:
    steps = [
        PromptStep(n * m, n * m**2 / 2, 0.01 + 2e-4 * n * m, 3)
        for n, m in zip((1, 2, 4, 8, 16), lengths, strict=True)
    ]
    assert seconds_per_pair(steps) == 0.0


def test_steps_of_as_many_tokens_are_averaged() -> None:
    steps = [
        PromptStep(480, 2 * 240**2 / 2, 0.03, 1),
        PromptStep(480, 10 * 48**2 / 2, 0.05, 3),
        PromptStep(4, 8, 0.002, 2),
    ]
    pair = 1e-8
    first, second = 0.03 - pair * 2 * 240**2 / 2, 0.05 - pair * 10 * 48**2 / 2
    found = seconds_without_pairs(steps, pair)
    assert [*found] == [4, 480]
    assert found[480] == pytest.approx((first + 3 * second) / 4)


def test_an_estimate_reads_shapes_alone_and_ignores_no_option() -> None:
    args = [SHAPES / "llama-3.1-8b", "--bandwidth", 4300, "--tflops", 790, "--batch-size", 2]
    args += ["--no-speculation", "--requests", 2, "--json"]
    result = plan(*args, "--kv-cache-gib", 1.0)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["shapes"]["profile"]["limits"]["num_blocks"] == 2**30 // (64 * 131072)
    assert {row["labels"]["kind"] for row in found["rows"]} == {"simulated", "outlook"}
    result = plan(*args, "--memory-fraction", 0.5)
    assert result.exit_code == 2
    assert "no engine is built" in result.stderr


def test_a_calibration_measures_every_cost(target: Path, draft: Path) -> None:
    speculation = {"model": str(draft), "num_speculative_tokens": 3}
    with LLM(target, speculation, max_num_seqs=2, enable_prefix_caching=False) as llm:
        text, seen = range(2, 60), list[int]()
        calibration = Calibration(llm.engine, (2,), SamplingParams(), 9, text, patience=0.0)
        profile = calibration.run(lambda done, what: seen.append(done))
        assert calibration.num_repeats == 2, "one more than a machine that is busy disturbs"
        assert seen == [*range(len(seen) - 1), calibration.num_runs]
        assert profile.limits.num_blocks == llm.engine.scheduler.pool.num_blocks
        with pytest.raises(ConfigError, match="at least 3, the largest batch"):
            Calibration(llm.engine, (3,), SamplingParams())
    assert (tuple(profile.drafts), tuple(profile.batches)) == ((0, 1, 2, 3), (1, 2))
    assert profile.prompts is not None
    assert min(profile.prompts.seconds) > 0
    assert {4, 32, 48, 96} <= {*profile.prompts.tokens}  # those that then decode, too
    assert profile.draft[0][3] > profile.draft[0][0] == 0
    assert profile.acceptance is not None
    assert len(profile.acceptance) == 3
    assert profile.memory
    assert profile.block_bytes


@pytest.mark.parametrize("budget", [48, 128])
def test_batches_with_more_prompt_tokens_than_a_step_are_timed_all_the_same(
    target: Path, draft: Path, budget: int
) -> None:
    """16 prompts of 48 tokens would be computed one after another, while the first ones decode."""
    speculation = {
        "model": str(draft), "num_speculative_tokens": 2, "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rate": 1.0,
    }  # fmt: skip
    sizes = {"max_num_seqs": 16, "max_num_batched_tokens": budget}
    with LLM(target, speculation, **sizes, enable_prefix_caching=False) as llm:
        calibration = Calibration(llm.engine, (16,), SamplingParams(), 1)
        profile = calibration.run()
    settled = {
        setup.drafts: len(found.steps)
        for setup, found in calibration._timings.items()
        if setup.batch == 16 and setup.output > 1
    }
    assert [*settled] == [0, 1, 2]
    assert min(settled.values()) >= 4
    assert profile.prompts is not None
    assert budget in profile.prompts.tokens  # all prompts at once


def test_a_cache_that_holds_no_such_batch_is_told(target: Path) -> None:
    sizes = {"max_num_seqs": 16, "num_blocks": 20, "block_size": 16}
    with LLM(target, **sizes, enable_prefix_caching=False) as llm:
        calibration = Calibration(llm.engine, (16,), SamplingParams(), 1)
        with pytest.raises(ConfigError, match="enough for 16 requests of 68 tokens at a time"):
            calibration.run()


def plan(*args: Any) -> Result:
    return CliRunner().invoke(cli.app, ["plan", *map(str, args)])


def test_the_command_reports_and_writes(tmp_path: Path) -> None:
    PROFILE.write(tmp_path / "p.json")
    args = ["--profile", tmp_path / "p.json", "--batch-size", "1,8", "--rate", 30]
    args += ["--acceptance-rates", "0.6"]
    args += ["--input-len", 20, "--output-len", 8, "--output", tmp_path / "o.json"]
    for suffix in ("csv", "svg", "html"):
        args += ["--output", tmp_path / f"o.{suffix}"]
    result = plan(*args)
    assert (result.exit_code, result.exception) == (0, None), result.output
    assert "concurrency 8, auto" in result.stdout
    assert result.stderr.splitlines()[:2] == ["Starting", "0 of 9 simulations done"]
    assert "drafts pay up to batch" in result.stdout
    rows = read(tmp_path / "o.json").rows
    kinds = {row.labels["kind"] for row in rows}
    assert kinds == {"simulated", "outlook", "break-even", "capacity", "fleet"}
    csv_lines = (tmp_path / "o.csv").read_text().splitlines()
    assert len(csv_lines) == 1 + sum(len(row.values) for row in rows)
    assert csv_lines[0].startswith("case,kind,")
    (fleet,) = (row for row in rows if row.labels["kind"] == "fleet")
    assert fleet.values["slo_met"] >= 0.93  # type: ignore[operator]
    assert "<svg" in (tmp_path / "o.svg").read_text()
    assert (tmp_path / "o.html").read_text().count("<svg") == 2
    result = plan(*args[:2], "--batch-size", 1, "--json", "--acceptance-rate", 0.2)
    assert json.loads(result.stdout)["shapes"]["acceptance"]["source"] == "stated: rate 0.2"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["another-model"], "left out: the profile is of"),
        (["--max-num-seqs", 4], "left out: the profile is of"),
        (["--no-speculation"], "left out: the profile is of"),
        (["--temperature", 0.7], "no steps are timed"),
        (["--batch-size", 9], "max_num_seqs"),
        (["--input-len", 600], "at most 512"),
        (["--acceptance-rates", "0.5,x"], "numbers"),
    ],
)
def test_the_command_refuses_what_it_would_ignore(
    tmp_path: Path, args: list[Any], said: str
) -> None:
    PROFILE.write(tmp_path / "p.json")
    result = plan("--profile", tmp_path / "p.json", "--batch-size", 1, *args)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())


def test_what_is_predicted_before_an_interruption_stays() -> None:
    planner = Planner(PROFILE, Acceptance((0.8, 0.6)), PlanOptions(batch_size="1,8", output_len=9))

    def stop(done: int, what: str) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        planner.run(stop)
    assert [r.case for r in planner.rows if r.labels["kind"] == "simulated"] == [
        "concurrency 1, plain", "concurrency 1, K=1",
    ]  # fmt: skip
    assert tables(planner.rows)
    assert sentences(planner.rows)
    assert all(chart.startswith("<svg") for chart in charts(planner.rows))


def test_a_number_of_drafts_has_one_colour_in_all_charts() -> None:
    planner = Planner(PROFILE, Acceptance((0.8, 0.6)), PlanOptions(batch_size="1,4", output_len=9))
    planner.run()
    speedup, users = map(ElementTree.fromstring, charts(planner.rows))
    shown = [*speedup]
    legend = [box for box in shown if box.get("width") == "12"]
    named = {str(shown[shown.index(box) + 1].text): box.get("fill") for box in legend}
    assert [*named] == ["K=1", "K=2", "auto"]
    assert len({*named.values()}) == 3
    drawn = [group.get("stroke") for group in speedup.iter(f"{SVG}g")]
    assert drawn == [*named.values()]
    assert [group.get("stroke") for group in users.iter(f"{SVG}g")] == ["currentColor", *drawn]
    said = [text.text for text in (*speedup.iter(f"{SVG}text"), *users.iter(f"{SVG}text"))]
    assert [said.count(name) for name in ("plain", *named)] == [1] * 4  # one legend for both

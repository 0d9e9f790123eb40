"""The figures of `foretoken bench` mean what their names say, add up, and survive an early end."""

from __future__ import annotations

import asyncio
import csv
import io
import os
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from foretoken import SamplingParams
from foretoken.config import SpeculativeConfig
from foretoken.engine.trace import StepTrace
from foretoken.engine.worker import Mailbox, tell
from foretoken.errors import ProcessingError, StepError
from foretoken.lab.bench.cases import Load, engine_cases
from foretoken.lab.bench.chart import charts
from foretoken.lab.bench.figures import (
    LATENCIES,
    UNITS,
    device_seconds,
    figures,
    outcomes,
    percentiles,
    unit_of,
)
from foretoken.lab.bench.floor import Floor, Reads
from foretoken.lab.bench.load import (
    Asked,
    Record,
    RequestFailedError,
    Run,
    Step,
    difference,
    drive,
)
from foretoken.lab.bench.offline import Engines
from foretoken.lab.bench.options import BenchOptions
from foretoken.lab.bench.report import results, tables
from foretoken.lab.bench.run import Bench, Measured
from foretoken.lab.desk import Table, as_csv, as_html, as_text
from foretoken.lab.results import Spread, read, write_file
from foretoken.outputs import SpeculationMetrics
from tests.lab.small import SMALL
from tests.support.asynchronous import until

SVG = "{http://www.w3.org/2000/svg}"
pytestmark = pytest.mark.usefixtures("known_memory")


def step(
    ms: float, decoding: int, accepted: int = 0, *, requests: int = 2, drafts: int = 0
) -> Step:
    """Of its time half is the target's pass, a tenth drafting and a tenth verification."""
    seconds = {"schedule": 0.1, "draft": 0.1, "forward": 0.5, "verify": 0.1, "commit": 0.1}
    trace = StepTrace(
        {phase: share * ms / 1000 for phase, share in seconds.items()},
        num_requests=requests,
        num_decoding=decoding,
        num_context=10 * requests,
        num_drafts=drafts,
        num_accepted=accepted,
    )
    return Step(ms / 1000, trace)


def counted(*rounds: tuple[int, int]) -> SpeculationMetrics:
    metrics = SpeculationMetrics()
    for drafted, accepted in rounds:
        metrics.observe(drafted, accepted)
    return metrics


def by_hand() -> Run:
    """Three requests, of 5, 1 and 3 tokens, the last of which failed; sent late by 10 to 30 ms."""
    first = Record(10.0, [10.1, 10.2, 10.4], 10.41, 20, 5)
    first.origins, first.sent = ["plain", "accepted", "resampled", "accepted", "accepted"], 10.01
    second = Record(10.0, [10.3], 10.3, 30, 1, ["plain"], sent=10.02)
    failed = Record(10.2, [10.3, 10.4], None, 0, 3, ["resampled"], "it broke off", 10.23)
    steps = [
        step(100, 0),
        step(10, 2, 0, drafts=4),  # the first that only decodes: a draft model catches up in it
        step(4, 2, 3, drafts=4),
        step(6, 1, 1, requests=1, drafts=2),
        step(50, 1, 1, drafts=2),
        step(8, 2, 1, drafts=2),
    ]
    return Run([first, second, failed], 0.5, steps, counted((2, 1), (2, 2), (1, 0)))


def test_figures_of_a_run_worked_out_by_hand() -> None:
    # Weights of 1 GB and 2 GB; 10 MB and 1 MB per token, half of the target's within 4 tokens.
    target = Reads(10**9, ((5 * 10**6, None), (5 * 10**6, 4)))
    floor = Floor(target, Reads(2 * 10**9, ((10**6, None),)), 2000.0)
    bounds = {"ttft_ms": 200.0, "tpot_ms": 75.1, "itl_ms": 200.1}
    found = figures(by_hand(), floor, bounds)
    latency = {name: found.pop(name) for name in [*found] if name.startswith(tuple(LATENCIES))}
    assert [latency[name] for name in LATENCIES] == pytest.approx([200, 75, 150, 350])
    # The decode steps are 4 ms with two requests and 6 ms with one, two drafts for each.
    reads = (2 + 2 * 0.005 * 10 + 2 * 0.005 * 4 + 0.005 * 10 + 0.005 * 4 + 0) / 2
    draft = 2 * (2 + 2 * 0.001 * 10 + 2 + 0.001 * 10) / 2
    assert found == pytest.approx(
        {
            "requests": 2,
            "failed_requests": 1,
            "output_tokens_per_second": 6 / 0.5,
            "total_tokens_per_second": 56 / 0.5,
            "tokens_per_second_per_user": 1000 / 75,
            "requests_per_second": 2 / 0.5,
            "goodput_requests_per_second": 1 / 0.5,
            "slo_met": 1 / 3,
            "send_lag_ms": 20.0,
            "offered_requests_per_second": 2 / 0.2,
            "sent_requests_per_second": 2 / 0.22,
            "wall_s": 0.5,
            "output_tokens": 3,
            "acceptance_length": 2.0,
            "acceptance_rate": 3 / 5,
            "unconditional_at_1": 2 / 3,
            "unconditional_at_2": 1 / 2,
            "conditional_at_1": 2 / 3,  # one was replaced at once, of the one that failed
            "conditional_at_2": 1 / 2,
            "length_share_1": 1 / 3,
            "length_share_2": 1 / 3,
            "length_share_3": 1 / 3,
            "requests_per_step": 1.5,
            "step_ms": 5.0,
            "draft_ms": 0.5,
            "target_ms": 2.5,
            "verify_ms": 0.5,
            "host_gap_ms": 1.5,
            "tokens_per_step": 1 + 4 / 3,
            "decode_ms_per_token": 5 / (1 + 4 / 3),
            "read_gb": reads + draft,
            "floor_ms": (reads + draft) / 2,
            "share_of_floor": (reads + draft) / 2 / 5,
        }
    )
    assert {*map(unit_of, found)}
    assert latency["ttft_ms_max"] == pytest.approx(300)
    whole = by_hand()
    whole.concurrency = 3  # which these steps never reach: most are those of 2
    assert (figures(whole, None, {})["step_ms"], figures(whole, None, {})["draft_ms"]) == (
        pytest.approx((4.0, 0.4))
    )


def test_a_head_that_follows_plain_decoding_is_drafting_and_no_host_gap() -> None:
    """Of a step of 8B behind 32 768 tokens with K = 0 it is 0.2 ms, which nothing else explains."""
    seconds = {"gap": 0.1, "draft": 0.2, "forward": 5.0, "verify": 0.3, "observe": 0.4}
    trace = StepTrace(seconds)
    assert device_seconds(trace) == {"draft": 0.4, "target": 5.0, "verify": 0.3}
    trace.num_drafts = 2
    assert device_seconds(trace)["draft"] == pytest.approx(0.6)


def test_what_a_run_cannot_tell_is_left_out() -> None:
    run = Run([Record(0.0, [0.1], 0.1, 0, 1)], 0.2, [step(9, 0)], SpeculationMetrics())
    found = figures(run, None, {})
    told = ("ttft_ms", "e2e_ms", "output_tokens", "output_tokens_per_second", "requests", "wall_s")
    told += ("failed_requests", "requests_per_second", "ttft_ms_max")
    assert {*found} == {*told}


def test_time_is_shared_by_the_tokens_behind_the_first_piece() -> None:
    """4 of 7 tokens came at once; an answer in one piece has no TPOT, and keeps no bound on it."""
    several = Record(0.0, [1.0, 1.3], 1.3, 10, 7, num_first=4)
    whole = Record(0.0, [1.0], 1.0, 10, 64, num_first=64)
    short = Record(0.0, [1.0], 1.0, 10, 1)
    found = figures(Run([several, whole, short], 2.0), None, {"tpot_ms": 110.0})
    assert found["tpot_ms"] == pytest.approx(100.0)
    assert found["slo_met"] == pytest.approx(2 / 3)
    assert "tpot_ms" not in figures(Run([whole, short], 2.0), None, {})


def test_percentiles_are_told_by_enough_requests_alone() -> None:
    def told(count: int) -> dict[str, float]:
        return percentiles({"ttft_ms": [float(i) for i in range(count)]})

    assert [len(told(count)) for count in (1, 9, 10, 20, 99, 100)] == [1, 1, 2, 3, 3, 4]
    assert told(101) == {f"ttft_ms_p{p}": p for p in (50, 90, 95, 99)}


@pytest.mark.parametrize(
    ("rounds", "conditional", "unconditional"),
    [
        ([(3, 3), (3, 1), (3, 0)], [2 / 3, 1 / 2, 1], [2 / 3, 1 / 3, 1 / 3]),
        ([(2, 2), (2, 0)], [1 / 2, 1], [1 / 2, 1 / 2]),
    ],
)
def test_a_servers_counts_give_both_kinds_of_acceptance(
    rounds: list[tuple[int, int]], conditional: list[float], unconditional: list[float]
) -> None:
    counts = counted(*rounds)
    counts.accepted_per_position += [0]  # as long as the server's K
    counts.drafted_per_position += [0]
    run = Run([Record(0.0, [0.1], 0.1, 0, 1)], 0.2, [], counts)
    found = figures(run, None, {})
    for kind, expected in (("conditional", conditional), ("unconditional", unconditional)):
        names = sorted(name for name in found if name.startswith(f"{kind}_at_"))
        assert [found[name] for name in names] == pytest.approx(expected)
    counts.drafted_per_position = []  # vLLM does not tell them
    assert [*outcomes(run)[0].values()] == counts.accepted_per_position


def test_counts_between_two_looks() -> None:
    before, after = counted((2, 1)), counted((2, 1), (3, 3), (0, 0))
    found = difference(before, after)
    assert (found.num_drafts, found.num_draft_tokens, found.num_accepted_tokens) == (1, 3, 3)
    assert (found.accepted_per_position, found.drafted_per_position) == ([1, 1, 1], [1, 1, 1])


@pytest.fixture(scope="module")
def bench(target: Path, draft: Path) -> Bench:
    """A whole run of a small pair, plain and speculative in turns."""
    options = BenchOptions(**SMALL, concurrency="1,3", slo="ttft=60000")
    speculation = SpeculativeConfig(model=str(draft), num_speculative_tokens=3)
    engine = {"model": str(target), "speculative_config": speculation, "threads": 1}
    engine |= {"enable_prefix_caching": False}
    made = Engines(options.sized(engine), SamplingParams(), 40.0)
    bench = Bench(options, made, engine_cases({}, 0.7, speculation, compare=True))
    put = Mailbox.put

    def put_alone(self: Mailbox, *news: Any) -> bool:
        """No step runs ahead of who reads it: each brings a piece, however busy the machine is."""
        if put(self, *news):
            tell([self])
        until(lambda: not self._unread)
        return False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mailbox, "put", put_alone)
        asyncio.run(bench.run())
    return bench


def test_the_figures_of_a_run_add_up(bench: Bench) -> None:
    assert len(bench.measured) == 4
    for (load, case), measured in bench.measured.items():
        assert (len(measured.repeats), measured.partial) == (3, False)
        for run in measured.repeats:
            assert min(run.values()) >= 0
            assert sum(run[f"{part}_ms"] for part in ("draft", "target", "verify", "host_gap")) == (
                pytest.approx(run["step_ms"])
            )
            assert (run["requests"], run["output_tokens"], run["slo_met"]) == (4, 9, 1)
            assert run["output_tokens_per_second"] * run["wall_s"] == pytest.approx(9 * 4)
            assert run["total_tokens_per_second"] * run["wall_s"] == pytest.approx(21 * 4)
            assert run["goodput_requests_per_second"] * run["wall_s"] == pytest.approx(4)
            # No request takes longer than the run; the time before its first token is part of it.
            behind = (run["e2e_ms"] - run["ttft_ms"]) / run["tpot_ms"]
            assert 1 <= behind <= 8 + 1e-9  # tokens, without those of the first piece
            assert run["e2e_ms"] <= 1000 * run["wall_s"]
            assert 1 <= run["requests_per_step"] <= load.concurrency
            assert run["floor_ms"] == pytest.approx(1000 * run["read_gb"] / 40)
            assert ("acceptance_rate" in run) == (not case.plain)
            if case.plain:
                assert run["tokens_per_step"] == 1
                assert run["draft_ms"] < run["step_ms"] / 20  # the draft model computes nothing
            else:
                assert run["draft_ms"] > 0
                assert 1 <= run["tokens_per_step"] <= 4
                shares = [run[f"length_share_{i}"] for i in range(1, 5)]
                assert sum(shares) == pytest.approx(1)
                mean = sum(i * share for i, share in enumerate(shares, 1))
                assert mean == pytest.approx(run["acceptance_length"])
            assert all(map(unit_of, run))


def test_the_results_file_has_a_spread_of_every_figure(bench: Bench, tmp_path: Path) -> None:
    found = results(bench, "foretoken bench", ["more"])
    assert found is not None
    path = tmp_path / "x.json"
    write_file(found, path)
    assert read(path) == found
    assert found.notes[-1] == "more"
    cases = [(row.labels["concurrency"], row.labels["k"]) for row in found.rows]
    assert cases == [(1, 0), (1, 3), (3, 0), (3, 3)]
    of_case = {f"{a.name}, {b.name}": m.repeats for (a, b), m in bench.measured.items()}
    runs = [of_case[row.case] for row in found.rows]
    spreads = [v for row in found.rows for v in row.values.values() if isinstance(v, Spread)]
    assert {spread.repeats for spread in spreads} == {3}
    told = {name for name in found.rows[0].values if name.startswith("ttft_ms_p")}
    assert told == {"ttft_ms_p50", "ttft_ms_p90"}  # of 3 runs of 4
    value = found.rows[0].values["step_ms"]
    assert value == Spread.of([run["step_ms"] for run in runs[0]], UNITS["step_ms"])
    ratios = [a["tpot_ms"] / b["tpot_ms"] for a, b in zip(runs[0], runs[1], strict=True)]
    assert found.rows[1].values["tpot_speedup"] == Spread.of(ratios, UNITS["tpot_speedup"])
    shapes = found.shapes
    assert shapes["speculation"]["num_speculative_tokens"] == 3
    assert (shapes["input_len"], shapes["bandwidth_given"]) == ("12", True)
    lines = [*csv.DictReader(io.StringIO(as_csv(found.rows)))]
    assert len(lines) == sum(len(row.values) for row in found.rows)
    line = next(n for n in lines if n["value"] == "step_ms")
    assert (line["case"], float(line["median"])) == ("concurrency 1, plain", value.median)  # type: ignore[union-attr]


def test_tables_and_figures_show_what_was_measured(bench: Bench) -> None:
    found = results(bench, "foretoken bench --sweep 'k=<2>'")
    assert found is not None
    speed = tables(found.rows)["Speed"]
    assert [line[0] for line in speed.lines] == [row.case for row in found.rows]
    value = found.rows[0].values["output_tokens_per_second"]
    assert isinstance(value, Spread)
    shown = f"{value.median:.0f} ({value.min:.0f}–{value.max:.0f})"
    assert shown == speed.lines[0][speed.header.index("tokens/s")]
    drawn = [ElementTree.fromstring(chart) for chart in charts(found.rows)]
    speedup, users, per_token, positions, lengths = drawn
    assert [len(one.findall(f".//{SVG}circle")) for one in (speedup, users)] == [2, 4]
    assert len(positions.findall(f".//{SVG}circle")) == 2 * 3
    bars = [r for r in per_token.findall(f"{SVG}rect") if r.get("width") != "12"]
    assert len(bars) == 4 * 4
    assert len(lengths.findall(f"{SVG}rect")) == 4
    report = as_html(found, tables(found.rows), charts(found.rows))
    assert "k=&lt;2&gt;" in report
    assert report.count("<svg") == 5
    addresses = {*re.findall(r'(?:src|href|url)\W*[=(]\W*"?([^">)]*)', report)}
    assert not addresses  # it loads nothing


def test_a_batch_that_never_decoded_whole_is_told(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = next(k for k in bench.measured if k[0].concurrency == 3 and k[1].plain)
    for together in (2, 3):
        run = by_hand()
        run.steps, run.concurrency = [step(4, n, requests=n) for n in (1, together, together)], 3
        monkeypatch.setitem(bench.measured, key, Measured([figures(run, None, {})]))
        found = results(bench, "foretoken bench")
        assert found is not None
        note = "concurrency 3, plain: in a run no more than 2 of 3 requests ever decoded together"
        assert any(line.startswith(note) for line in found.notes) == (together < 3)


def test_a_table_on_a_terminal() -> None:
    made = Table(["", "ms", "tokens/s"], [["a", "1.25", "7"], ["longer", "10.00", ""]])
    assert as_text(made) == "           ms  tokens/s\na        1.25         7\nlonger  10.00\n"


def test_what_the_engine_refuses_is_counted_and_what_it_fails_at_is_raised(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"model": str(target), "speculative_config": None, "num_blocks": 64, "threads": 1}
    system = Engines(options, SamplingParams(), 40.0)
    case = engine_cases({}, 0.0, None, compare=True)[0][0]

    async def work() -> None:
        async with system.opened([case]):
            for prompt in ([1] * 10_000, [{"role": "user", "content": "x"}]):
                with pytest.raises(RequestFailedError, match="`"):
                    await system.send(Asked(prompt, 3, 0), case, Record(0.0))  # type: ignore[arg-type]
            engine, run = system._engine.engine, Run()
            asked = [(0.0, Asked([1, 2, i], 3, i)) for i in range(8)]
            await drive(system, case, Load(8), asked, run)
            assert [step.trace.num_requests for step in run.steps] == [8, 8, 8]  # all at once
            monkeypatch.setattr(engine.runner.model, "forward", None)
            with pytest.raises((StepError, ProcessingError)):
                await drive(system, case, Load(1), [(0.0, Asked([1], 3, 0))], Run())
            assert engine.on_step is None

    asyncio.run(work())


@pytest.mark.parametrize("load", [Load(2), Load(0, 1000.0)])
def test_an_engine_that_dies_tells_its_own_error_and_leaves_no_task(
    target: Path, monkeypatch: pytest.MonkeyPatch, load: Load
) -> None:
    options = {"model": str(target), "speculative_config": None, "num_blocks": 64, "threads": 1}
    system = Engines(options, SamplingParams(), 40.0)
    case = engine_cases({}, 0.0, None, compare=True)[0][0]
    watch = system.watch

    def fail() -> None:
        raise ArithmeticError("a step failed")

    def watch_late(steps: list[Step] | None) -> None:
        if steps is None:
            system._engine._worker._thread.join(10)  # by now the engine is gone
        watch(steps)

    async def work() -> None:
        async with system.opened([case]):
            monkeypatch.setattr(system, "watch", watch_late)
            monkeypatch.setattr(system._engine.engine, "step", fail)
            asked = [(0.0, Asked([1, 2, i], 3, i)) for i in range(4)]
            with pytest.raises(StepError, match="a step failed"):
                await drive(system, case, load, asked, Run())
            assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(work())


def test_a_file_is_written_whole_or_not_at_all(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = results(bench, "foretoken bench")
    assert found is not None
    path = tmp_path / "x.json"
    path.write_text("before")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            write_file(found, path)
    assert path.read_text() == "before"
    write_file(found, path)
    assert os.listdir(tmp_path) == ["x.json"]

"""The figures of a run of `foretoken bench` add up, and survive an early end."""

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
from foretoken.engine.worker import Mailbox, wake_readers
from foretoken.errors import ProcessingError, StepError
from foretoken.lab.bench.command import charts, results, tables
from foretoken.lab.bench.figures import UNITS, figures, unit_of
from foretoken.lab.bench.load import BenchRequest, Record, RequestFailedError, Run, Step, drive
from foretoken.lab.bench.offline import Engines
from foretoken.lab.bench.options import BenchOptions, Load, engine_cases
from foretoken.lab.bench.run import Bench, Measured
from foretoken.lab.reporter import Section, Table, as_csv, as_html, as_text
from foretoken.lab.results import Spread, read, write_file
from tests.lab.runs import SMALL, by_hand, step
from tests.support.asynchronous import until

SVG = "{http://www.w3.org/2000/svg}"
pytestmark = pytest.mark.usefixtures("known_memory")


@pytest.fixture(scope="module")
def bench(target: Path, draft: Path) -> Bench:
    options = BenchOptions(**SMALL, concurrency="1,3", slo="ttft=60000")
    speculation = SpeculativeConfig(model=str(draft), num_speculative_tokens=3)
    engine = {"model": str(target), "speculative_config": speculation, "threads": 1}
    engine |= {"enable_prefix_caching": False}
    made = Engines(options.sized(engine), SamplingParams(), 40.0)
    bench = Bench(options, made, engine_cases({}, 0.7, speculation, compare=True))
    put = Mailbox.put

    def put_alone(self: Mailbox, *news: Any) -> bool:
        """Each step waits for its reader, so that each brings a piece, also on a busy machine."""
        if put(self, *news):
            wake_readers([self])
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
        if case.plain:  # only counting, no draft pass: a stall may be in some repeats, not in all
            assert min(run["draft_ms"] / run["step_ms"] for run in measured.repeats) < 1 / 30
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
            after = (run["e2e_ms"] - run["ttft_ms"]) / run["tpot_ms"]
            assert 1 <= after <= 8 + 1e-9  # tokens, without those of the first piece
            assert run["e2e_ms"] <= 1000 * run["wall_s"]
            assert 1 <= run["requests_per_step"] <= load.concurrency
            assert run["floor_ms"] == pytest.approx(1000 * run["read_gb"] / 40)
            assert ("acceptance_rate" in run) == (not case.plain)
            if case.plain:
                assert run["tokens_per_step"] == 1
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
    report = as_html(found, tables(found.rows), [Section(charts=charts(found.rows))])
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
        note = "concurrency 3, plain: in a run at most 2 of 3 requests decoded together"
        assert any(line.startswith(note) for line in found.notes) == (together < 3)


def test_a_table_on_a_terminal() -> None:
    made = Table(["", "ms", "tokens/s"], [["a", "1.25", "7"], ["longer", "10.00", ""]])
    assert as_text(made) == "           ms  tokens/s\na        1.25         7\nlonger  10.00\n"


class Failing:
    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, *given: Any, **named: Any) -> Any:
        raise ArithmeticError("a pass failed")


def small_engine(target: Path) -> dict[str, Any]:
    return {"model": str(target), "speculative_config": None, "num_blocks": 64, "threads": 1}


def test_what_the_engine_refuses_is_counted_and_what_it_fails_at_is_raised(target: Path) -> None:
    system = Engines(small_engine(target), SamplingParams(), 40.0)
    case = engine_cases({}, 0.0, None, compare=True)[0][0]

    async def work() -> None:
        async with system.opened([case]):
            for prompt in ([1] * 10_000, [{"role": "user", "content": "x"}]):
                with pytest.raises(RequestFailedError, match="`"):
                    await system.send(BenchRequest(prompt, 3, 0), case, Record(0.0))  # type: ignore[arg-type]
            engine, run = system._engine.engine, Run()
            asked = [(0.0, BenchRequest([1, 2, i], 3, i)) for i in range(8)]
            await drive(system, case, Load(8), asked, run)
            assert [step.trace.num_requests for step in run.steps] == [8, 8, 8]  # all at once
            engine.runner.model = Failing(engine.runner.model)
            with pytest.raises((StepError, ProcessingError)):
                await drive(system, case, Load(1), [(0.0, BenchRequest([1], 3, 0))], Run())
            assert engine.on_step is None

    asyncio.run(work())


class Dying(Engines):
    """Its first step fails, and `watch(None)` comes when the engine is gone."""

    def watch(self, steps: list[Step] | None) -> None:
        if steps is None:
            self._engine._worker._thread.join(10)
        super().watch(steps)
        if steps is not None:
            self._engine.engine.on_step = self.fail

    def fail(self, trace: StepTrace) -> None:
        raise ArithmeticError("a step failed")


@pytest.mark.parametrize("load", [Load(2), Load(0, 1000.0)])
def test_an_engine_that_dies_tells_its_own_error_and_leaves_no_task(
    target: Path, load: Load
) -> None:
    system = Dying(small_engine(target), SamplingParams(), 40.0)
    case = engine_cases({}, 0.0, None, compare=True)[0][0]

    async def work() -> None:
        async with system.opened([case]):
            asked = [(0.0, BenchRequest([1, 2, i], 3, i)) for i in range(4)]
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

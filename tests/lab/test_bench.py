"""The figures of `foretoken bench` add up, mean what the file says, and survive an early end."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from foretoken import LLM, SamplingParams
from foretoken.engine.trace import StepTrace
from foretoken.errors import ProcessingError, StepError
from foretoken.lab.bench import run as bench_run
from foretoken.lab.bench.chart import chart
from foretoken.lab.bench.figures import UNITS, Run, Step, figures, split_steps
from foretoken.lab.bench.floor import Floor, Reads
from foretoken.lab.bench.options import BenchOptions
from foretoken.lab.bench.report import Table, as_text, results, tables
from foretoken.lab.bench.run import Bench, Case, run_batch
from foretoken.lab.results import Spread, read, validate, write_file
from foretoken.outputs import CompletionOutput, RequestMetrics, RequestOutput

SVG = "{http://www.w3.org/2000/svg}"
SMALL = {"batch_size": "1,3", "input_len": 24, "output_len": 12, "bandwidth": 40.0}
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def bench(pair: LLM) -> Bench:
    """A whole run of the embedded pair, plain and speculative in turns."""
    bench = Bench(pair, BenchOptions(**SMALL, compare=True, prompts="heldout"), GREEDY)
    bench.run()
    return bench


def test_the_figures_of_a_run_add_up(bench: Bench) -> None:
    plain, drafted = bench.cases
    assert set(bench.measured) == {(b, case) for b in (1, 3) for case in (plain, drafted)}
    for (batch, case), repeats in bench.measured.items():
        assert len(repeats) == 3
        for run in repeats:
            assert min(run.values()) >= 0
            assert sum(run[f"{part}_s"] for part in ("prefill", "decode", "tail")) == (
                pytest.approx(run["wall_s"])
            )
            assert sum(run[f"{part}_ms"] for part in ("draft", "target", "verify", "host_gap")) == (
                pytest.approx(run["step_ms"])
            )
            assert run["output_tokens_per_second"] * run["wall_s"] == pytest.approx(12 * batch)
            assert run["total_tokens_per_second"] * run["wall_s"] == pytest.approx(36 * batch)
            assert run["requests_per_second"] * run["wall_s"] == pytest.approx(batch)
            # No request takes longer than the run; the time before its first token is part of it.
            assert run["ttft_ms"] + 11 * run["tpot_ms"] <= 1000 * run["wall_s"]
            assert run["decode_ms_per_token"] * run["tokens_per_step"] == (
                pytest.approx(run["step_ms"])
            )
            assert run["floor_ms"] == pytest.approx(1000 * run["read_gb"] / 40)
            assert run["share_of_floor"] == pytest.approx(run["floor_ms"] / run["step_ms"])
            assert ("acceptance_rate" in run) == (case is drafted)
            if case is drafted:
                assert run["draft_ms"] > 0
                assert 1 < run["tokens_per_step"] <= 5
                assert 1 <= run["acceptance_length"] <= 5
            else:
                assert (run["tokens_per_step"], run["draft_ms"]) == (1, 0)
            known = {*UNITS, *(f"accepted_at_{i}" for i in range(1, 5))}
            assert run.keys() <= known


def test_the_results_file_has_a_spread_of_every_figure(bench: Bench, tmp_path: Path) -> None:
    found = results(bench, "foretoken bench", ["more"])
    assert found is not None
    path = tmp_path / "x.json"
    write_file(found, path)
    assert read(path) == found
    assert found.notes[-1] == "more"
    cases = [(row.labels["batch"], row.labels["k"]) for row in found.rows]
    assert cases == [(1, 0), (1, 4), (3, 0), (3, 4)]
    plain, drafted = bench.cases
    for row in found.rows:
        batch = 1 if row.labels["batch"] == 1 else 3
        measured = bench.measured[batch, drafted if row.labels["k"] else plain]
        assert all(isinstance(value, Spread) for value in row.values.values())
        assert {value.repeats for value in row.values.values()} == {3}
        for name in measured[0]:
            assert row.values[name] == Spread.of(
                [one[name] for one in measured], UNITS.get(name, "accepted / drafted")
            )
    for batch, row in ((1, found.rows[1]), (3, found.rows[3])):
        pairs = zip(bench.measured[batch, plain], bench.measured[batch, drafted], strict=True)
        ratios = [a["tpot_ms"] / b["tpot_ms"] for a, b in pairs]
        assert row.values["tpot_speedup"] == Spread.of(ratios, UNITS["tpot_speedup"])
    shapes = found.shapes
    assert shapes["speculation"] == {"method": "draft_model"}
    assert (shapes["input_len"], shapes["bandwidth_given"]) == (24, True)
    assert shapes["kv_bytes_per_token"] == 20 * 2 * 2 * 64 * 4  # layers, K and V, heads, size, fp32


def test_tables_show_what_was_measured(bench: Bench) -> None:
    found = results(bench, "foretoken bench")
    assert found is not None
    shown = tables(found.rows)
    assert list(shown)[:2] == ["Speed", "Speed-up over plain decoding, in turns"]
    speed = shown["Speed"]
    assert [line[0] for line in speed.lines] == [row.case for row in found.rows]
    value = found.rows[0].values["output_tokens_per_second"]
    assert isinstance(value, Spread)
    assert speed.lines[0][3] == f"{value.median:.0f} ({value.min:.0f}–{value.max:.0f})"
    assert [line[0] for line in shown["Speed-up over plain decoding, in turns"].lines] == [
        "batch 1, draft_model, K=4",
        "batch 3, draft_model, K=4",
    ]


def test_a_table_on_a_terminal() -> None:
    made = Table(["", "ms", "tokens/s"], [["a", "1.25", "7"], ["longer", "10.00", ""]])
    assert as_text(made) == "           ms  tokens/s\na        1.25         7\nlonger  10.00\n"


def test_the_figure_has_a_point_and_a_bar_per_case(bench: Bench) -> None:
    found = results(bench, "foretoken bench")
    assert found is not None
    panels = ElementTree.fromstring(chart(found)).findall(f"{SVG}g/{SVG}svg")
    throughput, per_token, speedup = panels
    assert len(throughput.findall(f".//{SVG}circle")) == 4
    bars = [r for r in per_token.findall(f"{SVG}rect") if r.get("width") != "12"]
    assert len(bars) == 4 * 4
    assert sum(float(bar.get("height", "")) > 1 for bar in bars) >= 8
    assert len(speedup.findall(f"{SVG}rect")) == 2


def test_cases_take_turns_and_who_is_first_changes(
    pair: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int | None]] = []

    def fake(llm: LLM, prompts: Any, params: Sequence[SamplingParams]) -> Run:
        seen.append((len(prompts), params[0].num_speculative_tokens))
        return by_hand()

    monkeypatch.setattr(bench_run, "run_batch", fake)
    told: list[str] = []
    bench = Bench(pair, BenchOptions(**SMALL, compare=True, repeats=2), GREEDY)
    bench.run(lambda done, what: told.append(f"{done}: {what}"))
    turns = [0, None, None, 0, 0, None]  # one round warms up
    assert seen == [(batch, k) for batch in (1, 3) for k in turns]
    assert told[0] == "0: batch 1, plain, warm-up"
    assert told[2] == "2: batch 1, draft_model, K=4, repeat 1"
    assert told[-1] == f"{bench.num_runs}: done"
    assert {len(repeats) for repeats in bench.measured.values()} == {2}


def output(ttft: float, seconds: float, tokens: int, accepted: Sequence[int] = ()) -> RequestOutput:
    metrics = RequestMetrics(time_to_first_token=ttft, tokens_per_second=tokens / seconds)
    for count in accepted:
        metrics.observe(2, count)
    sample = CompletionOutput(0, [1] * tokens, "", "length")
    return RequestOutput("1", None, [1] * 10, [sample], metrics)


def step(
    ms: float, decoding: int, accepted: int = 0, *, requests: int = 2, drafts: int = 0
) -> Step:
    """Of its time half is the target's pass, a tenth drafting and a tenth verification."""
    seconds = {"schedule": 0.1, "draft": 0.1, "forward": 0.5, "verify": 0.1, "commit": 0.1}
    trace = StepTrace(
        {phase: share * ms / 1000 for phase, share in seconds.items()},
        num_requests=requests,
        num_decoding=decoding,
        num_drafts=drafts,
        num_accepted=accepted,
    )
    return Step(ms / 1000, trace)


def by_hand() -> Run:
    """Two requests of 10 and 7 tokens: a prompt, a mixed step, two whole ones, a last one."""
    outputs = [output(0.1, 0.2, 5, [2, 0]), output(0.02, 0.22, 9, [1])]
    steps = [
        step(100, 0),
        step(20, 1, 1, drafts=2),
        step(10, 2, 0, drafts=4),  # the first that only decodes: a draft model catches up in it
        step(4, 2, 3, drafts=4),
        step(6, 2, 1, drafts=4),
        step(5, 1, 1, requests=1, drafts=2),
    ]
    return Run(0.15, 10, outputs, steps)


def test_figures_of_a_run_worked_out_by_hand() -> None:
    parts = split_steps(by_hand())
    sizes = {name: [round(1000 * s.seconds) for s in steps] for name, steps in parts.items()}
    assert sizes == {"prefill": [100, 20, 10], "decode": [4, 6], "tail": [5]}
    # Weights of 1 GB and 2 GB; 10 MB and 1 MB per token, the target's half within 12 tokens.
    target = Reads(10**9, ((5 * 10**6, None), (5 * 10**6, 12)))
    found = figures(by_hand(), Floor(target, Reads(2 * 10**9, ((10**6, None),)), 2000.0))
    # Generated before the two steps: 1 each from their prompts, 2 in the mixed step, 2 and 5 in
    # those that only decode: 10 + 1 + (4 / 2 + 9 / 2) / 2 tokens of context.
    context = 10 + 1 + (4 / 2 + 9 / 2) / 2
    reads = 1 + 2 * (0.005 * context + 0.005 * 12)
    draft = 2 * (2 + 2 * 0.001 * context)
    assert found == pytest.approx(
        {
            "ttft_ms": 60.0,
            "tpot_ms": 25.0,  # both: 100 ms for 4 tokens, 200 ms for 8
            "output_tokens_per_second": 14 / 0.15,
            "total_tokens_per_second": 34 / 0.15,
            "requests_per_second": 2 / 0.15,
            "wall_s": 0.15,
            "cached_tokens": 0,
            "acceptance_length": 2.0,
            "acceptance_rate": 0.5,
            "accepted_at_1": 2 / 3,
            "accepted_at_2": 1 / 3,
            "prefill_s": 0.13,
            "decode_s": 0.010,
            "tail_s": 0.010,
            "step_ms": 5.0,
            "draft_ms": 0.5,
            "target_ms": 2.5,
            "verify_ms": 0.5,
            "host_gap_ms": 1.5,
            "tokens_per_step": 2.0,
            "decode_ms_per_token": 2.5,
            "read_gb": reads + draft,
            "floor_ms": (reads + draft) / 2,
            "share_of_floor": (reads + draft) / 2 / 5,
            "read_gb_per_s": (reads + draft) / 0.005,
            "target_gb_per_s": reads / 0.0025,
            "draft_gb_per_s": draft / 0.0005,
        }
    )


def test_one_token_tells_nothing_of_steps_or_tpot(pair: LLM) -> None:
    options = BenchOptions(**SMALL | {"output_len": 1, "batch_size": "2"}, repeats=1, warmup=0)
    bench = Bench(pair, options, GREEDY)
    bench.run()
    ((run,),) = bench.measured.values()
    assert not {"tpot_ms", "step_ms", "acceptance_rate"} & run.keys()
    assert run["ttft_ms"] > 0
    found = results(bench, "foretoken bench")
    assert found is not None
    assert any("No step in which the whole batch decoded" in note for note in found.notes)
    assert any("Fewer than 3 repeats" in note for note in found.notes)
    assert list(tables(found.rows)) == ["Speed", "Seconds of a run"]
    assert len(ElementTree.fromstring(chart(found)).findall(f"{SVG}g")) == 1


def test_a_failed_request_ends_the_benchmark(pair: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair.engine.runner.model, "forward", None)
    with pytest.raises(StepError):
        run_batch(pair, [[1, 2], [3, 4]], [GREEDY] * 2)
    assert pair.engine.on_step is None


def test_a_run_that_ends_early_keeps_whole_turns(
    pair: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def fake(*args: Any) -> Run:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise ProcessingError("enough")
        return by_hand()

    monkeypatch.setattr(bench_run, "run_batch", fake)
    bench = Bench(pair, BenchOptions(**SMALL, compare=True, warmup=1), GREEDY)
    assert results(bench, "foretoken bench") is None
    with pytest.raises(ProcessingError):
        bench.run()
    found = results(bench, "foretoken bench")
    assert found is not None
    validate(asdict(found))
    repeats = {row.case: row.values["wall_s"].repeats for row in found.rows}  # type: ignore[union-attr]
    assert repeats == {"batch 1, plain": 2, "batch 1, draft_model, K=4": 1}
    assert found.rows[1].values["speedup"].repeats == 1  # type: ignore[union-attr]


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


def test_cases_of_one_engine(pair: LLM) -> None:
    options = BenchOptions(**SMALL)
    assert Bench(pair, options, GREEDY).cases == [Case("draft_model, K=4", None)]

"""Tables and figures in the documents are what the results files say."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.common import goal
from benchmarks.tables.curves import CURVES, curve_figures
from benchmarks.tables.documents import FIGURES, TABLES, documents, outputs, regenerate
from benchmarks.tables.goals import NOT_MEASURED, goal_parts, goals
from benchmarks.tables.gpu import gpu_goals, ops_figures
from foretoken.lab.results import Row, Spread, collect, read, write
from tests.project.source import ROOT

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("path", outputs(), ids=lambda path: path.name)
def test_tables_and_figures_are_up_to_date(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == outputs()[path], "run `make tables`"


def test_no_figure_is_left_from_before() -> None:
    assert set(FIGURES.glob("*")) <= set(outputs())


def test_every_table_is_used() -> None:
    texts = "".join(path.read_text(encoding="utf-8") for path in documents())
    assert [name for name in TABLES if f"<!-- table: {name} -->" not in texts] == []


def test_a_changed_figure_is_noticed() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    start = text.index("<!-- table: summary -->")
    digit = next(i for i in range(text.index("---:", start), len(text)) if text[i].isdigit())
    broken = text[:digit] + str((int(text[digit]) + 1) % 10) + text[digit + 1 :]
    assert regenerate(broken) == text


def test_a_table_without_its_results_says_so(tmp_path: Path) -> None:
    text = "<!-- table: curves -->\nold\n<!-- end table -->"
    fresh = f"<!-- table: curves -->\n{NOT_MEASURED}<!-- end table -->"
    assert regenerate(text, tmp_path) == fresh


def test_goal_notes_are_read_as_they_are_written() -> None:
    row = Row("plain", {}, {"ratio": Spread("x", 5, 1.234, 1.0, 1.1, 1.3, 1.4), "host": 0.1})
    parts = goal_parts(goal("batch 16: plain to generate", row, "ratio", 1.15))
    assert parts == ["batch 16: plain to generate", "1.23", "≥ 1.15", "reached"]
    assert goal_parts(goal("it", row, "ratio", 1.3))[3] == "**not** reached"
    assert goal_parts(goal("host", row, "host", 0.1, least=False))[1:] == [
        "0.1",
        "≤ 0.1",
        "reached",
    ]
    assert goal_parts(goal("host", row, "host", 0.09, least=False))[3] == "**not** reached"
    assert goal_parts("Ratios are taken repeat by repeat.") == []


def test_the_growth_of_steps_has_a_goal_and_that_of_prefills_none(tmp_path: Path) -> None:
    fits = [("batch, plain", "batch", 0.995), ("prefill, plain", "prefill", 0.9)]
    fits.append(("context, batch 8, K=4", "context, batch 8", 0.989))
    rows = [
        Row(f"line: {case}", {"curve": curve, "k": 0, "fit": True}, {"r_squared": r_squared})
        for case, curve, r_squared in fits
    ]
    write(collect("curves", "python -m benchmarks.curves", {"steps": 1}, rows), tmp_path)
    assert goals(tmp_path).splitlines()[2:] == [
        "| `curves` | batch, plain: R² of its line | 0.995 | ≥ 0.99 | reached |",
        "| `curves` | context, batch 8, K=4: R² of its line | 0.989 | ≥ 0.99 | **not** reached |",
    ]


def op_row(case: str, engine: str, us: float, curve: str = "", x: int = 0) -> Row:
    labels = {"engine": engine, "case": case, "curve": curve, "x": x}
    values = {"graph_us": Spread.of([us, us + 1], "us"), "read_floor_us": us / 2}
    values |= {"eager_us": Spread.of([us + 9], "us"), "share_of_floor": 0.5}
    return Row(f"{case}: {engine}", labels, values)


def test_ops_have_a_line_per_case_and_a_goal_per_curve(tmp_path: Path) -> None:
    rows = [op_row("sample", "triton", 10.0), op_row("sample", "pytorch", 2000.0)]
    rows[0].values["speedup_over_pytorch"] = Spread.of([200.0], "x")
    for x in (1, 10, 100):
        case = f"sample, rows, x={x}"
        rows.append(op_row(case, "triton", 5.0 + x, "sample, rows", x))
    shapes = {"backends": ["triton"], "baselines": ["pytorch", "peer"], "device": "cuda"}
    note = goal("sample: triton: us, graph", rows[0], "graph_us", 11, least=False)
    results = collect("ops_gpu", "python -m benchmarks.ops", shapes, rows, [note])
    write(results, tmp_path)
    text = TABLES["ops_gpu"](tmp_path)
    line = "| sample | 10.5 (10.2–10.8) | 19.0 | 5.0 | 50.0% | 2000 |  | 200.0x |"
    assert line in text.splitlines()
    assert "![GPU: time of an op and its rows](figures/ops_gpu_rows.svg)" in text
    assert "| sample, rows | 5.50 | 1000.00 | 1.0000 |" in text
    assert set(ops_figures(tmp_path)) == {"ops_gpu_rows.svg"}
    assert goals(tmp_path).splitlines()[2:] == [
        "| `ops_gpu` | sample: triton: us, graph | 10.5 | ≤ 11 | reached |",
        "| `ops_gpu` | sample, rows: R² of its line | 1 | ≥ 0.99 | reached |",
    ]


def test_curve_figures_follow_the_results(tmp_path: Path) -> None:
    def point(curve: str, x: int, ms: float) -> Row:
        labels = {"curve": curve, "k": 0, "x": x}
        return Row(f"{curve}, plain, x={x}", labels, {"ms": Spread.of([ms, 1.1 * ms], "ms")})

    def figures(most: float) -> dict[str, str]:
        names = [name for _, _, wanted in CURVES.values() for name in wanted]
        rows = [point(name, x, most * x / 64) for name in names for x in (1, 64)]
        write(collect("curves", "python -m benchmarks.curves", {"steps": 1}, rows), tmp_path)
        return curve_figures(tmp_path)

    first = figures(8.0)
    assert set(first) == {f"curve_{name}.svg" for name in CURVES}
    for name, text in first.items():
        lines = ElementTree.fromstring(text).findall(f".//{SVG}polyline")
        assert len(lines) == len(CURVES[name[6:-4]][2])
    assert figures(8.0) == first
    assert figures(8.5) != first


def test_goals_on_a_gpu_hold_greedy_sampled_and_long_prompts_to_their_own(tmp_path: Path) -> None:
    def record(name: str, prompt: int, temperature: float, plain: float, drafted: float) -> None:
        rows = []
        for method, ms in (("plain", plain), ("eagle3", drafted)):
            labels = {"concurrency": 64, "method": method, "temperature": temperature}
            values = {"decode_ms_per_token": ms, "step_ms": 10.0, "host_gap_ms": 0.4}
            values |= {"requests": 64, "ttft_ms_max": 1500.0, "output_tokens_per_second": 1.0}
            rows.append(Row(method, {**labels}, {**values}))
        shapes = {"input_len": str(prompt)}
        write(collect(name, "foretoken bench", shapes, rows), tmp_path)

    record("gpu_eagle3", 1024, 0.0, 6.0, 4.0)
    record("gpu_eagle3_8k", 8192, 0.0, 9.0, 6.1)
    record("gpu_eagle3_sampled", 1024, 0.6, 6.1, 4.1)
    found = {
        name: [goal_parts(note) for note in gpu_goals(read(tmp_path / f"{name}.json"), tmp_path)]
        for name in ("gpu_eagle3", "gpu_eagle3_8k", "gpu_eagle3_sampled")
    }
    missed = {name: [p[0] for p in parts if "not" in p[3]] for name, parts in found.items()}
    gaps = ["plain: host gap to step", "eagle3: host gap to step"]
    late = "plain: ms to the last first token of 64 x 1024"
    assert missed == {
        "gpu_eagle3": [gaps[0], late, gaps[1]],
        "gpu_eagle3_8k": [gaps[0], "eagle3: ms per token", gaps[1]],  # 9 / 1.5 = 6
        "gpu_eagle3_sampled": [gaps[0], late, gaps[1]],  # 4.1 <= 1.03 * 4
    }
    assert "≤ 4.12" in {parts[2] for parts in found["gpu_eagle3_sampled"]}

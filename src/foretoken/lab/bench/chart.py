"""The figure of a benchmark, from its results file alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from foretoken.lab.bench.report import kernel_rows
from foretoken.lab.plot import Bar, Series, bar_chart, line_chart, page
from foretoken.lab.results import Results, Row, Spread

_KERNELS = (
    *("qkv", "attention", "o", "gate_up", "down", "head", "product", "draft", "sampling"),
    *("other", "idle"),
)
_PARTS = ("target", "draft", "verify", "host_gap")


def chart(results: Results) -> str:
    """SVG: throughput, where the time of a token goes, and the speed-up if plain was measured."""
    cases = [row for row in results.rows if "kernels" not in row.labels]
    charts = [_throughput(cases)]
    if timed := [row for row in cases if "step_ms" in row.values]:
        charts.append(_time_per_token(timed))
    if compared := [row for row in cases if "speedup" in row.values]:
        charts.append(_speedup(compared))
    if recorded := kernel_rows(results.rows):
        charts.append(_kernels(recorded))
    return page(charts)


def _kernels(cases: Mapping[str, Mapping[str, Row]]) -> str:
    """A drafter's kernels are one part, and so are small ones."""
    bars = []
    for kinds in cases.values():
        parts, floor = dict.fromkeys(_KERNELS, 0.0), 0.0
        for kind, row in kinds.items():
            own_ms = _spread(row, "kernel_ms").median
            if kind != "all":
                part = "draft" if kind.startswith("draft ") else kind.removesuffix(" merge")
                parts[part if part in parts else "other"] += own_ms
            if "share_of_floor" in row.values:
                floor += own_ms * _spread(row, "share_of_floor").median
        case = next(iter(kinds.values()))
        bars.append(Bar(_decoding(case), _group(case), parts, mark=floor))
    title = "What a decode step runs"
    return bar_chart(title, "ms per step, with a profiler", bars, mark="floor: reading memory")


def _throughput(rows: Sequence[Row]) -> str:
    lines: dict[str, list[tuple[float, float, float, float]]] = {}
    for row in rows:
        spread = _spread(row, "output_tokens_per_second")
        point = (float(str(row.labels["batch"])), spread.median, spread.min, spread.max)
        lines.setdefault(_decoding(row), []).append(point)
    series = [Series(name, sorted(points)) for name, points in lines.items()]
    title = "Throughput, prompts' time included"
    sizes = sorted({point[0] for points in lines.values() for point in points})
    return line_chart(title, "batch", "tokens/s", series, x_marks=sizes)


def _time_per_token(rows: Sequence[Row]) -> str:
    """Parts of a step over the tokens that a request gets of it."""
    bars = []
    for row in rows:
        tokens = _spread(row, "tokens_per_step").median
        parts = {
            part.replace("_", " "): _spread(row, f"{part}_ms").median / tokens for part in _PARTS
        }
        floor = _spread(row, "floor_ms").median / tokens
        bars.append(Bar(_decoding(row), _group(row), parts, mark=floor))
    title = "Where the time of a token goes, once the whole batch decodes"
    return bar_chart(title, "ms per token of a request", bars, mark="floor: reading memory")


def _speedup(rows: Sequence[Row]) -> str:
    bars = []
    for row in rows:
        spread = _spread(row, "speedup")
        reach = spread.min, spread.max
        bars.append(Bar(_decoding(row), _group(row), {"speed-up": spread.median}, reach=reach))
    return bar_chart("Speed-up over plain decoding, in turns", "x, tokens/s", bars, level=1.0)


def _decoding(row: Row) -> str:
    """Short enough to stand below a bar."""
    return f"K={row.labels['k']}" if row.labels["k"] else "plain"


def _group(row: Row) -> str:
    return f"batch {row.labels['batch']}"


def _spread(row: Row, name: str) -> Spread:
    value = row.values[name]
    if not isinstance(value, Spread):
        raise TypeError(f"{name} must be a spread")
    return value

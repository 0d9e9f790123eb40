"""The figure of a benchmark, from its results file alone."""

from __future__ import annotations

from collections.abc import Sequence

from foretoken.lab.plot import Bar, Series, bar_chart, line_chart, page
from foretoken.lab.results import Results, Row, Spread

_PARTS = ("target", "draft", "verify", "host_gap")


def chart(results: Results) -> str:
    """SVG: throughput, where the time of a token goes, and the speed-up if plain was measured."""
    charts = [_throughput(results.rows)]
    if timed := [row for row in results.rows if "step_ms" in row.values]:
        charts.append(_time_per_token(timed))
    if compared := [row for row in results.rows if "speedup" in row.values]:
        charts.append(_speedup(compared))
    return page(charts)


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

"""Tables and figures of `benchmarks.ops`: every case, and how cost grows."""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.markup import markdown, number, percent, where
from foretoken.lab.plot import Axes, Series, line_chart
from foretoken.lab.results import Results, Row, Spread, read

FILES = ("ops_gpu", "ops_cpu", "ops_avx512")
GROWTH = ("rows", "vocabulary")


def ops_times(name: str, folder: Path) -> str:
    """Every case of one file, on a GPU by graph replay and eager, and its growth."""
    return table(read(folder / f"{name}.json"))


def table(results: Results) -> str:
    """Microseconds of every case and implementation; figures and lines of the growth curves."""
    ours, others = results.shapes["backends"], results.shapes["baselines"]
    mode, gpu = timed_by(results), results.name == "ops_gpu"
    header = ["µs per call, median (quartiles)"]
    for name in ours:
        header += [f"`{name}`, graph replay", "eager"] if gpu else [f"`{name}`"]
    header += ["read floor", "of the floor", *others, "faster than plain PyTorch"]
    rows: dict[str, dict[str, Row]] = {}
    for row in results.rows:
        if not row.labels["curve"]:
            rows.setdefault(str(row.labels["case"]), {})[str(row.labels["engine"])] = row
    lines = []
    for case, found in rows.items():
        cells = [case]
        for name in ours:
            cells.append(quartiles(found.get(name), mode))
            cells += [quartiles(found.get(name), "eager_us", short=True)] if gpu else []
        best = next((found[name] for name in ours if name in found), None)
        if best is None:
            continue
        cells += [number(best, "read_floor_us", 1), percent(best, "share_of_floor")]
        cells += [quartiles(found.get(name), mode, short=True) for name in others]
        faster = number(best, "speedup_over_pytorch", 1)
        lines.append([*cells, f"{faster}x" if faster else ""])
    return markdown(header, lines) + growth(results) + where(results)


def timed_by(results: Results) -> str:
    """The value that goals and curves are about."""
    return "graph_us" if results.name == "ops_gpu" else "eager_us"


def quartiles(row: Row | None, name: str, short: bool = False) -> str:
    """`12.3 (12.1–12.5)`, or the median alone if `short`; empty where nothing was measured."""
    value = None if row is None else row.values.get(name)
    if not isinstance(value, Spread):
        return ""
    digits = 1 if value.median < 1000 else 0
    median = f"{value.median:.{digits}f}"
    return median if short else f"{median} ({value.q1:.{digits}f}–{value.q3:.{digits}f})"


def points(results: Results) -> dict[str, list[tuple[float, Row]]]:
    """Curve -> (x, row) of the first backend, in order of x."""
    found: dict[str, list[tuple[float, Row]]] = {}
    for row in results.rows:
        if row.labels["curve"] and row.labels["engine"] == results.shapes["backends"][0]:
            point = (float(row.labels["x"] or 0), row)
            found.setdefault(str(row.labels["curve"]), []).append(point)
    return {name: sorted(curve, key=lambda point: point[0]) for name, curve in found.items()}


def ops_lines(results: Results) -> list[Row]:
    """A row per curve: the least-squares line through its medians, microseconds."""
    lines = []
    for name, curve in points(results).items():
        if len(curve) < 3:
            continue
        x = [at for at, _ in curve]
        y = [row.values[timed_by(results)].median for _, row in curve]  # type: ignore[union-attr]
        line = statistics.linear_regression(x, y)
        values = {
            "intercept": line.intercept,
            "slope_per_1000": 1000 * line.slope,
            "r_squared": statistics.correlation(x, y) ** 2,
        }
        lines.append(Row(name, {"fit": True}, dict(values)))
    return lines


def growth(results: Results) -> str:
    """The figures of a file that has curves, and the line through each."""
    images = [f"![{title}](figures/{name})\n\n" for name, (title, _) in charts(results).items()]
    digits = {"intercept": 2, "slope_per_1000": 2, "r_squared": 4}
    lines = [
        [row.case, *(number(row, name, n) for name, n in digits.items())]
        for row in ops_lines(results)
    ]
    if not lines:
        return ""
    header = ["line", "µs at 0", "µs per 1000 rows or ids", "R²"]
    return "\n" + "".join(images) + markdown(header, lines)


def charts(results: Results) -> dict[str, tuple[str, str]]:
    """File name -> title and SVG text of each figure of the growth curves."""
    found = {}
    device = {"ops_gpu": "GPU", "ops_avx512": "CPU, AVX-512"}.get(results.name, "CPU")
    for what in GROWTH:
        lines = []
        for name, curve in points(results).items():
            if not name.endswith(f", {what}"):
                continue
            spread = [(x, row.values[timed_by(results)]) for x, row in curve]
            dots = [(x, v.median, v.min, v.max) for x, v in spread if isinstance(v, Spread)]
            lines.append(Series(name.removesuffix(f", {what}"), dots))
            if name.startswith("sample,"):
                floor = [(x, row.values["read_floor_us"]) for x, row in curve]
                dots = [(x, us, us, us) for x, us in floor if isinstance(us, float)]
                lines.append(Series("reading the logits once", dots))
        if lines:
            title = f"{device}: time of an op and its {what}"
            svg = line_chart(title, Axes(what, "µs", logarithmic=True), lines)
            found[f"{results.name}_{what}.svg"] = (title, svg)
    return found


def ops_figures(folder: Path) -> dict[str, str]:
    """File name -> SVG text, of the results files that are there."""
    files = [folder / f"{name}.json" for name in FILES]
    found = [charts(read(path)) for path in files if path.exists()]
    return {name: svg for one in found for name, (_, svg) in one.items()}

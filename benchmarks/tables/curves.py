"""The curves of step times: lines through them, and figures."""

from __future__ import annotations

from pathlib import Path

from benchmarks.tables.driver import markdown, number, percent
from foretoken.lab.plot import Axes, Series, line_chart
from foretoken.lab.results import Results, Spread, read

CURVES = {
    "batch": ("Step time and batch", "requests", ("batch",)),
    "context": ("Step time and context", "tokens", ("context, batch 1", "context, batch 8")),
    "prefill": ("Time to first token and prompt", "tokens", ("prefill",)),
}


def curves(results: Results) -> str:
    """The line through each series; the figures are those of the first machine."""
    shown = CURVES.items() if results.name == "curves" else ()
    images = [f"![{title}](figures/curve_{name}.svg)\n\n" for name, (title, *_) in shown]
    rows = [
        [
            row.case.removeprefix("line: "),
            number(row, "intercept"),
            number(row, "slope", 4),
            number(row, "r_squared", 4),
            percent(row, "largest_deviation"),
        ]
        for row in results.rows
        if row.labels.get("fit")
    ]
    header = ["line", "ms at 0", "ms per request or token", "R²", "farthest point"]
    return "".join(images) + markdown(header, rows)


def curve_figures(folder: Path) -> dict[str, str]:
    """File name -> SVG text of every curve."""
    rows = [row for row in read(folder / "curves.json").rows if "x" in row.labels]
    figures = {}
    for name, (title, x_label, wanted) in CURVES.items():
        series: dict[str, list[tuple[float, float, float, float]]] = {}
        for row in rows:
            ms = row.values["ms"]
            if row.labels["curve"] in wanted and isinstance(ms, Spread):
                point = (float(row.labels["x"] or 0), ms.median, ms.min, ms.max)
                series.setdefault(row.case.rpartition(", x=")[0], []).append(point)
        lines = [Series(case, points) for case, points in series.items()]
        figures[f"curve_{name}.svg"] = line_chart(title, Axes(x_label, "ms"), lines)
    return figures

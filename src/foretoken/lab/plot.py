"""Charts as SVG text, without a plotting library: the same points give the same bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 44, 52  # margins around the axes
COLOURS = (  # told apart on white and on near-black
    *("#2f6fde", "#d9822b", "#2a9d6f", "#b04fc4", "#c94a4a", "#8a6d3b"),
    *("#1fa2b8", "#d4a800", "#d76a9d", "#6c757d", "#a9b1b9"),
)
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328; }
.title { font-size: 15px; font-weight: 600; }
.small { font-size: 10px; }
.grid { stroke: #8c959f; stroke-opacity: .25; }
.axis { stroke: #57606a; }
.mark { stroke: #1f2328; stroke-width: 2; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .axis { stroke: #9198a1; } .mark { stroke: #e6edf3; }
}
"""
PAGE_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem;
  color: #1f2328; background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #8c959f40; }
th:first-child, td:first-child { text-align: left; }
.charts { display: flex; flex-wrap: wrap; } .charts svg { width: 36rem; height: auto; }
.words td:first-child { white-space: nowrap; }
.words td { text-align: left; overflow-wrap: anywhere; vertical-align: top; }
@media (prefers-color-scheme: dark) { body { color: #e6edf3; background: #0d1117; } }
"""


@dataclass(frozen=True)
class Series:
    """One line: its points in order of x, and how far each reaches down and up.

    Attributes:
        points: (x, median, least, most).
    """

    name: str
    points: Sequence[tuple[float, float, float, float]]


@dataclass(frozen=True)
class Bar:
    """A bar of stacked parts.

    Attributes:
        name, group: what it is, and what it shares with its neighbours: two lines below the axis.
        parts: name -> size, from the axis up.
        mark: a height to mark on the bar, or None.
        reach: how far its end reaches down and up, or None.
    """

    name: str
    group: str
    parts: dict[str, float]
    mark: float | None = None
    reach: tuple[float, float] | None = None


def ticks(most: float, count: int = 5) -> list[float]:
    """Round numbers from 0 up to the first that is not below `most`."""
    step = 10.0 ** math.floor(math.log10(most / count))
    step *= next(m for m in (1, 2, 5, 10) if m * step * count >= most)
    return [i * step for i in range(math.ceil(most / step - 1e-9) + 1)]


def decades(least: float, most: float) -> list[float]:
    """Powers of ten from the last that is not above `least` to the first not below `most`."""
    first, last = math.floor(math.log10(least) + 1e-9), math.ceil(math.log10(most) - 1e-9)
    return [10.0**i for i in range(first, max(last, first + 1) + 1)]


def _share(low: float, high: float, logarithmic: bool) -> Callable[[float], float]:
    """Where a value lies between an axis's two ends, 0 to 1; in the middle if they are one."""
    scale = math.log if logarithmic else float
    width = scale(high) - scale(low)
    return lambda value: (scale(value) - scale(low)) / width if width else 0.5


def line_chart(
    title: str,
    x_label: str,
    y_label: str,
    series: Sequence[Series],
    logarithmic: bool = False,
    x_marks: Sequence[float] = (),
    *,
    level: float | None = None,
    legend_above: bool = False,
) -> str:
    """A chart with x to the last point; a dot with its range per point.

    Args:
        logarithmic: both axes, of positive numbers; else both begin at 0.
        x_marks: positive numbers in order: x is logarithmic, from the first of them to the last.
        level: a height to draw a line at.
        legend_above: above the axes instead of at their top left, where falling lines begin.
    """
    points = [point for one in series for point in one.points]
    across = x_marks or [p[0] for p in points]
    lowest, highest = min(p[2] for p in points), max(level or 0, *(p[3] for p in points))
    low, high = min(across) if logarithmic or x_marks else 0.0, max(across)
    x_ticks = x_marks or (decades(low, high) if logarithmic else ticks(high))
    x_ticks = [tick for tick in x_ticks if low <= tick <= high]
    x_share = _share(low, high, logarithmic or bool(x_marks))
    y_ticks = decades(lowest, highest) if logarithmic else ticks(highest)
    y_share = _share(y_ticks[0], y_ticks[-1], logarithmic)
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    legend, top = _legend([one.name for one in series], "") if legend_above else ([], TOP)

    def at_x(x: float) -> float:
        return round(LEFT + (right - LEFT) * x_share(x), 1)

    def at_y(y: float) -> float:
        return round(bottom - (bottom - top) * y_share(y), 1)

    parts = [*_head(title), *_frame(y_ticks, at_y, y_label), *legend]
    for tick in x_ticks:
        parts.append(_line(at_x(tick), bottom, at_x(tick), bottom + 5, "axis"))
        parts.append(_text(at_x(tick), bottom + 20, f"{tick:g}", "middle"))
    parts.append(_text((LEFT + right) / 2, HEIGHT - 10, x_label, "middle"))
    for i, one in enumerate(series):
        colour = COLOURS[i % len(COLOURS)]
        path = " ".join(f"{at_x(x)},{at_y(y)}" for x, y, _, _ in one.points)
        parts.append(f'<g stroke="{colour}" fill="{colour}">')
        parts.append(f'<polyline points="{path}" fill="none" stroke-width="2"/>')
        for x, y, least, most in one.points:
            parts.append(_line(at_x(x), at_y(least), at_x(x), at_y(most)))
            parts.append(f'<circle cx="{at_x(x)}" cy="{at_y(y)}" r="3"/>')
        row = TOP + 10 + 20 * i  # the legend stands top left: cost grows, lines end top right
        if not legend_above:
            parts.append(_line(LEFT + 14, row, LEFT + 38, row))
        parts.append("</g>")
        if not legend_above:
            parts.append(_text(LEFT + 46, row + 4, one.name, "start"))
    if level is not None:
        parts.append(_line(LEFT, at_y(level), right, at_y(level), "mark"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def bar_chart(
    title: str, y_label: str, bars: Sequence[Bar], *, mark: str = "", level: float | None = None
) -> str:
    """A chart of bars that begin at 0, with a line of legend if there is more than one part.

    Args:
        mark: what the bars' marks are.
        level: a height to draw a line at.
    """
    bottom = HEIGHT - BOTTOM
    sizes = [sum(bar.parts.values()) for bar in bars] + [bar.reach[1] for bar in bars if bar.reach]
    y_ticks = ticks(max(*sizes, *(bar.mark or 0 for bar in bars), level or 0))
    names = list(dict.fromkeys(name for bar in bars for name in bar.parts))
    width = (WIDTH - RIGHT - LEFT) / len(bars)
    legend, top = _legend(names, mark) if len(names) > 1 else ([], TOP + 16)

    def at_y(y: float) -> float:
        return round(bottom - (bottom - top) * y / y_ticks[-1], 1)

    drawn = [*_head(title), *_frame(y_ticks, at_y, y_label), *legend]
    small = "small" if width < 60 else ""
    for i, bar in enumerate(bars):
        left, middle, base = LEFT + width * (i + 0.2), LEFT + width * (i + 0.5), 0.0
        for name, size in bar.parts.items():
            high, low = at_y(base + size), at_y(base)
            drawn.append(
                f'<rect x="{left:.1f}" y="{high:g}" width="{0.6 * width:.1f}" '
                f'height="{low - high:.1f}" fill="{COLOURS[names.index(name) % len(COLOURS)]}"/>'
            )
            base += size
        if bar.mark is not None:
            ends = LEFT + width * (i + 0.12), LEFT + width * (i + 0.88)
            drawn.append(_line(ends[0], at_y(bar.mark), ends[1], at_y(bar.mark), "mark"))
        if bar.reach:
            drawn.append(_line(middle, at_y(bar.reach[0]), middle, at_y(bar.reach[1]), "mark"))
        drawn.append(_text(middle, bottom + 18, bar.name, "middle", small))
    drawn += _groups([bar.group for bar in bars], width, bottom + 38)
    if level is not None:
        drawn.append(_line(LEFT, at_y(level), WIDTH - RIGHT, at_y(level), "mark"))
    return "\n".join([*drawn, "</svg>"]) + "\n"


def page(charts: Sequence[str]) -> str:
    """Charts below one another, as one file."""
    drawn = [_open(HEIGHT * len(charts))]
    for i, chart in enumerate(charts):
        drawn.append(f'<g transform="translate(0 {HEIGHT * i})">\n{chart}</g>')
    return "\n".join([*drawn, "</svg>"]) + "\n"


def html(title: str, sections: Sequence[str]) -> str:
    """A page in one file that loads nothing: a heading, and sections of HTML below one another."""
    head = f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
    body = "\n".join(f"<section>{section}</section>" for section in sections)
    return f"{head}\n<style>{PAGE_STYLE}</style>\n<h1>{escape(title)}</h1>\n{body}\n</html>\n"


def html_table(
    title: str, header: Sequence[str], lines: Sequence[Sequence[str]], kind: str = ""
) -> str:
    """A section with a table, the first column to the left, the others too if `kind` is `words`."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    rows = ("".join(f"<td>{escape(cell)}</td>" for cell in line) for line in lines)
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    table = f'<table class="{kind}"><tr>{top}</tr>\n{body}</table>'
    return f"<h2>{escape(title)}</h2>\n{table}"


def html_list(title: str, items: Sequence[str]) -> str:
    """A section with a list of sentences."""
    body = "\n".join(f"<li>{escape(item)}</li>" for item in items)
    return f"<h2>{escape(title)}</h2>\n<ul>{body}</ul>"


def _open(height: int) -> str:
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'


def _head(title: str) -> list[str]:
    heading = _text(LEFT, 22, title, "start", "title")
    return [_open(HEIGHT), f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>", heading]


def _frame(y_ticks: Sequence[float], at_y: Callable[[float], float], y_label: str) -> list[str]:
    """Both axes, and the vertical one's ticks and label."""
    top, bottom, right = at_y(y_ticks[-1]), HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for tick in y_ticks:
        parts.append(_line(LEFT, at_y(tick), right, at_y(tick), "grid"))
        parts.append(_text(LEFT - 8, at_y(tick) + 4, f"{tick:g}", "end"))
    parts.append(_line(LEFT, bottom, right, bottom, "axis"))
    parts.append(_line(LEFT, top, LEFT, bottom, "axis"))
    middle = (top + bottom) / 2
    parts.append(
        f'<text x="18" y="{middle:g}" text-anchor="middle" '
        f'transform="rotate(-90 18 {middle:g})">{escape(y_label)}</text>'
    )
    return parts


def _legend(names: Sequence[str], mark: str) -> tuple[list[str], int]:
    """Lines below the title, and where they end."""
    parts, x, y = [], float(LEFT), 44
    for i, name in enumerate([*names, mark] if mark else names):
        if x + 18 + 7.5 * len(name) > WIDTH:
            x, y = float(LEFT), y + 18
        if i < len(names):
            colour = COLOURS[i % len(COLOURS)]
            parts.append(f'<rect x="{x:g}" y="{y - 10}" width="12" height="12" fill="{colour}"/>')
        else:
            parts.append(_line(x, y - 4, x + 12, y - 4, "mark"))
        parts.append(_text(x + 18, y, name, "start"))
        x += 34 + 7.5 * len(name)
    return parts, y + 16


def _groups(groups: Sequence[str], width: float, y: float) -> list[str]:
    """Each group's name once, under the middle of its bars."""
    parts, first = [], 0
    for group, members in groupby(groups):
        count = len(list(members))
        parts.append(_text(LEFT + width * (first + count / 2), y, group, "middle"))
        first += count
    return parts


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{named}>{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"{named}/>'

"""Charts as SVG text, without a plotting library: the same points give the same bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from textwrap import wrap
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 640, 400
COLUMN_LIMIT = 6  # largest number of charts that a file shows in one column
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 44, 52  # margins around the axes
LETTER = 7.5  # width of a letter in the legend, px
TITLE_LETTERS, NOTE_LETTERS = 64, 92  # per line
COLOURS = (  # distinguishable on white and on near-black
    *("#2f6fde", "#d9822b", "#2a9d6f", "#b04fc4", "#c94a4a", "#8a6d3b"),
    *("#1fa2b8", "#d4a800", "#d76a9d", "#6c757d", "#a9b1b9"),
)
INK = "currentColor"  # the colour of lines to compare with, such as plain decoding or a limit
STYLE = """
svg { color: #1f2328; background: #fff; }
text { font: 13px system-ui, sans-serif; fill: currentColor; }
.title { font-size: 15px; font-weight: 600; }
.small { font-size: 10px; }
.note { font-size: 12px; fill-opacity: .8; }
.grid { stroke: #8c959f; stroke-opacity: .25; }
.axis { stroke: #57606a; }
.mark { stroke: currentColor; stroke-width: 2; }
@media (prefers-color-scheme: dark) {
  svg { color: #e6edf3; background: #0d1117; } .axis { stroke: #9198a1; }
}
"""
PAGE_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem;
  color: #1f2328; background: #fff; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
a { color: #0a5cc4; }
nav ul { columns: 26rem; padding: 0; list-style: none; }
nav li { break-inside: avoid; margin-bottom: .6rem; }
nav a { display: block; line-height: 44px; margin-bottom: -10px; font-weight: 600; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { padding: .2rem .8rem; text-align: right; white-space: nowrap; }
th, td { border-bottom: 1px solid #8c959f40; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr)); }
.charts { overflow-x: auto; margin-top: 1rem; }
.charts svg { width: 100%; min-width: 30rem; max-width: 40rem; height: auto; }
summary { line-height: 44px; cursor: pointer; }
.words td { text-align: left; vertical-align: top; }
.words td + td { white-space: normal; overflow-wrap: anywhere; }
@media (prefers-color-scheme: dark) {
  body { color: #e6edf3; background: #0d1117; } a { color: #79b8ff; }
}
"""


@dataclass(frozen=True)
class Series:
    """A line of a chart."""

    name: str  # for the legend, where each name appears once
    points: Sequence[tuple[float, float, float, float]]  # (x, median, minimum, maximum), ordered
    colour: str = ""  # one of `COLOURS`, or `INK`; "": the next colour
    dashed: bool = False


@dataclass(frozen=True)
class Bar:
    """A bar of stacked parts."""

    name: str  # the label below the axis
    group: str  # a label that neighbouring bars share, below the names
    parts: dict[str, float]  # name -> size, from the axis upwards
    mark: float | None = None  # a height to mark on the bar, or None
    limits: tuple[float, float] | None = None  # minimum and maximum of the height or mark


@dataclass(frozen=True)
class Axes:
    """The axes of a line chart."""

    x: str  # label of the axis, like `y`
    y: str
    logarithmic: bool = False  # whether both axes are logarithmic; otherwise both begin at 0
    x_marks: Sequence[float] = ()  # ticks of a logarithmic x axis, from end to end


def ticks(highest: float, count: int = 5) -> list[float]:
    """Round numbers from 0 to the first one >= `highest`, about `count` of them."""
    step = 10.0 ** math.floor(math.log10(highest / count))
    step *= next(m for m in (1, 2, 5, 10) if m * step * count >= highest)
    return [i * step for i in range(math.ceil(highest / step - 1e-9) + 1)]


def decades(lowest: float, highest: float) -> list[float]:
    """Powers of ten from the last one <= `lowest` to the first one >= `highest`."""
    first, last = math.floor(math.log10(lowest) + 1e-9), math.ceil(math.log10(highest) - 1e-9)
    return [10.0**i for i in range(first, max(last, first + 1) + 1)]


def _axis_share(low: float, high: float, logarithmic: bool) -> Callable[[float], float]:
    """A function from a value to the place on an axis, in [0, 1]; 0.5 if low and high are equal."""
    scale = math.log if logarithmic else float
    width = scale(high) - scale(low)
    return lambda value: (scale(value) - scale(low)) / width if width else 0.5


def line_chart(
    title: str,
    axes: Axes,
    series: Sequence[Series],
    *,
    level: tuple[str, float] | None = None,
    legend: bool = True,
    note: str = "",
) -> str:
    """A chart of lines, with a dot and a range for each point; returns SVG text.

    Args:
        level: a horizontal line across the chart: (name in the legend, height).
        note: how to read the chart, below the title.
    """
    points = [point for line in series for point in line.points]
    x_values = axes.x_marks or [p[0] for p in points]
    limit = level[1] if level else 0.0
    y_min, y_max = min(p[2] for p in points), max(limit, *(p[3] for p in points))
    x_min, x_max = min(x_values) if axes.logarithmic or axes.x_marks else 0.0, max(x_values)
    x_ticks = axes.x_marks or (decades(x_min, x_max) if axes.logarithmic else ticks(x_max))
    x_ticks = [tick for tick in x_ticks if x_min <= tick <= x_max]
    x_share = _axis_share(x_min, x_max, axes.logarithmic or bool(axes.x_marks))
    y_ticks = decades(y_min, y_max) if axes.logarithmic else ticks(y_max)
    y_share = _axis_share(y_ticks[0], y_ticks[-1], axes.logarithmic)
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    colours = [line.colour or COLOURS[i % len(COLOURS)] for i, line in enumerate(series)]
    colour_of = {line.name: colour for line, colour in zip(series, colours, strict=True)}
    colour_of, mark = (colour_of, level[0] if level else "") if legend else ({}, "")
    heading, top = _heading(title, note, colour_of, mark)

    def at_x(x: float) -> float:
        return round(LEFT + (right - LEFT) * x_share(x), 1)

    def at_y(y: float) -> float:
        return round(bottom - (bottom - top) * y_share(y), 1)

    parts = [*heading, *_frame(y_ticks, at_y, axes.y)]
    for tick in x_ticks:
        parts.append(_line(at_x(tick), bottom, at_x(tick), bottom + 5, "axis"))
        parts.append(_text(at_x(tick), bottom + 20, f"{tick:g}", "middle"))
    parts.append(_text((LEFT + right) / 2, HEIGHT - 10, axes.x, "middle"))
    if level is not None:
        parts.append(_line(LEFT, at_y(limit), right, at_y(limit), "mark"))
    for line, colour in zip(series, colours, strict=True):
        path = " ".join(f"{at_x(x)},{at_y(y)}" for x, y, _, _ in line.points)
        dashes = ' stroke-dasharray="6 4"' if line.dashed else ""
        parts.append(f'<g stroke="{colour}" fill="{colour}">')
        parts.append(f'<polyline points="{path}" fill="none" stroke-width="2"{dashes}/>')
        for x, y, minimum, maximum in line.points:
            if minimum < maximum:
                parts.append(_line(at_x(x), at_y(minimum), at_x(x), at_y(maximum)))
            parts.append(f'<circle cx="{at_x(x)}" cy="{at_y(y)}" r="3"/>')
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def bar_chart(
    title: str, y_label: str, bars: Sequence[Bar], *, mark: str = "", note: str = ""
) -> str:
    """A chart of bars, with a legend if bars have marks or several parts; returns SVG text.

    Args:
        mark: the meaning of the bars' marks, for the legend.
        note: how to read the chart, below the title.
    """
    bottom = HEIGHT - BOTTOM
    heights = [sum(bar.parts.values()) for bar in bars]
    heights += [bar.limits[1] for bar in bars if bar.limits]
    y_ticks = ticks(max(*heights, *(bar.mark or 0 for bar in bars)))
    names = list(dict.fromkeys(name for bar in bars for name in bar.parts))
    width = (WIDTH - RIGHT - LEFT) / len(bars)
    shades = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    heading, top = _heading(title, note, shades if len(names) > 1 or mark else {}, mark)

    def at_y(y: float) -> float:
        return round(bottom - (bottom - top) * y / y_ticks[-1], 1)

    elements = [*heading, *_frame(y_ticks, at_y, y_label)]
    small = "small" if width < 60 else ""
    for i, bar in enumerate(bars):
        left, middle, base = LEFT + width * (i + 0.2), LEFT + width * (i + 0.5), 0.0
        for name, size in bar.parts.items():
            high, low = at_y(base + size), at_y(base)
            elements.append(
                f'<rect x="{left:.1f}" y="{high:g}" width="{0.6 * width:.1f}" '
                f'height="{low - high:.1f}" fill="{shades[name]}"/>'
            )
            base += size
        if bar.mark is not None:
            ends = LEFT + width * (i + 0.12), LEFT + width * (i + 0.88)
            elements.append(_line(ends[0], at_y(bar.mark), ends[1], at_y(bar.mark), "mark"))
        if bar.limits:
            elements.append(_line(middle, at_y(bar.limits[0]), middle, at_y(bar.limits[1]), "mark"))
        elements.append(_text(middle, bottom + 18, bar.name, "middle", small))
    elements += _groups([bar.group for bar in bars], width, bottom + 38)
    return "\n".join([*elements, "</svg>"]) + "\n"


def page(charts: Sequence[str]) -> str:
    """Charts in one SVG: a few in one column, many in rows that make the picture about square."""
    columns = 1
    if len(charts) > COLUMN_LIMIT:
        columns = math.ceil(math.sqrt(len(charts) * HEIGHT / WIDTH))
    elements = [_svg_tag(WIDTH * columns, HEIGHT * math.ceil(len(charts) / columns))]
    for i, chart in enumerate(charts):
        row, column = divmod(i, columns)
        place = f"translate({WIDTH * column} {HEIGHT * row})"
        elements.append(f'<g transform="{place}">\n{chart}</g>')
    return "\n".join([*elements, "</svg>"]) + "\n"


def html(title: str, sections: Sequence[str]) -> str:
    """A page of HTML sections, in one file that loads nothing else."""
    meta = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    head = f'<!doctype html>\n<html lang="en">{meta}<title>{escape(title)}</title>'
    body = "\n".join(f"<section>{section}</section>" for section in sections)
    return f"{head}\n<style>{PAGE_STYLE}</style>\n<h1>{escape(title)}</h1>\n{body}\n</html>\n"


def html_table(
    title: str, header: Sequence[str], lines: Sequence[Sequence[str]], kind: str = ""
) -> str:
    """A section with a table; `kind`: "" or "words", in which all columns are left-aligned."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    rows = ("".join(f"<td>{escape(cell)}</td>" for cell in line) for line in lines)
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    table = f'<table class="{kind}"><tr>{top}</tr>\n{body}</table>'
    return f'<h2>{escape(title)}</h2>\n<div class="table">{table}</div>'


def html_contents(lines_of: Mapping[str, Sequence[str]]) -> str:
    """A section with a link to each section of charts and its first line, from title -> lines."""
    items = (
        f'<li><a href="#{_anchor(title)}">{escape(title)}</a>{escape("".join(lines[:1]))}</li>'
        for title, lines in lines_of.items()
    )
    return f"<nav><ul>{''.join(items)}</ul></nav>"


def html_charts(
    title: str, lines: Sequence[str], charts: Sequence[str], folded: Sequence[str]
) -> str:
    """A section of lines and charts; folded charts are shown after a click."""
    heading = f'<h2 id="{_anchor(title)}">{escape(title)}</h2>\n' if title else ""
    paragraphs = "".join(f"<p>{escape(line)}</p>" for line in lines)
    text = f'{heading}{paragraphs}<div class="charts">{"".join(charts)}</div>'
    if folded:
        text += f"<details><summary>More charts: {len(folded)}</summary>"
        text += f'<div class="charts">{"".join(folded)}</div></details>'
    return text


def _anchor(title: str) -> str:
    return re.sub(r"\W+", "-", title.lower()).strip("-")


def html_list(title: str, items: Sequence[str]) -> str:
    """A section with a list of sentences."""
    body = "\n".join(f"<li>{escape(item)}</li>" for item in items)
    return f"<h2>{escape(title)}</h2>\n<ul>{body}</ul>"


def _svg_tag(width: int, height: int) -> str:
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'


def _heading(
    title: str, note: str, colour_of: Mapping[str, str], mark: str
) -> tuple[list[str], int]:
    """Elements of title, note and legend above the axes, and the y at which they end."""
    parts = [_svg_tag(WIDTH, HEIGHT), f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>"]
    y = TOP - 22
    for line in wrap(title, TITLE_LETTERS):
        parts.append(_text(LEFT, y, line, "start", "title"))
        y += 18
    for line in wrap(note, NOTE_LETTERS):
        parts.append(_text(LEFT, y, line, "start", "note"))
        y += 16
    if not colour_of:
        return parts, max(y, TOP)
    legend, top = _legend(colour_of, mark, y + 4)
    return [*parts, *legend], top


def _frame(y_ticks: Sequence[float], at_y: Callable[[float], float], y_label: str) -> list[str]:
    """Elements of both axes, and ticks, grid lines and label of the vertical axis."""
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


def _legend(colour_of: Mapping[str, str], mark: str, y: int) -> tuple[list[str], int]:
    """Elements of the legend (names next to colours) below `y`, and the y at which it ends."""
    parts, x = [], float(LEFT)
    for name in (*colour_of, mark) if mark else colour_of:
        if x + 18 + LETTER * len(name) > WIDTH and x > LEFT:
            x, y = float(LEFT), y + 18
        if name in colour_of:
            shade = colour_of[name]
            parts.append(f'<rect x="{x:g}" y="{y - 10}" width="12" height="12" fill="{shade}"/>')
        else:
            parts.append(_line(x, y - 4, x + 12, y - 4, "mark"))
        parts.append(_text(x + 18, y, name, "start"))
        x += 34 + LETTER * len(name)
    return parts, y + 16


def _groups(groups: Sequence[str], width: float, y: float) -> list[str]:
    """The name of each group of neighbouring bars, centred below the group."""
    parts, start = [], 0
    for group, members in groupby(groups):
        count = len(list(members))
        parts.append(_text(LEFT + width * (start + count / 2), y, group, "middle"))
        start += count
    return parts


def _text(x: float, y: float, text: str, anchor: str, css_class: str = "") -> str:
    attribute = f' class="{css_class}"' if css_class else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{attribute}>{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, css_class: str = "") -> str:
    attribute = f' class="{css_class}"' if css_class else ""
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"{attribute}/>'

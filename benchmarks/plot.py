"""A line chart as SVG text, without a plotting library: the same points give the same bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 44, 52  # margins around the axes
COLOURS = ("#2f6fde", "#d9822b", "#2a9d6f", "#b04fc4")  # told apart on white and on near-black
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328; }
.title { font-size: 15px; font-weight: 600; }
.grid { stroke: #8c959f; stroke-opacity: .25; }
.axis { stroke: #57606a; }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3; } .axis { stroke: #9198a1; } }
"""


@dataclass(frozen=True)
class Series:
    """One line: its points in order of x, and how far each reaches down and up.

    Attributes:
        points: (x, median, least, most).
    """

    name: str
    points: Sequence[tuple[float, float, float, float]]


def ticks(most: float, count: int = 5) -> list[float]:
    """Round numbers from 0 up to the first that is not below `most`."""
    step = 10.0 ** math.floor(math.log10(most / count))
    step *= next(m for m in (1, 2, 5, 10) if m * step * count >= most)
    return [i * step for i in range(math.ceil(most / step - 1e-9) + 1)]


def decades(least: float, most: float) -> list[float]:
    """Powers of ten from the last that is not above `least` to the first not below `most`."""
    first, last = math.floor(math.log10(least) + 1e-9), math.ceil(math.log10(most) - 1e-9)
    return [10.0**i for i in range(first, max(last, first + 1) + 1)]


def _axis(
    least: float, most: float, logarithmic: bool, to_end: bool
) -> tuple[list[float], Callable[[float], float]]:
    """Ticks, and where a value lies between the axis's two ends, 0 to 1.

    Args:
        to_end: the axis ends at `most` instead of at a tick (and, if logarithmic, begins at
            `least`); ticks beyond are left out.
    """
    marks = decades(least, most) if logarithmic else ticks(most)
    low, high = (least, most) if to_end and most > least else (marks[0], marks[-1])
    if not logarithmic:
        return [mark for mark in marks if mark <= high], lambda value: value / high
    width = math.log(high / low)
    marks = [mark for mark in marks if low <= mark <= high]
    return marks, lambda value: math.log(value / low) / width


def line_chart(
    title: str, x_label: str, y_label: str, series: Sequence[Series], logarithmic: bool = False
) -> str:
    """A chart with x to the last point; a dot with its range per point.

    Args:
        logarithmic: both axes, of positive numbers; else both begin at 0.
    """
    points = [point for one in series for point in one.points]
    across = [p[0] for p in points]
    x_ticks, x_share = _axis(min(across), max(across), logarithmic, to_end=True)
    up = (min(p[2] for p in points), max(p[3] for p in points))
    y_ticks, y_share = _axis(*up, logarithmic, to_end=False)
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT

    def at_x(x: float) -> float:
        return round(LEFT + (right - LEFT) * x_share(x), 1)

    def at_y(y: float) -> float:
        return round(bottom - (bottom - TOP) * y_share(y), 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        _text(LEFT, 22, title, "start", "title"),
    ]
    for tick in y_ticks:
        parts.append(_line(LEFT, at_y(tick), right, at_y(tick), "grid"))
        parts.append(_text(LEFT - 8, at_y(tick) + 4, f"{tick:g}", "end"))
    for tick in x_ticks:
        parts.append(_line(at_x(tick), bottom, at_x(tick), bottom + 5, "axis"))
        parts.append(_text(at_x(tick), bottom + 20, f"{tick:g}", "middle"))
    parts.append(_line(LEFT, bottom, right, bottom, "axis"))
    parts.append(_line(LEFT, TOP, LEFT, bottom, "axis"))
    parts.append(_text((LEFT + right) / 2, HEIGHT - 10, x_label, "middle"))
    middle = (TOP + bottom) / 2
    parts.append(
        f'<text x="18" y="{middle:g}" text-anchor="middle" '
        f'transform="rotate(-90 18 {middle:g})">{escape(y_label)}</text>'
    )
    for i, one in enumerate(series):
        colour = COLOURS[i % len(COLOURS)]
        path = " ".join(f"{at_x(x)},{at_y(y)}" for x, y, _, _ in one.points)
        parts.append(f'<g stroke="{colour}" fill="{colour}">')
        parts.append(f'<polyline points="{path}" fill="none" stroke-width="2"/>')
        for x, y, least, most in one.points:
            parts.append(_line(at_x(x), at_y(least), at_x(x), at_y(most)))
            parts.append(f'<circle cx="{at_x(x)}" cy="{at_y(y)}" r="3"/>')
        row = TOP + 10 + 20 * i  # the legend stands top left: cost grows, lines end top right
        parts.append(_line(LEFT + 14, row, LEFT + 38, row))
        parts.append("</g>")
        parts.append(_text(LEFT + 46, row + 4, one.name, "start"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{named}>{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"{named}/>'

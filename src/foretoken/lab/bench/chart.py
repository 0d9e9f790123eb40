"""The figures of a benchmark or a plan, from its rows alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from foretoken.lab.plot import COLOURS, INK, Axes, Bar, Series, bar_chart, line_chart
from foretoken.lab.results import Row, Spread

_PARTS = ("target", "draft", "verify", "host_gap")
PLAIN = "plain"
Point = tuple[float, float, float, float]
Colours = Mapping[str, str]
"""Of each way of decoding, in all charts of a file: the same K is the same colour."""


def charts(rows: Sequence[Row]) -> list[str]:
    """SVGs: speed-up over the loads, a user's speed against all, a token's time, acceptance."""

    def having(name: str) -> list[Row]:
        return [row for row in rows if name in row.values]

    decodings = dict.fromkeys(map(_decoding, rows))
    drafting = [name for name in decodings if name != PLAIN]
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(drafting)} | {PLAIN: INK}
    made: list[str] = []
    # Under a rate throughput is the rate's, so that it is TPOT that tells of speed.
    for axis, name in (("concurrency", "speedup"), ("request_rate", "tpot_speedup")):
        if under := [row for row in having(name) if row.labels.get(axis)]:
            made.append(_speedup(under, axis, name, colours))
    if users := having("tokens_per_second_per_user"):
        made.append(_per_user(users, colours, is_first=not made))
    if timed := having("floor_ms"):
        made.append(_time_per_token(timed))
    if accepted := having("acceptance_length"):
        first = _load(accepted[0])  # lengths hardly depend on the load
        shown = [row for row in accepted if _load(row) == first][:6]
        made += [_positions(shown, colours), _lengths(shown, colours)]
    return made


def _speedup(rows: Sequence[Row], axis: str, name: str, colours: Colours) -> str:
    """Over the loads, with the line of no speculation."""

    def point(row: Row) -> Point:
        return _point(float(row.labels[axis] or 0), _spread(row, name))

    series = _series(rows, point, colours)
    marks = sorted({point[0] for one in series for point in one.points})
    label = "times as many tokens/s" if name == "speedup" else "times as short a TPOT"
    axes = Axes(axis.replace("_", " "), label, x_marks=marks)
    return line_chart("Speed-up over plain decoding", axes, series, level=(PLAIN, 1.0))


def _per_user(rows: Sequence[Row], colours: Colours, is_first: bool) -> str:
    """Each line goes through the loads in order."""

    def point(row: Row) -> Point:
        in_all = _spread(row, "output_tokens_per_second").median
        return _point(in_all, _spread(row, "tokens_per_second_per_user"))

    axes = Axes("tokens/s in all", "tokens/s per user")
    colour = "" if is_first else ", in the colour of its speed-up"
    note = f"A line is a way of decoding{colour}. A dot is a load, the lightest at the top left: "
    note += "the further right, the more all get; the lower, the less each gets."
    title = "What a user gets against what all get"
    return line_chart(title, axes, _series(rows, point, colours), legend=is_first, note=note)


def _series(rows: Sequence[Row], point: Callable[[Row], Point], colours: Colours) -> list[Series]:
    """A line for each case, of a point for each load."""
    lines: dict[str, list[Point]] = {}
    for row in rows:
        lines.setdefault(_decoding(row), []).append(point(row))
    return [Series(name, points, colours[name]) for name, points in lines.items()]


def _time_per_token(rows: Sequence[Row]) -> str:
    """Parts of a step over the tokens that a request gets of it."""
    bars = []
    for row in rows:
        tokens = _spread(row, "tokens_per_step").median
        parts = {
            part.replace("_", " "): _spread(row, f"{part}_ms").median / tokens for part in _PARTS
        }
        floor = _spread(row, "floor_ms").median / tokens
        bars.append(Bar(_short(row), _load(row), parts, mark=floor))
    title = "Where the time of a token goes, in decode steps"
    return bar_chart(title, "ms per token of a request", bars, mark="floor: reading memory")


def _positions(rows: Sequence[Row], colours: Colours) -> str:
    """Unconditional lines fall; conditional ones stay level if drafts are as good further on."""
    series = []
    for row in rows:
        name = _decoding(row)
        for kind in ("unconditional", "conditional"):
            points = [_point(i, spread) for i, spread in _numbered(row, f"{kind}_at_").items()]
            if points:
                series.append(Series(name, points, colours[name], dashed=kind == "conditional"))
    title = f"Drafts accepted, by position ({_load(rows[0])})"
    note = "Solid: of all drafts there. Dashed: of those before which every draft was accepted."
    axes = Axes("position of the draft", "share accepted")
    return line_chart(title, axes, series, note=note)


def _lengths(rows: Sequence[Row], colours: Colours) -> str:
    """Bars of one case; more would stand too close, and are lines."""
    title = f"Tokens that a verification gives ({_load(rows[0])})"
    found = {_decoding(row): _numbered(row, "length_share_") for row in rows}
    if len(rows) > 1:
        series = [
            Series(name, [_point(*at) for at in at_i.items()], colours[name])
            for name, at_i in found.items()
        ]
        return line_chart(title, Axes("tokens", "share of verifications"), series)
    bars = [
        Bar(str(i), name, {"share": spread.median}, reach=(spread.min, spread.max))
        for name, at_i in found.items()
        for i, spread in at_i.items()
    ]
    return bar_chart(title, "share of verifications", bars)


def _numbered(row: Row, prefix: str) -> Mapping[int, Spread]:
    names = [name for name in row.values if name.startswith(prefix)]
    return {int(name.removeprefix(prefix)): _spread(row, name) for name in names}


def _point(x: float, spread: Spread) -> Point:
    return x, spread.median, spread.min, spread.max


def _load(row: Row) -> str:
    rate = row.labels.get("request_rate")
    return f"{rate:g} requests/s" if rate else f"concurrency {row.labels['concurrency']}"


def _decoding(row: Row) -> str:
    return row.case.removeprefix(f"{_load(row)}, ")


def _short(row: Row) -> str:
    """Short enough to stand below a bar."""
    return f"K={row.labels['k']}" if row.labels["k"] else "plain"


def _spread(row: Row, name: str) -> Spread:
    """A value; what is predicted is one number."""
    value = row.values[name]
    return value if isinstance(value, Spread) else Spread.of([value], "")

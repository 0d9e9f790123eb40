"""`foretoken bench`: measure every case, then show and write tables and charts of the results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, product
from typing import Any

from foretoken.lab.bench.figures import percentiles, unit_of
from foretoken.lab.bench.offline import Engines
from foretoken.lab.bench.options import (
    BenchCase,
    BenchOptions,
    Load,
    engine_cases,
    parse_sweep,
    server_cases,
)
from foretoken.lab.bench.run import Bench, Measured
from foretoken.lab.bench.server import Server
from foretoken.lab.plot import COLOURS, INK, Axes, Bar, Series, bar_chart, line_chart
from foretoken.lab.reporter import Reporter, Section, Table
from foretoken.lab.results import Label, Results, Row, Spread, Value, collect, stem
from foretoken.sampling.params import SamplingParams

_PARTS = ("target", "draft", "verify", "host_gap")
PLAIN = "plain"
Point = tuple[float, float, float, float]
Colours = Mapping[str, str]  # of each way of decoding, the same in all charts of a file
_MIN_REPEATS = 3  # with fewer repeats, the spread says little
_LATE = 0.05  # largest share by which a client is late, or sends fewer requests, without a remark
_SHAPES = ("input_len", "output_len", "repeats", "warmup", "prompts", "seed", "slo")
_SPEEDUPS = {
    "speedup": "output_tokens_per_second", "tpot_speedup": "tpot_ms", "e2e_speedup": "e2e_ms"
}  # fmt: skip
_NOTES = (
    "Every figure is one number per run, and its spread is over the repeats. Cases take turns, in "
    "an order that is reversed with each repeat; warm-up is left out.",
    "TTFT: from when a request is due to its first piece of answer; E2E: to the last piece. TPOT: "
    "(E2E - TTFT) / tokens after the first piece. ITL: time between two pieces; a piece has all "
    "tokens of a step. Means are over the requests of a run, percentiles over the requests of all "
    "repeats, if there are enough requests; figures of ITL are over all gaps.",
    "unconditional_at_i: share of the i-th drafts that were accepted with all drafts before them. "
    "conditional_at_i: share of accepted drafts among the i-th drafts with all drafts before them "
    "accepted. length_share_i: share of verifications that gave i tokens.",
)
_ENGINE_NOTES = (
    "step_ms = draft_ms + target_ms + verify_ms + host_gap_ms: means over the steps in which no "
    "request computes its prompt and, at a fixed concurrency, all requests decode. A step begins "
    "at the end of the previous step; times are from the engine's trace. verify is sampling and "
    "the verification rule. The host gap is what no device phase covers.",
    "read_gb: the target's weights once and the K/V of all contexts, and the same of a draft model "
    "or an EAGLE-3 head for each draft pass. floor_ms is read_gb over the bandwidth; weights that "
    "stay in a cache are read faster.",
)


def _rows(bench: Bench) -> list[Row]:
    result = []  # for each load and case that has a measured run
    for load, case in product(bench.options.loads, chain(*bench.groups)):
        measured = bench.measured.get((load, case), Measured())
        if not any(measured.repeats):
            continue
        labels: dict[str, Label] = {
            "concurrency": load.concurrency or None, "request_rate": load.rate, **case.labels
        }  # fmt: skip
        if measured.partial:
            labels["partial"] = True
        values = _spreads(measured.repeats) | percentiles(measured.samples)
        if (plain := _plain_of(bench, load, case)) is not None:
            values |= _spreads(_speedups(plain, measured.repeats))
        result.append(Row(f"{load.name}, {case.name}", labels, values))
    return result


def _plain_of(bench: Bench, load: Load, case: BenchCase) -> list[dict[str, float]] | None:
    """Plain decoding with the case's engine and temperature; None if plain or not measured."""
    if case.plain:
        return None
    group = next(group for group in bench.groups if case in group)
    for other in group:
        if other.plain and other.labels["temperature"] == case.labels["temperature"]:
            measured = bench.measured.get((load, other))
            return measured.repeats if measured else None
    return None


def _spreads(repeats: Sequence[dict[str, float]]) -> dict[str, Value]:
    """The spread of each figure over the repeats that have the figure."""
    names = dict.fromkeys(chain(*repeats))
    measured = {name: [repeat[name] for repeat in repeats if name in repeat] for name in names}
    return {name: Spread.of(values, unit_of(name)) for name, values in measured.items()}


def _speedups(
    plain: Sequence[dict[str, float]], drafted: Sequence[dict[str, float]]
) -> list[dict[str, float]]:
    """Speed-ups over plain decoding, repeat by repeat; an interrupted last repeat is left out."""
    return [
        {
            name: ours[figure] / base[figure] if name == "speedup" else base[figure] / ours[figure]
            for name, figure in _SPEEDUPS.items()
            if base.get(figure) and ours.get(figure)
        }
        for base, ours in zip(plain, drafted, strict=False)
    ]


def results(bench: Bench, command: str, notes: Sequence[str] = ()) -> Results | None:
    """All measurements up to now in the shared schema; None if there are no measurements.

    notes: further lines, which follow all other notes
    """
    rows, options = _rows(bench), bench.options
    if not rows:
        return None
    shapes = {
        **bench.client.shapes(),
        "loads": [load.name for load in options.loads],
        "num_requests": [options.requests_of(load) for load in options.loads],
        **{name: getattr(options, name) for name in _SHAPES},
        "sweep": [*options.sweep],
    }
    meaning = [*_NOTES, *(_ENGINE_NOTES if bench.client.floor else ())]
    all_notes = [*meaning, *_remarks(bench, rows), *bench.notes, *bench.client.notes, *notes]
    return collect(stem(options.output, "bench"), command, shapes, rows, all_notes)


def remarks(results: Results) -> list[str]:
    """The notes of results, without the notes about the meaning of the figures."""
    return [note for note in results.notes if note not in _NOTES + _ENGINE_NOTES]


def _remarks(bench: Bench, rows: Sequence[Row]) -> list[str]:
    remarks = []  # notes that concern only these runs
    if any(row.labels["rule"] == "synthetic" for row in rows):
        remarks.append("Acceptance was set by the rule `synthetic`, not by the drafts.")
    if any("speedup" in row.values for row in rows):
        plain = "plain: the same engine or server, with K = 0 for every request."
        remarks.append(f"{plain} Speed-ups compare runs of the same repeat.")
    if bench.options.repeats < _MIN_REPEATS:
        remarks.append(f"Fewer than {_MIN_REPEATS} repeats: the spread says little.")
    for row in rows:
        together, limit = _number(row, "requests_per_step", "min"), row.labels["concurrency"]
        if isinstance(limit, int) and 0 < together < limit:
            remarks.append(
                f"{row.case}: in a run at most {together:g} of {limit} requests decoded together; "
                "step figures are of these smaller batches."
            )
        lag, ttft = _number(row, "send_lag_ms"), _number(row, "ttft_ms")
        offered, sent = (_number(row, f"{k}_requests_per_second") for k in ("offered", "sent"))
        if lag > _LATE * ttft or sent < (1 - _LATE) * offered:
            remarks.append(
                f"{row.case}: this client was {lag:.0f} ms late on average, and sent {sent:.3g} "
                f"requests/s instead of {offered:.3g}: latencies include this delay."
            )
    if partial := [row.case for row in rows if row.labels.get("partial")]:
        remarks.append(f"Partial figures, of a run that was cut short: {'; '.join(partial)}.")
    for why, count in bench.failed.most_common(5):
        remarks.append(f"Failed requests: {count}: {why}")
    return remarks


TABLES: dict[str, dict[str, tuple[str, int, bool]]] = {
    "Speed": {
        "TTFT, ms": ("ttft_ms_p50", 1, False),
        "P95": ("ttft_ms_p95", 1, False),
        "P99": ("ttft_ms_p99", 1, False),
        "TPOT, ms": ("tpot_ms_p50", 2, False),
        "P95 ": ("tpot_ms_p95", 2, False),
        "P99 ": ("tpot_ms_p99", 2, False),
        "E2E, ms": ("e2e_ms_p50", 0, False),
        "tokens/s": ("output_tokens_per_second", 0, True),
        "goodput/s": ("goodput_requests_per_second", 2, False),
        "failed": ("failed_requests", 0, False),
    },
    "Speed-up over plain decoding, in turns": {
        "in tokens/s": ("speedup", 2, True),
        "in TPOT": ("tpot_speedup", 2, True),
        "in E2E": ("e2e_speedup", 2, True),
    },
    "Acceptance (at i: draft i and all before it; / i: draft i if all before it are)": {
        "length": ("acceptance_length", 2, False),
        "rate": ("acceptance_rate", 2, False),
        "at 1": ("unconditional_at_1", 2, False),
        **{
            f"{at} {i}": (f"{kind}_at_{i}", 2, False)
            for i in range(2, 5)
            for at, kind in (("at", "unconditional"), ("/", "conditional"))
        },
    },
    "Milliseconds of a decode step": {
        "requests": ("requests_per_step", 1, False),
        "draft": ("draft_ms", 2, False),
        "target": ("target_ms", 2, False),
        "verify": ("verify_ms", 2, False),
        "host gap": ("host_gap_ms", 2, False),
        "step": ("step_ms", 2, False),
        "per token": ("decode_ms_per_token", 3, False),
        "floor/step": ("share_of_floor", 2, False),
    },
}
"""title -> heading -> name of a value, digits, and whether its range is shown"""


def tables(rows: Sequence[Row]) -> dict[str, Table]:
    """Tables by title; columns, lines and tables without a value are left out."""
    all_tables = {title: table(rows, columns) for title, columns in TABLES.items()}
    return {title: table for title, table in all_tables.items() if table.lines}


def table(rows: Sequence[Row], columns: Mapping[str, tuple[str, int, bool]]) -> Table:
    """A table with a line of medians for each row; columns and lines without a value are left out.

    columns: heading -> name of a value, digits, and whether its range is shown
    """
    used = {
        heading: column
        for heading, column in columns.items()
        if any(column[0] in row.values for row in rows)
        and (column[0] != "failed_requests" or any(_number(row, column[0], "max") for row in rows))
    }
    lines = []
    for row in rows:
        title = row.case + (" (partial)" if row.labels.get("partial") else "")
        if any(cells := [cell(row, *column) for column in used.values()]):
            lines.append([title, *cells])
    return Table(["", *(heading.strip() for heading in used)], lines)


def _number(row: Row, name: str, statistic: str = "median") -> float:
    """A value of a row, or the given statistic of its spread; 0 if there is no such value."""
    value = row.values.get(name, 0.0)
    return float(getattr(value, statistic)) if isinstance(value, Spread) else value


def cell(row: Row, name: str, digits: int, ranged: bool = False) -> str:
    """A value of a row as text, or the median of its spread; empty if there is no such value.

    ranged: whether the minimum and maximum are shown, too
    """
    value = row.values.get(name)
    if not isinstance(value, Spread):
        return "" if value is None else f"{value:.{digits}f}"
    text = f"{value.median:.{digits}f}"
    return f"{text} ({value.min:.{digits}f}–{value.max:.{digits}f})" if ranged else text


def charts(rows: Sequence[Row]) -> list[str]:
    """All charts of a benchmark, as SVG; charts without a value are left out."""

    def rows_with(name: str) -> list[Row]:
        return [row for row in rows if name in row.values]

    decodings = dict.fromkeys(map(_decoding, rows))
    drafting = [name for name in decodings if name != PLAIN]
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(drafting)} | {PLAIN: INK}
    result: list[str] = []
    # Under a request rate, throughput depends only on the rate: there TPOT shows the speed.
    for axis, name in (("concurrency", "speedup"), ("request_rate", "tpot_speedup")):
        if rows_of_axis := [row for row in rows_with(name) if row.labels.get(axis)]:
            result.append(_speedup(rows_of_axis, axis, name, colours))
    if rows_of_users := rows_with("tokens_per_second_per_user"):
        result.append(_per_user(rows_of_users, colours, is_first=not result))
    if timed := rows_with("floor_ms"):
        result.append(_time_per_token(timed))
    if accepted := rows_with("acceptance_length"):
        load = _load(accepted[0])  # acceptance hardly depends on the load: one load is enough
        shown = [row for row in accepted if _load(row) == load][:6]
        result += [_positions(shown, colours), _lengths(shown, colours)]
    return result


def _speedup(rows: Sequence[Row], axis: str, name: str, colours: Colours) -> str:
    series = _series(rows, lambda row: float(row.labels[axis] or 0), name, colours)
    marks = sorted({point[0] for line in series for point in line.points})
    label = "times as many tokens/s" if name == "speedup" else "times as short a TPOT"
    axes = Axes(axis.replace("_", " "), label, x_marks=marks)
    return line_chart("Speed-up over plain decoding", axes, series, level=(PLAIN, 1.0))


def _per_user(rows: Sequence[Row], colours: Colours, is_first: bool) -> str:
    """A chart of a user's speed against the total speed; lines connect loads in order."""
    name = "tokens_per_second_per_user"
    series = _series(rows, lambda r: _number(r, "output_tokens_per_second"), name, colours)
    axes = Axes("tokens/s in all", "tokens/s per user")
    colour = "" if is_first else ", in the colour of its speed-up"
    note = f"A line is a way of decoding{colour}. A dot is a load, the lightest at the top left: "
    note += "the further right, the more all get; the lower, the less each gets."
    title = "What a user gets against what all get"
    return line_chart(title, axes, series, legend=is_first, note=note)


def _series(
    rows: Sequence[Row], x_of: Callable[[Row], float], name: str, colours: Colours
) -> list[Series]:
    """Lines of a chart of value `name`: one for each case, with a point for each load."""
    lines: dict[str, list[Point]] = {}
    for row in rows:
        lines.setdefault(_decoding(row), []).append(_point(x_of(row), _spread(row, name)))
    return [Series(name, points, colours[name]) for name, points in lines.items()]


def _time_per_token(rows: Sequence[Row]) -> str:
    """A chart of the parts of a step, divided by the tokens that a request gets from the step."""
    bars = []
    for row in rows:
        tokens = _spread(row, "tokens_per_step").median
        ms = {part: _spread(row, f"{part}_ms").median / tokens for part in (*_PARTS, "floor")}
        parts = {part.replace("_", " "): ms[part] for part in _PARTS}
        name = f"K={row.labels['k']}" if row.labels["k"] else "plain"
        bars.append(Bar(name, _load(row), parts, mark=ms["floor"]))
    title = "Where the time of a token goes, in decode steps"
    return bar_chart(title, "ms per token of a request", bars, mark="floor: reading memory")


def _positions(rows: Sequence[Row], colours: Colours) -> str:
    """Acceptance by position; a conditional line is level if all drafts are equally good."""
    series = []
    for row in rows:
        name = _decoding(row)
        for kind in ("unconditional", "conditional"):
            points = [_point(i, spread) for i, spread in _numbered(row, f"{kind}_at_").items()]
            if points:
                series.append(Series(name, points, colours[name], dashed=kind == "conditional"))
    title = f"Drafts accepted, by position ({_load(rows[0])})"
    note = "Solid: of all drafts there. Dashed: of those with all earlier drafts accepted."
    axes = Axes("position of the draft", "share accepted")
    return line_chart(title, axes, series, note=note)


def _lengths(rows: Sequence[Row], colours: Colours) -> str:
    """A chart of the tokens per verification: bars for a single case, lines for several cases."""
    title = f"Tokens that a verification gives ({_load(rows[0])})"
    shares_of = {_decoding(row): _numbered(row, "length_share_") for row in rows}
    if len(rows) > 1:
        series = [
            Series(name, [_point(*item) for item in shares.items()], colours[name])
            for name, shares in shares_of.items()
        ]
        return line_chart(title, Axes("tokens", "share of verifications"), series)
    bars = [
        Bar(str(i), name, {"share": spread.median}, limits=(spread.min, spread.max))
        for name, shares in shares_of.items()
        for i, spread in shares.items()
    ]
    return bar_chart(title, "share of verifications", bars)


def _numbered(row: Row, prefix: str) -> Mapping[int, Spread]:
    """The values with names `prefix` + number, by number."""
    names = [name for name in row.values if name.startswith(prefix)]
    return {int(name.removeprefix(prefix)): _spread(row, name) for name in names}


def _point(x: float, spread: Spread) -> Point:
    return x, spread.median, spread.min, spread.max


def _load(row: Row) -> str:
    rate = row.labels.get("request_rate")
    return f"{rate:g} requests/s" if rate else f"concurrency {row.labels['concurrency']}"


def _decoding(row: Row) -> str:
    return row.case.removeprefix(f"{_load(row)}, ")


def _spread(row: Row, name: str) -> Spread:
    """A value of a row as a spread, also if it is a single number, as in predictions."""
    value = row.values[name]
    return value if isinstance(value, Spread) else Spread.of([value], "")


async def make_bench(
    options: BenchOptions, params: SamplingParams, engine: dict[str, Any]
) -> Bench:
    """The benchmark for these options; a server is first asked which fields it takes.

    engine: options of an engine in this process, as returned by `BenchOptions.sized`
    """
    sweep, temperature = parse_sweep(options.sweep), params.temperature
    if options.url is None:
        speculation = engine["speculative_config"]
        groups = engine_cases(sweep, temperature, speculation, compare=options.compare)
        return Bench(options, Engines(engine, params, options.bandwidth), groups)
    names = {"model": options.served_model, "api_key": options.api_key}
    server = Server(options.url, params, timeout=options.timeout, **names)
    await server.prepare()
    switches = {"speculates": server.speculates, "compare": options.compare}
    return Bench(options, server, server_cases(sweep, temperature, **switches))


async def run(
    reporter: Reporter, options: BenchOptions, params: SamplingParams, engine: dict[str, Any]
) -> None:
    """Measure and report. After an exception, the finished runs are still reported."""
    bench, notes, num_ended = await make_bench(options, params, engine), list[str](), 0

    def count(ended: int, run_name: str) -> None:
        nonlocal num_ended
        num_ended = ended
        report(ended, run_name)

    try:
        with reporter.progress(bench.num_requests, "requests") as report:
            await bench.run(count)
    except BaseException as error:
        if num_ended < bench.num_requests:
            runs = sum(len(measured.repeats) for measured in bench.measured.values())
            why = type(error).__name__ if isinstance(error, Exception) else "a signal"
            notes.append(f"Ended early by {why}, after {runs} measured runs.")
        raise
    finally:
        if (file := results(bench, reporter.command_line, notes)) is not None:
            lines, tables_shown = remarks(file), tables(file.rows)
            if bandwidth := file.shapes.get("bandwidth_gb_per_s"):
                origin = "given" if file.shapes["bandwidth_given"] else "measured"
                lines.insert(0, f"The floor is for memory of {bandwidth:.1f} GB/s ({origin}).")
            reporter.show(tables_shown, lines)
            reporter.write(file, options.output, tables_shown, [Section(charts=charts(file.rows))])

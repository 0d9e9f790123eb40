"""Results file and tables of a benchmark; both come from its rows alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

from foretoken.lab.bench.cases import Case, Load
from foretoken.lab.bench.figures import percentiles, unit_of
from foretoken.lab.bench.run import Bench, Measured
from foretoken.lab.desk import Table
from foretoken.lab.results import Label, Results, Row, Spread, Value, collect, stem

_LEAST_REPEATS, _LATE = 3, 0.05
_SHAPES = ("input_len", "output_len", "repeats", "warmup", "prompts", "seed", "slo")
_SPEEDUPS = {
    "speedup": "output_tokens_per_second", "tpot_speedup": "tpot_ms", "e2e_speedup": "e2e_ms"
}  # fmt: skip
_NOTES = (
    "Every figure is one number per run, and its spread is over the repeats. Cases take turns, and "
    "who goes first changes with each repeat; warm-up is left out.",
    "Of each request: TTFT from when it was due to its first tokens, E2E to its last, TPOT the "
    "time between the two over the tokens behind the first piece, ITL between pieces of the "
    "answer, each with all tokens of a step. Means are over the requests of a run, percentiles "
    "over those of all repeats, if there are enough to tell; of ITL over all gaps.",
    "unconditional_at_i: of the i-th drafts, how many were accepted with all before them. "
    "conditional_at_i: the same of those that were tested, since all before them were accepted. "
    "length_share_i: of all verifications, how many gave i tokens.",
)
_ENGINE_NOTES = (
    "step_ms = draft_ms + target_ms + verify_ms + host_gap_ms, means over the steps in which no "
    "request computes its prompt and, at a fixed concurrency, the whole of it decodes, each from "
    "the end of the step before, from the engine's own trace. verify is sampling and the "
    "verification rule. The host gap is what no device phase covers.",
    "read_gb: the target's weights once and the K/V of all contexts, and the same of a draft model "
    "or an EAGLE-3 head for each draft pass. floor_ms is that over the bandwidth; weights that "
    "stay in a cache are read faster.",
)


def rows(bench: Bench) -> list[Row]:
    """A row per load and case of which a run was measured."""
    found = []
    cases = [case for group in bench.groups for case in group]
    for load, case in product(bench.options.loads, cases):
        measured = bench.measured.get((load, case), Measured())
        if not any(measured.repeats):
            continue
        labels: dict[str, Label] = {
            "concurrency": load.concurrency or None, "request_rate": load.rate, **case.labels
        }  # fmt: skip
        if measured.partial:
            labels["partial"] = True
        values = _spreads(measured.repeats) | percentiles(measured.samples)
        if (plain := _plain_beside(bench, load, case)) is not None:
            values |= _spreads(_speedups(plain, measured.repeats))
        found.append(Row(f"{load.name}, {case.name}", labels, values))
    return found


def _plain_beside(bench: Bench, load: Load, case: Case) -> list[dict[str, float]] | None:
    """Plain decoding of the same engine and temperature."""
    if case.plain:
        return None
    group = next(group for group in bench.groups if case in group)
    for other in group:
        if other.plain and other.labels["temperature"] == case.labels["temperature"]:
            there = bench.measured.get((load, other))
            return there.repeats if there else None
    return None


def _spreads(repeats: Sequence[dict[str, float]]) -> dict[str, Value]:
    """One spread per figure, over the repeats that have it."""
    measured: dict[str, list[float]] = {}
    for name, value in (pair for repeat in repeats for pair in repeat.items()):
        measured.setdefault(name, []).append(value)
    return {name: Spread.of(values, unit_of(name)) for name, values in measured.items()}


def _speedups(
    plain: Sequence[dict[str, float]], drafted: Sequence[dict[str, float]]
) -> list[dict[str, float]]:
    """To plain decoding, turn by turn; an interruption may have left the last turn halved."""
    return [
        {
            name: fast[of] / slow[of] if name == "speedup" else slow[of] / fast[of]
            for name, of in _SPEEDUPS.items()
            if slow.get(of) and fast.get(of)
        }
        for slow, fast in zip(plain, drafted, strict=False)
    ]


def results(bench: Bench, command: str, notes: Sequence[str] = ()) -> Results | None:
    """What was measured so far, in the shared schema; None if nothing was.

    Args:
        notes: beside those on what the figures mean.
    """
    found, options = rows(bench), bench.options
    if not found:
        return None
    shapes = {
        **bench.client.shapes(),
        "loads": [load.name for load in options.loads],
        "num_requests": [options.requests_of(load) for load in options.loads],
        **{name: getattr(options, name) for name in _SHAPES},
        "sweep": [*options.sweep],
    }
    said = [*_NOTES, *(_ENGINE_NOTES if bench.client.floor else ()), *_remarks(bench, found)]
    said += [*bench.notes, *bench.client.notes, *notes]
    return collect(stem(options.output, "bench"), command, shapes, found, said)


def remarks(results: Results) -> list[str]:
    """Its notes but those on what figures mean."""
    return [note for note in results.notes if note not in _NOTES + _ENGINE_NOTES]


def _remarks(bench: Bench, found: Sequence[Row]) -> list[str]:
    """What a reader must know of these runs in particular."""
    remarks = []
    if any(row.labels["rule"] == "synthetic" for row in found):
        remarks.append("Acceptance was set by the rule `synthetic`; it is no drafter's.")
    if any("speedup" in row.values for row in found):
        remarks.append(
            "plain: the same engine or server, with K = 0 for every request. Speed-ups are taken "
            "turn by turn."
        )
    if bench.options.repeats < _LEAST_REPEATS:
        remarks.append(f"Fewer than {_LEAST_REPEATS} repeats: the spread says little.")
    for row in found:
        together, asked = _number(row, "requests_per_step", "min"), row.labels["concurrency"]
        if isinstance(asked, int) and 0 < together < asked:
            remarks.append(
                f"{row.case}: in a run no more than {together:g} of {asked} requests ever decoded "
                "together; the figures of its steps are of those steps."
            )
        lag, ttft = _number(row, "send_lag_ms"), _number(row, "ttft_ms")
        offered, sent = (_number(row, f"{k}_requests_per_second") for k in ("offered", "sent"))
        if lag > _LATE * ttft or sent < (1 - _LATE) * offered:
            remarks.append(
                f"{row.case}: this client was {lag:.0f} ms late on average, and sent {sent:.3g} "
                f"requests/s instead of {offered:.3g}: it was a limit, and is part of latencies."
            )
    if partial := [row.case for row in found if row.labels.get("partial")]:
        remarks.append(f"Partial, of a run that was cut short: {'; '.join(partial)}.")
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
    "Acceptance (positions: with all before / if all before were)": {
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
"""Title -> heading -> name of a value, digits, and whether the least and the most are shown."""


def tables(found: Sequence[Row]) -> dict[str, Table]:
    """Medians of all rows by title; columns, lines and tables without a value are left out."""
    made = {title: table(found, columns) for title, columns in TABLES.items()}
    return {title: table for title, table in made.items() if table.lines}


def table(found: Sequence[Row], columns: Mapping[str, tuple[str, int, bool]]) -> Table:
    """One of them."""
    there = {
        heading: column
        for heading, column in columns.items()
        if any(column[0] in row.values for row in found)
        and (column[0] != "failed_requests" or any(_number(row, column[0], "max") for row in found))
    }
    lines = [[_title(row), *(cell(row, *column) for column in there.values())] for row in found]
    header = ["", *(heading.strip() for heading in there)]
    return Table(header, [line for line in lines if any(line[1:])])


def _title(row: Row) -> str:
    return row.case + (" (partial)" if row.labels.get("partial") else "")


def _number(row: Row, name: str, of: str = "median") -> float:
    """A value, or that one of a spread; 0 without it."""
    value = row.values.get(name, 0.0)
    return float(getattr(value, of)) if isinstance(value, Spread) else value


def cell(row: Row, name: str, digits: int, ranged: bool = False) -> str:
    """A value as text, of a spread the median; empty without one."""
    value = row.values.get(name)
    if not isinstance(value, Spread):
        return "" if value is None else f"{value:.{digits}f}"
    text = f"{value.median:.{digits}f}"
    return f"{text} ({value.min:.{digits}f}–{value.max:.{digits}f})" if ranged else text

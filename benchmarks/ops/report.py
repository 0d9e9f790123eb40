"""Of `benchmarks.ops`: what a row is selected by, its goals' verdicts, its line in the report."""

from __future__ import annotations

from benchmarks.common import goal
from benchmarks.ops import baseline
from benchmarks.ops.backends import Ours
from benchmarks.ops.cases import DTYPES, Case
from foretoken.lab.results import Row, Spread


def labels(case: Case, name: str) -> dict[str, str | int | float | bool | None]:
    """What a reader selects rows by."""
    return {
        "engine": name,
        "case": case.name,
        "op": case.op,
        "rows": case.rows,
        "vocabulary": case.vocabulary,
        "dtype": DTYPES[case.dtype],
        "curve": case.curve,
        "x": case.x,
    }


def goal_notes(cases: list[Case], rows: list[Row], ours: list[Ours]) -> list[str]:
    """A note per goal and backend that has a figure for it."""
    found = {row.case: row for row in rows}
    units = {"graph_us": "us, graph", "eager_us": "us, eager", "ns_per_logit": "ns per logit"}
    notes = []
    for case in cases:
        for wanted in case.goals:
            for backend in ours:
                row = found.get(f"{case.name}: {backend.name}")
                if row is None or wanted.value not in row.values:
                    continue
                if wanted.backend in (None, backend.name):
                    what = units.get(wanted.value, wanted.value.replace("_", " "))
                    what += f" ({wanted.note})" if wanted.note else ""
                    named = f"{row.case}: {what}"
                    notes.append(goal(named, row, wanted.value, wanted.bound, wanted.least))
    return notes


def report(rows: list[Row]) -> None:
    """One line per implementation of a case."""
    for row in rows:
        cells = [f"{row.case:<72}"]
        for value in ("graph_us", "eager_us"):
            us = row.values.get(value)
            if isinstance(us, Spread):
                cells.append(f"{value[:5]} {us.median:9.1f} ({us.q1:.1f}-{us.q3:.1f}) us")
        cells.append(f"{row.values['share_of_floor']:4.0%} of floor")
        for value in ("ratio", f"speedup_over_{baseline.NAME}"):
            ratio = row.values.get(value)
            if isinstance(ratio, Spread):
                cells.append(f"{value.split('_')[0]} {ratio.median:.3g}x")
        if "accepted_per_request" in row.values:
            cells.append(f"accepted {row.values['accepted_per_request']:.2f}")
        if "extra_memory_share" in row.values:
            cells.append(f"memory {row.values['extra_memory_share']:.2%}")
        print("  ".join(cells), flush=True)

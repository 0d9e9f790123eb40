"""Tables and figures of a plan, in the look of a benchmark's; all come from its rows alone."""

from __future__ import annotations

from collections.abc import Sequence

from foretoken.lab.bench import report as bench
from foretoken.lab.bench.report import cell, table
from foretoken.lab.desk import Table
from foretoken.lab.results import Row

_COLUMNS = {
    "tokens/s": ("output_tokens_per_second", 0, False),
    "speed-up": ("speedup", 2, False),
    "tokens/step": ("tokens_per_step", 2, False),
    "TPOT, ms": ("tpot_ms_p50", 2, False),
    "P95": ("tpot_ms_p95", 2, False),
    "TTFT, ms": ("ttft_ms_p50", 1, False),
    "P95 ": ("ttft_ms_p95", 1, False),
    "P99": ("ttft_ms_p99", 1, False),
}
_TITLES = {
    "simulated": ("Predicted: this many requests under way at a time", _COLUMNS),
    "outlook": (
        "Best K while a batch decodes",
        {
            "best K": ("best_k", 0, False),
            "tokens/s": ("output_tokens_per_second", 0, False),
            "speed-up": ("speedup", 2, False),
            "cache, GiB": ("cache_gib", 3, False),
        },
    ),
    "capacity": (
        "Requests per second within the bounds, of one engine",
        {"requests/s": ("capacity", 2, False), "engines": ("replicas", 0, False)},
    ),
    "fleet": (
        "One engine of the fleet",
        {
            **_COLUMNS,
            "within bounds": ("slo_met", 3, False),
            "memory, GiB": ("memory_gib", 2, False),
        },
    ),
}


def tables(rows: Sequence[Row]) -> dict[str, Table]:
    """By title; columns without a value are left out."""
    made = {}
    for kind, (title, columns) in _TITLES.items():
        found = [row for row in rows if row.labels["kind"] == kind]
        if found:
            made[title] = table(found, columns)
        if kind == "outlook" and found and (needs := _needs(found)).lines:
            made["Mean tokens per round that K drafts must reach to pay, bonus included"] = needs
    return made


def _needs(rows: Sequence[Row]) -> Table:
    """Of each K; where not even K + 1 would pay, a dash."""
    drafts = sorted(int(n[12:]) for n in rows[0].values if n.startswith("need_length_"))
    lines = []
    for row in rows:
        cells = [cell(row, f"need_length_{k}", 2) for k in drafts]
        possible = [float(c) <= k + 1 for c, k in zip(cells, drafts, strict=True)]
        lines.append([row.case, *(c if p else "–" for c, p in zip(cells, possible, strict=True))])
    return Table(["", *(f"K={k}" for k in drafts)], lines if drafts else [])


def sentences(rows: Sequence[Row]) -> list[str]:
    """What the break-even rows say."""
    said = []
    for row in rows:
        if row.labels["kind"] == "break-even":
            last, most = row.values["last_batch"], row.labels["up_to"]
            where = f"At {row.labels['context']} tokens of context drafts"
            if not last:
                said.append(f"{where} do not pay at any batch up to {most}.")
            elif last == most:
                said.append(f"{where} pay up to batch {most}, the most that run at once.")
            else:
                said.append(f"{where} pay up to batch {last}, and at none above.")
    return said


def charts(rows: Sequence[Row]) -> list[str]:
    """SVGs of what was simulated: speed-up over the loads, a user's speed against all."""
    return bench.charts([row for row in rows if row.labels["kind"] == "simulated"])

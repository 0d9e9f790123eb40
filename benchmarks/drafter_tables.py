"""The tables of docs/drafters.md: what drafters bring, and what K = `auto` does."""

from __future__ import annotations

from pathlib import Path

from benchmarks.markup import markdown, number, spread, where
from foretoken.lab.results import Results, Row, Spread, read


def drafters(results: Results) -> str:
    """A line for each drafter: what it needs, when it wins, what it brought, and its memory."""
    temperatures = sorted({row.labels["temperature"] for row in results.rows})
    header = ["drafter", "needs", "wins where"]
    header += [f"tokens per step, T={t:g}" for t in temperatures]
    header += [f"speed to plain, T={t:g}" for t in temperatures]
    header += ["bytes per token", "per request", "shared"]
    lines = []
    for name in dict.fromkeys(row.labels["drafter"] for row in results.rows):
        rows = [row for row in results.rows if row.labels["drafter"] == name]
        labels, values = rows[0].labels, rows[0].values
        if "bytes_shared" not in values:
            continue  # plain decoding
        cells = [f"`{name}`", str(labels["needs"]), str(labels["wins"])]
        cells += [number(row, "tokens_per_step") for row in rows]
        cells += [quartiles(row, "speed_to_plain") for row in rows]
        memory = ("kv_bytes_per_token", "bytes_per_request", "bytes_shared")
        lines.append([*cells, *(f"{values[kind]:,.0f}".replace(",", " ") for kind in memory)])
    return markdown(header, lines)


def quartiles(row: Row, name: str) -> str:
    """The median, and between which quartiles it lies."""
    value = row.values[name]
    if not isinstance(value, Spread):
        raise TypeError(f"{name} must be a spread")
    return f"{value.median:.2f} ({value.q1:.2f}–{value.q3:.2f})"


def auto(results: Results) -> str:
    """Plain decoding, the best fixed K and `auto` at every batch size and temperature."""
    cases = {(r.labels["batch"], r.labels["temperature"], r.labels["k"]): r for r in results.rows}
    rows = []
    for (batch, temperature, k), row in sorted(cases.items(), key=lambda case: case[0][:2]):
        if k == "auto":
            others = [cases[batch, temperature, other] for other in (0, row.labels["best_k"])]
            cells = [f"batch {batch}, T={temperature:g}", number(others[0], "tokens_per_second", 0)]
            cells.append(f"K={row.labels['best_k']}: {number(others[1], 'tokens_per_second', 0)}")
            cells.append(number(row, "tokens_per_second", 0))
            for name in ("ratio_to_best", "ratio_to_plain"):
                low, high = (number(row, f"{name}_{end}") for end in ("low", "high"))
                cells.append(f"{number(row, name)} ({low}–{high})")
            rows.append(cells)
    header = ["tokens/s", "plain", "best fixed K", "auto", "auto to best", "auto to plain"]
    return markdown(header, rows)


def cpu_bf16(folder: Path) -> str:
    """A 0.6B shape in bfloat16 on a CPU: speculation at each K beside plain decoding."""
    lines, found = [], [read(path) for path in sorted(folder.glob("cpu_bf16_k*.json"))]
    for results in found:
        row = results.rows[-1]
        cells = [row.case, spread(results.rows[0], "output_tokens_per_second", 1)]
        cells += [spread(row, "output_tokens_per_second", 1), spread(row, "speedup", 2)]
        cells += [number(row, name, 1) for name in ("draft_ms", "target_ms")]
        lines.append([*cells, number(results.rows[0], "target_ms", 1)])
    header = ["", "plain, tokens/s", "speculative", "speed-up", "draft, ms", "target, ms", "plain"]
    return markdown(header, lines) + where(found[-1])

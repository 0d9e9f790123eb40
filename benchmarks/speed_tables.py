"""Tables of speed.json: every case, and the README's summary."""

from __future__ import annotations

from benchmarks.markup import markdown, number, spread
from foretoken.lab.results import Label, Results, Row, Spread

TEMPERATURES = (0.0, 0.8)
BASELINES = {
    "plain": "to plain",
    "generate": "to `generate`",
    "best_assisted": "to assisted",
    "llama_cpp": "to llama.cpp",
    "best_llama_cpp_drafted": "to drafted llama.cpp",
}


def speed(results: Results) -> str:
    """Every case: tokens/s and the ratios, at both temperatures."""
    others = {
        f"ratio_to_{name}": title
        for name, title in BASELINES.items()
        if f"ratio_to_{name}" in results.rows[0].values
    }
    header = ["batch 1, 2 cores, float32"]
    for t in TEMPERATURES:
        header += [f"tokens/s, T={t:g}", *others.values()]
    by_case, rows = {row.case: row for row in results.rows}, []
    for name in dict.fromkeys(row.case.rpartition(", T=")[0] for row in results.rows):
        cells = [name]
        for t in TEMPERATURES:
            row = by_case[f"{name}, T={t:g}"]
            cells.append(spread(row, "tokens_per_second", 0))
            cells += [f"{number(row, ratio)}x" for ratio in others]
        rows.append(cells)
    return markdown(header, rows)


def best(results: Results, labels: dict[str, Label]) -> Row | None:
    """The row with the highest median speed among those with such labels; None: there is none."""

    def median(row: Row) -> float:
        value = row.values["tokens_per_second"]
        return value.median if isinstance(value, Spread) else value

    rows = [row for row in results.rows if labels.items() <= row.labels.items()]
    return max(rows, key=median, default=None)


def summary(results: Results) -> str:
    """The README's table: the best K of each method; "" for a run with fewer threads than cores."""
    header = ["embedded pair, batch 1, 2 CPU cores"]
    for t in TEMPERATURES:
        header += [f"tokens/s, T={t:g}", "to plain"]
    # Files of 2026-11-21 have one number of threads and do not label it.
    threads = {"threads": max(results.shapes["threads"])} if "threads" in results.shapes else {}
    if threads and threads["threads"] < results.shapes["cores"]:
        return ""
    rows = []
    for title, engine, method in (
        ("plain decoding", "foretoken", "plain"),
        ("speculative, draft model", "foretoken", "draft_model"),
        ("speculative, n-gram", "foretoken", "ngram"),
        ("llama.cpp", "llama.cpp", "plain"),
        ("llama.cpp, same draft model", "llama.cpp", "draft_model"),
        ("Transformers `generate`", "transformers", "generate"),
        ("Transformers assisted generation", "transformers", "assisted"),
    ):
        cells = [title]
        for t in TEMPERATURES:
            labels = {"engine": engine, "method": method, "temperature": t, **threads}
            row = best(results, labels)
            if row is None:
                break
            k = f", K={row.labels['k']}" if row.labels["k"] else ""
            cells += [f"{number(row, 'tokens_per_second', 0)}{k}"]
            cells += [f"{number(row, 'ratio_to_plain')}x"]
        else:
            rows.append(cells)
    return markdown(header, rows)

"""Writes the tables in README.md and docs/ from the results files; `--check` only compares.

A table stands between `<!-- table: NAME -->` and `<!-- end table -->`; NAME is a function here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.common import RESULTS, ROOT
from foretoken.lab.results import Results, Row, Spread, read

MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end table -->)", flags=re.DOTALL)
TEMPERATURES = (0.0, 0.8)
BASELINES = ("plain", "generate", "best_assisted")


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def where(results: Results) -> str:
    """One line under a table: machine, versions, date, commit, file."""
    hardware, versions = results.hardware, results.versions
    return (
        f"\n{hardware['cpu']}, {hardware['threads']} threads; torch {versions['torch']}, "
        f"transformers {versions['transformers']}; {results.date[:10]}, commit "
        f"{results.commit[:10]}; `benchmarks/results/{results.name}.json`.\n"
    )


def number(row: Row, name: str, digits: int = 2) -> str:
    value = row.values.get(name)
    if value is None:
        return ""
    return f"{value.median if isinstance(value, Spread) else value:.{digits}f}"


def spread(row: Row, name: str, digits: int) -> str:
    value = row.values[name]
    if not isinstance(value, Spread):
        return f"{value:.{digits}f}"
    return f"{value.median:.{digits}f} ({value.min:.{digits}f}–{value.max:.{digits}f})"


def speed(folder: Path) -> str:
    """Every case: tokens/s and the ratios, at both temperatures."""
    results = read(folder / "speed.json")
    header = ["batch 1, 2 cores, float32"]
    for t in TEMPERATURES:
        header += [f"tokens/s, T={t:g}", "to plain", "to `generate`", "to assisted"]
    rows = []
    for name in dict.fromkeys(row.case.rpartition(", T=")[0] for row in results.rows):
        cells = [name]
        for t in TEMPERATURES:
            row = results.row(f"{name}, T={t:g}")
            cells.append(spread(row, "tokens_per_second", 0))
            cells += [f"{number(row, f'ratio_to_{other}')}x" for other in BASELINES]
        rows.append(cells)
    return markdown(header, rows) + where(results)


def best(results: Results, method: str, temperature: float) -> Row:
    """The row of a method with the highest median speed at a temperature."""

    def median(row: Row) -> float:
        value = row.values["tokens_per_second"]
        return value.median if isinstance(value, Spread) else value

    labels = {"method": method, "temperature": temperature}
    rows = [row for row in results.rows if labels.items() <= row.labels.items()]
    return max(rows, key=median)


def summary(folder: Path) -> str:
    """The README's table: the best K of each method, with the acceptance behind it."""
    results = read(folder / "speed.json")
    header = ["embedded pair, batch 1, 2 CPU cores"]
    for t in TEMPERATURES:
        header += [f"tokens/s, T={t:g}", "to plain"]
    rows = []
    for title, method in (
        ("plain decoding", "plain"),
        ("speculative, draft model", "draft_model"),
        ("speculative, n-gram", "ngram"),
        ("Transformers `generate`", "generate"),
        ("Transformers assisted generation", "assisted"),
    ):
        cells = [title]
        for t in TEMPERATURES:
            row = best(results, method, t)
            k = f", K={row.labels['k']}" if row.labels["k"] else ""
            cells += [f"{number(row, 'tokens_per_second', 0)}{k}"]
            cells += [f"{number(row, 'ratio_to_plain')}x"]
        rows.append(cells)
    return markdown(header, rows) + where(results)


def acceptance(folder: Path) -> str:
    """Every drafter: mean acceptance length, per position, and what was left out."""
    results = read(folder / "acceptance.json")
    k = results.shapes["k"]
    header = ["drafter, temperature", "mean length", "prompts (quartiles)"]
    header += [f"at {i}" for i in range(1, k + 1)] + ["verifications", "in a cycle"]
    rows = []
    for row in results.rows:
        per_prompt = row.values["per_prompt_length"]
        if not isinstance(per_prompt, Spread):
            raise TypeError("per_prompt_length must be a spread")
        cells = [row.case, number(row, "mean_acceptance_length")]
        cells.append(f"{per_prompt.q1:.2f}–{per_prompt.q3:.2f}")
        cells += [f"{row.values[f'accepted_at_{i}']:.2f}" for i in range(1, k + 1)]
        cells += [f"{row.values['verifications']}"]
        rows.append([*cells, f"{row.values['cycles']} of {row.values['prompts']}"])
    return markdown(header, rows) + where(results)


def one_hot(folder: Path) -> str:
    """The same sampled drafts verified with their real q and as one-hot, side by side."""
    results = read(folder / "acceptance.json")
    rows = []
    for row in results.rows:
        accepted = row.values.get("same_drafts_as_one_hot_accepted")
        if accepted is None or row.case.startswith("draft model, sampled, verified"):
            continue
        real = row.values["accepted"]
        if isinstance(real, Spread) or isinstance(accepted, Spread):
            raise TypeError("accepted drafts are counts")
        ours = f"{real} ({number(row, 'mean_acceptance_length')})"
        shadow = f"{accepted} ({number(row, 'same_drafts_as_one_hot_length')})"
        rows.append([row.case, ours, shadow, f"{real / accepted:.2f}x"])
    header = ["accepted drafts (mean length)", "with the real q", "as one-hot", "ratio"]
    return markdown(header, rows) + where(results)


def cost(folder: Path) -> str:
    """Start-up times and peak memory."""
    results = read(folder / "cost.json")
    rows = []
    for row in results.rows:
        for name in row.values:
            unit = {"seconds": "s", "peak_memory": "MiB", "mebibytes": "MiB"}[name]
            digits = 2 if unit == "s" else 0
            what = {"peak_memory": ", peak memory"}.get(name, "")
            rows.append([row.case + what, f"{spread(row, name, digits)} {unit}"])
    return markdown(["", "median (least–most)"], rows) + where(results)


def profile(folder: Path) -> str:
    """Milliseconds of each part of a step."""
    results = read(folder / "profile.json")
    parts = [
        "target pass",
        "draft passes",
        "drafting, beside its passes",
        "sampling and verification",
        "the rest",
    ]
    header = ["ms per step", "step", *parts, "tokens per step"]
    rows = [
        [row.case, *(number(row, part) for part in ("step", *parts, "tokens_per_step"))]
        for row in results.rows
    ]
    return markdown(header, rows) + where(results)


TABLES: dict[str, Callable[[Path], str]] = {
    "summary": summary,
    "speed": speed,
    "profile": profile,
    "acceptance": acceptance,
    "one_hot": one_hot,
    "cost": cost,
}


def documents() -> list[Path]:
    """Documents that hold a generated table."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path for path in paths if MARKED.search(path.read_text(encoding="utf-8"))]


def regenerate(text: str, folder: Path = RESULTS) -> str:
    """`text` with every marked table written anew."""
    return MARKED.sub(lambda match: match[1] + TABLES[match[2]](folder) + match[3], text)


def main() -> None:
    stale = []
    for path in documents():
        text = path.read_text(encoding="utf-8")
        fresh = regenerate(text)
        if fresh == text:
            continue
        stale.append(str(path.relative_to(ROOT)))
        if "--check" not in sys.argv:
            path.write_text(fresh, encoding="utf-8")
    if "--check" in sys.argv and stale:
        sys.exit(f"out of date, run `make tables`: {', '.join(stale)}")
    print(f"tables written: {', '.join(stale)}" if stale else "tables are up to date")


if __name__ == "__main__":
    main()

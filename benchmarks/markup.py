"""Markdown of the generated tables: rows, cells, and where figures come from."""

from __future__ import annotations

from foretoken.lab.results import Results, Row, Spread


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def where(results: Results) -> str:
    """One line under a table: machine, versions, date, commit, file."""
    hardware, versions = results.hardware, results.versions
    cpu = f"{hardware['cpu']}, {hardware['cores']} cores"
    if results.shapes.get("device", "cpu") != "cpu":
        cpu = f"{hardware['accelerator']}; {cpu}"
    if "read_gb_per_s" in hardware:
        cpu += f" with {hardware['vector_instructions']} reading {hardware['read_gb_per_s']} GB/s"
    return (
        f"\n{cpu}; torch {versions['torch']}, "
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


def percent(row: Row, name: str) -> str:
    value = row.values.get(name)
    if value is None:
        return ""
    return f"{value.median if isinstance(value, Spread) else value:.1%}"

"""Writes the tables and figures of README.md and docs/ from the results files; `--check` compares.

A table stands between `<!-- table: NAME -->` and `<!-- end table -->`; NAME is one of `TABLES`. A
figure is a file in docs/figures.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.common import RESULTS, ROOT
from benchmarks.tables import cpu, plans, server, speed
from benchmarks.tables.curves import curve_figures, curves
from benchmarks.tables.driver import OfMachines, of_machines
from benchmarks.tables.goals import NOT_MEASURED, goals, laws
from benchmarks.tables.gpu import FILES, gpu, ops_figures, ops_times
from foretoken.lab.bench.command import charts
from foretoken.lab.plan import command as plan_report
from foretoken.lab.plot import page
from foretoken.lab.results import read

MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end table -->)", flags=re.DOTALL)
FIGURES = ROOT / "docs" / "figures"

TABLES: dict[str, Callable[[Path], str]] = {
    "acceptance": OfMachines("acceptance", cpu.acceptance),
    "audit_gallery": OfMachines("audit", cpu.audit_gallery),
    "audit_server": OfMachines("server_audit", cpu.audit_verdicts),
    "audit_verdicts": OfMachines("verdicts", cpu.audit_verdicts),
    "auto": OfMachines("auto", cpu.auto),
    "bench": OfMachines("bench", cpu.bench),
    "catch_up": OfMachines("prefix", cpu.catch_up),
    "cost": OfMachines("cost", cpu.cost),
    "cpu_bf16": cpu.cpu_bf16,
    "curves": OfMachines("curves", curves),
    "drafters": OfMachines("drafters", cpu.drafters),
    "embedded_plan": OfMachines("embedded_plan", plans.embedded_plan),
    "filters": OfMachines("filters", cpu.bought),
    "fleet_plan": server.fleet_plan,
    "gguf_shapes": speed.gguf_shapes,
    "goals": goals,
    "gpu": gpu,
    "laws": laws,
    "lengths": OfMachines("lengths", cpu.bought),
    "one_hot": of_machines(cpu.one_hot),
    "plan": OfMachines("plan", plans.plan),
    "plan_beside_bench": plans.plan_beside_bench,
    "prefix": of_machines(cpu.prefix),
    "profile": OfMachines("profile", cpu.profile),
    "published": plans.published,
    "real_acceptance": speed.real_acceptance,
    "real_model": speed.real_model,
    "replicas_death": server.replicas_death,
    "replicas_hop": server.replicas_hop,
    "replicas_messages": server.replicas_messages,
    "replicas_prefixes": server.replicas_prefixes,
    "reproducibility": of_machines(cpu.reproducibility),
    "server_bears": server.server_bears,
    "server_clients": server.server_clients,
    "server_costs": server.server_costs,
    "server_stalls": server.server_stalls,
    "speed": OfMachines("speed", speed.speed),
    "summary": OfMachines("speed", speed.summary),
    "throughput": of_machines(cpu.throughput),
    **{name: partial(ops_times, name) for name in FILES},
}


def documents() -> list[Path]:
    """Documents that hold a generated table."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path for path in paths if MARKED.search(path.read_text(encoding="utf-8"))]


def regenerate(text: str, folder: Path = RESULTS) -> str:
    """`text` with every marked table written anew; one without its results file says so."""

    def table(name: str) -> str:
        try:
            return TABLES[name](folder)
        except FileNotFoundError:
            return NOT_MEASURED

    return MARKED.sub(lambda match: match[1] + table(match[2]) + match[3], text)


def outputs(folder: Path = RESULTS) -> dict[Path, str]:
    """Every generated file and what it must hold."""
    texts = {path: regenerate(path.read_text(encoding="utf-8"), folder) for path in documents()}
    if (folder / "curves.json").exists():
        texts |= {FIGURES / name: svg for name, svg in curve_figures(folder).items()}
    if (folder / "bench.json").exists():
        texts[FIGURES / "bench.svg"] = page(charts(read(folder / "bench.json").rows))
    if (stored := folder / "embedded_plan.json").exists():
        texts[FIGURES / "plan.svg"] = page(plan_report.charts(read(stored).rows))
    texts |= {FIGURES / name: svg for name, svg in ops_figures(folder).items()}
    return texts


def main() -> None:
    stale = []
    for path, fresh in outputs().items():
        if path.exists() and path.read_text(encoding="utf-8") == fresh:
            continue
        stale.append(str(path.relative_to(ROOT)))
        if "--check" not in sys.argv:
            path.parent.mkdir(exist_ok=True)
            path.write_text(fresh, encoding="utf-8")
    if "--check" in sys.argv and stale:
        sys.exit(f"out of date, run `make tables`: {', '.join(stale)}")
    print(f"tables written: {', '.join(stale)}" if stale else "tables are up to date")

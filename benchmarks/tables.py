"""Writes the tables and figures of README.md and docs/ from the results files; `--check` compares.

A table stands between `<!-- table: NAME -->` and `<!-- end table -->`; NAME is a function here. A
figure is a file in docs/figures.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.common import RESULTS, ROOT, goal
from benchmarks.drafter_tables import auto, cpu_bf16, drafters
from benchmarks.gguf_tables import gguf_shapes, real_acceptance, real_model
from benchmarks.gpu_tables import gpu, gpu_goals
from benchmarks.lab_tables import audit_gallery, audit_verdicts, bought
from benchmarks.markup import markdown, number, percent, spread, where
from benchmarks.ops_tables import FILES, ops_figures, ops_lines, ops_times
from benchmarks.plan_tables import embedded_plan, plan, plan_beside_bench, published
from benchmarks.replica_tables import death, hop, messages, plans, prefixes
from benchmarks.serve_tables import server_bears, server_clients, server_costs, server_stalls
from benchmarks.speed_tables import speed, summary
from foretoken.lab.bench import report
from foretoken.lab.bench.report import charts
from foretoken.lab.plan import command as plan_report
from foretoken.lab.plot import Axes, Series, line_chart, page
from foretoken.lab.results import Results, Spread, read

MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end table -->)", flags=re.DOTALL)
FIGURES = ROOT / "docs" / "figures"
NOT_MEASURED = "Not measured yet: `make bench`.\n"


def acceptance(results: Results) -> str:
    """Every drafter: mean acceptance length, per position, and what was left out."""
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
        cells += [f"{row.values[f'unconditional_at_{i}']:.2f}" for i in range(1, k + 1)]
        cells += [f"{row.values['verifications']}"]
        rows.append([*cells, f"{row.values['cycles']} of {row.values['prompts']}"])
    return markdown(header, rows)


def one_hot(results: Results) -> str:
    """The same sampled drafts verified with their real q and as one-hot, side by side."""
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
    return markdown(header, rows)


def cost(results: Results) -> str:
    """Start-up times and peak memory."""
    rows = []
    for row in results.rows:
        for name in row.values:
            unit = {"seconds": "s", "peak_memory": "MiB", "mebibytes": "MiB"}[name]
            digits = 2 if unit == "s" else 0
            what = {"peak_memory": ", peak memory"}.get(name, "")
            rows.append([row.case + what, f"{spread(row, name, digits)} {unit}"])
    return markdown(["", "median (least–most)"], rows)


def profile(results: Results) -> str:
    """Milliseconds of each part of a step; older files split what is `drafting` now."""
    parts = [
        "target pass",
        "drafting",
        "draft passes",
        "drafting, beside its passes",
        "sampling and verification",
        "scheduling",
        "commit",
        "the rest",
    ]
    parts = [part for part in parts if any(part in row.values for row in results.rows)]
    header = [
        "ms per step",
        "step",
        *parts,
        "scheduling and sampling",
        "all host work",
        "outside",
        "tokens per step",
    ]
    rows = []
    for row in results.rows:
        cells = [row.case, *(number(row, part) for part in ("step", *parts))]
        cells += [percent(row, "scheduling_and_sampling"), percent(row, "host_overhead")]
        cells.append(number(row, "outside the step"))
        rows.append([*cells, number(row, "tokens_per_step")])
    return markdown(header, rows)


def throughput(results: Results) -> str:
    """Every case of every batch size: tokens/s, ratios, and how many prompts agree."""
    header = ["T=0", "tokens/s", "to plain", "to `generate`", "to continuous batching"]
    header.append("prompts equal to plain")
    rows = []
    for row in results.rows:
        cells = [row.case, spread(row, "tokens_per_second", 0)]
        for other in ("plain", "generate", "continuous"):
            cells.append(f"{number(row, f'ratio_to_{other}')}x")
        ties, differ = row.values["near_ties"], row.values["differ"]
        equal = f"{row.values['prompts_equal_to_plain']} of {row.labels['batch']}"
        notes = [f"{count} {what}" for count, what in ((ties, "ties"), (differ, "other")) if count]
        rows.append([*cells, f"{equal} ({', '.join(notes)})" if notes else equal])
    return markdown(header, rows)


def prefix(results: Results) -> str:
    """Time to first token cold and warm, and what the drafter catches up."""
    rows = []
    for row in results.rows:
        if "temperature" not in row.labels:
            continue
        cells = [row.case, spread(row, "first_token, cold", 1)]
        for name in ("another tail", "the same prompt"):
            ms = spread(row, f"first_token, {name}", 1)
            cells.append(f"{ms}, {number(row, f'ratio, {name}', 3)}x")
        equal = f"{row.values['outputs_equal_to_uncached']} of {row.values['outputs']}"
        rows.append([*cells, equal])
    header = ["ms", "cold", "same prompt, another tail", "exactly the same prompt"]
    header.append("outputs equal to those without reuse")
    return markdown(header, rows)


def catch_up(results: Results) -> str:
    """A request's first drafting: fresh, with what the drafter has, and after a skipped stretch."""
    row = next(row for row in results.rows if row.case.startswith("first drafting"))
    rows = [[name, f"{spread(row, name, 1)} ms"] for name in row.values]
    return markdown([row.case, "median (least–most)"], rows)


def reproducibility(results: Results) -> str:
    """Requests whose tokens depend on the batch, by dtype and backend."""
    names = ("differ_in_batch", "differ_in_reversed_batch", "differ_when_repeated")
    rows = [
        [row.case, *(f"{row.values[name]} of {row.values['requests']}" for name in names)]
        for row in results.rows
    ]
    header = ["requests with other tokens", "in a batch", "in another order", "in the same again"]
    return markdown(header, rows)


CURVES = {
    "batch": ("Step time and batch", "requests", ("batch",)),
    "context": ("Step time and context", "tokens", ("context, batch 1", "context, batch 8")),
    "prefill": ("Time to first token and prompt", "tokens", ("prefill",)),
}


def curves(results: Results) -> str:
    """The line through each series; the figures are those of the first machine."""
    shown = CURVES.items() if results.name == "curves" else ()
    images = [f"![{title}](figures/curve_{name}.svg)\n\n" for name, (title, *_) in shown]
    rows = [
        [
            row.case.removeprefix("line: "),
            number(row, "intercept"),
            number(row, "slope", 4),
            number(row, "r_squared", 4),
            percent(row, "largest_deviation"),
        ]
        for row in results.rows
        if row.labels.get("fit")
    ]
    header = ["line", "ms at 0", "ms per request or token", "R²", "farthest point"]
    return "".join(images) + markdown(header, rows)


def curve_figures(folder: Path) -> dict[str, str]:
    """File name -> SVG text of every curve."""
    rows = [row for row in read(folder / "curves.json").rows if "x" in row.labels]
    figures = {}
    for name, (title, x_label, wanted) in CURVES.items():
        series: dict[str, list[tuple[float, float, float, float]]] = {}
        for row in rows:
            ms = row.values["ms"]
            if row.labels["curve"] in wanted and isinstance(ms, Spread):
                point = (float(row.labels["x"] or 0), ms.median, ms.min, ms.max)
                series.setdefault(row.case.rpartition(", x=")[0], []).append(point)
        lines = [Series(case, points) for case, points in series.items()]
        figures[f"curve_{name}.svg"] = line_chart(title, Axes(x_label, "ms"), lines)
    return figures


def bench(results: Results) -> str:
    """What `foretoken bench` prints first, with the speed-up beside it."""
    columns = {
        "TTFT, ms": ("ttft_ms_p50", 1, False),
        "TPOT, ms": ("tpot_ms_p50", 2, False),
        "tokens/s": ("output_tokens_per_second", 0, True),
        "accepted length": ("acceptance_length", 2, False),
        "speed-up": ("speedup", 2, True),
        "floor/step": ("share_of_floor", 2, False),
    }
    made = report.table(results.rows, columns)
    return markdown(made.header, made.lines)


GPU = ("gpu_plain", "gpu_eagle3", "gpu_prefill", "gpu_synthetic", "gpu_auto", "gpu_start")
DRAFTING = ("drafters", "auto")
GOALS = ("speed", "throughput", "profile", "prefix", "reproducibility", "curves")
GOALS += ("serve", *DRAFTING, *GPU, *FILES, "plan")
LEAST_R_SQUARED = 0.99


def laws(folder: Path) -> str:
    """The statistical laws of every record: how many numbers, and how many missed their bounds."""
    kinds = ("joint", "mutants", "noise-fp32", "vocabularies", "synthetic", "far_rows")
    lines, places = [], ""
    for path in sorted(folder.glob("law*.json")):
        results = read(path)
        named = [str(row.labels["law"]) for row in results.rows]
        others = sum(name not in kinds for name in named)
        broken = sum(not row.labels["passed"] for row in results.rows)
        counts = [str(named.count(kind)) for kind in kinds]
        lines.append([f"`{results.name}`", *counts, str(others), str(len(named)), str(broken)])
        places += where(results)
    header = ["numbers of", *kinds, "others", "in all", "outside their bounds"]
    return markdown(header, lines) + places


def goals(folder: Path) -> str:
    """Every note of the results files that names a goal, and the straightness of step times."""
    rows = []
    measured = [
        results
        for stem in GOALS
        if (folder / f"{stem}.json").exists()
        for results in runs(stem, folder)
    ]
    for results in measured:
        notes = [*results.notes, *straightness(results), *gpu_goals(results, folder)]
        if results.name in FILES:
            notes += [
                goal(f"{line.case}: R² of its line", line, "r_squared", LEAST_R_SQUARED)
                for line in ops_lines(results)
            ]
        rows += [[f"`{results.name}`", *note] for text in notes if (note := goal_parts(text))]
    if not rows:
        return NOT_MEASURED
    return markdown(["results file", "what", "median", "goal", "verdict"], rows)


def straightness(results: Results) -> list[str]:
    """A goal note per line through step times; a prefill's growth is not meant to be one."""
    return [
        goal(
            f"{row.case.removeprefix('line: ')}: R² of its line", row, "r_squared", LEAST_R_SQUARED
        )
        for row in results.rows
        if row.labels.get("fit") and row.labels["curve"] != "prefill"
    ]


def goal_parts(note: str) -> list[str]:
    """What was compared, its median, its goal and the verdict; [] for any other note."""
    found = re.fullmatch(r"(.+) (\S+), goal ([<>]=) (\S+): (reached|NOT reached)\.", note)
    if found is None:
        return []
    what, median, sign, bound, verdict = found.groups()
    return [what, median, {">=": "≥ ", "<=": "≤ "}[sign] + bound, verdict.replace("NOT", "**not**")]


MEASURED: dict[str, tuple[str, Callable[[Results], str]]] = {
    "summary": ("speed", summary),
    "speed": ("speed", speed),
    "profile": ("profile", profile),
    "acceptance": ("acceptance", acceptance),
    "one_hot": ("acceptance", one_hot),
    "cost": ("cost", cost),
    "throughput": ("throughput", throughput),
    "auto": ("auto", auto),
    "drafters": ("drafters", drafters),
    "prefix": ("prefix", prefix),
    "catch_up": ("prefix", catch_up),
    "reproducibility": ("reproducibility", reproducibility),
    "curves": ("curves", curves),
    "bench": ("bench", bench),
    "audit_gallery": ("audit", audit_gallery),
    "audit_verdicts": ("verdicts", audit_verdicts),
    "audit_server": ("server_audit", audit_verdicts),
    "lengths": ("lengths", bought),
    "filters": ("filters", bought),
    "plan": ("plan", plan),
    "embedded_plan": ("embedded_plan", embedded_plan),
}


def by_machine(name: str, folder: Path) -> str:
    """A table per machine that ran the benchmark, each with where its figures come from."""
    stem, table = MEASURED[name]
    made = [(table(results), where(results)) for results in runs(stem, folder)]
    return "\n".join(text + place for text, place in made if text)


def runs(stem: str, folder: Path) -> list[Results]:
    """The results of one benchmark on every machine (`--machine`), the first without a name."""
    paths = [folder / f"{stem}.json", *sorted(folder.glob(f"{stem}_*.json"))]
    return [read(path) for path in paths]


TABLES: dict[str, Callable[[Path], str]] = {
    **{name: partial(by_machine, name) for name in MEASURED},
    "goals": goals,
    "gpu": gpu,
    "cpu_bf16": cpu_bf16,
    "published": published,
    "plan_beside_bench": plan_beside_bench,
    "laws": laws,
    "server_costs": server_costs,
    "server_bears": server_bears,
    "server_stalls": server_stalls,
    "server_clients": server_clients,
    "replicas_death": death,
    "replicas_hop": hop,
    "replicas_messages": messages,
    "replicas_prefixes": prefixes,
    "fleet_plan": plans,
    "real_model": real_model,
    "real_acceptance": real_acceptance,
    "gguf_shapes": gguf_shapes,
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


if __name__ == "__main__":
    main()

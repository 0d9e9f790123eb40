"""The goals that results files name, and the straightness of what they measured."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.common import goal
from benchmarks.tables.driver import markdown, runs, where
from benchmarks.tables.gpu import FILES, gpu_goals, ops_lines
from foretoken.lab.results import Results, read

NOT_MEASURED = "Not measured yet: `make bench`.\n"
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

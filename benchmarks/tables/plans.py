"""The tables of docs/plan.md: what is predicted, and how good that is."""

from __future__ import annotations

from pathlib import Path

from benchmarks.tables.driver import markdown, number
from foretoken.engine.pace import PromptCosts
from foretoken.lab.plan.command import figures, sentences
from foretoken.lab.plan.command import tables as plan_tables
from foretoken.lab.plan.profile import Acceptance, EngineLimits, Profile
from foretoken.lab.plan.simulate import Outlook, RequestSpec, Simulation
from foretoken.lab.results import Results, Spread, read

PUBLISHED = {0: (1.0, 7.07), 2: (2.36, 4.32), 3: (2.79, 4.09), 4: (3.08, 4.05), 5: (3.32, 4.13)}
PUBLISHED |= {7: (3.54, 4.29)}
"""8B, EAGLE-3, one H100, batch 1: K -> tokens per step, ms per token."""
CALIBRATED = (0, 3, 7)


def published_outlook() -> Outlook:
    """From the times of three rows of the published table, and all its acceptance lengths."""
    seconds = [PUBLISHED[k][0] * PUBLISHED[k][1] / 1e3 for k in CALIBRATED]
    profile = Profile(
        "8B", "eagle3", "published", CALIBRATED, (1,), (seconds,), ((0.0,) * 3,), (0.0,) * 3,
        0.0, None, EngineLimits(1, 8192, 8192, 16, 1024),
    )  # fmt: skip
    lengths = {k: tokens for k, (tokens, _) in PUBLISHED.items() if k}
    return Outlook(profile, Acceptance(lengths=lengths))


def published(folder: Path) -> str:
    """The published table beside what follows from three of its rows."""
    outlook, lines = published_outlook(), []
    for k, (tokens, ms) in PUBLISHED.items():
        found = 1e3 / outlook.rate(1, k, 1000)
        how = "calibrated on" if k in CALIBRATED else f"{found / ms - 1:+.1%}"
        lines.append(
            [f"K={k}" if k else "plain", f"{tokens:.2f}", f"{ms:.2f}", f"{found:.2f}", how]
        )
    header = ["", "tokens per step", "ms per token: published", "predicted", "error"]
    return markdown(header, lines)


def plan_beside_bench(folder: Path) -> str:
    """What `foretoken bench` measured, and what the profile of another run says of its requests."""
    bench, stored = read(folder / "bench.json"), read(folder / "embedded_plan.json").shapes
    parts = {"prompts": PromptCosts(**stored["profile"]["prompts"])}
    limits = EngineLimits(**stored["profile"]["limits"])
    profile = Profile(**{**stored["profile"], **parts, "limits": limits})
    lengths, lines = [int(bench.shapes[f"{name}_len"]) for name in ("input", "output")], []
    counts = dict(zip(bench.shapes["loads"], bench.shapes["num_requests"], strict=True))
    for row in bench.rows:
        concurrency, drafts = (int(row.labels[name] or 0) for name in ("concurrency", "k"))
        specs = [RequestSpec(0.0, *lengths)] * counts[f"concurrency {concurrency}"]
        joint = tuple(profile.acceptance or ())[:drafts]
        found = figures(Simulation(profile, joint, drafts, concurrency).run(specs), {})
        cells = [row.case]
        for name, digits in {"output_tokens_per_second": 0, "tpot_ms": 2}.items():
            measured = row.values[name]
            if not isinstance(measured, Spread):
                raise TypeError(f"{name} must be a spread")
            cells += [f"{found[name]:.{digits}f}", f"{measured.median:.{digits}f}"]
            cells.append(f"{found[name] / measured.median - 1:+.0%}")
        lines.append(cells)
    header = ["", "tokens/s: predicted", "measured", "error"]
    return markdown([*header, "TPOT, ms: predicted", "measured", "error"], lines)


def plan(results: Results) -> str:
    """What `foretoken plan` predicted, and what came: throughput, TPOT, TTFT."""
    names = {"output_tokens_per_second": 0, "tpot_ms": 2, "ttft_ms": 1}
    lines = []
    for row in results.rows:
        if "seconds" in row.values:
            continue
        if row.case == "all":
            cells = ["**mean error (largest)**"]
            for name in names:
                mean, most = row.values[f"mean_error_{name}"], row.values[f"most_error_{name}"]
                cells += ["", "", f"{mean:.1%} ({most:.1%})"]
        else:
            cells = [row.case]
            for name, digits in names.items():
                pair = [number(row, f"{kind}{name}", digits) for kind in ("predicted_", "")]
                cells += [*pair, f"{row.values[f'error_{name}']:+.1%}"]
        lines.append(cells)
    header = [""]
    for what in ("tokens/s", "TPOT, ms", "TTFT, ms"):
        header += [f"{what}: predicted", "measured", "error"]
    return markdown(header, lines)


def embedded_plan(results: Results) -> str:
    """What `foretoken plan` prints of the embedded pair."""
    parts = [
        f"{title}:\n\n{markdown([*table.header], table.lines)}"
        for title, table in plan_tables(results.rows).items()
    ]
    return "\n".join([*parts, " ".join(sentences(results.rows)) + "\n"])

"""Tables of what is measured on a CPU: acceptance, speed, drafters, prefixes, audits."""

from __future__ import annotations

from pathlib import Path

from benchmarks.tables.driver import (
    Cell,
    Table,
    case,
    count,
    markdown,
    number,
    of,
    percent,
    quartiles,
    spread,
    where,
)
from foretoken.lab.audit.gallery import BUGS
from foretoken.lab.bench.command import table
from foretoken.lab.results import Results, Row, Spread, read

COST_UNITS = {"seconds": ("s", 2), "peak_memory": ("MiB", 0), "mebibytes": ("MiB", 0)}
PARTS = (
    "target pass", "drafting", "draft passes", "drafting, beside its passes",
    "sampling and verification", "scheduling", "commit", "the rest",
)  # fmt: skip


def acceptance(results: Results) -> str:
    """Every drafter: mean acceptance length, per position, and what was left out."""

    def per_prompt(row: Row) -> str:
        return quartiles(row, "per_prompt_length").partition("(")[2].removesuffix(")")

    def at(i: int) -> Cell:
        return of(number, f"unconditional_at_{i}")

    columns: dict[str, Cell] = {
        "drafter, temperature": case,
        "mean length": of(number, "mean_acceptance_length"),
        "prompts (quartiles)": per_prompt,
        **{f"at {i}": at(i) for i in range(1, results.shapes["k"] + 1)},
        "verifications": of(number, "verifications", 0),
        "in a cycle": count("cycles", "prompts"),
    }
    return Table("acceptance", columns).text(results)


def _as_one_hot(row: Row) -> bool:
    sampled = row.case.startswith("draft model, sampled, verified")
    return "same_drafts_as_one_hot_accepted" in row.values and not sampled


def _gained_by_q(row: Row) -> str:
    real, one_hot = row.values["accepted"], row.values["same_drafts_as_one_hot_accepted"]
    if isinstance(real, Spread) or isinstance(one_hot, Spread):
        raise TypeError("accepted drafts are counts")
    return f"{real / one_hot:.2f}x"


one_hot = Table(
    "acceptance",
    {
        "accepted drafts (mean length)": case,
        "with the real q": lambda row: (
            f"{row.values['accepted']} ({number(row, 'mean_acceptance_length')})"
        ),
        "as one-hot": lambda row: (
            f"{row.values['same_drafts_as_one_hot_accepted']} "
            f"({number(row, 'same_drafts_as_one_hot_length')})"
        ),
        "ratio": _gained_by_q,
    },
    shown=_as_one_hot,
)


def cost(results: Results) -> str:
    """Start-up times and peak memory."""
    rows = []
    for row in results.rows:
        for name in row.values:
            unit, digits = COST_UNITS[name]
            what = {"peak_memory": ", peak memory"}.get(name, "")
            rows.append([row.case + what, f"{spread(row, name, digits)} {unit}"])
    return markdown(["", "median (least–most)"], rows)


def profile(results: Results) -> str:
    """Milliseconds of each part of a step; older files split what is `drafting` now."""
    parts = [part for part in PARTS if any(part in row.values for row in results.rows)]
    columns: dict[str, Cell] = {
        "ms per step": case,
        **{part: of(number, part) for part in ("step", *parts)},
        "scheduling and sampling": of(percent, "scheduling_and_sampling"),
        "all host work": of(percent, "host_overhead"),
        "outside": of(number, "outside the step"),
        "tokens per step": of(number, "tokens_per_step"),
    }
    return Table("profile", columns).text(results)


def _equal_to_plain(row: Row) -> str:
    equal = f"{row.values['prompts_equal_to_plain']} of {row.labels['batch']}"
    counts = ((row.values["near_ties"], "ties"), (row.values["differ"], "other"))
    notes = ", ".join(f"{count} {what}" for count, what in counts if count)
    return f"{equal} ({notes})" if notes else equal


throughput = Table(
    "throughput",
    {
        "T=0": case,
        "tokens/s": of(spread, "tokens_per_second", 0),
        "to plain": of(number, "ratio_to_plain", unit="x"),
        "to `generate`": of(number, "ratio_to_generate", unit="x"),
        "to continuous batching": of(number, "ratio_to_continuous", unit="x"),
        "prompts equal to plain": _equal_to_plain,
    },
)


def _reused(name: str) -> Cell:
    def cell(row: Row) -> str:
        return f"{spread(row, f'first_token, {name}', 1)}, {number(row, f'ratio, {name}', 3)}x"

    return cell


prefix = Table(
    "prefix",
    {
        "ms": case,
        "cold": of(spread, "first_token, cold", 1),
        "same prompt, another tail": _reused("another tail"),
        "exactly the same prompt": _reused("the same prompt"),
        "outputs equal to those without reuse": count("outputs_equal_to_uncached", "outputs"),
    },
    shown=lambda row: "temperature" in row.labels,
)


def catch_up(results: Results) -> str:
    """A request's first drafting: fresh, with what the drafter has, and after a skipped stretch."""
    row = next(row for row in results.rows if row.case.startswith("first drafting"))
    rows = [[name, f"{spread(row, name, 1)} ms"] for name in row.values]
    return markdown([row.case, "median (least–most)"], rows)


reproducibility = Table(
    "reproducibility",
    {
        "requests with other tokens": case,
        "in a batch": count("differ_in_batch", "requests"),
        "in another order": count("differ_in_reversed_batch", "requests"),
        "in the same again": count("differ_when_repeated", "requests"),
    },
)


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
    made = table(results.rows, columns)
    return markdown(made.header, made.lines)


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


def audit_gallery(results: Results) -> str:
    """Every rule and bug: what is wrong, when it was refuted, what it accepts."""
    what, rows = {bug.key: bug.flaw for bug in BUGS}, []
    for row in results.rows:
        seen = f"{row.values.get('draws_to_refute', 0):,}"
        if "draws_to_refute" not in row.values:
            seen = "by injected uniforms" if row.labels["refuted"] else "not refuted"
        if row.labels["accepts_less"] and not row.labels["refuted"]:
            seen += ", accepts less than it could"
        accepted = number(row, "pairs_accepted") if row.values["pairs_draws"] else ""
        rows.append([f"`{row.case}`", what.get(row.case, "nothing"), seen, accepted])
    optimum = next(row for row in results.rows if row.values["pairs_draws"])
    standard, best = (number(optimum, f"pairs_{name}") for name in ("standard", "best"))
    accepted = f"accepted of 2 drafts (`standard` {standard}, at most {best})"
    return markdown(["", "what is wrong", "refuted after draws", accepted], rows)


def audit_verdicts(results: Results) -> str:
    """A line per subject."""
    return "".join(f"- {row.case}: {row.labels['verdict']}\n" for row in results.rows)


def bought(results: Results) -> str:
    """What every case of `foretoken bench` that drafts accepted, and what it gained."""
    columns = {
        "tokens/step": ("acceptance_length", 2), "of drafts accepted": ("acceptance_rate", 2),
        "speed-up": ("speedup", 2), "tokens/s": ("output_tokens_per_second", 0),
    }  # fmt: skip
    rows = [row for row in results.rows if "acceptance_length" in row.values]
    there = {head: at for head, at in columns.items() if any(at[0] in row.values for row in rows)}
    lines = [[row.case, *(spread(row, *at) for at in there.values())] for row in rows]
    return markdown(["", *there], lines)

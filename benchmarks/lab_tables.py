"""The tables of the laboratory's own commands."""

from __future__ import annotations

from benchmarks.markup import markdown, number, spread
from foretoken.lab.audit.gallery import BUGS
from foretoken.lab.results import Results


def audit_gallery(results: Results) -> str:
    """Every rule and bug: what is wrong, when it was refuted, what it accepts."""
    what, rows = {bug.key: bug.what for bug in BUGS}, []
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

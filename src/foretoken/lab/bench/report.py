"""Results file and tables of a benchmark; both come from its rows alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from foretoken.lab.bench.figures import UNITS
from foretoken.lab.bench.run import Bench
from foretoken.lab.results import Label, Results, Row, Spread, Value, collect

_LEAST_REPEATS = 3
_SHAPES = ("input_len", "output_len", "repeats", "warmup", "prompts", "seed")
_NOTES = (
    "All requests of a batch are submitted at once; what comes of them is ignored, and each "
    "generates exactly `output_len` tokens. Every figure is one number per run, and its spread is "
    "over the repeats. Cases take turns, and who goes first changes with each repeat.",
    "ttft_ms, tpot_ms: means over the requests; TPOT is the time from a request's first token to "
    "its last over the tokens behind the first. prefill_s + decode_s + tail_s = wall_s: decode_s "
    "is the steps in which the whole batch decodes, tail_s what follows when requests have ended, "
    "prefill_s everything before, with the first step that only decodes, in which a draft model "
    "computes the prompts.",
    "step_ms = draft_ms + target_ms + verify_ms + host_gap_ms, means over the steps of decode_s, "
    "each from the end of the step before. The host gap is what no device phase covers.",
    "read_gb: the target's weights once and the K/V of all contexts, and the same of a draft model "
    "or an EAGLE-3 head for each draft pass. floor_ms is that over the bandwidth; weights that "
    "stay in a cache are read faster.",
)
_KERNEL_NOTE = (
    "Kernels were recorded in a few steps near the beginning of another run; a profiler slows "
    "steps down. duration_ms is from a kernel's start to its end; some start while the one before "
    "ends, and wait. kernel_ms is from the end of all before to the kernel's own; with `idle` it "
    "adds up to the step. Sums of duration_ms, and steps, in ms: "
)


class Table(NamedTuple):
    """Headings, and lines of as many cells."""

    header: list[str]
    lines: list[list[str]]


def rows(bench: Bench) -> list[Row]:
    """A row per batch size and case of which a run was measured."""
    found = []
    for batch, case in product(bench.options.batch_sizes, bench.cases):
        if not (repeats := bench.measured.get((batch, case))):
            continue
        speculation = bench.llm.config.speculative_config if case.num_drafts is None else None
        labels: dict[str, Label] = {
            "batch": batch,
            "method": speculation.method if speculation else "plain",
            "k": speculation.num_speculative_tokens if speculation else 0,
            "rule": speculation.rejection_sample_method if speculation else None,
        }
        values = _spreads(repeats)
        if case.num_drafts is None and bench.options.compare:
            plain = bench.measured.get((batch, bench.cases[0]), [])
            values |= _spreads(_speedups(plain, repeats))
        name = f"batch {batch}, {case.name}"
        found.append(Row(name, labels, values))
        for kind, figures in bench.kernels.get((batch, case), {}).items():
            labels = {**labels, "kernels": kind}
            found.append(Row(f"{name}: {kind}", labels, _spreads([figures])))
    return found


def _spreads(repeats: Sequence[dict[str, float]]) -> dict[str, Value]:
    """One spread per figure, over the repeats that have it."""
    measured: dict[str, list[float]] = {}
    for name, value in (pair for repeat in repeats for pair in repeat.items()):
        measured.setdefault(name, []).append(value)
    return {
        name: Spread.of(values, UNITS.get(name, "accepted / drafted"))
        for name, values in measured.items()
    }


def _speedups(
    plain: Sequence[dict[str, float]], drafted: Sequence[dict[str, float]]
) -> list[dict[str, float]]:
    """To plain decoding, turn by turn; an interruption may have left the last turn halved."""
    ratios = []
    for slow, fast in zip(plain, drafted, strict=False):
        name = "output_tokens_per_second"
        ratios.append({"speedup": fast[name] / slow[name]})
        if "tpot_ms" in slow:
            ratios[-1]["tpot_speedup"] = slow["tpot_ms"] / fast["tpot_ms"]
    return ratios


def results(bench: Bench, command: str, notes: Sequence[str] = ()) -> Results | None:
    """What was measured so far, in the shared schema; None if nothing was.

    Args:
        notes: beside those on what the figures mean.
    """
    found = rows(bench)
    if not found:
        return None
    said = [*_NOTES, *_remarks(bench), *notes]
    return collect(_name(bench.options.output), command, _shapes(bench), found, said)


def _name(output: str | None) -> str:
    stem = Path(output).stem.lower() if output else "bench"
    return "".join(c if c.isascii() and c.isalnum() else "_" for c in stem)


def _shapes(bench: Bench) -> dict[str, Any]:
    options, config, floor = bench.options, bench.llm.config, bench.floor
    model = bench.llm.engine.runner.model
    speculation = config.speculative_config
    return {
        "model": _shown(config.model),
        "device": model.device.type,
        "dtype": str(model.dtype).removeprefix("torch."),
        "speculation": _set_fields(speculation) if speculation else None,
        "batch_sizes": list(options.batch_sizes),
        **{name: getattr(options, name) for name in _SHAPES},
        "sampling": _set_fields(bench.params, without=("seed",)),
        "engine": _set_fields(config, without=("model", "speculative_config")),
        "target_weights_gb": floor.target.weights / 1e9,
        "draft_weights_gb": floor.drafter.weights / 1e9,
        "kv_bytes_per_token": sum(size for size, _ in floor.target.layers),
        "bandwidth_gb_per_s": floor.bandwidth,
        "bandwidth_given": options.bandwidth is not None,
    }


def _set_fields(config: Any, without: Sequence[str] = ()) -> dict[str, Any]:
    """Fields that are not at their default."""
    pairs = ((field, getattr(config, field.name)) for field in fields(config))
    return {
        field.name: _shown(value)
        for field, value in pairs
        if value != field.default and field.name not in without
    }


def _shown(value: Any) -> Any:
    """Of an absolute path only the name: where it lay is this machine's affair."""
    is_path = isinstance(value, str) and value.startswith("/")
    return Path(value).name if is_path else value


def _remarks(bench: Bench) -> list[str]:
    """What a reader must know of these runs in particular."""
    remarks = []
    speculation = bench.llm.config.speculative_config
    if speculation is not None and speculation.rejection_sample_method == "synthetic":
        remarks.append("Acceptance was set by the rule `synthetic`; it is no drafter's.")
    if len(bench.cases) > 1:
        remarks.append(
            "plain: the same engine, with K = 0 for every request. speedup and tpot_speedup are "
            "taken turn by turn."
        )
    if bench.kernels:
        sums = [
            f"{figures['all']['duration_ms']:.3f} and {figures['all']['kernel_ms']:.3f} at batch "
            f"{batch}, {case.name}"
            for (batch, case), figures in bench.kernels.items()
        ]
        remarks.append(f"{_KERNEL_NOTE}{'; '.join(sums)}.")
    if bench.unknown:
        remarks.append(f"Kernels of kind `other`: {', '.join(sorted(bench.unknown))}.")
    if bench.options.repeats < _LEAST_REPEATS:
        remarks.append(f"Fewer than {_LEAST_REPEATS} repeats: the spread says little.")
    missing = [
        f"{batch} ({case.name})"
        for (batch, case), repeats in bench.measured.items()
        if not any("step_ms" in repeat for repeat in repeats)
    ]
    if missing:
        remarks.append(
            f"No step in which the whole batch decoded: {', '.join(missing)}. More `output_len`, "
            "or more blocks of cache, would give some."
        )
    return remarks


TABLES: dict[str, dict[str, tuple[str, int, bool]]] = {
    "Speed": {
        "TTFT, ms": ("ttft_ms", 1, False),
        "TPOT, ms": ("tpot_ms", 2, False),
        "tokens/s": ("output_tokens_per_second", 0, True),
        "accepted length": ("acceptance_length", 2, False),
    },
    "Speed-up over plain decoding, in turns": {
        "in tokens/s": ("speedup", 2, True),
        "in TPOT": ("tpot_speedup", 2, True),
    },
    "Seconds of a run": {
        "prefill": ("prefill_s", 3, False),
        "whole batch decodes": ("decode_s", 3, False),
        "the rest": ("tail_s", 3, False),
        "requests/s": ("requests_per_second", 2, False),
    },
    "Milliseconds of a step in which the whole batch decodes": {
        "draft": ("draft_ms", 2, False),
        "target": ("target_ms", 2, False),
        "verify": ("verify_ms", 2, False),
        "host gap": ("host_gap_ms", 2, False),
        "step": ("step_ms", 2, False),
        "per token": ("decode_ms_per_token", 3, False),
    },
    "What that step reads at least": {
        "GB": ("read_gb", 3, False),
        "GB/s": ("read_gb_per_s", 1, False),
        "target, GB/s": ("target_gb_per_s", 1, False),
        "floor, ms": ("floor_ms", 2, False),
        "floor/step": ("share_of_floor", 2, False),
    },
}
"""Title -> heading -> name of a value, digits, and whether the least and the most are shown."""
_KERNELS = {
    "calls": ("calls", 1, False),
    "us/call": ("call_us", 2, False),
    "with waits, ms": ("duration_ms", 3, False),
    "own, ms": ("kernel_ms", 3, False),
    "own/step": ("share_of_step", 3, False),
    "GB": ("read_gb", 3, False),
    "GB/s": ("read_gb_per_s", 0, False),
    "floor/own": ("share_of_floor", 2, False),
}


def tables(found: Sequence[Row]) -> dict[str, Table]:
    """Medians of all rows by title; columns, lines and tables without a value are left out."""
    cases = [row for row in found if "kernels" not in row.labels]
    made = {title: table(cases, columns) for title, columns in TABLES.items()}
    for case, kinds in kernel_rows(found).items():
        made[f"Kernels of a step: {case}"] = table(list(kinds.values()), _KERNELS)
    return {title: table for title, table in made.items() if table.lines}


def kernel_rows(found: Sequence[Row]) -> dict[str, dict[str, Row]]:
    """By case, and by kind of kernel."""
    cases: dict[str, dict[str, Row]] = {}
    for row in found:
        if kind := row.labels.get("kernels"):
            case = row.case.removesuffix(f": {kind}")
            cases.setdefault(case, {})[str(kind)] = replace(row, case=str(kind))
    return cases


def table(found: Sequence[Row], columns: Mapping[str, tuple[str, int, bool]]) -> Table:
    """One of them."""
    there = {
        heading: column
        for heading, column in columns.items()
        if any(column[0] in row.values for row in found)
    }
    lines = [[row.case, *(_cell(row, *column) for column in there.values())] for row in found]
    return Table(["", *there], [line for line in lines if any(line[1:])])


def _cell(row: Row, name: str, digits: int, ranged: bool) -> str:
    value = row.values.get(name)
    if not isinstance(value, Spread):
        return ""
    text = f"{value.median:.{digits}f}"
    return f"{text} ({value.min:.{digits}f}–{value.max:.{digits}f})" if ranged else text


def as_text(made: Table) -> str:
    """Lines for a terminal: the first column to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(made.header, *made.lines, strict=True)]
    text = ""
    for first, *cells in (made.header, *made.lines):
        numbers = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        text += "  ".join([first.ljust(widths[0]), *numbers]).rstrip() + "\n"
    return text

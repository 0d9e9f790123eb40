"""Tables and figures of decoding on a GPU, and of `benchmarks.ops` on each kind of machine."""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.common import goal
from benchmarks.tables.driver import markdown, median, number, percent, quartiles, where
from foretoken.lab.plot import Axes, Series, line_chart
from foretoken.lab.results import Results, Row, Spread, read

FILES = ("ops_gpu", "ops_cpu", "ops_avx512")
GROWTH = ("rows", "vocabulary")
STEMS = ("gpu_plain", "gpu_eagle3")
MS_PER_TOKEN = {
    "plain": {1: 4.15, 8: 4.4, 64: 6.8},
    "eagle3": {1: 1.75, 8: 2.15, 64: 4.4},
}
"""Of greedy decoding behind prompts of `SHORT` tokens, by concurrency."""
SHORT = 1024
LAST_FIRST_TOKEN_MS = 1490.0  # of 64 prompts of that length
SAMPLED = 1.03  # times greedy decoding
HOST_GAP = 0.03  # of a step
Key = tuple[str, int, int, bool]
OF_THE_BEST = 0.95  # tokens/s: a larger batch is no slower than all smaller ones


def ops_times(name: str, folder: Path) -> str:
    """Every case of one file, on a GPU by graph replay and eager, and its growth."""
    return table(read(folder / f"{name}.json"))


def table(results: Results) -> str:
    """Microseconds of every case and implementation; figures and lines of the growth curves."""
    ours, others = results.shapes["backends"], results.shapes["baselines"]
    mode, gpu = timed_by(results), results.name == "ops_gpu"
    header = ["µs per call, median (quartiles)"]
    for name in ours:
        header += [f"`{name}`, graph replay", "eager"] if gpu else [f"`{name}`"]
    header += ["read floor", "of the floor", *others, "faster than plain PyTorch"]
    rows: dict[str, dict[str, Row]] = {}
    for row in results.rows:
        if not row.labels["curve"]:
            rows.setdefault(str(row.labels["case"]), {})[str(row.labels["engine"])] = row
    lines = []
    for case, found in rows.items():
        cells = [case]
        for name in ours:
            cells.append(microseconds(found.get(name), mode))
            cells += [microseconds(found.get(name), "eager_us", short=True)] if gpu else []
        best = next((found[name] for name in ours if name in found), None)
        if best is None:
            continue
        cells += [number(best, "read_floor_us", 1), percent(best, "share_of_floor")]
        cells += [microseconds(found.get(name), mode, short=True) for name in others]
        faster = number(best, "speedup_over_pytorch", 1)
        lines.append([*cells, f"{faster}x" if faster else ""])
    return markdown(header, lines) + growth(results) + where(results)


def timed_by(results: Results) -> str:
    """The value that goals and curves are about."""
    return "graph_us" if results.name == "ops_gpu" else "eager_us"


def microseconds(row: Row | None, name: str, *, short: bool = False) -> str:
    """`12.3 (12.1–12.5)`, or the median alone if `short`; empty where nothing was measured."""
    digits = 1 if (median(row, name) or 0.0) < 1000 else 0
    return number(row, name, digits) if short else quartiles(row, name, digits)


def points(results: Results) -> dict[str, list[tuple[float, Row]]]:
    """Curve -> (x, row) of the first backend, in order of x."""
    found: dict[str, list[tuple[float, Row]]] = {}
    for row in results.rows:
        if row.labels["curve"] and row.labels["engine"] == results.shapes["backends"][0]:
            point = (float(row.labels["x"] or 0), row)
            found.setdefault(str(row.labels["curve"]), []).append(point)
    return {name: sorted(curve, key=lambda point: point[0]) for name, curve in found.items()}


def ops_lines(results: Results) -> list[Row]:
    """A row per curve: the least-squares line through its medians, microseconds."""
    lines = []
    for name, curve in points(results).items():
        if len(curve) < 3:
            continue
        x = [at for at, _ in curve]
        y = [row.values[timed_by(results)].median for _, row in curve]  # type: ignore[union-attr]
        line = statistics.linear_regression(x, y)
        values = {
            "intercept": line.intercept,
            "slope_per_1000": 1000 * line.slope,
            "r_squared": statistics.correlation(x, y) ** 2,
        }
        lines.append(Row(name, {"fit": True}, dict(values)))
    return lines


def growth(results: Results) -> str:
    """The figures of a file that has curves, and the line through each."""
    images = [f"![{title}](figures/{name})\n\n" for name, (title, _) in charts(results).items()]
    digits = {"intercept": 2, "slope_per_1000": 2, "r_squared": 4}
    lines = [
        [row.case, *(number(row, name, n) for name, n in digits.items())]
        for row in ops_lines(results)
    ]
    if not lines:
        return ""
    header = ["line", "µs at 0", "µs per 1000 rows or ids", "R²"]
    return "\n" + "".join(images) + markdown(header, lines)


def charts(results: Results) -> dict[str, tuple[str, str]]:
    """File name -> title and SVG text of each figure of the growth curves."""
    found = {}
    device = {"ops_gpu": "GPU", "ops_avx512": "CPU, AVX-512"}.get(results.name, "CPU")
    for what in GROWTH:
        lines = []
        for name, curve in points(results).items():
            if not name.endswith(f", {what}"):
                continue
            spread = [(x, row.values[timed_by(results)]) for x, row in curve]
            dots = [(x, v.median, v.min, v.max) for x, v in spread if isinstance(v, Spread)]
            lines.append(Series(name.removesuffix(f", {what}"), dots))
            if name.startswith("sample,"):
                floor = [(x, row.values["read_floor_us"]) for x, row in curve]
                dots = [(x, us, us, us) for x, us in floor if isinstance(us, float)]
                lines.append(Series("reading the logits once", dots))
        if lines:
            title = f"{device}: time of an op and its {what}"
            svg = line_chart(title, Axes(what, "µs", logarithmic=True), lines)
            found[f"{results.name}_{what}.svg"] = (title, svg)
    return found


def ops_figures(folder: Path) -> dict[str, str]:
    """File name -> SVG text, of the results files that are there."""
    files = [folder / f"{name}.json" for name in FILES]
    found = [charts(read(path)) for path in files if path.exists()]
    return {name: svg for one in found for name, (_, svg) in one.items()}


def gpu(folder: Path) -> str:
    """Decoding on a GPU: every row of every results file of `foretoken bench` there."""
    header = ["results file", "case", "prompt", "ms per step", "ms per token", "draft", "target"]
    header += ["verify", "host gap", "tokens/s", "floor/step"]
    values = {"step_ms": 2, "decode_ms_per_token": 3, "draft_ms": 2, "target_ms": 2}
    values |= {"verify_ms": 2, "host_gap_ms": 2, "output_tokens_per_second": 0, "share_of_floor": 2}
    lines, of_files = [], measured(folder)
    for results in of_files:
        for row in results.rows:
            if "kernels" in row.labels:
                continue
            cells = [number(row, name, digits) for name, digits in values.items()]
            length = str(results.shapes["input_len"])
            lines.append([f"`{results.name}`", row.case, length, *cells])
    if not of_files:
        raise FileNotFoundError(folder)
    return markdown(header, lines) + where(of_files[0])


def measured(folder: Path) -> list[Results]:
    """What `foretoken bench` recorded on a GPU."""
    return [read(path) for stem in STEMS for path in sorted(folder.glob(f"{stem}*.json"))]


def gpu_goals(results: Results, folder: Path) -> list[str]:
    """Goal notes of one of them; the rows of older files have theirs among the notes."""
    if not results.name.startswith(STEMS):
        return []
    known = dict[Key, float]()
    for other in reversed(measured(folder)):
        known |= _per_token(other)
    known |= _per_token(results)  # what was measured in the same turns goes before
    prompt, notes = int(results.shapes["input_len"]), list[str]()
    best = max(
        ((median(row, "output_tokens_per_second") or 0.0) for row in results.rows), default=0.0
    )
    for row in results.rows:
        if "concurrency" not in row.labels or "step_ms" not in row.values:
            continue
        method, batch = str(row.labels["method"]), int(row.labels["concurrency"] or 0)
        bound = MS_PER_TOKEN.get(method, {}).get(batch)
        if row.labels["temperature"]:
            greedy = known.get((method, prompt, batch, False))
            bound = greedy and SAMPLED * greedy
        elif prompt > SHORT:
            ends = [known.get((kind, length, batch, False)) for kind, length in (
                ("plain", prompt), (method, SHORT), ("plain", SHORT)
            )]  # fmt: skip
            plain, short, short_plain = (end or 0.0 for end in ends)
            bound = plain * short / short_plain if all(ends) and method != "plain" else None
        elif prompt < SHORT:
            bound = None
        if bound:
            what = f"{row.case}: ms per token"
            notes.append(goal(what, row, "decode_ms_per_token", float(f"{bound:.4g}"), False))
        if batch in MS_PER_TOKEN["plain"]:
            share = (median(row, "host_gap_ms") or 0.0) / (median(row, "step_ms") or 0.0)
            gap = Row(row.case, {}, {"share": share})
            notes.append(goal(f"{row.case}: host gap to step", gap, "share", HOST_GAP, False))
        if (method, prompt, batch) == ("plain", SHORT, 64) and (
            median(row, "requests") or 0.0
        ) == batch:
            what = f"{row.case}: ms to the last first token of 64 x 1024"
            notes.append(goal(what, row, "ttft_ms_max", LAST_FIRST_TOKEN_MS, False))
        if batch == 512:
            what = f"{row.case}: tokens/s, no less than 95 % of the best"
            notes.append(goal(what, row, "output_tokens_per_second", round(OF_THE_BEST * best)))
    return notes


def _per_token(results: Results) -> dict[Key, float]:
    """Median ms per token by method, length of the prompt, concurrency, and whether sampled."""
    return {
        (
            str(row.labels["method"]),
            int(results.shapes["input_len"]),
            int(row.labels["concurrency"] or 0),
            bool(row.labels["temperature"]),
        ): (median(row, "decode_ms_per_token") or 0.0)
        for row in results.rows
        if "concurrency" in row.labels and "decode_ms_per_token" in row.values
    }

"""The table of docs/gpu.md, and the goals of what it shows: `foretoken bench` on a GPU."""

from __future__ import annotations

from pathlib import Path

from benchmarks.common import goal
from benchmarks.markup import markdown, number, where
from foretoken.lab.results import Results, Row, Spread, read

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
    best = max((_median(row, "output_tokens_per_second") for row in results.rows), default=0.0)
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
        share = _median(row, "host_gap_ms") / _median(row, "step_ms")
        gap = Row(row.case, {}, {"share": share})
        notes.append(goal(f"{row.case}: host gap to step", gap, "share", HOST_GAP, False))
        if (method, prompt, batch) == ("plain", SHORT, 64) and _median(row, "requests") == batch:
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
        ): _median(row, "decode_ms_per_token")
        for row in results.rows
        if "concurrency" in row.labels and "decode_ms_per_token" in row.values
    }


def _median(row: Row, name: str) -> float:
    value = row.values.get(name, 0.0)
    return float(value.median if isinstance(value, Spread) else value)

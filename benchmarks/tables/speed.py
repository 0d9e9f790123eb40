"""Tables of speed.json and gguf_*.json: the embedded pair, a real model, and random weights."""

from __future__ import annotations

from pathlib import Path

from benchmarks.tables.driver import find, markdown, median, number, spread, where
from foretoken.lab.results import Label, Results, Row, read

TEMPERATURES = (0.0, 0.8)
BASELINES = {
    "plain": "to plain",
    "generate": "to `generate`",
    "best_assisted": "to assisted",
    "llama_cpp": "to llama.cpp",
    "best_llama_cpp_drafted": "to drafted llama.cpp",
}
PAIR = (  # title, engine, method
    ("plain decoding", "foretoken", "plain"),
    ("speculative, draft model", "foretoken", "draft_model"),
    ("speculative, n-gram", "foretoken", "ngram"),
    ("llama.cpp", "llama.cpp", "plain"),
    ("llama.cpp, same draft model", "llama.cpp", "draft_model"),
    ("Transformers `generate`", "transformers", "generate"),
    ("Transformers assisted generation", "transformers", "assisted"),
)
REAL = (
    ("plain", "foretoken", "plain"),
    ("EAGLE-3 head, best K", "foretoken", "eagle3"),
    ("EAGLE-3 head, K=auto", "foretoken", "auto"),
    ("n-gram, best K", "foretoken", "ngram"),
    ("llama.cpp plain", "llama.cpp", "plain"),
    ("llama.cpp lookup, best", "llama.cpp", "lookup"),
)
SMOLLM2 = {"Q4_1": "gguf_smollm2_135m_instruct_q4_1", "Q8_0": "gguf_smollm2_135m_instruct_q8_0"}
LONG = 512  # tokens of the prompt that is timed


def best(results: Results, **labels: Label) -> Row | None:
    """The row with the highest median speed among those with such labels; None: there is none."""
    rows = [row for row in find(results, **labels) if "tokens_per_second" in row.values]
    return max(rows, key=lambda row: median(row, "tokens_per_second") or 0.0, default=None)


def speed(results: Results) -> str:
    """Every case: tokens/s and the ratios, at both temperatures."""
    others = {
        f"ratio_to_{name}": title
        for name, title in BASELINES.items()
        if f"ratio_to_{name}" in results.rows[0].values
    }
    header = ["batch 1, 2 cores, float32"]
    for t in TEMPERATURES:
        header += [f"tokens/s, T={t:g}", *others.values()]
    by_case, rows = {row.case: row for row in results.rows}, []
    for name in dict.fromkeys(row.case.rpartition(", T=")[0] for row in results.rows):
        cells = [name]
        for t in TEMPERATURES:
            row = by_case[f"{name}, T={t:g}"]
            cells.append(spread(row, "tokens_per_second", 0))
            cells += [f"{number(row, ratio)}x" for ratio in others]
        rows.append(cells)
    return markdown(header, rows)


def summary(results: Results) -> str:
    """The README's table: the best K of each method; "" for a run with fewer threads than cores."""
    header = ["embedded pair, batch 1, 2 CPU cores"]
    for t in TEMPERATURES:
        header += [f"tokens/s, T={t:g}", "to plain"]
    # Files of 2026-11-21 have one number of threads and do not label it.
    threads = {"threads": max(results.shapes["threads"])} if "threads" in results.shapes else {}
    if threads and threads["threads"] < results.shapes["cores"]:
        return ""
    rows = []
    for title, engine, method in PAIR:
        cells = [title]
        for t in TEMPERATURES:
            row = best(results, engine=engine, method=method, temperature=t, **threads)
            if row is None:
                break
            k = f", K={row.labels['k']}" if row.labels["k"] else ""
            cells += [f"{number(row, 'tokens_per_second', 0)}{k}"]
            cells += [f"{number(row, 'ratio_to_plain')}x"]
        else:
            rows.append(cells)
    return markdown(header, rows)


class Starts:
    """What `benchmarks.speed_gguf.starts` measured, with one number of threads."""

    def __init__(self, results: Results, threads: int) -> None:
        self._results, self._threads = results, threads

    def seconds(self, engine: str, what: str) -> float | None:
        rows = find(self._results, engine=engine, method=what, threads=self._threads)
        return median(rows[0] if rows else None, "seconds")

    def rates(self, what: str, tokens: int, digits: int = 0) -> str:
        """Tokens per second of ours and of llama.cpp, and their ratio."""
        ours, theirs = (self.seconds(engine, what) for engine in ("foretoken", "llama.cpp"))
        if ours is None or theirs is None:
            return ""
        mine, other = tokens / ours, tokens / theirs
        return f"{mine:.{digits}f} / {other:.{digits}f} ({mine / other:.2f}x)"

    def loads(self) -> str:
        ours, theirs = (self.seconds(engine, "load") for engine in ("foretoken", "llama.cpp"))
        return "" if ours is None or theirs is None else f"{ours:.2f} / {theirs:.2f}"


def real_model(folder: Path) -> str:
    """SmolLM2-135M-Instruct: what a file takes with each number of threads."""
    found = {title: read(folder / f"{file}.json") for title, file in SMOLLM2.items()}
    columns = [(title, r, t) for title, r in found.items() for t in (1, 2)]
    header = ["SmolLM2-135M-Instruct, batch 1"]
    header += [f"{title}, {t} thread{'s' * (t > 1)}" for title, _, t in columns]
    starts = [Starts(results, threads) for _, results, threads in columns]
    pair = "Foretoken / llama.cpp"
    long = f"prompt of {LONG}"
    rows = [
        [f"plain decoding, tokens/s: {pair}", *(s.rates("token", 1) for s in starts)],
        [f"{long} tokens, tokens/s: {pair}", *(s.rates(long, LONG) for s in starts)],
        [f"loading, s: {pair}", *(s.loads() for s in starts)],
    ]
    for t in TEMPERATURES:
        for title, engine, method in REAL:
            cells = []
            for _, results, threads in columns:
                row = best(results, threads=threads, temperature=t, engine=engine, method=method)
                k = f", K={row.labels['k']}" if row and method == "eagle3" else ""
                ratio = number(row, "ratio_to_plain")
                cells.append(f"{number(row, 'tokens_per_second', 0)}{k} ({ratio}x)" if row else "")
            if any(cells):
                rows.append([f"answers, T={t:g}, tokens/s (to plain): {title}", *cells])
    return markdown(header, rows) + "\n".join(map(where, found.values()))


def real_acceptance(folder: Path) -> str:
    """Acceptance of its head on held-out chats."""
    results = read(folder / f"{SMOLLM2['Q4_1']}.json")
    found = [row for row in results.rows if "mean_acceptance_length" in row.values]
    if not found:
        raise FileNotFoundError(f"{results.name}.json has no acceptance")
    cells: dict[str, dict[str, str]] = {}
    for row in sorted(found, key=lambda row: row.labels["temperature"]):
        name = f"{row.labels['kind']}, T={row.labels['temperature']:g}"
        cells.setdefault(name, {})[f"K={row.labels['k']}"] = number(row, "mean_acceptance_length")
    rows = [[name, *by_k.values()] for name, by_k in cells.items()]
    header = ["accepted drafts + 1", *next(iter(cells.values()))]
    return markdown(header, rows) + where(results)


def gguf_shapes(folder: Path) -> str:
    """Random weights of the shapes of Qwen3: plain decoding, and how near memory's bound."""
    header = [
        "random weights",
        "threads",
        "decoding, tokens/s: Foretoken / llama.cpp",
        "GB/s read (of memory's)",
        "pass of 5 rows / of 1",
        f"prompt of {LONG}, tokens/s: Foretoken / llama.cpp",
        "loading, s",
    ]
    rows, results = [], None
    for path in sorted(folder.glob("gguf_qwen3_*.json")):
        results = read(path)
        size, memory = results.shapes["bytes"] / 1e9, results.hardware["read_gb_per_s"]
        name = results.shapes["target"].removesuffix(".gguf")
        for threads in (1, 2):
            starts = Starts(results, threads)
            token, verify = (
                starts.seconds("foretoken", what) or 0.0 for what in ("token", "pass of 5 rows")
            )
            cells = [f"{name}, {size:.2f} GB", str(threads), starts.rates("token", 1, 1)]
            cells += [f"{size / token:.1f} ({size / token / memory:.0%})"]
            cells += [f"{verify / token:.2f}", starts.rates(f"prompt of {LONG}", LONG)]
            rows.append([*cells, f"{starts.seconds('foretoken', 'load'):.1f}"])
    if results is None:
        raise FileNotFoundError("gguf_qwen3_*.json")
    return markdown(header, rows) + where(results)

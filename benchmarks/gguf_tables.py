"""Tables of gguf_*.json: a real model, and random weights of other shapes, beside llama.cpp."""

from __future__ import annotations

from pathlib import Path

from benchmarks.markup import markdown, where
from foretoken.lab.results import Results, Row, Spread, read

REAL = "gguf_smollm2_135m_instruct_"
FILES = {"q4_1": "Q4_1", "q8_0": "Q8_0"}
LONG = 512  # tokens of the prompt that is timed
BANDWIDTH = "read_gb_per_s"


def median(row: Row | None, value: str) -> float | None:
    found = None if row is None else row.values.get(value)
    return found.median if isinstance(found, Spread) else found if found is None else float(found)


def find(results: Results, **labels: object) -> list[Row]:
    return [row for row in results.rows if labels.items() <= row.labels.items()]


def start(results: Results, engine: str, what: str, threads: int) -> float | None:
    """Seconds of one of `benchmarks.speed_gguf.starts`."""
    rows = find(results, engine=engine, method=what, threads=threads)
    return median(rows[0] if rows else None, "seconds")


def best(
    results: Results, threads: int, temperature: float, engine: str, method: str
) -> Row | None:
    rows = find(results, threads=threads, temperature=temperature, engine=engine, method=method)
    return max(rows, key=lambda row: median(row, "tokens_per_second") or 0, default=None)


def rate(seconds: float | None, tokens: int = 1) -> float | None:
    return None if seconds is None else tokens / seconds


def beside(ours: float | None, theirs: float | None, digits: int = 0) -> str:
    """A figure of ours, one of llama.cpp's, and their ratio."""
    if ours is None or theirs is None:
        return ""
    return f"{ours:.{digits}f} / {theirs:.{digits}f} ({ours / theirs:.2f}x)"


def real_model(folder: Path) -> str:
    """SmolLM2-135M-Instruct: what a file takes with each number of threads."""
    found = {title: read(folder / f"{REAL}{name}.json") for name, title in FILES.items()}
    columns = [(r, t) for r in found.values() for t in (1, 2)]
    header = ["SmolLM2-135M-Instruct, batch 1"]
    header += [f"{n}, {t} thread{'s' * (t > 1)}" for n in found for t in (1, 2)]
    rows = [
        ["plain decoding, tokens/s: Foretoken / llama.cpp"],
        [f"prompt of {LONG} tokens, tokens/s: Foretoken / llama.cpp"],
        ["loading, s: Foretoken / llama.cpp"],
    ]
    for results, threads in columns:
        pair = [
            [start(results, e, w, threads) for e in ("foretoken", "llama.cpp")]
            for w in ("token", "prompt of 512", "load")
        ]
        rows[0].append(beside(*(rate(s) for s in pair[0])))
        rows[1].append(beside(*(rate(s, LONG) for s in pair[1])))
        ours, theirs = pair[2]
        rows[2].append("" if ours is None or theirs is None else f"{ours:.2f} / {theirs:.2f}")
    for temperature in (0.0, 0.8):
        for title, engine, method in (
            ("plain", "foretoken", "plain"),
            ("EAGLE-3 head, best K", "foretoken", "eagle3"),
            ("EAGLE-3 head, K=auto", "foretoken", "auto"),
            ("n-gram, best K", "foretoken", "ngram"),
            ("llama.cpp plain", "llama.cpp", "plain"),
            ("llama.cpp lookup, best", "llama.cpp", "lookup"),
        ):
            cells = []
            for results, threads in columns:
                row = best(results, threads, temperature, engine, method)
                speed, ratio = median(row, "tokens_per_second"), median(row, "ratio_to_plain")
                k = f", K={row.labels['k']}" if row and method == "eagle3" else ""
                cells.append("" if speed is None else f"{speed:.0f}{k} ({ratio:.2f}x)")
            if any(cells):
                rows.append([f"answers, T={temperature:g}, tokens/s (to plain): {title}", *cells])
    return markdown(header, rows) + "\n".join(where(r) for r in found.values())


def real_acceptance(folder: Path) -> str:
    """Acceptance of its head on held-out chats."""
    results = read(folder / f"{REAL}q4_1.json")
    found = [row for row in results.rows if "mean_acceptance_length" in row.values]
    if not found:
        raise FileNotFoundError(f"{results.name}.json has no acceptance")
    ks = sorted({int(str(row.labels["k"])) for row in found})
    rows = []
    for temperature in (0.0, 0.8):
        for kind in ("chat", "code"):
            cells = [f"{kind}, T={temperature:g}"]
            for k in ks:
                (row,) = [
                    r
                    for r in found
                    if {"k": k, "temperature": temperature, "kind": kind}.items()
                    <= r.labels.items()
                ]
                cells.append(f"{median(row, 'mean_acceptance_length'):.2f}")
            rows.append(cells)
    return markdown(["accepted drafts + 1", *(f"K={k}" for k in ks)], rows) + where(results)


def gguf_shapes(folder: Path) -> str:
    """Random weights of the shapes of Qwen3: plain decoding, and how near memory's bound."""
    rows, last = [], None
    for path in sorted(folder.glob("gguf_qwen3_*.json")):
        last = results = read(path)
        size, bandwidth = float(str(results.shapes["bytes"])), results.hardware.get(BANDWIDTH)
        name = str(results.shapes["target"]).removesuffix(".gguf")
        for threads in (1, 2):
            ours, theirs = (start(results, e, "token", threads) for e in ("foretoken", "llama.cpp"))
            prompt = [
                start(results, e, "prompt of 512", threads) for e in ("foretoken", "llama.cpp")
            ]
            load = start(results, "foretoken", "load", threads)
            verify = start(results, "foretoken", "pass of 5 rows", threads)
            read_rate = size / 1e9 / ours if ours else 0.0
            of_memory = f"{read_rate:.1f}" + (
                f" ({read_rate / float(bandwidth):.0%})" if bandwidth else ""
            )
            rows.append(
                [
                    f"{name}, {size / 1e9:.2f} GB",
                    str(threads),
                    beside(rate(ours), rate(theirs), 1),
                    of_memory,
                    f"{verify / ours:.2f}" if verify and ours else "",
                    beside(*(rate(s, LONG) for s in prompt)),
                    f"{load:.1f}" if load else "",
                ]
            )
    if last is None:
        raise FileNotFoundError("gguf_qwen3_*.json")
    header = [
        "random weights",
        "threads",
        "decoding, tokens/s: Foretoken / llama.cpp",
        "GB/s read (of memory's)",
        "pass of 5 rows / of 1",
        f"prompt of {LONG}, tokens/s: Foretoken / llama.cpp",
        "loading, s",
    ]
    return markdown(header, rows) + where(last)

"""The same requests on two devices, or backends, in float32: how many texts are the same?

Held-out prompts of the embedded pair, plain, with its draft model and with prompt lookup, at T=0
and seeded at T=0.8. Texts that differ must do so from a near-tie on (`near_ties.py`).

    python -m benchmarks.same_text --devices cpu cuda --output benchmarks/results
    python -m benchmarks.same_text --devices cpu cpu --backends native torch
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.near_ties import Parted, unexplained
from foretoken import LLM, SamplingParams
from foretoken.lab.results import Row, collect, write
from foretoken.lab.workloads import heldout

SPECULATION: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 4},
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
}
TEMPERATURES = (0.0, 0.8)
LEAST = 0.95  # of the texts must be the same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", nargs=2, default=["cpu", "cuda"])
    parser.add_argument("--backends", nargs=2, default=["auto", "auto"])
    parser.add_argument("--prompts", type=int, default=192)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--output", type=Path, default=None, help="a folder")
    args = parser.parse_args()
    sides, rows = list(zip(args.devices, args.backends, strict=True)), []
    for drafter, speculation in SPECULATION.items():
        found: list[list[list[int]]] = []
        for device, backend in sides:
            with LLM(
                "tiny-python", speculation, device=device, backend=backend, dtype="float32",
                max_num_seqs=32, max_model_len=512, num_blocks=1200, block_size=16,
            ) as llm:  # fmt: skip
                encode = llm.get_tokenizer().encode
                prompts = [encode(item.prompt)[-400:] for item in heldout(args.prompts)]
                asked = [
                    SamplingParams(temperature=t, seed=seed, max_tokens=args.max_tokens)
                    for t in TEMPERATURES
                    for seed in range(len(prompts))
                ]
                outputs = llm.generate(prompts * len(TEMPERATURES), asked)
                found.append([output.outputs[0].token_ids for output in outputs])
        both = zip(prompts * len(TEMPERATURES), asked, *found, strict=True)
        parted = [Parted.of(prompt, p, 0, b, a) for prompt, p, a, b in both]
        for t in TEMPERATURES:
            of_t = [x for x, p in zip(parted, asked, strict=True) if p.temperature == t]
            unlike = [x for x in of_t if x is not None]
            wrong = len(unexplained(unlike, speculation))
            values = {
                "texts": len(of_t),
                "same": len(of_t) - len(unlike),
                "near_ties": len(unlike) - wrong,
                "unexplained": wrong,
            }
            labels = {"drafter": drafter, "temperature": t}
            rows.append(Row(f"{drafter}, T={t:g}", labels, values))
            print(rows[-1].case, values, flush=True)
    if args.output is not None:
        command = f"python -m benchmarks.same_text {' '.join(sys.argv[1:])}"
        shapes = {"sides": sides, "max_tokens": args.max_tokens, "dtype": "float32"}
        write(collect(f"same_text_{sides[1][0]}", command, shapes, rows), args.output)
    few = any(row.values["same"] < LEAST * row.values["texts"] for row in rows)
    return int(few or any(row.values["unexplained"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())

"""How many drafts of a head are accepted on the held-out prompts, in the engine.

`python -m training.smollm2.evaluate --model FOLDER --head HEAD --out FILE`. Every request runs on
its own text. Outputs that end in a loop are easy to draft: they are counted apart.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foretoken import LLM, SamplingParams
from foretoken.outputs import RequestOutput, SpeculationMetrics
from training.smollm2.texts import read_heldout
from training.tiny_python.windows import ends_in_cycle

LAWS = ((0.0, "standard"), (0.8, "standard"), (0.8, "block"))
MAX_TOKENS = 256


def count(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Of these requests together: accepted drafts + 1 of a verification, and by position.

    `accepted_at[i]`: how often the drafts up to i were all accepted; `chance_at[i]`: how often i
    was, where all before it were.
    """
    total = SpeculationMetrics()
    for output in outputs:
        total.add(output.metrics)
    accepted, drafted = total.accepted_per_position, total.drafted_per_position
    reached = [drafted[0], *accepted] if drafted else []
    return {
        "requests": len(outputs),
        "verifications": total.num_drafts,
        "length": total.mean_acceptance_length,
        "accepted_at": [a / d for a, d in zip(accepted, drafted, strict=True)],
        "chance_at": [a / max(1, r) for a, r in zip(accepted, reached, strict=False)],
    }


def summary(outputs: Sequence[RequestOutput], kinds: Sequence[str]) -> dict[str, Any]:
    """`count` of those that do not end in a loop, of all, and of each kind."""
    kept = [not ends_in_cycle(output.outputs[0].token_ids) for output in outputs]

    def of(kind: str | None) -> list[RequestOutput]:
        rows = zip(outputs, kinds, kept, strict=True)
        return [output for output, its, is_kept in rows if is_kept and kind in (its, None)]

    return {
        "without_loops": count(of(None)),
        **{kind: count(of(kind)) for kind in sorted(set(kinds))},
        "all": count(outputs),
    }


def measure(
    model: str, head: str, drafts: Sequence[int], samples: int, most: int, engine: dict[str, Any]
) -> list[dict[str, Any]]:
    """A row for each law and K; sampled ones run each prompt `samples` times."""
    rows = read_heldout()
    speculation = {"method": "eagle3", "model": head, "num_speculative_tokens": max(drafts)}
    found = list[dict[str, Any]]()
    with LLM(model, speculation, **engine) as llm:
        tokenizer: Any = llm.tokenizer
        given = [
            tokenizer.apply_chat_template(
                row["messages"], tokenize=False, add_generation_prompt=True
            )
            for row in rows
        ]
        for temperature, rule in LAWS:
            times = samples if temperature else 1
            params = [
                SamplingParams(temperature=temperature, max_tokens=most, seed=seed)
                for seed in range(len(given) * times)
            ]
            for k in drafts:
                for one in params:
                    one.num_speculative_tokens, one.rejection_sample_method = k, rule
                outputs = llm.generate(given * times, params)
                found.append({"temperature": temperature, "rule": rule, "k": k})
                found[-1] |= summary(outputs, [row["kind"] for row in rows] * times)
                kept = found[-1]["without_loops"]
                print(f"T={temperature:g} {rule} K={k}: {kept['length']:.3f}", flush=True)
    return found


def main() -> None:
    """Command line."""
    began = time.time()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--head", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--drafts", type=int, nargs="+", default=[2, 3, 4, 5, 6])
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--kv-cache-gib", type=float)
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    engine: dict[str, Any] = {
        "max_model_len": 1024, "max_num_seqs": args.max_num_seqs,
        "kv_cache_gib": args.kv_cache_gib, "dtype": args.dtype,
    }  # fmt: skip
    found = measure(args.model, args.head, args.drafts, args.samples, args.max_tokens, engine)
    record = {"max_tokens": args.max_tokens, "samples": args.samples, "dtype": args.dtype,
              "seconds": round(time.time() - began), "rows": found}  # fmt: skip
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

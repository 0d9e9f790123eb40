"""The same requests on two devices, or backends, in float32: how many texts are the same?

Held-out prompts of the embedded pair: plain, with its draft model, with prompt lookup, with random
EAGLE-3 heads, with K = `auto`, and with all of these drafters at once, at T=0 and seeded at T=0.8.
The pool is too small for what runs, prompts come twice, and copies of some requests are aborted.
Texts that differ must do so from a near-tie on (`near_ties.py`); traces are compared where K is
fixed.

    python -m benchmarks.same_text --devices cpu cuda --output benchmarks/results
    python -m benchmarks.same_text --devices cpu cpu --backends native torch
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.heads import save_head
from benchmarks.near_ties import Parted, unexplained
from foretoken import LLM, SamplingParams
from foretoken.engine.boundary import build_output
from foretoken.lab.results import Row, collect, write
from foretoken.lab.workloads import heldout
from foretoken.models import resolve_checkpoint
from foretoken.models.checkpoint import read_config
from foretoken.outputs import RequestOutput

AUTO = {"num_speculative_tokens": "auto", "max_speculative_tokens": 4}
NAMES = ("draft_model", "ngram", "eagle3")  # of "several"
HEADS: dict[str, dict[str, Any]] = {
    "eagle3, norms": {
        "drafted": 1024, "model_type": "qwen3", "norm_before_residual": True, "fc_norm": True,
        "norm_output": True, "sliding_window": 24, "layer_types": ["sliding_attention"],
    },
    "eagle3, biases": {
        "attention_bias": True, "norm_before_fc": True, "partial_rotary_factor": 0.5,
    },
}  # fmt: skip
"""Of `save_head`; where nothing is said, a head without any of these."""
CASES = ("plain", *NAMES, *HEADS, "several", "auto", "several, auto")
RULES = (None, "block", "coupled")
TEMPERATURES = (0.0, 0.8)
LEAST = 0.95  # of the texts must be the same, and of their traces
CLOSE = 1e-3  # probabilities in a trace
ABORTED_AT = 10  # tokens
WAVE = 4  # requests, which come again at the next temperature
HAPPENED = ("preemptions", "cached_tokens", "aborted")


def speculation(case: str, head: Path) -> dict[str, Any] | None:
    """The option of an engine; `head` is a folder."""
    name, _, rest = case.partition(", ")
    k = AUTO if "auto" in (name, rest) else {"num_speculative_tokens": 4}
    one: dict[str, dict[str, Any]] = {name: {"method": name} for name in NAMES}
    one["eagle3"]["model"] = str(head)
    if name == "several":
        return {**k, "drafters": [*one.values()], "method": "draft_model"}
    return None if name == "plain" else {**k, **one["draft_model" if name == "auto" else name]}


def params_of(case: str, number: int, max_tokens: int) -> list[SamplingParams]:
    """Of requests at each temperature, whose drafters, rules and traces take turns."""
    plain = case == "plain"
    return [
        SamplingParams(
            temperature=temperature, seed=seed, max_tokens=max_tokens, trace=seed % 3 == 1,
            drafter=NAMES[seed % 3] if case.startswith("several") else None,
            rejection_sample_method=None if plain else RULES[seed // 3 % 3],
        )
        for start in range(0, number, WAVE)
        for temperature in TEMPERATURES
        for seed in range(start, min(start + WAVE, number))
    ]  # fmt: skip


def serve(
    llm: LLM, prompts: list[list[int]], asked: Sequence[SamplingParams], happened: dict[str, int]
) -> list[RequestOutput]:
    """All at once, beside copies of every eighth that are aborted; counts what happened."""
    engine = llm.engine
    groups, copies = [], []
    for i, (prompt, params) in enumerate(zip(prompts, asked, strict=True)):
        groups.append(engine.add(str(i), prompt, params))
        if i % 8 == 0:
            copies.append(engine.add(f"copy of {i}", prompt, params))
    while engine.has_work:
        for group in copies:
            if not group.finished and group.samples[0].num_output >= ABORTED_AT:
                engine.abort(group)
                happened["aborted"] += 1
        engine.step()
    engine.step()  # what ran ahead is read
    engine.check_integrity()
    outputs = [build_output(engine, group) for group in groups]
    for output in outputs:
        if output.error is not None:
            raise output.error
        happened["preemptions"] += output.metrics.num_preemptions
        happened["cached_tokens"] += output.metrics.num_cached_tokens
    return outputs


def traces_agree(one: RequestOutput, other: RequestOutput) -> bool:
    """Whether each token came about in the same way."""
    mine, theirs = one.outputs[0].trace or [], other.outputs[0].trace or []
    return len(mine) == len(theirs) and all(
        (a.token_id, a.origin, a.draft_index, a.drafter, len(a.dropped))
        == (b.token_id, b.origin, b.draft_index, b.drafter, len(b.dropped))
        and abs((a.p or 0.0) - (b.p or 0.0)) < CLOSE
        and abs((a.q or 0.0) - (b.q or 0.0)) < CLOSE
        for a, b in zip(mine, theirs, strict=True)
    )


def compare(case: str, args: argparse.Namespace, head: Path) -> list[Row]:
    """A row per temperature."""
    given, found = speculation(case, head), list[list[RequestOutput]]()
    happened = dict.fromkeys(HAPPENED, 0)
    for device, backend in zip(args.devices, args.backends, strict=True):
        with LLM(
            "tiny-python", given, device=device, backend=backend, dtype="float32",
            max_num_seqs=32, max_model_len=512, num_blocks=args.num_blocks, block_size=16,
        ) as llm:  # fmt: skip
            encode = llm.get_tokenizer().encode
            texts = [
                encode(item.prompt)[-100 if i % 4 else -400 :]
                for i, item in enumerate(heldout(args.prompts))
            ]
            asked = params_of(case, args.prompts, args.max_tokens)
            prompts = [texts[params.seed or 0] for params in asked]
            happened = dict.fromkeys(HAPPENED, 0)  # on the second
            found.append(serve(llm, prompts, asked, happened))
    rows = []
    for temperature in TEMPERATURES:
        at = [i for i, params in enumerate(asked) if params.temperature == temperature]
        pairs = [(found[0][i], found[1][i]) for i in at]
        both = zip(at, pairs, strict=True)
        parted = [
            Parted.of(prompts[i], asked[i], 0, b.outputs[0].token_ids, a.outputs[0].token_ids)
            for i, (a, b) in both
        ]
        unlike = [x for x in parted if x is not None]
        wrong = len(unexplained(unlike, given))
        values: dict[str, Any] = {
            "texts": len(at),
            "same": len(at) - len(unlike),
            "near_ties": len(unlike) - wrong,
            "unexplained": wrong,
            **happened,
        }
        if "auto" not in case:
            like = [
                p for p, x in zip(pairs, parted, strict=True) if x is None and p[0].outputs[0].trace
            ]
            values |= {"traces": len(like), "traces_same": sum(traces_agree(*p) for p in like)}
        rows.append(
            Row(f"{case}, T={temperature:g}", {"drafter": case, "temperature": temperature}, values)
        )
    return rows


def is_right(row: Row) -> bool:
    """Nothing is unexplained, and little parts."""
    values: Any = row.values
    few = values["same"] < LEAST * values["texts"]
    few |= values.get("traces_same", 0) < LEAST * values.get("traces", 0)
    return not (few or values["unexplained"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", nargs=2, default=["cpu", "cuda"])
    parser.add_argument("--backends", nargs=2, default=["auto", "auto"])
    parser.add_argument("--prompts", type=int, default=192)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--num-blocks", type=int, default=160, help="of the pool: too few")
    parser.add_argument("--cases", nargs="+", default=CASES, choices=CASES)
    parser.add_argument("--name", help="of the results file")
    parser.add_argument("--output", type=Path, default=None, help="a folder")
    args, rows = parser.parse_args(), list[Row]()
    config = read_config(resolve_checkpoint("tiny-python"))
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"hidden": config["hidden_size"], "vocabulary": config["vocab_size"]}
        for number, case in enumerate(args.cases):
            own = {**sizes, "head_dim": 64, **HEADS.get(case, {})}
            head = save_head(Path(folder) / str(number), **own)
            rows += compare(case, args, head)
            for row in rows[-len(TEMPERATURES) :]:
                print("ok " if is_right(row) else "BAD", row.case, row.values, flush=True)
            if args.output is not None:
                command = f"python -m benchmarks.same_text {' '.join(sys.argv[1:])}"
                sides = list(zip(args.devices, args.backends, strict=True))
                shapes = {"sides": sides, "max_tokens": args.max_tokens, "dtype": "float32"}
                name = args.name or f"same_text_{args.devices[1]}"
                write(collect(name, command, shapes, rows), args.output)
    missing = [name for name in HAPPENED if not any(row.values[name] for row in rows)]
    if missing:
        print("BAD: there were no", *missing)
    return int(bool(missing) or not all(map(is_right, rows)))


if __name__ == "__main__":
    sys.exit(main())

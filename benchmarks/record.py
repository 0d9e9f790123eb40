"""Record what some 600 requests return, and compare two recordings byte for byte.

    python -m benchmarks.record run --backend native --out before.jsonl
    python -m benchmarks.record compare before.jsonl after.jsonl

For a change that must not change a token: record before it and after it. The requests go through
`LLM` and cover every rule, drafter, filter and edit, preemption, prefix hits and chunked prefills.
An older commit is recorded with PYTHONPATH naming its `src` first and this tree second, which is
why only the names that all versions share are used here.

A recording has one JSON object per line and request. Log-probabilities are written as hexadecimal
floats: every bit counts. What a clock decides is left out.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import foretoken
from foretoken import LLM, Logprob, RequestOutput, SamplingParams
from foretoken.lab.workloads import heldout
from foretoken.ops import BACKENDS

TARGET = "tiny-python"
NAMES = {  # of a backend, the newest first
    "native": ("native", "native_cpu"),
    "torch": ("torch", "torch_cpu"),
    "reference": ("reference",),
}
LENGTHS = {  # of outputs: the reference takes some 15 times as long for a token
    "native": (6, 17, 40, 96),
    "torch": (6, 17, 40, 96),
    "reference": (5, 9, 16, 32),
}
NEWLINE, COMMA, COLON, UNDERSCORE = 199, 12, 26, 63  # of the target's tokenizer
VOCABULARY = 4096
BAD_ID = 10 * VOCABULARY

TEMPERATURES = (0.0, 0.0, 0.3, 0.8, 1.0, 1.5)
FILTERS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"top_k": 1},
    {"top_k": 20},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"top_k": 50, "top_p": 0.8},
    {"top_k": 200, "top_p": 0.95, "min_p": 0.01},
)
EDITS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"logit_bias": {NEWLINE: 2.5, COMMA: -100.0, 300: 4.0}},
    {"allowed_token_ids": range(0, VOCABULARY, 3)},
    {"bad_words": ["self", "return None", ")", "\n"]},
    {"min_tokens": 4, "stop_token_ids": [NEWLINE, COLON, UNDERSCORE]},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.8, "frequency_penalty": 0.4},
    {"frequency_penalty": -0.5, "repetition_penalty": 0.9},
    {
        "logit_bias": {COLON: 3.0},
        "allowed_token_ids": range(2, VOCABULARY),
        "bad_words": ["import"],
        "min_tokens": 3,
        "presence_penalty": -0.3,
        "repetition_penalty": 1.1,
    },
)
ENDS: tuple[dict[str, Any], ...] = (
    {},
    {"ignore_eos": True},
    {"ignore_eos": True},
    {"stop": ["\n\n", "return"]},
    {"stop": [")", "= "], "include_stop_str_in_output": True},
    {"stop_token_ids": [NEWLINE, COMMA]},
    {"stop_token_ids": [UNDERSCORE], "min_tokens": 2, "skip_special_tokens": False},
)
LOGPROBS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"logprobs": 0},
    {"logprobs": 1},
    {"logprobs": 5},
    {"prompt_logprobs": 0},
    {"prompt_logprobs": 5, "logprobs": 2},
)
SAMPLES = (1, 1, 1, 2, 3)
REFUSED: tuple[dict[str, Any], ...] = (
    {"max_tokens": 100_000},
    {"stop_token_ids": [BAD_ID]},
    {"allowed_token_ids": [COMMA], "bad_words": [","], "max_tokens": 5},  # fails while it runs
)
COUNTS = """num_steps num_drafts num_draft_tokens num_accepted_tokens accepted_per_position
    drafted_per_position num_synthetic_drafts num_cached_tokens num_preemptions""".split()


@dataclass(frozen=True)
class Request:
    """A prompt and its `SamplingParams` as a dict."""

    prompt: Any
    params: dict[str, Any]


@dataclass(frozen=True)
class Recipe:
    """An engine and the requests that it is given.

    Attributes:
        most: K of the engine; 0 without speculation.
        rules: of its requests; None is the engine's.
        characters: of a prompt.
        shared: held-out texts that a prompt begins with.
        shows: a count that must not be 0 over all requests, or the recipe misses its purpose.
    """

    name: str
    speculation: dict[str, Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    rules: tuple[str | None, ...] = (None, "standard", "block", "coupled")
    per_call: int = 16
    characters: int = 160
    shared: int = 0
    shows: str = "num_steps"

    @property
    def most(self) -> int:
        return (self.speculation or {}).get("num_speculative_tokens", 0)


def drafting(k: int, method: str = "draft_model", **options: Any) -> dict[str, Any]:
    return {"method": method, "num_speculative_tokens": k, **options}


def synthetic(k: int, method: str = "draft_model", **options: Any) -> dict[str, Any]:
    return drafting(k, method, rejection_sample_method="synthetic", **options)


_MIXED = (None, "synthetic", "standard", "block", "coupled")
_SMALL = {"block_size": 4, "num_blocks": 39, "max_num_seqs": 8}  # holds one long request
RECIPES = (
    Recipe("plain"),
    Recipe("draft", drafting(4), {"max_num_seqs": 6}, shows="num_accepted_tokens"),
    Recipe("draft-deep", drafting(6, rejection_sample_method="block"), {"seed": 3}),
    Recipe("draft-greedy", drafting(5, draft_sample_method="greedy"), {"seed": 2**64 - 1}),
    Recipe("draft-coupled", drafting(3, rejection_sample_method="coupled")),
    Recipe("ngram", drafting(4, "ngram"), shared=1, shows="num_accepted_tokens"),
    Recipe("ngram-one", drafting(1, "ngram", prompt_lookup_min=1, prompt_lookup_max=3)),
    Recipe("synthetic-rate", synthetic(4, synthetic_acceptance_rate=0.6), rules=_MIXED),
    Recipe(
        "synthetic-rates",
        synthetic(3, draft_sample_method="greedy", synthetic_acceptance_rates=[0.9, 0.5, 0.2]),
        rules=_MIXED,
    ),
    Recipe(
        "synthetic-length", synthetic(5, "ngram", synthetic_acceptance_length=2.7), rules=_MIXED
    ),
    Recipe(
        "preemption",
        drafting(4),
        _SMALL,
        per_call=24,
        characters=90,
        shows="num_preemptions",
    ),
    Recipe(
        "preemption-cold",
        drafting(3, draft_sample_method="greedy"),
        _SMALL | {"enable_prefix_caching": False},
        characters=90,
        shows="num_preemptions",
    ),
    Recipe(
        "chunks",
        drafting(3),
        {"max_num_batched_tokens": 23, "max_num_seqs": 5, "enable_prefix_caching": False},
    ),
    Recipe("prefix", drafting(2), {"max_num_seqs": 4}, shared=3, shows="num_cached_tokens"),
    Recipe("fp64-noise", drafting(4), {"use_fp64_gumbel": True}),
    Recipe("bfloat16", drafting(4), {"dtype": "bfloat16", "max_num_seqs": 5}),
)


def calls(recipe: Recipe, lengths: tuple[int, ...]) -> list[list[Request]]:
    """The requests of two calls, always the same; the second begins with prompts of the first."""
    chosen = random.Random(recipe.name)
    texts = [item.prompt for item in heldout()]
    chosen.shuffle(texts)
    beginnings = ["\n".join(texts[i * recipe.shared : (i + 1) * recipe.shared]) for i in range(2)]
    tails = [text[-recipe.characters :] for text in texts[-2 * recipe.per_call :]]
    prompts = [beginnings[i % 2] + tail for i, tail in enumerate(tails)]
    prompts[recipe.per_call : recipe.per_call + 3] = prompts[:3]
    requests = [Request(prompt, parameters(recipe, chosen, lengths)) for prompt in prompts]
    refused = [Request(prompts[0], wrong) for wrong in REFUSED]
    refused.append(Request([1, BAD_ID], {}))
    return [requests[: recipe.per_call] + refused, requests[recipe.per_call :]]


def parameters(recipe: Recipe, chosen: random.Random, lengths: tuple[int, ...]) -> dict[str, Any]:
    """One of each kind."""
    params = {
        "temperature": chosen.choice(TEMPERATURES),
        "max_tokens": chosen.choice(lengths),
        "n": chosen.choice(SAMPLES),
        "seed": chosen.choice((None, 0, chosen.getrandbits(64))),
    }
    for kind in (FILTERS, EDITS, ENDS, LOGPROBS):
        params |= chosen.choice(kind)
    if recipe.speculation:
        params["num_speculative_tokens"] = chosen.choice((None, None, *range(recipe.most + 1)))
        params["rejection_sample_method"] = chosen.choice(recipe.rules)
    return params


def run(kind: str, out: Path) -> None:
    """Write the recording of a backend."""
    backend = next(name for name in NAMES[kind] if name in BACKENDS)
    print(f"foretoken of {Path(foretoken.__file__).parent}, backend {backend}")
    with out.open("w", encoding="utf-8") as file:
        for recipe in RECIPES:
            start, counts = time.perf_counter(), Counter[str]()
            for line in recorded(recipe, backend, LENGTHS[kind]):
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
                counts.update({k: v for k, v in line["counts"].items() if isinstance(v, int)})
                counts["requests"] += 1
            if not counts[recipe.shows]:
                raise SystemExit(f"{recipe.name}: {recipe.shows} is 0 over all of its requests")
            shown = {k: counts[k] for k in ("requests", *COUNTS) if counts[k]}
            print(f"{recipe.name:<17}{time.perf_counter() - start:6.1f} s  {shown}", flush=True)


def recorded(recipe: Recipe, backend: str, lengths: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """The lines of one engine."""
    options = {"threads": 1, "max_num_seqs": 16} | recipe.options
    with LLM(TARGET, recipe.speculation, backend=backend, **options) as llm:
        for number, requests in enumerate(calls(recipe, lengths)):
            prompts = [request.prompt for request in requests]
            params = [SamplingParams(**request.params) for request in requests]
            outputs = llm.generate(prompts, params, use_tqdm=False, on_error="return")
            for i, output in enumerate(outputs):
                yield {"request": f"{recipe.name}/{number}/{i}"} | as_line(output)


def as_line(output: RequestOutput) -> dict[str, Any]:
    """What a user may see of an output, except for times."""
    return {
        "prompt_token_ids": output.prompt_token_ids,
        "prompt_logprobs": as_rows(output.prompt_logprobs),
        "error": output.error and type(output.error).__name__,
        "counts": {name: getattr(output.metrics, name) for name in COUNTS},
        "samples": [
            {
                "token_ids": sample.token_ids,
                "text": sample.text,
                "finish_reason": sample.finish_reason,
                "stop_reason": sample.stop_reason,
                "seed": sample.seed,
                "origins": sample.origins,
                "logprobs": as_rows(sample.logprobs),
            }
            for sample in output.outputs
        ],
    }


def as_rows(positions: Any) -> list[Any] | None:
    """Per token None or its entries in order: id, log-probability, rank, text."""
    if positions is None:
        return None

    def entry(token: int, found: Logprob) -> list[Any]:
        return [token, float(found.logprob).hex(), found.rank, found.decoded_token]

    return [row and [entry(*item) for item in row.items()] for row in positions]


def compare(one: Path, other: Path) -> int:
    """Print what was compared and every difference; returns how many there are."""
    before, after = read(one), read(other)
    differences = [f"{name}: only in {one}" for name in before.keys() - after.keys()]
    differences += [f"{name}: only in {other}" for name in after.keys() - before.keys()]
    sizes = Counter[str]()
    for name in before:
        if name in after:
            sizes += size(before[name])
            differences += [f"{name}: {d}" for d in differing(before[name], after[name])]
    kinds = ("requests", "samples", "tokens", "log-probabilities")
    print("compared:", ", ".join(f"{sizes[kind]} {kind}" for kind in kinds))
    print("\n".join([*sorted(differences), f"{len(differences)} differences"]))
    return len(differences)


def read(path: Path) -> dict[str, dict[str, Any]]:
    """A recording by the names of its requests."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    return {line["request"]: line for line in lines}


def size(line: dict[str, Any]) -> Counter[str]:
    """What there is to compare in one request."""
    samples = line["samples"]
    scored = [line["prompt_logprobs"], *(sample["logprobs"] for sample in samples)]
    return Counter(
        {
            "requests": 1,
            "samples": len(samples),
            "tokens": sum(len(sample["token_ids"]) for sample in samples),
            "log-probabilities": sum(len(row or ()) for rows in scored for row in rows or ()),
        }
    )


def differing(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """One sentence per field that differs; of a list the first place."""
    if isinstance(one, dict) and isinstance(other, dict):
        for name in one | other:
            yield from differing(one.get(name), other.get(name), f"{where}.{name}".lstrip("."))
    elif where == "samples" and len(one) == len(other):
        for i, pair in enumerate(zip(one, other, strict=True)):
            yield from differing(*pair, f"samples[{i}]")
    elif isinstance(one, list) and isinstance(other, list) and one != other:
        unequal = [i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b]
        at = unequal[0] if unequal else min(len(one), len(other))
        shown = " → ".join(
            repr(items[at]) if at < len(items) else "no more" for items in (one, other)
        )
        more = f" (lengths {len(one)} and {len(other)}, {len(unequal)} places differ)"
        yield f"{where}[{at}]: {shown}{more}"
    elif one != other:
        yield f"{where}: {one!r} → {other!r}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("run", help="write a recording")
    recording.add_argument("--backend", choices=tuple(NAMES), default="native")
    recording.add_argument("--out", type=Path, required=True)
    comparison = commands.add_parser("compare", help="exit code 1 if two recordings differ")
    comparison.add_argument("before", type=Path)
    comparison.add_argument("after", type=Path)
    options = parser.parse_args()
    if options.command == "run":
        run(options.backend, options.out)
    else:
        sys.exit(1 if compare(options.before, options.after) else 0)


if __name__ == "__main__":
    main()

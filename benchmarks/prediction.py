"""What a prediction buys, by how far it is from what the target says.

The target's own greedy text is taken, edited, and given as the prediction: as if the caller had a
file, and the target returned it with those edits. Texts are served one at a time, all drafters on
the same prompts in turns.

    python -m benchmarks.prediction
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.common import TARGET, parse, progress, record
from foretoken import LLM, SamplingParams
from foretoken.lab.results import Row, Spread
from foretoken.lab.workloads import heldout
from foretoken.outputs import RequestOutput

K, LENGTH = 5, 192
OWN = {"method": "draft_model"}
KEYWORDS = {"self", "return", "import", "else", "elif", "with", "from", "class", "None", "raise"}
Edit = Callable[[random.Random, str], str]


def renamed(rng: random.Random, text: str) -> str:
    """Two names are others."""
    names = sorted(set(re.findall(r"\b[a-z_]{4,}\b", text)) - KEYWORDS)
    for name in rng.sample(names, min(2, len(names))):
        text = re.sub(rf"\b{name}\b", f"old_{name}", text)
    return text


def missing(rng: random.Random, text: str) -> str:
    """One line in eight is missing: the target says more."""
    return "\n".join(line for line in text.split("\n") if rng.random() > 1 / 8)


def more(rng: random.Random, text: str) -> str:
    """One line in eight stands twice, once changed: the target says less."""
    lines = text.split("\n")
    return "\n".join(f"{line}\n{line}  # old" if rng.random() < 1 / 8 else line for line in lines)


EDITS: dict[str, Edit] = {
    "the text itself": lambda rng, text: text,
    "two names changed": renamed,
    "one line in 8 missing": missing,
    "one line in 8 too many": more,
    "another text": lambda rng, text: heldout()[rng.randrange(len(heldout()))].reference,
}


def served(
    llm: LLM, prompts: Sequence[str], params: Sequence[SamplingParams]
) -> tuple[float, list[RequestOutput]]:
    """Seconds, and outputs, one request at a time."""
    start = time.perf_counter()
    outputs = [llm.generate(*one)[0] for one in zip(prompts, params, strict=True)]
    return time.perf_counter() - start, outputs


def main() -> None:
    args = parse(__doc__, prompts=8, repeats=5)
    prompts = [one.prompt for one in heldout(args.prompts)]
    greedy = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    options: dict[str, Any] = {"max_num_seqs": 1, "enable_prefix_caching": False}
    predicting = LLM(TARGET, {"method": "prediction", "num_speculative_tokens": K}, **options)
    drafting = LLM(TARGET, OWN | {"num_speculative_tokens": K}, **options)
    by_text = LLM(TARGET, {"method": "draft_text", "num_speculative_tokens": K}, **options)
    looking = LLM(TARGET, {"method": "ngram", "num_speculative_tokens": K}, **options)
    plain = [greedy] * len(prompts)
    texts = served(predicting, prompts, plain)[1]
    rng = random.Random(1)
    cases = {"plain": (predicting, plain)}
    cases |= {"draft_model": (drafting, plain), "draft_text": (by_text, plain)}
    cases |= {"ngram": (looking, plain)}
    for name, edit in EDITS.items():
        predicted = [replace(greedy, prediction=edit(rng, o.outputs[0].text)) for o in texts]
        cases[f"prediction, {name}"] = predicting, predicted
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    rows = []
    for repeat in progress(range(args.repeats + 1), "prediction"):
        for name, (llm, params) in cases.items():
            took, outputs = served(llm, prompts, params)
            if repeat:  # the first one warms up
                seconds[name].append(took)
            said = ([o.outputs[0].token_ids for o in both] for both in (outputs, texts))
            if next(said) != next(said):
                raise SystemExit(f"{name} changed a token")
            if repeat == args.repeats:
                drafted = sum(o.metrics.num_drafts for o in outputs)
                accepted = sum(o.metrics.num_accepted_tokens for o in outputs)
                tokens, steps = LENGTH * len(prompts), sum(o.metrics.num_steps for o in outputs)
                ratios = [a / b for a, b in zip(seconds["plain"], seconds[name], strict=True)]
                values = {
                    "tokens_per_step": tokens / steps,
                    "mean_acceptance_length": 1 + accepted / max(drafted, 1),
                    "speed_over_plain": Spread.of(ratios, "x"),
                    "tokens_per_second": Spread.of([tokens / s for s in seconds[name]], "1/s"),
                }
                rows.append(Row(name, {"case": name}, values))
                print(name, {k: getattr(v, "median", v) for k, v in values.items()})
    shapes = {"target": TARGET, "prompts": args.prompts, "tokens": LENGTH, "k": K, "batch": 1}
    notes = ["T=0: every case returned the same tokens, or the benchmark would have ended."]
    record("prediction", args, shapes, rows, notes)


if __name__ == "__main__":
    main()

"""The joint distribution of five tokens, through a whole engine: is it the target's?

A target and an unlike draft of a few tokens each, with random weights. The target's distribution of
three tokens is computed in float64 from its module alone; then tens of thousands of requests that
differ in their seed go through the engine, for each drafter and rule, and their counts must fit it.
The same counts must not fit the distribution at another temperature: a test that cannot fail shows
nothing.

    python -m benchmarks.engine_law --device cuda --output benchmarks/results
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from benchmarks.heads import save_head
from foretoken import LLM, SamplingParams
from foretoken.lab.laws.findings import CORRECT_P, MUTANT_P, goodness_of_fit
from foretoken.lab.results import Row, collect, write

VOCABULARY, LENGTH, K = 4, 5, 3
PROMPT = [1, 2, 3, 1, 2, 3, 1, 2]  # the first token is drawn with it, then come three drafts
OTHER = 1.35  # times the temperature: a distribution that must not fit
RULES = ("standard", "block", "coupled")
FILTERS: dict[str, dict[str, Any]] = {
    "T0.8": {"temperature": 0.8},
    "T1, top-k 3, top-p 0.9": {"temperature": 1.0, "top_k": 3, "top_p": 0.9},
}


def save_model(folder: Path, seed: int) -> Path:
    """A Llama of a few tokens whose next token depends on those before."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=64, intermediate_size=128, vocab_size=VOCABULARY, max_position_embeddings=64,
        tie_word_embeddings=False, initializer_range=0.25, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def exact(folder: Path, asked: dict[str, Any], heat: float = 1.0) -> list[float]:
    """The probability of every continuation of five tokens, float64."""
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()

    def next_PV(prefixes: list[list[int]]) -> torch.Tensor:
        with torch.inference_mode():
            logits = module(torch.tensor(prefixes)).logits[:, -1]
        return filtered(logits / (asked["temperature"] * heat), asked)

    joint: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        p_PV = next_PV([[*PROMPT, *path] for path in joint])
        joint = {
            (*path, token): mass * float(p_V[token])
            for (path, mass), p_V in zip(joint.items(), p_PV, strict=True)
            for token in range(VOCABULARY)
        }
    return list(joint.values())


def filtered(logits_PV: torch.Tensor, asked: dict[str, Any]) -> torch.Tensor:
    """Top-k, then top-p within it, as probabilities."""
    kept = torch.ones_like(logits_PV, dtype=torch.bool)
    if "top_k" in asked:
        kept = logits_PV >= logits_PV.topk(asked["top_k"], dim=1).values[:, -1:]
    p_PV = logits_PV.masked_fill(~kept, -torch.inf).softmax(dim=1)
    if "top_p" in asked:
        ordered, index = p_PV.sort(dim=1, descending=True)
        before = ordered.cumsum(dim=1) - ordered
        p_PV = p_PV.scatter(1, index, ordered.masked_fill(before >= asked["top_p"], 0.0))
    return p_PV / p_PV.sum(dim=1, keepdim=True)


def draw(llm: LLM, asked: dict[str, Any], rule: str | None, count: int) -> tuple[list[int], float]:
    """Counts of every continuation, and the share of drafts that was accepted."""
    engine, found = llm.engine, Counter[tuple[int, ...]]()
    groups = [
        engine.add(
            str(i),
            PROMPT,
            SamplingParams(
                seed=i, max_tokens=LENGTH, ignore_eos=True, rejection_sample_method=rule, **asked
            ),
        )
        for i in range(count)
    ]
    while engine.has_work:
        engine.step()
    for group in groups:
        if group.error is not None:
            raise group.error
        (sample,) = group.samples
        found[tuple(sample.token_ids[sample.num_prompt :])] += 1
    drafted = sum(group.metrics.num_draft_tokens for group in groups)
    accepted = sum(group.metrics.num_accepted_tokens for group in groups)
    paths = itertools.product(range(VOCABULARY), repeat=LENGTH)
    return [found[path] for path in paths], accepted / max(drafted, 1)


DRAFTERS = ("plain", "draft_model", "draft_model, greedy", "eagle3", "ngram")


def cases(folder: Path) -> dict[str, dict[str, Any] | None]:
    """The speculative configurations, by the names of `DRAFTERS`."""
    draft = {"model": str(save_model(folder / "draft", 2)), "num_speculative_tokens": K}
    few = {"hidden": 64, "vocabulary": VOCABULARY, "drafted": VOCABULARY - 1}
    head = save_head(folder / "head", **few, head_dim=64, aux_layers=(0, 1, 1), seed=3)
    made = (
        None,
        draft,
        {**draft, "draft_sample_method": "greedy"},
        {"method": "eagle3", "model": str(head), "num_speculative_tokens": K},
        {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": K},
    )
    return dict(zip(DRAFTERS, made, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--trials", type=int, default=40_000)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no case after so many")
    parser.add_argument("--drafters", nargs="+", choices=DRAFTERS, default=DRAFTERS)
    parser.add_argument("--output", type=Path, default=None, help="a folder")
    args = parser.parse_args()
    start, rows, failed = time.perf_counter(), [], 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        target = save_model(folder / "target", 1)
        laws = {f: (exact(target, a), exact(target, a, OTHER)) for f, a in FILTERS.items()}
        for drafter, speculation in cases(folder).items():
            if drafter not in args.drafters:
                continue
            llm = LLM(
                str(target), speculation, device=args.device, backend=args.backend,
                dtype="float32", max_num_seqs=256, max_num_batched_tokens=4096, num_blocks=1024,
                block_size=16,
            )  # fmt: skip
            for rule, chosen in itertools.product(RULES if speculation else (None,), FILTERS):
                if time.perf_counter() - start > args.seconds:
                    continue
                asked = FILTERS[chosen]
                counts, accepted = draw(llm, asked, rule, args.trials)
                p, other = (goodness_of_fit(counts, law).p_value for law in laws[chosen])
                good = p > CORRECT_P and other < MUTANT_P
                failed += not good
                labels = {"drafter": drafter, "rule": rule, "parameters": chosen}
                values = {"p_value": p, "p_value_of_the_other": other, "accepted": accepted}
                case = f"{drafter}, {rule or 'no rule'}, {chosen}"
                rows.append(Row(case, labels, {**values, "trials": args.trials}))
                seconds = time.perf_counter() - start
                print(f"{seconds:6.1f} s {'ok ' if good else 'BAD'} {case}", json.dumps(values))
    if args.output is not None:
        command = f"python -m benchmarks.engine_law {' '.join(sys.argv[1:])}"
        shapes = {"vocabulary": VOCABULARY, "tokens": LENGTH, "drafts": K}
        write(collect(f"engine_law_{args.device}", command, shapes, rows), args.output)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

"""Measure acceptance free-running, on the shipped prompts, with a plain reference loop.

`python -m training.tiny_python.freerun`. Two Transformers models and two caches that are cropped
after every verification: slow and simple, and independent of the engine, whose figures it should
match. Rejection rule: accept x with probability min(1, p(x)/q(x)), else
draw from the normalised max(p - q, 0) (Leviathan et al. 2023).
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache, partial
from itertools import accumulate, repeat
from multiprocessing import get_context
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaForCausalLM

from training.tiny_python.export import ASSETS
from training.tiny_python.windows import cycle_start, ends_in_cycle

DRAFTS, NEW_TOKENS = 4, 256


class Cached:
    """A model with its cache; `step` feeds the tokens the cache lacks."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.model = model
        self.cache = DynamicCache(config=model.config)

    def step(self, ids_T: list[int], keep: int) -> torch.Tensor:
        """Logits after each token of `ids_T` beyond the cached prefix, at most `keep`. [T', V]."""
        have = self.cache.get_seq_length()
        fresh_1T = torch.tensor([ids_T[have:]])
        out = self.model(fresh_1T, past_key_values=self.cache, logits_to_keep=keep)
        return out.logits[0]

    def rewind(self, length: int) -> None:
        """Forget everything beyond `length` tokens."""
        if (excess := self.cache.get_seq_length() - length) > 0:
            self.cache.crop(-excess)


def distribution(logits_V: torch.Tensor, temperature: float) -> torch.Tensor:
    """Probabilities at `temperature`; one-hot of the arg-max at 0. Shape: [V]."""
    if temperature == 0:
        return torch.zeros_like(logits_V).index_fill_(0, logits_V.argmax(-1, keepdim=True), 1.0)
    return (logits_V / temperature).softmax(-1)


def pick(p_V: torch.Tensor, noise: torch.Generator) -> int:
    """One token from a distribution."""
    return int(torch.multinomial(p_V, 1, generator=noise))


def verify(
    target: Cached,
    ids: list[int],
    drafted: list[tuple[int, torch.Tensor]],
    t: float,
    noise: torch.Generator,
) -> list[int]:
    """The tokens one verification emits: the accepted drafts and one more."""
    logits_TV = target.step(ids + [token for token, _ in drafted], keep=len(drafted) + 1)
    emitted: list[int] = []
    for logits_V, (token, q_V) in zip(logits_TV, drafted, strict=False):
        p_V = distribution(logits_V, t)
        if torch.rand((), generator=noise) * q_V[token] < p_V[token]:
            emitted.append(token)
            continue
        return [*emitted, pick((p_V - q_V).clamp_min(0), noise)]
    return [*emitted, pick(distribution(logits_TV[-1], t), noise)]


@torch.no_grad()
def run(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    prompt: list[int],
    t: float,
    seed: int,
    new_tokens: int = NEW_TOKENS,
) -> tuple[list[int], list[int]]:
    """(new tokens, tokens emitted by each verification) for one prompt."""
    noise = torch.Generator().manual_seed(seed)
    p_side, q_side, ids = Cached(target), Cached(draft), list(prompt)
    p_side.step(ids[:-1], keep=1)
    lengths: list[int] = []
    while len(ids) - len(prompt) < new_tokens:
        drafted: list[tuple[int, torch.Tensor]] = []
        while len(drafted) < DRAFTS:
            logits_TV = q_side.step(ids + [token for token, _ in drafted], keep=1)
            q_V = distribution(logits_TV[-1], t)
            drafted.append((pick(q_V, noise), q_V))
        emitted = verify(p_side, ids, drafted, t, noise)
        lengths.append(len(emitted))
        ids += emitted
        # The newest token has been seen by neither side in this place.
        p_side.rewind(len(ids) - 1)
        q_side.rewind(len(ids) - 1)
    return ids[len(prompt) :], lengths


@lru_cache(maxsize=1)
def load_pair(target: Path, draft: Path) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """Both models in fp32, once per process, one thread each."""
    torch.set_num_threads(1)
    models = (AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32) for p in (target, draft))
    p_model, q_model = (model.eval() for model in models)
    return p_model, q_model


def run_job(
    folders: tuple[Path, Path], prompt: list[int], t: float, seed: int
) -> tuple[list[int], list[int]]:
    """`run` on a worker process."""
    return run(*load_pair(*folders), prompt, t, seed)


def before_cycle(tokens: list[int], lengths: list[int]) -> list[int]:
    """The verifications that end before the output starts to repeat; all, if it never does."""
    start = cycle_start(tokens)
    limit = len(tokens) if start is None else start
    return [n for n, end in zip(lengths, accumulate(lengths), strict=True) if end <= limit]


def summary(runs: list[tuple[list[int], list[int]]]) -> dict[str, float]:
    """Mean tokens per verification, pooled over outputs: three ways to treat cyclic outputs.

    `mean_length` leaves cyclic outputs out, `mean_length_before_cycle` keeps their part before the
    repetition, `mean_length_with_cycles` keeps everything.
    """
    before = [n for run_ in runs for n in before_cycle(*run_)]
    kept = [n for tokens, lengths in runs if not ends_in_cycle(tokens) for n in lengths]
    every = [n for _, lengths in runs for n in lengths]
    return {
        "prompts": len(runs),
        "outputs_ending_in_cycle": sum(ends_in_cycle(tokens) for tokens, _ in runs),
        "mean_length": round(sum(kept) / max(1, len(kept)), 3),
        "mean_length_before_cycle": round(sum(before) / max(1, len(before)), 3),
        "verifications_before_cycle": len(before),
        "mean_length_with_cycles": round(sum(every) / len(every), 3),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, default=ASSETS / "tiny-python")
    parser.add_argument("--draft", type=Path, default=ASSETS / "tiny-python-draft")
    parser.add_argument("--out", type=Path, default=Path(".corpus/runs/freerun.json"))
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    lines = (ASSETS / "tiny-python" / "heldout.jsonl").read_text().splitlines()
    prompts = [tokenizer(json.loads(line)["prompt"])["input_ids"] for line in lines]
    table: dict[str, dict[str, float]] = {}
    with ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool:
        for t in (0.0, 0.8):
            job = partial(run_job, (args.target, args.draft))
            runs = list(pool.map(job, prompts, repeat(t), range(len(prompts))))
            table[f"T{t}"] = summary(runs)
            print(json.dumps({f"T{t}": table[f"T{t}"]}), flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""How much is accepted of a draft model whose tokenizer has fewer tokens than the target's.

The embedded draft model, cut to the tokens of its first merges: by ids the rest is read by the last
piece that its own tokenizer makes of it, by text as all of them (`docs/drafters.md`).

    python -m benchmarks.vocabularies
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.common import DRAFT, TARGET, parse, record
from foretoken import LLM, SamplingParams
from foretoken.lab.results import Row
from foretoken.lab.workloads import heldout
from foretoken.models.locate import resolve_checkpoint

MERGES = (None, 2880, 1920, 960, 480)  # that are kept; None: all


def cut(source: Path, kept: int, folder: Path) -> frozenset[int]:
    """Save the model with the tokens of so many merges; returns their ids in the whole one."""
    from transformers import AutoModelForCausalLM

    told = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary, merges = told["model"]["vocab"], told["model"]["merges"]
    pairs = [tuple(one) if isinstance(one, list) else tuple(one.split(" ")) for one in merges]
    dropped = {a + b for a, b in pairs} - {a + b for a, b in pairs[:kept]}
    pieces = [piece for piece in sorted(vocabulary, key=vocabulary.get) if piece not in dropped]
    told["model"] |= {"vocab": {p: i for i, p in enumerate(pieces)}, "merges": merges[:kept]}
    for added in told["added_tokens"]:
        added["id"] = told["model"]["vocab"].get(added["content"], added["id"])
    rows = [vocabulary[piece] for piece in pieces]
    model = AutoModelForCausalLM.from_pretrained(source)
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    weights = [layer.weight.detach()[rows].clone() for layer in layers]
    model.resize_token_embeddings(len(rows))
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(weights[0])
        model.get_output_embeddings().weight.copy_(weights[1])
    model.save_pretrained(folder)
    for file in source.iterdir():
        if "token" in file.name:
            shutil.copy(file, folder / file.name)
    (folder / "tokenizer.json").write_text(json.dumps(told), encoding="utf-8")
    return frozenset(rows)


def measure(
    method: str, draft: str, known: frozenset[int] | None, temperature: float, count: int
) -> Row:
    """Accepted tokens over prompts of held-out code, each drafted for behind the other."""
    speculation = {"method": method, "model": draft, "num_speculative_tokens": 5}
    params = SamplingParams(temperature=temperature, max_tokens=96, seed=1)
    with LLM(TARGET, speculation, max_num_seqs=8, max_num_batched_tokens=512) as llm:
        outputs = llm.generate([one.prompt for one in heldout(count)], params)
    tokens: Sequence[int] = [i for output in outputs for i in output.outputs[0].token_ids]
    rounds = sum(output.metrics.drafted_per_position[0] for output in outputs)
    accepted = sum(output.metrics.num_accepted_tokens for output in outputs)
    share = 1.0 if known is None else sum(i in known for i in tokens) / len(tokens)
    size = 4096 if known is None else len(known)
    print(f"{method} T={temperature} {size} tokens, {share:.3f}: {1 + accepted / rounds:.3f}")
    values = {"share_of_text": share, "mean_acceptance_length": 1 + accepted / rounds}
    labels = {"method": method, "temperature": temperature, "tokens": size}
    return Row(f"{method}, T={temperature}, {size} tokens", labels, values | {"rounds": rounds})


def main() -> None:
    args = parse(__doc__, prompts=40)
    source, rows = resolve_checkpoint(DRAFT), list[Row]()
    for kept in MERGES:
        with tempfile.TemporaryDirectory() as folder:
            known = None if kept is None else cut(source, kept, Path(folder))
            draft = DRAFT if known is None else folder
            for method in ("draft_model", "draft_text"):
                rows += [measure(method, draft, known, t, args.prompts) for t in (0.0, 0.8)]
    shapes = {"target": TARGET, "draft": DRAFT, "prompts": args.prompts, "max_tokens": 96, "k": 5}
    notes = ["Seeds and prompts are fixed. The draft learnt with the whole tokenizer."]
    record("vocabularies", args, shapes, rows, notes)


if __name__ == "__main__":
    main()

"""Estimate how well a draft predicts its target, on held-out prompts.

`python -m training.tiny_python.evaluate --drafts .corpus/runs/draft-2x192`.

At temperature 0 the figure is exact up to near-ties: the draft is run along the target's greedy
output, and a window accepts while the arg-maxima agree. At temperature 0.8 it is an estimate: a
token drafted at a position passes with probability sum(min(p, q)) there, along a sampled output.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from training.tiny_python.data import load_stream
from training.tiny_python.decode import StaticDecoder
from training.tiny_python.models import logits_of
from training.tiny_python.pretrain import autocast, heldout_loss
from training.tiny_python.windows import ends_in_cycle, window_lengths

DRAFTS_PER_WINDOW = 4
NEW_TOKENS = 256
PROMPT_TOKENS = 160


def stream_prompts(stream_N: torch.Tensor, rows: int, width: int) -> torch.Tensor:
    """`rows` evenly spaced windows of the held-out stream. Shape: [rows, width]."""
    starts_B = torch.linspace(0, len(stream_N) - width - 1, rows).long()
    return stream_N[starts_B[:, None] + torch.arange(width)].long()


def outputs_at(
    target: LlamaForCausalLM, prompt_BP: torch.Tensor, temperature: float, new_tokens: int
) -> torch.Tensor:
    """The target's outputs at `temperature`, prompt included. Shape: [B, P + new_tokens]."""
    rows, width = prompt_BP.shape
    decoder = StaticDecoder(target, rows, width + new_tokens)
    temperature_B = torch.full((rows,), temperature)
    return decoder.generate(prompt_BP.to(target.device), temperature_B)


@torch.no_grad()
def predictions(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, ids_BT: torch.Tensor, new_tokens: int
) -> dict[str, torch.Tensor]:
    """Per-token agreement over the last `new_tokens` tokens of every row. Shapes: [B, N]."""
    out: dict[str, list[torch.Tensor]] = {"greedy": [], "own": [], "min_1.0": [], "min_0.8": []}
    out["dot_0.8"] = []
    for chunk_BT in ids_BT.split(32):
        with autocast(str(target.device)):
            p_BNV = logits_of(target, chunk_BT)[:, -new_tokens - 1 : -1].float()
            q_BNV = logits_of(draft, chunk_BT)[:, -new_tokens - 1 : -1].float()
        choice_BN = q_BNV.argmax(-1)
        out["greedy"].append(choice_BN == p_BNV.argmax(-1))
        out["own"].append(choice_BN == chunk_BT[:, -new_tokens:])
        for temperature in (1.0, 0.8):
            p, q = (p_BNV / temperature).softmax(-1), (q_BNV / temperature).softmax(-1)
            out[f"min_{temperature}"].append(torch.minimum(p, q).sum(-1))
            if temperature == 0.8:
                out["dot_0.8"].append((p * q).sum(-1))
    return {name: torch.cat(parts).cpu() for name, parts in out.items()}


def mean(values: list[int]) -> float:
    """Mean, 0.0 for an empty list."""
    return sum(values) / len(values) if values else 0.0


def run_lengths(pass_BN: torch.Tensor, keep_B: list[bool]) -> float:
    """Mean tokens per verification over the kept rows."""
    rows = [row for row, keep in zip(pass_BN.tolist(), keep_B, strict=True) if keep]
    return mean([n for row in rows for n in window_lengths(row, DRAFTS_PER_WINDOW)])


def evaluate_draft(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    outputs: dict[float, torch.Tensor],
    new_tokens: int,
    seed: int,
) -> dict[str, float]:
    """Mean verification lengths on the target's outputs, cyclic outputs left out."""
    noise = torch.Generator().manual_seed(seed)
    row: dict[str, float] = {}
    for temperature, ids_BT in outputs.items():
        keep_B = [not ends_in_cycle(r) for r in ids_BT[:, -new_tokens:].tolist()]
        seen = predictions(target, draft, ids_BT, new_tokens)
        pass_BN = seen["own"]
        if temperature > 0:
            beta_BN = seen[f"min_{temperature}"]
            pass_BN = torch.rand(beta_BN.shape, generator=noise) < beta_BN
        row[f"mean_length_T{temperature}"] = round(run_lengths(pass_BN, keep_B), 3)
        row[f"mean_length_with_cycles_T{temperature}"] = round(
            run_lengths(pass_BN, [True] * len(keep_B)), 3
        )
        row[f"rate_T{temperature}"] = round(pass_BN[torch.tensor(keep_B)].float().mean().item(), 4)
        row[f"cyclic_outputs_T{temperature}"] = keep_B.count(False)
    return row


def text_agreement(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, ids_BT: torch.Tensor
) -> dict[str, float]:
    """Teacher-forced agreement on real held-out text."""
    seen = predictions(target, draft, ids_BT, ids_BT.shape[1] - 64)
    names = {"greedy": "greedy_agreement", "min_1.0": "sum_min_T1", "min_0.8": "sum_min_T0.8"}
    names["dot_0.8"] = "sum_pq_T0.8"
    return {label: round(seen[key].float().mean().item(), 4) for key, label in names.items()}


def load(path: Path, device: str) -> LlamaForCausalLM:
    """A model in its stored precision on a GPU, fp32 on a CPU."""
    dtype = torch.bfloat16 if "cuda" in device else torch.float32
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()


def evaluate(
    target: LlamaForCausalLM,
    drafts: dict[str, LlamaForCausalLM],
    heldout_N: torch.Tensor,
    rows: int,
    seed: int = 20,
) -> dict[str, object]:
    """All figures for every draft, on `rows` prompts from the held-out stream."""
    device = str(target.device)
    torch.manual_seed(seed)
    prompt_BP = stream_prompts(heldout_N, rows, PROMPT_TOKENS)
    outputs = {t: outputs_at(target, prompt_BP, t, NEW_TOKENS) for t in (0.0, 0.8)}
    text_BT = stream_prompts(heldout_N, rows, 576).to(device)
    loss = heldout_loss(target, heldout_N, 10**6, 1_024, device)
    table: dict[str, object] = {"target": {"heldout_loss": round(loss, 4)}, "prompts": rows}
    for name, draft in drafts.items():
        row = {"heldout_loss": round(heldout_loss(draft, heldout_N, 10**6, 1_024, device), 4)}
        row |= text_agreement(target, draft, text_BT)
        row |= evaluate_draft(target, draft, outputs, NEW_TOKENS, seed)
        table[name] = {"parameters": draft.num_parameters(), **row}
        print(name, json.dumps(table[name]), flush=True)
    return table


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, default=Path(".corpus"))
    parser.add_argument("--target", type=Path, default=Path(".corpus/runs/target"))
    parser.add_argument("--drafts", type=Path, nargs="+", required=True)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--out", type=Path, default=Path(".corpus/runs/evaluate.json"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.corpus / "tokenizer")
    heldout_N = load_stream(args.corpus, "heldout", tokenizer)
    target = load(args.target, args.device)
    drafts = {path.name: load(path, args.device) for path in args.drafts}
    table = evaluate(target, drafts, heldout_N, args.rows)
    args.out.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()

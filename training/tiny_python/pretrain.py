"""Pre-train the target on the corpus.

`python -m training.tiny_python.pretrain --corpus .corpus --out .corpus/runs/target`.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoTokenizer, LlamaForCausalLM

from foretoken.lab.train_eagle3.trainer import adamw, learning_rate, set_learning_rate
from training.tiny_python.data import Windows, load_stream
from training.tiny_python.models import build, logits_of


@dataclass(frozen=True)
class PretrainConfig:
    """Everything that decides the run."""

    shape: str = "target"
    steps: int = 6_000
    rows: int = 64
    length: int = 1_024
    lr: float = 2.5e-3
    warmup: int = 200
    weight_decay: float = 0.2
    clip: float = 1.0
    eval_every: int = 500
    eval_rows: int = 512
    seed: int = 0
    device: str = "cuda"
    compile: bool = True


def token_loss(model: torch.nn.Module, ids_BT: torch.Tensor) -> torch.Tensor:
    """Mean negative log-likelihood of tokens 1..T-1, in nats. `ids_BT` holds T tokens a row."""
    logits_BTV = logits_of(model, ids_BT[:, :-1])
    return F.cross_entropy(logits_BTV.float().flatten(0, 1), ids_BT[:, 1:].flatten())


@torch.no_grad()
def heldout_loss(
    model: torch.nn.Module, stream_N: torch.Tensor, rows: int, length: int, device: str
) -> float:
    """Mean loss over the first `rows · k` windows of the held-out stream, batches of 32."""
    count = min(rows, (len(stream_N) - 1) // length)
    offsets_T = torch.arange(length + 1)
    total = 0.0
    batches = range(0, count - count % 32 or count, 32)
    for first in batches:
        starts_B = torch.arange(first, min(first + 32, count)) * length
        ids_BT = stream_N[starts_B[:, None] + offsets_T].to(device).long()
        with autocast(device):
            total += token_loss(model, ids_BT).item()
    return total / len(batches)


def autocast(device: str) -> torch.autocast:
    """bf16 arithmetic on a GPU, plain fp32 on a CPU."""
    return torch.autocast(torch.device(device).type, torch.bfloat16, enabled="cuda" in device)


def pretrain(
    config: PretrainConfig, train_N: torch.Tensor, heldout_N: torch.Tensor, vocab_size: int
) -> tuple[LlamaForCausalLM, list[dict[str, float]]]:
    """Train; returns the weights of the best held-out loss and the history of losses."""
    torch.set_float32_matmul_precision("high")
    model = build(config.shape, vocab_size, config.seed).to(config.device)
    forward = torch.compile(token_loss) if config.compile else token_loss
    windows = Windows(train_N, config.length, config.seed + 1, config.device)
    optimizer = adamw(model.parameters(), config.lr, config.weight_decay)
    history: list[dict[str, float]] = []
    best, best_state, began = float("inf"), {}, time.perf_counter()
    recent = torch.zeros((), device=config.device)
    for step in range(1, config.steps + 1):
        lr = learning_rate(step - 1, config.steps, config.lr, config.warmup)
        set_learning_rate(optimizer, lr)
        with autocast(config.device):
            loss = forward(model, windows.batch(config.rows))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recent = recent.lerp(loss.detach(), 1.0 if step == 1 else 0.05)
        if step % config.eval_every and step != config.steps:
            continue
        held = heldout_loss(model, heldout_N, config.eval_rows, config.length, config.device)
        seconds = round(time.perf_counter() - began, 1)
        history.append(
            {"step": step, "train": recent.item(), "heldout": held, "lr": lr, "seconds": seconds}
        )
        print(json.dumps(history[-1]), flush=True)
        if held < best:
            best = held
            best_state = {k: v.detach().clone() for k, v in model.state_dict().items()}
    model.load_state_dict(best_state)
    return model, history


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, default=Path(".corpus"))
    parser.add_argument("--out", type=Path, default=Path(".corpus/runs/target"))
    parser.add_argument("--steps", type=int, default=PretrainConfig.steps)
    parser.add_argument("--eval-every", type=int, default=PretrainConfig.eval_every)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.corpus / "tokenizer")
    train_N = load_stream(args.corpus, "train", tokenizer)
    heldout_N = load_stream(args.corpus, "heldout", tokenizer)
    config = PretrainConfig(steps=args.steps, eval_every=args.eval_every, device=args.device)
    print(json.dumps({"train_tokens": len(train_N), "heldout_tokens": len(heldout_N)}), flush=True)
    model, history = pretrain(config, train_N, heldout_N, len(tokenizer))
    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    info = {
        "config": asdict(config),
        "train_tokens": len(train_N),
        "heldout_tokens": len(heldout_N),
        "parameters": model.num_parameters(),
        "device": torch.cuda.get_device_name() if "cuda" in args.device else "cpu",
        "history": history,
    }
    (args.out / "pretrain.json").write_text(json.dumps(info, indent=1) + "\n")


if __name__ == "__main__":
    main()

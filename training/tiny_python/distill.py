"""Distil draft candidates on the target's own outputs, several at once on shared target logits.

`python -m training.tiny_python.distill --target .corpus/runs/target --out .corpus/runs`.

The loss is forward KL first, which moves mass where the target has any, then total variation,
1 - sum(min(p, q)): exactly the probability that the rejection rule refuses a drafted token
(Leviathan et al. 2023). Low temperatures in the mixture stand for greedy decoding.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from foretoken.lab.train_eagle3.trainer import adamw, learning_rate, set_learning_rate
from training.tiny_python.data import Windows, load_stream
from training.tiny_python.generate import sample_corpus
from training.tiny_python.models import build, logits_of
from training.tiny_python.pretrain import autocast


@dataclass(frozen=True)
class DistillConfig:
    """Everything that decides the run."""

    shapes: tuple[str, ...] = ("draft-1x256", "draft-2x192", "draft-2x256")
    steps: int = 5_000
    rows: int = 128
    length: int = 512
    real_every: int = 5
    kl_share: float = 0.4
    temperatures: tuple[float, ...] = (1.0, 0.8, 0.5, 0.8)
    lr: float = 4e-3
    warmup: int = 150
    weight_decay: float = 0.05
    clip: float = 1.0
    rounds: int = 36
    sample_rows: int = 2_048
    prompt: int = 192
    seed: int = 10
    log_every: int = 250
    device: str = "cuda"
    compile: bool = True


def kl_loss(p_logits_BTV: torch.Tensor, q_logits_BTV: torch.Tensor) -> torch.Tensor:
    """Mean forward KL(p, q) in nats."""
    log_p_BTV = p_logits_BTV.float().log_softmax(-1)
    log_q_BTV = q_logits_BTV.float().log_softmax(-1)
    return (log_p_BTV.exp() * (log_p_BTV - log_q_BTV)).sum(-1).mean()


def tv_loss(
    p_logits_BTV: torch.Tensor, q_logits_BTV: torch.Tensor, temperature: torch.Tensor
) -> torch.Tensor:
    """Mean total variation 1 - sum(min(p, q)) at `temperature`: the expected rejection rate."""
    p_BTV = (p_logits_BTV.float() / temperature).softmax(-1)
    q_BTV = (q_logits_BTV.float() / temperature).softmax(-1)
    return 1 - torch.minimum(p_BTV, q_BTV).sum(-1).mean()


def draft_loss(
    draft: torch.nn.Module,
    ids_BT: torch.Tensor,
    p_logits_BTV: torch.Tensor,
    temperature: torch.Tensor,
    use_tv: bool,
) -> torch.Tensor:
    """KL at temperature 1, or total variation with a little KL that keeps the tail alive."""
    q_logits_BTV = logits_of(draft, ids_BT)
    kl = kl_loss(p_logits_BTV, q_logits_BTV)
    return tv_loss(p_logits_BTV, q_logits_BTV, temperature) + 0.05 * kl if use_tv else kl


class Mixture:
    """Batches of token ids: the target's outputs, every `real_every`-th batch real text."""

    def __init__(self, config: DistillConfig, own_NT: torch.Tensor, train_N: torch.Tensor) -> None:
        self._config = config
        self._own_NT = own_NT.to(config.device)
        self._real = Windows(train_N, config.length, config.seed + 2, config.device)
        self._order = torch.Generator().manual_seed(config.seed + 3)
        self._queue = torch.empty(0, dtype=torch.long)

    def batch(self, step: int) -> torch.Tensor:
        """Ids of shape [rows, length]."""
        rows = self._config.rows
        if step % self._config.real_every == 0:
            return self._real.batch(rows)[:, :-1].contiguous()
        while len(self._queue) < rows:
            fresh = torch.randperm(len(self._own_NT), generator=self._order)
            self._queue = torch.cat([self._queue, fresh])
        picked, self._queue = self._queue[:rows], self._queue[rows:]
        return self._own_NT[picked.to(self._config.device)].long()


def distill(
    config: DistillConfig,
    target: LlamaForCausalLM,
    own_NT: torch.Tensor,
    train_N: torch.Tensor,
) -> tuple[dict[str, LlamaForCausalLM], list[dict[str, object]]]:
    """Train every shape of `config.shapes` on the same batches; returns drafts and history."""
    torch.set_float32_matmul_precision("high")
    wrap: Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]]
    wrap = torch.compile if config.compile else lambda f: f
    vocab = target.config.vocab_size
    drafts = {s: build(s, vocab, config.seed).to(config.device) for s in config.shapes}
    optimizers = {
        s: adamw(d.parameters(), config.lr, config.weight_decay) for s, d in drafts.items()
    }
    losses = {s: wrap(draft_loss) for s in drafts}
    target_logits = wrap(logits_of)
    mixture = Mixture(config, own_NT, train_N)
    history: list[dict[str, object]] = []
    began = time.perf_counter()
    for step in range(1, config.steps + 1):
        ids_BT = mixture.batch(step)
        with torch.no_grad(), autocast(config.device):
            p_logits_BTV = target_logits(target, ids_BT)
        logged = step % config.log_every == 0 or step == config.steps
        use_tv = step > config.kl_share * config.steps
        temperature = config.temperatures[step % len(config.temperatures)]
        temperature_0 = torch.tensor(temperature, device=config.device)
        lr = learning_rate(step - 1, config.steps, config.lr, config.warmup)
        row: dict[str, object] = {"step": step, "loss": "tv" if use_tv else "kl"}
        for shape, draft in drafts.items():
            set_learning_rate(optimizers[shape], lr)
            with autocast(config.device):
                loss = losses[shape](draft, ids_BT, p_logits_BTV, temperature_0, use_tv)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(draft.parameters(), config.clip)
            optimizers[shape].step()
            optimizers[shape].zero_grad(set_to_none=True)
            if logged:
                row[shape] = round(loss.item(), 4)
        if logged:
            row["seconds"] = round(time.perf_counter() - began, 1)
            history.append(row)
            print(json.dumps(row), flush=True)
    return drafts, history


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, default=Path(".corpus"))
    parser.add_argument("--target", type=Path, default=Path(".corpus/runs/target"))
    parser.add_argument("--out", type=Path, default=Path(".corpus/runs"))
    parser.add_argument("--steps", type=int, default=DistillConfig.steps)
    parser.add_argument("--rounds", type=int, default=DistillConfig.rounds)
    parser.add_argument("--shapes", nargs="+", default=list(DistillConfig.shapes))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    config = DistillConfig(
        shapes=tuple(args.shapes), steps=args.steps, rounds=args.rounds, device=args.device
    )
    tokenizer = AutoTokenizer.from_pretrained(args.corpus / "tokenizer")
    train_N = load_stream(args.corpus, "train", tokenizer)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.bfloat16)
    target = target.to(config.device).eval().requires_grad_(False)
    own_NT, stats = sample_corpus(
        target,
        train_N,
        config.rounds,
        config.sample_rows,
        config.prompt,
        config.length,
        config.seed,
    )
    print(json.dumps(stats), flush=True)
    drafts, history = distill(config, target, own_NT, train_N)
    for shape, draft in drafts.items():
        draft.to(torch.bfloat16).save_pretrained(args.out / shape)
        tokenizer.save_pretrained(args.out / shape)
    info = {"config": asdict(config), "own_outputs": stats, "history": history}
    (args.out / "distill.json").write_text(json.dumps(info, indent=1) + "\n")


if __name__ == "__main__":
    main()

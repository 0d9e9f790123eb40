"""Train the EAGLE-3 head of the embedded target, on a GPU, within a budget of seconds.

`python -m training.tiny_python.eagle3 pack` writes the training text as a small file, so that the
machine with the GPU needs no corpus. `python -m training.tiny_python.eagle3 train --seconds 340`
has the target continue windows of it, tries variants of the head for some hundred steps each, and
trains the best one for the rest of the time.
"""

from __future__ import annotations

import argparse
import json
import lzma
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from foretoken.lab.train_eagle3.export import describe_head, save_weights, write_card
from foretoken.lab.train_eagle3.losses import compile_losses
from foretoken.lab.train_eagle3.texts import Batches, cut
from foretoken.lab.train_eagle3.trainer import Recipe, Target, Trainer
from foretoken.models.eagle3_config import read_eagle3_config
from training.tiny_python.corpus import read_split
from training.tiny_python.data import encode_files
from training.tiny_python.export import ASSETS
from training.tiny_python.generate import sample_corpus

# Consecutive tokens resemble each other: two bytes each, compressed as pairs.
PACKING = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 3, "lp": 1, "pb": 1}]
FILES = 512  # of a piece: 2.8 M tokens, half a byte each
TEMPERATURES = (0.8, 0.3)  # of the measurements; the lower one stands for greedy decoding


@dataclass(frozen=True)
class HeadConfig:
    """Everything that decides the run, beside the time that there is."""

    rows: int = 64
    length: int = 512
    prompt: int = 192
    rounds: int = 24
    sample_rows: int = 2_048
    held_rows: int = 256
    real_share: float = 0.2
    unroll: int = 5
    lr: float = 2e-3
    loss: str = "length"
    kl_share: float = 0.3
    tied: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    intermediate: int = 640
    aux_layers: tuple[int, ...] = (2, 10, 17)
    trial_steps: int = 250
    seed: int = 20
    device: str = "cuda"


# What is tried, against the head as above. The last two are measured, not taken: a wider layer
# makes every draft slower, and fused heads know neither norm of EAGLE-3.1.
VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "loss tv": {"loss": "tv"},
    "the target's output layer": {"tied": True},
    "higher learning rate": {"lr": 4e-3},
    "later states": {"aux_layers": (6, 13, 19)},
    "wider": {"intermediate": 1024},
    "both norms": {"fc_norm": True, "norm_output": True},
}
NOT_TAKEN = ("wider", "both norms")
TRIAL_SHARE = 0.2  # of the time that is left behind sampling
RESERVE_S = 15  # for the measurements between and after the steps, and for writing


def pack(corpus: Path, out: Path, limit: int) -> int:
    """Write the first training files as compressed token ids, at most `limit` bytes; how many."""
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "tiny-python")
    files = read_split(corpus / "train.jsonl.xz")
    pieces, count = list[bytes](), 0
    for first in range(0, len(files), FILES):
        ids = encode_files(tokenizer, files[first : first + FILES])
        piece = lzma.compress(ids.tobytes(), filters=PACKING)
        if sum(map(len, pieces)) + len(piece) > limit:
            break
        pieces.append(piece)
        count += len(ids)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(b"".join(pieces))
    return count


def unpack(path: Path) -> torch.Tensor:
    """The stream that `pack` wrote, int16 [N]."""
    return torch.from_numpy(np.frombuffer(lzma.decompress(path.read_bytes()), np.int16).copy())


def build_trainer(
    config: HeadConfig, module: LlamaForCausalLM, sample_BT: torch.Tensor, steps: int, folder: Path
) -> Trainer:
    """A fresh head; its `config.json` is in `folder` then."""
    described = describe_head(
        module.config,
        intermediate_size=config.intermediate,
        fc_norm=config.fc_norm,
        norm_output=config.norm_output,
    )
    described["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [*config.aux_layers]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n")
    weights = module.get_input_embeddings().weight, module.get_output_embeddings().weight
    target = Target(module, *weights, config.aux_layers)
    recipe = Recipe(steps, config.unroll, config.lr, config.loss, config.kl_share, config.seed)
    return Trainer(read_eagle3_config(folder), target, recipe, sample_BT, tied=config.tied)


def accepted(trainer: Trainer, held_NL: torch.Tensor, rows: int) -> dict[str, float]:
    """Mean drafts accepted, teacher-forced on texts not trained on, by temperature."""
    return {f"T{t}": sum(trainer.evaluate(held_NL, rows, t)) for t in TEMPERATURES}


class Run:
    """One run: texts, trials, the head itself; writes into `out` as it goes."""

    def __init__(self, config: HeadConfig, module: LlamaForCausalLM, out: Path, until: float):
        self.config, self.module, self.out, self.until = config, module, out, until
        self.record: dict[str, Any] = {"config": asdict(config)}

    def texts(self, stream_N: torch.Tensor) -> None:
        """The target's own texts, held-out ones among them, and real ones."""
        config = self.config
        own_NL, stats = sample_corpus(
            self.module, stream_N, config.rounds, config.sample_rows, config.prompt, config.length,
            config.seed,
        )  # fmt: skip
        self.note("texts", stats)
        # Rows lie by temperature: held-out ones are a sample of all.
        order = torch.randperm(len(own_NL), generator=torch.Generator().manual_seed(config.seed))
        own_NL = own_NL[order].to(config.device)
        self.held_NL, own_NL = own_NL[: config.held_rows], own_NL[config.held_rows :]
        real_NL = cut(stream_N, config.length).to(config.device)
        self.batches = Batches(own_NL, real_NL, config.rows, config.real_share, config.seed)

    def trainer(self, config: HeadConfig, steps: int) -> Trainer:
        """A fresh one, whose head is in `head`."""
        sample_BT = self.held_NL[: config.rows].long()
        return build_trainer(config, self.module, sample_BT, steps, self.out / "head")

    def pace(self) -> float:
        """Seconds of a step of the head as it is, compiling left out."""
        warm, timed = 20, 40  # the second kind of loss comes with step 18
        trainer, began = self.trainer(self.config, warm + timed), 0.0
        for step in range(warm + timed):
            if step == warm:
                began = self.now()
            trainer.train(self.batches.batch(step))
        return (self.now() - began) / timed

    def trials(self, pace: float) -> HeadConfig:
        """Train each variant, for a share of the time in all; the best of those that are taken."""
        left = TRIAL_SHARE * (self.until - self.now()) / len(VARIANTS)
        steps, found = max(1, min(self.config.trial_steps, int(left / pace))), dict[str, float]()
        for name, changes in VARIANTS.items():
            config = replace(self.config, **changes)
            trainer, began = self.trainer(config, steps), self.now()
            for step in range(steps):
                trainer.train(self.batches.batch(step))
            seconds = (self.now() - began) / steps
            row = accepted(trainer, self.held_NL, config.rows)
            self.note(f"trial: {name}", {"steps": steps, "seconds_per_step": seconds, **row})
            found[name] = sum(row.values()) if name not in NOT_TAKEN else 0.0
        best = max(found, key=lambda name: found[name])
        self.note("taken", best)
        return replace(self.config, **VARIANTS[best])

    def train(self, config: HeadConfig, pace: float) -> None:
        """Train for as many steps as the time allows."""
        folder = self.out / "head"
        steps = max(1, int(0.97 * (self.until - self.now() - RESERVE_S) / pace))
        self.note("plan", {"steps": steps, "seconds_per_step": pace})
        trainer, every, measured = self.trainer(config, steps), max(1, steps // 40), {}
        for step in range(steps):
            loss = trainer.train(self.batches.batch(step))
            is_last = trainer.step == steps or time.time() > self.until - RESERVE_S / 2
            if trainer.step % every == 0 or is_last:
                row = {"step": trainer.step, "loss": loss.item()}
                trainer.history.append(row)
                print(json.dumps({**row, "left": round(self.until - time.time())}), flush=True)
            if trainer.step % (8 * every) == 0 or is_last:
                measured = accepted(trainer, self.held_NL, config.rows)
                self.note(f"accepted at step {trainer.step}", measured)
                save_weights(folder, trainer.weights, None)
            if is_last:
                break
        self.note("history", trainer.history)
        done = f"{trainer.step} of {steps}"
        facts = {"model": "tiny-python", **asdict(config), "steps": done, "accepted": measured}
        write_card(folder, facts, trainer.history)

    def now(self) -> float:
        """Wall-clock seconds, the device's work done."""
        if self.config.device == "cuda":
            torch.cuda.synchronize()
        return time.time()

    def note(self, name: str, value: Any) -> None:
        """Into the record, which is whole at any time, and onto the log."""
        self.record[name] = value
        print(json.dumps({name: value})[:500], flush=True)
        (self.out / "eagle3.json").write_text(json.dumps(self.record, indent=1) + "\n")


def main() -> None:
    """Command line."""
    began = time.time()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=["pack", "train"])
    parser.add_argument("--corpus", type=Path, default=Path(".corpus"))
    parser.add_argument("--stream", type=Path, default=Path(".corpus/stream.xz"))
    parser.add_argument("--limit", type=int, default=14 * 2**20, help="bytes of the stream")
    parser.add_argument("--target", type=Path, default=ASSETS / "tiny-python")
    parser.add_argument("--out", type=Path, default=Path(".corpus/runs/eagle3"))
    parser.add_argument("--seconds", type=float, default=340.0)
    for name in (
        "rows",
        "rounds",
        "sample_rows",
        "held_rows",
        "intermediate",
        "trial_steps",
        "seed",
    ):
        kind = "--" + name.replace("_", "-")
        parser.add_argument(kind, type=int, default=getattr(HeadConfig, name))
    parser.add_argument("--device", default=HeadConfig.device)
    args = parser.parse_args()
    if args.stage == "pack":
        print(f"{pack(args.corpus, args.stream, args.limit)} tokens in {args.stream}")
        return
    names = vars(args).keys() & {field.name for field in fields(HeadConfig)}
    config = HeadConfig(**{name: getattr(args, name) for name in names})
    args.out.mkdir(parents=True, exist_ok=True)
    module = AutoModelForCausalLM.from_pretrained(
        args.target, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    module = module.to(config.device).eval().requires_grad_(False)
    if config.device == "cuda":
        compile_losses()
    run = Run(config, module, args.out, began + args.seconds)
    run.texts(unpack(args.stream))
    pace = run.pace()
    run.train(run.trials(pace) if config.trial_steps else config, pace)


if __name__ == "__main__":
    main()

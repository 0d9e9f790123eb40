"""Train the EAGLE-3 head of the embedded target, on a GPU, within a budget of seconds.

`python -m training.tiny_python.eagle3 pack` writes the training text as a small file, so that the
machine with the GPU needs no corpus. `python -m training.tiny_python.eagle3 train --seconds 340`
has the target continue windows of it, tries optimisers for some steps each, and trains with the
best one for the rest of the time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import lzma
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from foretoken.errors import ConfigError
from foretoken.lab.train_eagle3.command import Batches, cut, describe_head, save_weights, write_card
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
    length: int = 517  # 512 positions to draft from
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
    heads: int = 4
    kv_heads: int = 2
    aux_layers: tuple[int, ...] = (2, 10, 17)
    muon_share: float = 0.0
    trial_steps: int = 120
    seed: int = 20
    device: str = "cuda"


# Muon's learning rate for the inner matrices, in units of AdamW's; 0: AdamW for all.
MUON_SHARES = (0.0, 0.4, 1.0)
RESERVE_S = 15  # for the measurements between and after the steps, and for writing


def pack(corpus: Path, out: Path, limit: int, num_files: int = FILES) -> int:
    """Write the first training files as compressed token ids, in pieces of `num_files` files.

    Returns the number of ids. All pieces together have at most `limit` bytes.
    """
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "tiny-python")
    files = read_split(corpus / "train.jsonl.xz")
    pieces, count = list[bytes](), 0
    for first in range(0, len(files), num_files):
        ids = encode_files(tokenizer, files[first : first + num_files])
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
    config: HeadConfig,
    module: LlamaForCausalLM,
    sample_BT: torch.Tensor,
    steps: int,
    folder: Path,
    target_ids: torch.Tensor | None = None,
) -> Trainer:
    """A fresh head, which drafts these ids or all; its `config.json` is in `folder` then."""
    described = describe_head(
        module.config,
        draft_vocab_size=None if target_ids is None else len(target_ids),
        intermediate_size=config.intermediate,
        fc_norm=config.fc_norm,
        norm_output=config.norm_output,
    )
    described["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [*config.aux_layers]
    described |= {
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n")
    weights = module.get_input_embeddings().weight, module.get_output_embeddings().weight
    fuse = torch.compile if config.device == "cuda" else lambda function: function
    target = Target(fuse(module), *weights, config.aux_layers)
    recipe = Recipe(
        steps, config.unroll, config.lr, config.loss, config.kl_share, config.seed,
        config.muon_share,
    )  # fmt: skip
    read = read_eagle3_config(folder)
    return Trainer(
        read, target, recipe, sample_BT, target_ids=target_ids, tied=config.tied, fuse=fuse
    )


@torch.no_grad()
def begin_from(trainer: Trainer, config: HeadConfig, folder: Path) -> None:
    """Take over a head, which may be narrower, have fewer heads of attention and read fewer states.

    What is new adds nothing. Of a wider one the units with the largest weights remain.

    Raises:
        ConfigError: heads of attention would be lost, or share other heads of keys and values.
    """
    start = read_eagle3_config(folder).layer
    had = start.num_attention_heads, start.num_key_value_heads
    if config.heads < had[0] or config.heads * had[1] != config.kv_heads * had[0]:
        bound = f"a multiple of {had[0]} and {had[1]}, those of the head in `{folder}`"
        raise ConfigError("heads, kv_heads", (config.heads, config.kv_heads), bound)
    stored = load_file(folder / "model.safetensors", device=config.device)
    names = [f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    gate, up, down = (stored[name].float() for name in names)
    sizes_I = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)
    kept_I = sizes_I.topk(min(config.intermediate, len(sizes_I))).indices.sort().values
    for name, dim in zip(names, (0, 0, 1), strict=True):
        stored[name] = stored[name].index_select(dim, kept_I)
    width, known = trainer.target.embedding.shape[1], read_eagle3_config(folder).aux_layers
    for name, weight in trainer.weights.items():
        given = stored[name.replace("layers.0.", "midlayer.")].to(weight)
        if name.endswith(("fc.weight", "o_proj.weight", "down_proj.weight")):
            weight.zero_()
        if name == "fc.weight":
            places = [config.aux_layers.index(layer) for layer in known or ()]
            given = torch.cat([given, given.new_zeros(width, width)], dim=1)
            sources = [
                places.index(i) if i in places else -1 for i in range(len(config.aux_layers))
            ]
            given = torch.cat([given.split(width, dim=1)[i] for i in sources], dim=1)
        weight[tuple(slice(n) for n in given.shape)] = given


def accepted(trainer: Trainer, held_NL: torch.Tensor, rows: int) -> dict[str, float]:
    """Mean drafts accepted, teacher-forced on texts not trained on, by temperature."""
    return {f"T{t}": sum(trainer.evaluate(held_NL, rows, t)) for t in TEMPERATURES}


class Run:
    """One run: texts, trials, the head itself; writes into `out` as it goes."""

    model = "tiny-python"
    target_ids: torch.Tensor | None = None
    """What the head drafts; None: all ids."""

    def __init__(
        self,
        config: HeadConfig,
        module: LlamaForCausalLM,
        out: Path,
        until: float,
        start: Path | None = None,
        clock: Callable[[], float] = time.time,
    ):
        """
        Args:
            until: when the run must have ended, in seconds of `clock`.
        """
        self.config, self.module, self.out, self.until = config, module, out, until
        self.start, self.clock = start, clock
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

    def trainer(self, steps: int) -> Trainer:
        """Of a head that is in `head`: a fresh one, or one that begins as the one at the start."""
        config = self.config
        sample_BT = self.held_NL[: config.rows].long()
        folder = self.out / "head"
        trainer = build_trainer(config, self.module, sample_BT, steps, folder, self.target_ids)
        if self.start is not None:
            begin_from(trainer, config, self.start)
        return trainer

    def choose_optimizer(self, trainer: Trainer) -> None:
        """Try each from the same weights, for some steps of the whole schedule; take the best."""
        first, found = {name: w.clone() for name, w in trainer.weights.items()}, {}
        kept = trainer.recipe
        for share in (None, *MUON_SHARES):  # the first time all is compiled
            trainer.begin(
                kept._replace(steps=self.config.trial_steps, muon_share=share or 0.0), first
            )
            began = self.now()
            for step in range(self.config.trial_steps if share is not None else 4):
                trainer.train(self.batches.batch(step))
            if share is None:
                continue
            seconds = (self.now() - began) / self.config.trial_steps
            row = accepted(trainer, self.held_NL, self.config.rows)
            self.note(f"trial: Muon {share}", {"seconds_per_step": seconds, **row})
            found[share] = sum(row.values())
        best = max(found, key=lambda share: found[share]) if found else kept.muon_share
        self.note("taken", best)
        trainer.begin(kept._replace(muon_share=best), first)

    def train(self) -> None:
        """Train for as many steps as the time allows, which is found out again and again: the
        learning rate has fallen when it is over."""
        folder, every, measured = self.out / "head", 50, {}
        trainer = self.trainer(1_000_000)
        if self.config.trial_steps:
            self.choose_optimizer(trainer)
        for step in itertools.count():
            if step == every:
                began = self.now()
            loss = trainer.train(self.batches.batch(step))
            left = self.until - RESERVE_S - self.clock()
            is_last = trainer.step == trainer.recipe.steps or left < 0
            if trainer.step % every == 0 or is_last:
                row = {"step": trainer.step, "loss": loss.item()}
                trainer.history.append(row)
                print(json.dumps({**row, "left": round(left)}), flush=True)
            if trainer.step % every == 0 and step > every:
                pace = (self.now() - began) / (step - every)
                trainer.recipe = trainer.recipe._replace(steps=trainer.step + int(left / pace))
            if trainer.step % (20 * every) == 0 or is_last:
                measured = accepted(trainer, self.held_NL, self.config.rows)
                self.note(f"accepted at step {trainer.step}", measured)
                save_weights(folder, trainer.weights, trainer.target_ids)
            if is_last:
                break
        self.note("history", trainer.history)
        decided = {**asdict(self.config), "muon_share": trainer.recipe.muon_share}
        facts: dict[str, Any] = {"model": self.model, **decided, "steps": trainer.step}
        facts["accepted"] = measured
        write_card(folder, facts, trainer.history)

    def now(self) -> float:
        """Seconds of the clock, once the device's work is done."""
        if self.config.device == "cuda":
            torch.cuda.synchronize()
        return self.clock()

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
        "heads",
        "kv_heads",
        "trial_steps",
        "seed",
    ):
        kind = "--" + name.replace("_", "-")
        parser.add_argument(kind, type=int, default=getattr(HeadConfig, name))
    parser.add_argument("--lr", type=float, default=HeadConfig.lr)
    parser.add_argument("--muon-share", type=float, default=HeadConfig.muon_share)
    parser.add_argument("--kl-share", type=float, default=HeadConfig.kl_share)
    parser.add_argument("--aux-layers", type=int, nargs="+", default=HeadConfig.aux_layers)
    parser.add_argument("--start", type=Path, help="a head to go on from")
    parser.add_argument("--device", default=HeadConfig.device)
    args = parser.parse_args()
    if args.stage == "pack":
        print(f"{pack(args.corpus, args.stream, args.limit)} tokens in {args.stream}")
        return
    names = vars(args).keys() & {field.name for field in fields(HeadConfig)}
    config = HeadConfig(**{name: getattr(args, name) for name in names})
    config = replace(config, aux_layers=tuple(config.aux_layers))
    args.out.mkdir(parents=True, exist_ok=True)
    module = AutoModelForCausalLM.from_pretrained(
        args.target, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    module = module.to(config.device).eval().requires_grad_(False)
    run = Run(config, module, args.out, began + args.seconds, args.start)
    run.texts(unpack(args.stream))
    run.train()


if __name__ == "__main__":
    main()

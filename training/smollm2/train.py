"""Train the head for SmolLM2-135M-Instruct on the target's own texts, on a GPU, for some seconds.

`python -m training.smollm2.train --model FOLDER --texts DIR --out OUT --seconds 900`. The loop is
that of the embedded head (`training.tiny_python.eagle3`): as many steps as the time allows.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from foretoken.lab.train_eagle3.command import Batches
from training.smollm2.texts import frequent_ids, pack, select
from training.tiny_python import eagle3


@dataclass(frozen=True)
class HeadConfig(eagle3.HeadConfig):
    """As for the embedded head, and how many ids are drafted; `prompt`, `rounds`, `sample_rows` and
    `real_share` play no part: the texts are there."""

    rows: int = 32
    length: int = 773  # 768 positions to draft from
    intermediate: int = 1280
    heads: int = 9
    kv_heads: int = 3
    aux_layers: tuple[int, ...] = (6, 18, 29)
    drafted: int = 5632
    lr: float = 4e-3
    kl_share: float = 0.5
    muon_share: float = 0.4
    trial_steps: int = 0
    seed: int = 30


class Run(eagle3.Run):
    """One run upon texts that the target has written."""

    model = "SmolLM2-135M-Instruct"

    def take(self, rows_NL: Tensor, drafted: int) -> None:
        """These rows, held-out ones among them; of a head to go on from, what it drafts."""
        config = self.config
        ids_V = frequent_ids(rows_NL, drafted, self.module.config.vocab_size)
        if self.start is not None:
            offset_V = load_file(self.start / "model.safetensors")["d2t"]
            ids_V = offset_V + torch.arange(len(offset_V))
        self.target_ids = ids_V.to(config.device)
        share = torch.isin(rows_NL[: config.held_rows], ids_V.int()).float().mean().item()
        self.note("rows", {"shape": [*rows_NL.shape], "share_of_tokens_drafted": share})
        rows_NL = rows_NL.to(config.device)
        self.held_NL, own_NL = rows_NL[: config.held_rows], rows_NL[config.held_rows :]
        self.batches = Batches(own_NL, own_NL[:0], config.rows, 0.0, config.seed)


def read_rows(folder: Path, length: int, seed: int) -> tuple[Tensor, dict[str, int]]:
    """Rows of all texts in a folder, and counts; made once for each length."""
    path = folder / f"rows-{length}-{seed}.pt"
    if not path.exists():
        texts, counts = select(sorted(folder.glob("texts-*.safetensors")), seed)
        rows_NL = pack(texts, length)
        order = torch.randperm(len(rows_NL), generator=torch.Generator().manual_seed(seed))
        torch.save((rows_NL[order], counts), path)
    rows_NL, counts = torch.load(path)
    return rows_NL, counts


def main() -> None:
    """Command line."""
    began = time.time()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=900.0)
    parser.add_argument("--start", type=Path, help="a head to go on from, which drafts the same")
    for field in fields(HeadConfig):
        option = "--" + field.name.replace("_", "-")
        if field.name == "aux_layers":
            parser.add_argument(option, type=int, nargs="+", default=field.default)
        elif isinstance(field.default, bool):
            parser.add_argument(option, action="store_true")
        else:
            parser.add_argument(option, type=type(field.default), default=field.default)
    args = parser.parse_args()
    config = HeadConfig(**{field.name: getattr(args, field.name) for field in fields(HeadConfig)})
    config = replace(config, aux_layers=tuple(config.aux_layers))
    args.out.mkdir(parents=True, exist_ok=True)
    dtype = torch.bfloat16 if config.device == "cuda" else torch.float32
    module = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=dtype, attn_implementation="sdpa"
    )
    module = module.to(config.device).eval().requires_grad_(False)
    run = Run(config, module, args.out, began + args.seconds, args.start)
    rows_NL, counts = read_rows(args.texts, config.length, 0)
    run.note("texts", counts)
    run.take(rows_NL, config.drafted)
    run.train()
    head = load_file(args.out / "head" / "model.safetensors")
    run.note("parameters", sum(weight.numel() for weight in head.values() if weight.ndim == 2))
    run.note("seconds", round(time.time() - began))


if __name__ == "__main__":
    main()

"""Write the pair as the package ships it: two plain folders, weights in bf16.

`python -m training.tiny_python.export --draft .corpus/runs/draft-2x192`.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from training.tiny_python.models import END_OF_TEXT_ID

ASSETS = Path(__file__).parents[2] / "src" / "foretoken" / "assets"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def export_model(source: Path, tokenizer: Path, folder: Path) -> int:
    """Write one loadable folder, one weight file in bf16; returns the bytes written.

    The generation config carries token ids only: sampling settings belong to the caller.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), END_OF_TEXT_ID)
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(folder, max_shard_size="1GB")
    (folder / "model.safetensors").chmod(0o644)
    for name in TOKENIZER_FILES:
        shutil.copy(tokenizer / name, folder / name)
    return sum(f.stat().st_size for f in folder.iterdir())


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, default=Path(".corpus"))
    parser.add_argument("--target", type=Path, default=Path(".corpus/runs/target"))
    parser.add_argument("--draft", type=Path, default=Path(".corpus/runs/draft-2x192"))
    parser.add_argument("--out", type=Path, default=ASSETS)
    args = parser.parse_args()
    tokenizer = args.corpus / "tokenizer"
    for source, name in ((args.target, "tiny-python"), (args.draft, "tiny-python-draft")):
        size = export_model(source, tokenizer, args.out / name)
        print(f"{name}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()

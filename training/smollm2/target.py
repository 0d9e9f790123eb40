"""The target as an ordinary checkpoint: the GGUF file's weights, dequantised to bfloat16.

`python -m training.smollm2.target FILE.gguf FOLDER`. For machines on which the head is trained and
measured; needs the packages `gguf` and `accelerate`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

SPECIAL = {"<|im_start|>": 1, "<|im_end|>": 2}


def convert(file: Path, folder: Path) -> None:
    """Write weights, tokenizer and chat template.

    Raises:
        ValueError: the tokenizer lost a special token, or the template.
    """
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    found = {text: tokenizer.encode(text, add_special_tokens=False) for text in SPECIAL}
    if found != {text: [i] for text, i in SPECIAL.items()} or not tokenizer.chat_template:
        raise ValueError(f"{file.name}: special tokens are {found}, or there is no chat template")
    read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16)
    if hasattr(read.config, "quantization_config"):
        del read.config.quantization_config
    model = AutoModelForCausalLM.from_config(read.config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())  # one that was read from GGUF refuses to be saved
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    convert(args.file, args.folder)


if __name__ == "__main__":
    main()

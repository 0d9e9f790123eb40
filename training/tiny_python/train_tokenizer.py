"""Train the byte-level BPE tokenizer of the pair: 4096 entries, exact round trips.

`python -m training.tiny_python.train_tokenizer --corpus .corpus --out .corpus/tokenizer`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from training.tiny_python.corpus import read_split

VOCAB_SIZE = 4096
END_OF_TEXT = "<|endoftext|>"
CONTEXT = 2048
SAMPLE_EVERY = 2  # every second file is plenty for 4096 merges, at half the time


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """Byte-level BPE over `texts`; no token is added when encoding.

    The byte-level pre-tokenizer keeps a newline together with the indentation after it, so one
    token covers "end of line, indent by 8".
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, default=Path(".corpus"))
    parser.add_argument("--out", type=Path, default=Path(".corpus/tokenizer"))
    args = parser.parse_args()
    files = read_split(args.corpus / "train.jsonl.xz")[::SAMPLE_EVERY]
    tokenizer = train_tokenizer(f.text for f in files)
    tokenizer.save_pretrained(args.out)
    print(f"vocabulary: {len(tokenizer)}")


if __name__ == "__main__":
    main()

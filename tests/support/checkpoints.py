"""Tiny random checkpoints with a byte-level tokenizer, for tests of engine and LLM."""

from __future__ import annotations

from pathlib import Path

import torch

VOCABULARY = 260
END = 256


def ids_of(text: str | bytes) -> list[int]:
    """Token ids of a text or of bytes, one per byte: the order of the byte-level alphabet."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    order = printable + [byte for byte in range(256) if byte not in printable]
    return [order.index(byte) for byte in (text.encode() if isinstance(text, str) else text)]


def save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: i for i, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", clean_up_tokenization_spaces=False
    )
    assert fast.eos_token_id == END
    fast.save_pretrained(folder)


def save_checkpoint(
    folder: Path,
    *,
    seed: int = 0,
    layers: int = 2,
    hidden: int = 32,
    vocabulary: int = VOCABULARY,
    tokenizer: bool = True,
    max_len: int = 256,
    spread: float = 0.3,
) -> Path:
    """A random Llama, deterministic in its arguments; its greedy text does not repeat at once."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,  # what the native decoder takes
        intermediate_size=2 * hidden,
        vocab_size=vocabulary,
        max_position_embeddings=max_len,
        tie_word_embeddings=False,
        initializer_range=spread,
        bos_token_id=None,
        eos_token_id=END if tokenizer else None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    if tokenizer:
        save_tokenizer(folder)
    return folder

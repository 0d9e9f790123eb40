"""Shapes of the target and of the draft candidates, built as plain Transformers models."""

from __future__ import annotations

import math

import torch
from transformers import LlamaConfig, LlamaForCausalLM

CONTEXT = 2048
END_OF_TEXT_ID = 0

# name -> (layers, hidden, heads, KV heads, intermediate)
SHAPES: dict[str, tuple[int, int, int, int, int]] = {
    "target": (20, 256, 4, 2, 640),
    "draft-1x256": (1, 256, 4, 2, 704),
    "draft-2x192": (2, 192, 3, 1, 512),
    "draft-2x256": (2, 256, 4, 2, 704),
    "tiny": (2, 32, 2, 1, 64),
    "tiny-draft": (1, 32, 2, 1, 64),
}


def build(name: str, vocab_size: int, seed: int) -> LlamaForCausalLM:
    """A freshly initialised model of shape `name`, tied embeddings, fp32.

    Residual projections start smaller by sqrt(2 · layers), so depth does not inflate the stream.
    """
    layers, hidden, heads, kv_heads, intermediate = SHAPES[name]
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=END_OF_TEXT_ID,
        pad_token_id=END_OF_TEXT_ID,
        attn_implementation="sdpa",
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if key.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(1 / math.sqrt(2 * layers))
        # With a pad token the library zeroes its embedding row; the end of text is a real token.
        model.model.embed_tokens.weight[END_OF_TEXT_ID].normal_(0.0, 0.02)
    model.model.embed_tokens.padding_idx = None
    return model


def logits_of(model: torch.nn.Module, ids_BT: torch.Tensor) -> torch.Tensor:
    """Next-token logits of every position, no cache. Shape: [B, T, V]."""
    return model(input_ids=ids_BT, use_cache=False).logits

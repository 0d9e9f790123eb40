"""Tiny random checkpoints of many model families, and a plain Transformers forward to compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCABULARY = 96

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
_ALTERNATING = ["sliding_attention", "full_attention"]
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

SUPPORTED: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 5, "head_dim": 8},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "gemma2": {
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 5,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gpt_neox": {},
    "phi": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_oss": {**_EXPERTS, "head_dim": 8, "sliding_window": 5, "layer_types": _ALTERNATING},
    "gemma4_text": {
        "head_dim": 8,
        "global_head_dim": 16,
        "sliding_window": 5,
        "layer_types": _ALTERNATING,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
    },
}
MORE: dict[str, dict[str, Any]] = {
    "apertus": {},
    "cohere": {},
    "cohere2": {"sliding_window": 5},
    "ernie4_5": {},
    "exaone4": {"sliding_window": 5, "sliding_window_pattern": 2},
    "gemma": {"head_dim": 8},
    "gemma3_text": {
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 5,
        "layer_types": _ALTERNATING,
    },
    "glm": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "granite": {},
    "granitemoe": _EXPERTS,
    "helium": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "ministral": {"sliding_window": 5, "head_dim": 8},
    "mixtral": _EXPERTS,
    "nemotron": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 5},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "phi3": {},
    "qwen3_moe": {
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "decoder_sparse_step": 1,
    },
    "seed_oss": {"head_dim": 8},
    "smollm3": {},
    "starcoder2": {"sliding_window": 5},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bloom": ({"n_layer": 2, "n_head": 4}, "_supports_attention_backend"),
    "mamba": ({"state_size": 4}, "_supports_attention_backend"),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, "attention calls in 2 layers"),
    "llama4_text": (
        {
            "head_dim": 8,
            "intermediate_size_mlp": 48,
            "num_local_experts": 2,
            "attention_chunk_size": 8,
        },
        "chunked_attention",
    ),
    "bert": ({}, "differs from its own eager attention"),
}


def make_config(family: str, overrides: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(family, **{**_COMMON, **overrides})


def save_model(
    folder: Path,
    family: str,
    overrides: dict[str, Any],
    *,
    dtype: torch.dtype = torch.float32,
    **save: Any,
) -> Path:
    """A random checkpoint whose attention is far from uniform (weights of deviation 0.2)."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(make_config(family, overrides), dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder, **save)
    return folder


def plain_model(folder: Path) -> Any:
    """Transformers' own model: eager attention, nothing of ours."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def plain_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """[n, V] logits of one sequence."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits

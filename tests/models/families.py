"""Tiny random checkpoints of many model families, and a plain Transformers forward to compare."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

VOCABULARY = 96

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip
_WINDOW = 5  # shorter than the self-check's sequences and the tests' texts
_ALTERNATING = ["sliding_attention", "full_attention"]
_MIXED = {"sliding_window": _WINDOW, "layer_types": _ALTERNATING}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_MANY_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_ROUTED_EXPERTS = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}  # fmt: skip
_OLD_NAMES = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}

_WITHOUT_SETTINGS = (
    "apertus", "arcee", "bitnet", "cohere", "ernie4_5", "gpt_neox", "granite", "jais2", "llama",
    "nanochat", "nemotron", "olmo", "olmo2", "persimmon", "phi", "stablelm",
)  # fmt: skip
_WITH_HEADS_OF_8 = (
    "gemma", "glm", "glm4", "helium", "hunyuan_v1_dense", "ministral3", "seed_oss",
)  # fmt: skip
SUPPORTED: dict[str, dict[str, Any]] = {
    **{name: {} for name in _WITHOUT_SETTINGS},
    **{name: {"head_dim": 8} for name in _WITH_HEADS_OF_8},
    "cohere2": _MIXED,
    "ctrl": _OLD_NAMES,
    "deepseek_v3": {
        **_ROUTED_EXPERTS, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1,
        "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 12,
    },
    "exaone4": {"sliding_window": _WINDOW, "sliding_window_pattern": 2},
    "gemma2": {
        **_MIXED, "head_dim": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {**_MIXED, "head_dim": 8, "query_pre_attn_scalar": 8},
    "gemma4_text": {
        **_MIXED, "head_dim": 8, "global_head_dim": 16, "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
    },
    "glm4_moe": {**_ROUTED_EXPERTS, "head_dim": 8},
    "gpt2": _OLD_NAMES,
    "gpt_bigcode": _OLD_NAMES,
    "gpt_oss": {**_EXPERTS, **_MIXED, "head_dim": 8},
    "granitemoe": _EXPERTS,
    "jetmoe": {**_EXPERTS, "kv_channels": 8},
    "ministral": {"sliding_window": _WINDOW, "head_dim": 8},
    "mistral": {"sliding_window": _WINDOW, "head_dim": 8},
    "mixtral": {**_EXPERTS, "sliding_window": _WINDOW},
    "olmo3": _MIXED,
    "olmoe": _MANY_EXPERTS,
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "phi3": {"sliding_window": _WINDOW},
    "phimoe": _EXPERTS,
    "qwen2": {**_MIXED, "use_sliding_window": True},
    "qwen2_moe": {**_MANY_EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3": {**_MIXED, "use_sliding_window": True, "head_dim": 8},
    "qwen3_moe": {**_MANY_EXPERTS, "head_dim": 8, "decoder_sparse_step": 1},
    "smollm3": {**_MIXED, "use_sliding_window": True},
    "starcoder2": {"sliding_window": _WINDOW},
    "vaultgemma": {**_MIXED, "head_dim": 8, "query_pre_attn_scalar": 8},
}  # fmt: skip

_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
_CHUNKS = {"attention_chunk_size": 8}
_OWN_CODE = "its attention is its own code"
_STATE = "it keeps a recurrent state"

# Settings, and the message.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bart": ({}, "`bart`.*attends to an encoder's output"),
    "bert": ({}, "`bert` differs from its own eager attention"),
    "biogpt": ({}, "`biogpt`.*does not declare that it can"),
    "bloom": ({"n_layer": 2, "n_head": 4}, "`bloom`.*its own code adds ALiBi biases"),
    "codegen": ({**_OLD_NAMES, "rotary_dim": 4}, f"`codegen`.*{_OWN_CODE}"),
    "deepseek_v4": ({}, "type `heavily_compressed_attention`: only full and sliding window"),
    "diffllama": ({}, "`diffllama` makes 4 attention calls in 2 layers"),
    "doge": ({}, "layer 0 asks for `attention_mask`"),
    "falcon": ({}, f"`falcon`.*{_OWN_CODE}"),
    "falcon_h1": ({}, f"`falcon_h1` is of type `hybrid`: {_STATE}"),
    "gpt_neo": (
        {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "num_heads": 4},
        f"`gpt_neo`.*{_OWN_CODE}",
    ),
    "gptj": ({**_OLD_NAMES, "rotary_dim": 8}, f"`gptj`.*{_OWN_CODE}"),
    "jamba": ({}, f"`jamba` is of type `linear_attention`: {_STATE}"),
    "lfm2": (
        {"layer_types": ["conv", "full_attention"]},
        f"Layer 0 of `lfm2` is of type `conv`: {_STATE}",
    ),
    "llama4_text": (
        {"head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 2, **_CHUNKS},
        "`llama4_text` is of type `chunked_attention`: attention in chunks is not a sliding window",
    ),
    "mamba": ({"state_size": 4}, f"`mamba` is of type `linear_attention`: {_STATE}"),
    "mpt": (
        {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
        "`mpt`.*its own code adds ALiBi biases",
    ),
    "qwen3_5_text": (
        {**_LINEAR, "head_dim": 8},
        f"Layer 0 of `qwen3_5_text` is of type `linear_attention`: {_STATE}",
    ),
    "qwen3_next": (
        {**_LINEAR, **_MANY_EXPERTS, "head_dim": 8, "shared_expert_intermediate_size": 16},
        f"Layer 0 of `qwen3_next` is of type `linear_attention`: {_STATE}",
    ),
    "rwkv": ({}, f"`rwkv`.*{_STATE}"),
    "xglm": ({}, f"`xglm`.*{_OWN_CODE}"),
}


_VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "depth": 1,
    "num_attention_heads": 2, "num_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
    "embed_dim": 16, "out_hidden_size": 32, "image_size": 28, "patch_size": 14,
}  # fmt: skip
_SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}

# The settings of the text part.
MULTIMODAL: dict[str, dict[str, Any]] = {
    "aya_vision": {"model_type": "cohere2"},
    "gemma3": SUPPORTED["gemma3_text"],
    "gemma4": SUPPORTED["gemma4_text"] | {"pad_token_id": 0},
    "glm4v": {"rope_parameters": _SECTIONS},
    "idefics3": {"model_type": "llama"},
    "internvl": {"model_type": "qwen2"},
    "llava": {"model_type": "llama"},
    "llava_next": {"model_type": "mistral"},
    "llava_onevision": {"model_type": "qwen2"},
    "mistral3": {"model_type": "mistral", "head_dim": 8},
    "paligemma": {"model_type": "gemma", "head_dim": 8},
    "qwen2_5_vl": {"rope_parameters": _SECTIONS},
    "qwen2_vl": {"rope_parameters": _SECTIONS},
    "qwen3_vl": {"rope_parameters": _SECTIONS, "head_dim": 8},
    "smolvlm": {"model_type": "llama"},
}


def make_config(family: str, overrides: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    settings = {**_COMMON, **overrides}
    if family in MULTIMODAL:
        settings = {"text_config": settings, "vision_config": dict(_VISION)}
    return AutoConfig.for_model(family, **settings)


def _auto_class(family: str) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if family in MULTIMODAL else AutoModelForCausalLM


def save_model(
    folder: Path,
    family: str,
    overrides: dict[str, Any],
    *,
    dtype: torch.dtype = torch.float32,
    **save: Any,
) -> Path:
    model = _auto_class(family).from_config(make_config(family, overrides), dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder, **save)
    return folder


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Have the tensors of a checkpoint edited in place."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def plain_model(folder: Path) -> Any:
    """Transformers' own model: eager attention, nothing of ours."""
    family = json.loads((folder / "config.json").read_text())["model_type"]
    model: Any = _auto_class(family).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def same_weights(one: Any, other: Any) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)


def plain_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits

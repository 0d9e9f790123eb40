"""Tensors of a GGUF file by the names of Transformers' parameters, and the order of their rows."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from foretoken.errors import UnsupportedModelError
from foretoken.models.gguf.reader import GgufFile, GgufTensor

# GGUF's names with Transformers' names: outside of layers, then within a layer.
_OUTSIDE = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
}  # fmt: skip
_IN_LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
_GGUF_IN_LAYER = {name: gguf for gguf, name in _IN_LAYER.items()}
_GGUF_OUTSIDE = {name: gguf for gguf, name in _OUTSIDE.items()}

ROPE_FACTORS = "rope_freqs.weight"
"""A tensor that is not a parameter of a module. `config.py` finds the type of RoPE by it."""

_PERMUTED = ("llama", "mistral3")  # architectures in which RoPE rotates neighbouring rows of a head


def parameter_name(name: str) -> str | None:
    """The parameter for a tensor's name (`model.layers.3.mlp.up_proj.weight` for
    `blk.3.ffn_up.weight`); None for a tensor that the families of `config.py` do not have."""
    match = re.fullmatch(r"(?:blk\.(0|[1-9]\d{0,5})\.)?(\w+)\.(weight|bias)", name, re.ASCII)
    if match is None:
        return None
    layer, stem, leaf = match.groups()
    if layer is None:
        return f"{_OUTSIDE[stem]}.{leaf}" if stem in _OUTSIDE else None
    return f"model.layers.{layer}.{_IN_LAYER[stem]}.{leaf}" if stem in _IN_LAYER else None


def tensor_name(name: str) -> str | None:
    """The name of a parameter's tensor in a file, the inverse of `parameter_name`; None for a
    parameter that is not known."""
    path, _, leaf = name.rpartition(".")
    if leaf not in ("weight", "bias"):
        return None
    if path in _GGUF_OUTSIDE:
        return f"{_GGUF_OUTSIDE[path]}.{leaf}"
    match = re.fullmatch(r"model\.layers\.(0|[1-9]\d{0,5})\.([\w.]+)", path, re.ASCII)
    if match is None or match[2] not in _GGUF_IN_LAYER:
        return None
    return f"blk.{match[1]}.{_GGUF_IN_LAYER[match[2]]}.{leaf}"


def parameters(file: GgufFile) -> dict[str, GgufTensor]:
    """The tensors of a model by the names of Transformers' parameters; `UnsupportedModelError` for
    a tensor that is not a known parameter."""
    by_name: dict[str, GgufTensor] = {}
    for name, tensor in file.tensors.items():
        parameter = parameter_name(name)
        if parameter is not None:
            by_name[parameter] = tensor
        elif name != ROPE_FACTORS:
            raise UnsupportedModelError(
                f"`{tensor.path}` has the tensor `{name}`, which no family that is supported as "
                "GGUF has. Use a checkpoint of this model in safetensors."
            )
    return by_name


def row_order(architecture: str, name: str, values: Mapping[str, int]) -> NDArray[np.int64] | None:
    """For each row of a parameter the row's index in the file; None if the order is the same.

    `file_rows[row_order(...)]` are Transformers' rows. RoPE in llama.cpp rotates pairs of
    neighbouring rows of a head. RoPE in Transformers rotates pairs of a row in the first half of
    the head and a row in the second half. So llama.cpp's converter interleaves the two halves of
    each query and key head, in weights and biases.

    Args:
        architecture: `general.architecture` of the file.
        name: the parameter's name in Transformers.
        values: the configuration, with `num_attention_heads`, `num_key_value_heads`, `head_dim`.
    """
    match = re.search(r"\.self_attn\.([qk])_proj\.(weight|bias)$", name)
    if match is None or architecture not in _PERMUTED:
        return None
    heads = values["num_attention_heads" if match[1] == "q" else "num_key_value_heads"]
    rows = np.arange(heads * values["head_dim"], dtype=np.int64)
    return rows.reshape(heads, values["head_dim"] // 2, 2).swapaxes(1, 2).reshape(-1)

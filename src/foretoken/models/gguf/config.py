"""What the metadata of a GGUF file says of its model, as the values of a `config.json`.

Belongs here: the architectures that are served and their switches; what ends a text. Does not:
types and bounds of single values (`keys.py`), RoPE (`rope.py`), the tokenizer, weights.

A value that would change what the model computes is taken over or refused, never dropped. Not in a
file at all: the sliding window of the first Mistral models, which llama.cpp does not have either.
"""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.models.gguf.keys import Keys
from foretoken.models.gguf.names import parameter_name
from foretoken.models.gguf.reader import shown
from foretoken.models.gguf.rope import rope_parameters
from foretoken.models.gguf.split import GgufFile
from foretoken.models.sizes import Stored, check_sizes


class Architecture(NamedTuple):
    """A `general.architecture` that is served.

    biased: query, key and value always have biases, and no other layer has
    """

    model_type: str
    class_name: str
    biased: bool = False


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM"),
    "mistral3": Architecture("mistral", "MistralForCausalLM"),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", biased=True),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
}
"""Each a family of `families.py`. Files of Mistral models say `llama`."""

_MISTRAL = Architecture("mistral", "MistralForCausalLM")
# What changes what a model of these architectures computes, unless it has this value.
_INERT = {
    "expert_count": 0,
    "expert_used_count": 0,
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.scale": 0.0,
    "attention.temperature_scale": 0.0,
    "attention.temperature_length": 0,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "embedding_scale": 0.0,
    "logit_scale": 0.0,
    "nextn_predict_layers": 0,
    "pooling_type": 0,
    "residual_scale": 0.0,
    "use_parallel_residual": False,
}
_PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_ENDS = frozenset(
    """<|endoftext|> <|end_of_text|> <|im_end|> <|eot_id|> <|eom_id|> <|end|> <end_of_turn>
    <end_of_utterance> <EOT> <|EOT|>""".split()
)
"""Control tokens that end an answer, as llama.cpp has it; a file names one or two of them."""

_CONTROL = 3  # a token's type


def config_values(file: GgufFile) -> dict[str, Any]:
    """The values of the `config.json` of an equal checkpoint in Hugging Face's layout.

    Raises:
        CheckpointError: a key is missing, of another type, out of bounds, or contradicts the
            tensors.
        UnsupportedModelError: another architecture, or a switch that is not served.
    """
    keys = Keys(file)
    architecture = _architecture(file, keys)
    heads, hidden = keys.whole("attention.head_count"), keys.whole("embedding_length")
    layers = keys.whole("block_count")
    vocabulary = _vocabulary(file, keys, hidden)
    if "attention.key_length" not in keys and hidden % heads:
        keys.wrong("embedding_length", hidden, f"a multiple of `attention.head_count`, {heads}")
    head_dim = keys.whole("attention.key_length", hidden // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if (size := keys.whole(name, head_dim)) != head_dim:
            keys.refuse(name, size, f"{head_dim}, the size of a head")
    if head_dim % 2:
        keys.wrong("attention.key_length", head_dim, "even")
    values: dict[str, Any] = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": keys.whole("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.whole("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": keys.whole("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope_parameters(file, keys, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **_window(keys, architecture),
        **token_ids(file),
    }
    kinds = {tensor.kind for tensor in file.tensors.values() if len(tensor.shape) > 1}
    if len(kinds) == 1 and kinds <= _PLAIN.keys():
        values["dtype"] = _PLAIN[kinds.pop()]
    _check_head_counts(keys, values)
    stored = stored_sizes(file)
    if layers > stored.layers:
        keys.wrong("block_count", layers, f"at most {stored.layers}: the layers that are there")
    check_sizes(file.path, values, stored)
    values |= _biases(file, keys, architecture, layers)
    return values


def generation_values(file: GgufFile) -> dict[str, Any]:
    """The values of the `generation_config.json` of an equal checkpoint: what ends a text."""
    values = token_ids(file)
    ends = {values["eos_token_id"], *_stated_ends(Keys(file)), *_ending_tokens(file)} - {None}
    return {**values, "eos_token_id": sorted(ends) or None}


def token_ids(file: GgufFile) -> dict[str, int | None]:
    """The ids that begin, end and fill a text.

    Raises:
        CheckpointError: one of them is no token of the vocabulary.
    """
    keys = Keys(file)
    return {
        "bos_token_id": keys.token("bos_token_id"),
        "eos_token_id": keys.token("eos_token_id"),
        "pad_token_id": keys.token("padding_token_id"),
    }


def stored_sizes(file: GgufFile) -> Stored:
    """The sizes of what a file holds, for `check_sizes` and `check_numbers`."""
    shapes = {parameter_name(t.name) or t.name: t.shape for t in file.tensors.values()}
    layers = {match[1] for name in file.tensors if (match := re.match(r"blk\.(\d+)\.", name))}
    return Stored(sum(map(math.prod, shapes.values())), len(layers), shapes)


def _architecture(file: GgufFile, keys: Keys) -> Architecture:
    """The file's architecture, without switches that its family does not have."""
    name = keys.architecture
    if (kind := file.metadata.get("general.type", "model")) != "model":
        raise UnsupportedModelError(
            f"`{keys.path}` holds something of type {shown(kind)} (`general.type`): must be a "
            "model. Merge an adapter into its model before converting it."
        )
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"`{keys.path}` is of the architecture `{name[:60]}`, which is not served as GGUF; "
            f"served are {', '.join(sorted(ARCHITECTURES))}. If it has a checkpoint in "
            "safetensors, use that."
        )
    for key, inert in _INERT.items():
        if (value := keys.get(key, inert)) != inert and value is not None:
            keys.refuse(key, value, f"{inert}, or left out")
    slides = name == "llama" and keys.get("attention.sliding_window", 0)
    return _MISTRAL if slides else ARCHITECTURES[name]


def _window(keys: Keys, architecture: Architecture) -> dict[str, Any]:
    """The sliding window: of all layers of a Mistral model; other families have none in GGUF."""
    if not keys.get("attention.sliding_window", 0):
        return {"sliding_window": None} if architecture.model_type == "mistral" else {}
    window = keys.whole("attention.sliding_window")
    if architecture.model_type != "mistral":
        keys.refuse("attention.sliding_window", window, "left out: which layers slide is not said")
    if pattern := keys.get("attention.sliding_window_pattern", 0):
        keys.refuse("attention.sliding_window_pattern", pattern, "left out")
    return {"sliding_window": window}


def _vocabulary(file: GgufFile, keys: Keys, hidden: int) -> int:
    """The number of tokens, by the embedding, which the rest of the file has to agree with."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(
            f"`{file.path}` has no tensor `token_embd.weight`: it holds no model, or a part of one."
        )
    if len(embedding.shape) != 2 or embedding.shape[1] != hidden:
        raise CheckpointError(
            f"`{file.path}` has `token_embd.weight` of shape {[*embedding.shape]}: must have 2 "
            f"dimensions, the last of `embedding_length`, {hidden}."
        )
    size = embedding.shape[0]
    if (stated := keys.whole("vocab_size", size)) != size:
        keys.wrong("vocab_size", stated, f"{size}, the rows of `token_embd.weight`")
    tokens = file.metadata.get("tokenizer.ggml.tokens", [])
    if isinstance(tokens, list) and len(tokens) > size:
        raise CheckpointError(
            f"`{file.path}` has {len(tokens)} tokens: must be at most {size}, the rows of "
            "`token_embd.weight`."
        )
    return size


def _check_head_counts(keys: Keys, values: dict[str, Any]) -> None:
    heads, kv_heads = values["num_attention_heads"], values["num_key_value_heads"]
    if heads % kv_heads:
        keys.wrong("attention.head_count_kv", kv_heads, f"a divisor of {heads}, the heads")


def _biases(file: GgufFile, keys: Keys, architecture: Architecture, layers: int) -> dict[str, bool]:
    """Which linear layers have biases, by the tensors that are there.

    Transformers has one switch for the four of attention and one for the three of the feed-forward
    layer, so all layers have all of a group or none.
    """
    switches = {}
    groups = {"attention_bias": ("q", "k", "v", "output"), "mlp_bias": ("gate", "up", "down")}
    for switch, parts in groups.items():
        prefix = "attn" if switch == "attention_bias" else "ffn"
        names = [f"blk.{i}.{prefix}_{part}.bias" for i in range(layers) for part in parts]
        found = [name for name in names if name in file.tensors]
        wanted = [name for name in names if "output" not in name] if architecture.biased else names
        if architecture.biased and switch == "attention_bias":
            if found != wanted:
                odd = sorted(set(found) ^ set(wanted))[0]
                state = "has" if odd in found else "lacks"
                raise CheckpointError(f"`{file.path}` {state} the tensor `{odd}`.")
            continue
        if not found:
            continue
        if found != names or switch not in _SWITCHES.get(architecture.model_type, ()):
            raise UnsupportedModelError(
                f"`{file.path}` has {len(found)} biases of {len(names)} such as `{found[0]}`, "
                f"which Transformers' `{architecture.model_type}` does not have."
            )
        switches[switch] = True
    return switches


_SWITCHES = {"llama": ("attention_bias", "mlp_bias"), "qwen3": ("attention_bias",)}


def _stated_ends(keys: Keys) -> list[int | None]:
    return [keys.token(f"{name}_token_id") for name in ("eot", "eom")]


def _ending_tokens(file: GgufFile) -> list[int]:
    tokens = file.metadata.get("tokenizer.ggml.tokens", [])
    types = file.metadata.get("tokenizer.ggml.token_type", [])
    if not isinstance(tokens, list) or not isinstance(types, list):
        return []  # `tokenizer.py` says what is wrong
    pairs = enumerate(zip(types, tokens, strict=False))
    return [i for i, (kind, token) in pairs if kind == _CONTROL and token in _ENDS]

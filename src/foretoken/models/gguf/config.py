"""The metadata of a GGUF file as the values of a `config.json`.

A value that would change what the model computes is used or refused, never ignored. Only the
sliding window of the first Mistral models is lost: GGUF files do not contain it.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.models.gguf.names import ROPE_FACTORS, parameter_name
from foretoken.models.gguf.reader import GgufFile, short_repr
from foretoken.models.sizes import StoredSizes, check_sizes


class Architecture(NamedTuple):
    """A supported `general.architecture`, by the type and the class of the model in Transformers.

    has_qkv_bias: the projections of queries, keys and values have biases, and no other layer does
    """

    model_type: str
    class_name: str
    has_qkv_bias: bool = False


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM"),
    "mistral3": Architecture("mistral", "MistralForCausalLM"),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", has_qkv_bias=True),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
}
"""The supported architectures by name. Each `model_type` is a family in `families.py`."""

_MISTRAL = Architecture("mistral", "MistralForCausalLM")  # files of such models state `llama`
# Settings that change what a model computes, each with the only supported value.
_SUPPORTED_VALUES = {
    "expert_count": 0, "expert_used_count": 0, "attention.causal": True,
    "attention.clamp_kqv": 0.0, "attention.max_alibi_bias": 0.0, "attention.scale": 0.0,
    "attention.temperature_scale": 0.0, "attention.temperature_length": 0,
    "attn_logit_softcapping": 0.0, "final_logit_softcapping": 0.0, "embedding_scale": 0.0,
    "logit_scale": 0.0, "nextn_predict_layers": 0, "pooling_type": 0, "residual_scale": 0.0,
    "use_parallel_residual": False,
}  # fmt: skip
_PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Control tokens that end an answer, as in llama.cpp. The metadata of a file names only one or two
# of the tokens that end an answer of its model.
_ENDING_TOKENS = frozenset(
    """<|endoftext|> <|end_of_text|> <|im_end|> <|eot_id|> <|eom_id|> <|end|> <end_of_turn>
    <end_of_utterance> <EOT> <|EOT|>""".split()
)

_CONTROL = 3  # the type of a control token
_MAX_SIZE = 2**31 - 1
_TOKENIZER = "tokenizer.ggml."

_THETA = 10_000.0  # the default of llama.cpp and Transformers
# RoPE of Llama 3.1, 3.2 and 3.3 as published, without `factor`, which differs from model to model.
_LLAMA3 = {
    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
# Relative tolerance: llama.cpp's converter computes frequencies and factors in float32.
_FACTOR_TOLERANCE = 1e-5
# Multipliers of RoPE that Transformers lacks or defines differently, each with the only supported
# value.
_MULTIPLIERS = {
    "rope.scaling.attn_factor": 1.0, "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0, "rope.scaling.yarn_log_multiplier": 0.0,
    "rope.scaling.alpha": 0.0,
}  # fmt: skip


def config_values(file: GgufFile) -> dict[str, Any]:
    """The content of the `config.json` that the same model has in Hugging Face's layout.

    Raises:
        CheckpointError: a key is missing, or its value has another type, is out of bounds, or
            contradicts the tensors or another value.
        UnsupportedModelError: the architecture or the value of a setting is not supported.
    """
    keys = Keys(file)
    architecture = _architecture(file, keys)
    heads, hidden = keys.whole("attention.head_count"), keys.whole("embedding_length")
    layers = keys.whole("block_count")
    vocabulary = _vocabulary(file, keys, hidden)
    if "attention.key_length" not in keys and hidden % heads:
        bound = f"a multiple of `attention.head_count`, {heads}"
        keys.raise_invalid("embedding_length", hidden, bound)
    head_dim = keys.whole("attention.key_length", hidden // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if (size := keys.whole(name, head_dim)) != head_dim:
            keys.raise_unsupported(name, size, f"{head_dim}, the size of a head")
    if head_dim % 2:
        keys.raise_invalid("attention.key_length", head_dim, "even")
    values: dict[str, Any] = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "vocab_size": vocabulary, "hidden_size": hidden,
        "intermediate_size": keys.whole("feed_forward_length"),
        "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": keys.whole("attention.head_count_kv", heads),
        "head_dim": head_dim, "hidden_act": "silu",
        "max_position_embeddings": keys.whole("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope_parameters(file, keys, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **_window(keys, architecture), **token_ids(file),
    }  # fmt: skip
    kinds = {tensor.kind for tensor in file.tensors.values() if len(tensor.shape) > 1}
    if len(kinds) == 1 and kinds <= _PLAIN.keys():
        values["dtype"] = _PLAIN[kinds.pop()]
    if heads % (kv_heads := values["num_key_value_heads"]):
        bound = f"a divisor of {heads}, the number of heads"
        keys.raise_invalid("attention.head_count_kv", kv_heads, bound)
    stored = stored_sizes(file)
    if layers > stored.layers:
        bound = f"at most {stored.layers}, the number of layers in the file"
        keys.raise_invalid("block_count", layers, bound)
    check_sizes(file.path, values, stored)
    return values | _biases(file, architecture, layers)


def generation_values(file: GgufFile) -> dict[str, Any]:
    """The content of the `generation_config.json` of the same model: ids of special tokens, with
    all tokens that end a text in `eos_token_id`."""
    values, keys = token_ids(file), Keys(file)
    stated_ids = {values["eos_token_id"], keys.token("eot_token_id"), keys.token("eom_token_id")}
    ending_ids = {*stated_ids, *_ending_ids(file)} - {None}
    return {**values, "eos_token_id": sorted(ending_ids) or None}


def token_ids(file: GgufFile) -> dict[str, int | None]:
    """The ids of the tokens that begin, end and pad a text; None for a token that is not stated,
    `CheckpointError` for a value that is not an id of the vocabulary."""
    keys = Keys(file)
    return {
        "bos_token_id": keys.token("bos_token_id"),
        "eos_token_id": keys.token("eos_token_id"),
        "pad_token_id": keys.token("padding_token_id"),
    }


def stored_sizes(file: GgufFile) -> StoredSizes:
    """The sizes of a file's tensors, for `check_sizes` and `check_numbers`."""
    shapes = {parameter_name(t.name) or t.name: t.shape for t in file.tensors.values()}
    layers = {match[1] for name in file.tensors if (match := re.match(r"blk\.(\d+)\.", name))}
    return StoredSizes(sum(map(math.prod, shapes.values())), len(layers), shapes)


def _architecture(file: GgufFile, keys: Keys) -> Architecture:
    """The file's architecture, checked together with the settings that change computations."""
    name = keys.architecture
    if (kind := file.metadata.get("general.type", "model")) != "model":
        raise UnsupportedModelError(
            f"`{keys.path}` has {short_repr(kind)} as `general.type`: must be 'model'. If "
            "the file is an adapter, merge it into its model before converting the model to GGUF."
        )
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"`{keys.path}` is of the architecture `{name[:60]}`, which is not supported as GGUF; "
            f"supported are {', '.join(sorted(ARCHITECTURES))}. Use a checkpoint of this model in "
            "safetensors, if there is one."
        )
    for key, supported in _SUPPORTED_VALUES.items():
        if (value := keys.get(key, supported)) != supported and value is not None:
            keys.raise_unsupported(key, value, f"{supported}, or absent")
    is_mistral = name == "llama" and keys.get("attention.sliding_window", 0)
    return _MISTRAL if is_mistral else ARCHITECTURES[name]


def _window(keys: Keys, architecture: Architecture) -> dict[str, Any]:
    """`sliding_window` for `config.json`; {} for a family without this field.

    Only Mistral models are supported with a window, which must be the same in all layers.
    """
    if not keys.get("attention.sliding_window", 0):
        return {"sliding_window": None} if architecture.model_type == "mistral" else {}
    window = keys.whole("attention.sliding_window")
    if architecture.model_type != "mistral":
        bound = "absent, because the file does not say which layers have this window"
        keys.raise_unsupported("attention.sliding_window", window, bound)
    if pattern := keys.get("attention.sliding_window_pattern", 0):
        keys.raise_unsupported("attention.sliding_window_pattern", pattern, "absent")
    return {"sliding_window": window}


def _vocabulary(file: GgufFile, keys: Keys, hidden: int) -> int:
    """The number of the embedding's rows, checked against the metadata; `hidden`: hidden size."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(
            f"`{file.path}` has no tensor `token_embd.weight`: it holds no model, or only a part."
        )
    if len(embedding.shape) != 2 or embedding.shape[1] != hidden:
        raise CheckpointError(
            f"`{file.path}` has `token_embd.weight` of shape {[*embedding.shape]}: must be a "
            f"matrix with rows of {hidden} numbers, the `embedding_length`."
        )
    size = embedding.shape[0]
    if (stated := keys.whole("vocab_size", size)) != size:
        keys.raise_invalid("vocab_size", stated, f"{size}, the rows of `token_embd.weight`")
    tokens = file.metadata.get("tokenizer.ggml.tokens", [])
    if isinstance(tokens, list) and len(tokens) > size:
        raise CheckpointError(
            f"`{file.path}` has {len(tokens)} tokens: must be at most {size}, the rows of "
            "`token_embd.weight`."
        )
    return size


def _biases(file: GgufFile, architecture: Architecture, layers: int) -> dict[str, bool]:
    """The switches of `config.json` for biases, by the tensors in the file.

    Transformers has one switch for the four linear layers of attention, and one for the three of
    the feed-forward part. So in each of these groups all biases must exist, or none.
    (Qwen2 has no such switch: only its queries, keys and values must have biases.)
    """
    switches = {}
    groups = {
        "attention_bias": ("attn_q", "attn_k", "attn_v", "attn_output"),
        "mlp_bias": ("ffn_gate", "ffn_up", "ffn_down"),
    }
    for switch, stems in groups.items():
        names = [f"blk.{i}.{stem}.bias" for i in range(layers) for stem in stems]
        existing = [name for name in names if name in file.tensors]
        if architecture.has_qkv_bias and switch == "attention_bias":
            required = [name for name in names if "output" not in name]
            if existing != required:
                name = sorted(set(existing) ^ set(required))[0]
                state = "has" if name in existing else "lacks"
                raise CheckpointError(f"`{file.path}` {state} the tensor `{name}`.")
            continue
        if not existing:
            continue
        if existing != names or switch not in _BIAS_SWITCHES.get(architecture.model_type, ()):
            raise UnsupportedModelError(
                f"`{file.path}` has {len(existing)} of {len(names)} possible biases, for example "
                f"`{existing[0]}`: no `{architecture.model_type}` of Transformers has just these."
            )
        switches[switch] = True
    return switches


_BIAS_SWITCHES = {"llama": ("attention_bias", "mlp_bias"), "qwen3": ("attention_bias",)}


def _ending_ids(file: GgufFile) -> list[int]:
    """The ids of the file's control tokens that are in `_ENDING_TOKENS`."""
    tokens = file.metadata.get("tokenizer.ggml.tokens", [])
    types = file.metadata.get("tokenizer.ggml.token_type", [])
    if not isinstance(tokens, list) or not isinstance(types, list):
        return []  # `tokenizer.py` raises the error
    pairs = enumerate(zip(types, tokens, strict=False))
    return [i for i, (kind, token) in pairs if kind == _CONTROL and token in _ENDING_TOKENS]


def rope_parameters(file: GgufFile, keys: Keys, head_dim: int) -> dict[str, Any]:
    """The `rope_parameters` for `config.json`; errors as in `config_values`."""
    theta = keys.number("rope.freq_base", _THETA)
    kind = keys.get("rope.scaling.type", "none")
    factor_key = "rope.scaling.factor" if "rope.scaling.factor" in keys else "rope.scale_linear"
    if kind == "none" and factor_key == "rope.scale_linear" and keys.get(factor_key, 1.0) != 1.0:
        kind = "linear"  # in files older than the key `rope.scaling.type`
    for name, supported in _MULTIPLIERS.items():
        if (value := keys.get(name, supported)) != supported:
            keys.raise_unsupported(name, value, f"{supported}, or absent")
    if sections := keys.get("rope.dimension_sections"):
        keys.raise_unsupported("rope.dimension_sections", sections, "absent")
    if kind not in ("none", "linear", "yarn"):
        keys.raise_unsupported("rope.scaling.type", kind, "none, linear or yarn")
    if ROPE_FACTORS in file.tensors:
        if kind != "none":
            bound = f"none in a file that has `{ROPE_FACTORS}`"
            keys.raise_unsupported("rope.scaling.type", kind, bound)
        return {"rope_theta": theta, **_llama3(file, theta, head_dim)}
    if kind == "none":
        return {"rope_theta": theta, "rope_type": "default"}
    factor = keys.number(factor_key)
    if factor < 1:
        keys.raise_invalid(factor_key, factor, "at least 1")
    values = {"rope_theta": theta, "rope_type": kind, "factor": factor}
    if kind == "linear":
        return values
    values["original_max_position_embeddings"] = keys.whole("rope.scaling.original_context_length")
    for name in ("beta_fast", "beta_slow"):
        if f"rope.scaling.yarn_{name}" in keys:
            values[name] = keys.number(f"rope.scaling.yarn_{name}")
    return values


def _llama3(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    """The parameters of RoPE type `llama3` from which Transformers computes the factors that the
    file stores as a tensor; type `default` if all factors are 1. `UnsupportedModelError` unless the
    tensor holds the factors of a published Llama 3 model."""
    tensor = file.tensors[ROPE_FACTORS]
    if tensor.kind != "F32" or tensor.shape != (head_dim // 2,):
        raise UnsupportedModelError(
            f"`{tensor.path}` has `{ROPE_FACTORS}` as {tensor.kind} of shape {[*tensor.shape]}: "
            f"must be F32 of [{head_dim // 2}], half the size of a head."
        )
    stored = tensor.values().astype(np.float64)
    if np.array_equal(stored, np.ones_like(stored)):
        return {"rope_type": "default"}
    factor = float(stored.max())
    if math.isfinite(factor) and factor > 1:
        expected = llama3_factors(theta, head_dim, factor)
        if np.allclose(expected, stored, rtol=_FACTOR_TOLERANCE, atol=0):
            return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    raise UnsupportedModelError(
        f"`{tensor.path}` has factors of RoPE (`{ROPE_FACTORS}`) that are not supported: must be "
        f"those of Llama 3 ({_LLAMA3})."
    )


def llama3_factors(theta: float, head_dim: int, factor: float) -> NDArray[np.float64]:
    """The divisor of each RoPE frequency, float64 [head_dim / 2], as Llama 3.1 was published: 1 for
    short wavelengths, `factor` for long wavelengths, and a smooth function between."""
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    length = _LLAMA3["original_max_position_embeddings"]
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (length / wavelength - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    is_short, is_long = wavelength < length / high, wavelength > length / low
    return np.where(is_short, 1.0, np.where(is_long, factor, between))


class Keys:
    """A file's metadata, checked as they are read, by keys without the architecture's prefix:
    `context_length` for `llama.context_length`."""

    def __init__(self, file: GgufFile) -> None:
        self.path: Path = file.path
        self._metadata = file.metadata
        name = file.metadata.get("general.architecture")
        if not isinstance(name, str) or not name:
            raise CheckpointError(
                f"`{file.path}` gives `general.architecture` as {short_repr(name)}: must be the "
                "name of an architecture. Is the file a model?"
            )
        self.architecture = name

    def __contains__(self, name: str) -> bool:
        return self._full(name) in self._metadata

    def get(self, name: str, default: Any = None) -> Any:
        return self._metadata.get(self._full(name), default)

    def whole(self, name: str, default: int | None = None) -> int:
        """The value of a key that must be an integer in 1.._MAX_SIZE, or a list that repeats such
        an integer for each layer."""
        value = self._required(name, default)
        if isinstance(value, list) and value:
            if any(item != value[0] for item in value):
                self.raise_unsupported(name, value, "the same for all layers")
            value = value[0]
        if type(value) is not int or not 1 <= value <= _MAX_SIZE:
            self.raise_invalid(name, value, f"a whole number in 1..{_MAX_SIZE}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """The value of a key that must be a number above 0. A float32 is read as the shortest
        decimal number: 0.1 instead of 0.10000000149."""
        value = self._required(name, default)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            self.raise_invalid(name, value, "a number above 0")
        as_float32 = np.float32(value)
        return float(str(as_float32)) if float(as_float32) == value else float(value)

    def token(self, name: str) -> int | None:
        """The token id at a key of the tokenizer; None if the file does not state an id."""
        value = self._metadata.get(_TOKENIZER + name)
        tokens = self._metadata.get(f"{_TOKENIZER}tokens")
        if value is None or value == 2**32 - 1:  # how llama.cpp writes that there is no such token
            return None
        count = len(tokens) if isinstance(tokens, list) else _MAX_SIZE
        if type(value) is not int or not 0 <= value < count:
            raise CheckpointError(
                f"`{self.path}` gives `{_TOKENIZER}{name}` as {short_repr(value)}: must be a token "
                f"id in 0..{count - 1}."
            )
        return value

    def raise_invalid(self, name: str, value: Any, bound: str) -> NoReturn:
        """Raise `CheckpointError` for a value that no model can have."""
        raise CheckpointError(
            f"`{self.path}` gives `{self._full(name)}` as {short_repr(value)}: must be {bound}."
        )

    def raise_unsupported(self, name: str, value: Any, bound: str) -> NoReturn:
        """Raise `UnsupportedModelError` for a value that is possible, but not supported."""
        raise UnsupportedModelError(
            f"`{self.path}` gives `{self._full(name)}` as {short_repr(value)}, which is not "
            f"supported: must be {bound}."
        )

    def _full(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def _required(self, name: str, default: Any) -> Any:
        value = self.get(name, default)
        if value is None:
            raise CheckpointError(
                f"`{self.path}` has no key `{self._full(name)}`: it holds no model, or only a part."
            )
        return value

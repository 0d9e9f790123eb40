"""The metadata of a GGUF file as the values of a `config.json`.

Belongs here: the architectures that are served, their switches, RoPE (with the frequency factors
that Llama 3 files store as a tensor), the tokens that end a text, and the types and bounds of
single values. Does not: the tokenizer, weights, RoPE frequencies (Transformers' modules compute
them).

A value that would change what the model computes is used or refused, never ignored. There is one
exception: GGUF files do not contain the sliding window of the first Mistral models. llama.cpp
ignores it, too.
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
from foretoken.models.gguf.reader import GgufFile, shown
from foretoken.models.sizes import StoredSizes, check_sizes


class Architecture(NamedTuple):
    """A `general.architecture` that is served.

    biased: query, key and value projections have biases, and no other layer does
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
"""By `general.architecture`. Each model type is a family in `families.py`. Files of Mistral
models state `llama`."""

_MISTRAL = Architecture("mistral", "MistralForCausalLM")
# Settings that change what a model computes. Each has the only value that is served.
_SERVED_VALUES = {
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
"""Control tokens that end an answer, as in llama.cpp. The metadata of a file names only one or two
of its ending tokens."""

_CONTROL = 3  # the type of a control token
_MAX_SIZE = 2**31 - 1
_TOKENIZER = "tokenizer.ggml."

_THETA = 10_000.0  # the default of llama.cpp and Transformers
# RoPE of Llama 3.1, 3.2 and 3.3 as published. `factor` differs; it is the tensor's largest number.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Relative tolerance: llama.cpp's converter computes frequencies and factors in float32.
_FACTOR_TOLERANCE = 1e-5
# Multipliers of RoPE that Transformers lacks or defines differently. Each has the only value that
# is served.
_MULTIPLIERS = {
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "rope.scaling.alpha": 0.0,
}


def config_values(file: GgufFile) -> dict[str, Any]:
    """The content of the `config.json` that the same model has in Hugging Face's layout.

    Raises:
        CheckpointError: a key is missing, has another type, is out of bounds, or contradicts the
            tensors.
        UnsupportedModelError: the architecture or the value of a switch is not served.
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
    if heads % (kv_heads := values["num_key_value_heads"]):
        keys.wrong("attention.head_count_kv", kv_heads, f"a divisor of {heads}, the heads")
    stored = stored_sizes(file)
    if layers > stored.layers:
        keys.wrong("block_count", layers, f"at most {stored.layers}: the layers that are there")
    check_sizes(file.path, values, stored)
    return values | _biases(file, architecture, layers)


def generation_values(file: GgufFile) -> dict[str, Any]:
    """The content of the `generation_config.json` of the same model.

    It has the ids of special tokens; `eos_token_id` is a list of all tokens that end a text.
    """
    values, keys = token_ids(file), Keys(file)
    named = {values["eos_token_id"], keys.token("eot_token_id"), keys.token("eom_token_id")}
    ending_ids = {*named, *_ending_tokens(file)} - {None}
    return {**values, "eos_token_id": sorted(ending_ids) or None}


def token_ids(file: GgufFile) -> dict[str, int | None]:
    """The ids of the tokens that begin, end and pad a text; None for a token that is not stated.

    Raises:
        CheckpointError: an id is not in the vocabulary.
    """
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
    """The file's architecture.

    Raises:
        UnsupportedModelError: it is not served, or a setting has a value that is not served.
    """
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
    for key, served in _SERVED_VALUES.items():
        if (value := keys.get(key, served)) != served and value is not None:
            keys.refuse(key, value, f"{served}, or left out")
    is_mistral = name == "llama" and keys.get("attention.sliding_window", 0)
    return _MISTRAL if is_mistral else ARCHITECTURES[name]


def _window(keys: Keys, architecture: Architecture) -> dict[str, Any]:
    """`sliding_window` for `config.json`; {} for a family without this field.

    Only Mistral models in GGUF have a window, and all their layers have the same one.

    Raises:
        UnsupportedModelError: only some layers have a window, or the file does not say which.
    """
    if not keys.get("attention.sliding_window", 0):
        return {"sliding_window": None} if architecture.model_type == "mistral" else {}
    window = keys.whole("attention.sliding_window")
    if architecture.model_type != "mistral":
        keys.refuse("attention.sliding_window", window, "left out: which layers slide is not said")
    if pattern := keys.get("attention.sliding_window_pattern", 0):
        keys.refuse("attention.sliding_window_pattern", pattern, "left out")
    return {"sliding_window": window}


def _vocabulary(file: GgufFile, keys: Keys, hidden: int) -> int:
    """The number of tokens: the rows of the embedding.

    Args:
        hidden: the model's hidden size.

    Raises:
        CheckpointError: there is no embedding, or the metadata contradict it.
    """
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


def _biases(file: GgufFile, architecture: Architecture, layers: int) -> dict[str, bool]:
    """The switches of `config.json` for biases, by the tensors in the file.

    Transformers has one switch for the four linear layers of attention, and one for the three of
    the feed-forward part. So in each of these groups all biases must exist, or none.

    Raises:
        CheckpointError, UnsupportedModelError: Transformers' model has other biases than the file.
    """
    switches = {}
    groups = {
        "attention_bias": ("attn_q", "attn_k", "attn_v", "attn_output"),
        "mlp_bias": ("ffn_gate", "ffn_up", "ffn_down"),
    }
    for switch, parts in groups.items():
        names = [f"blk.{i}.{part}.bias" for i in range(layers) for part in parts]
        existing = [name for name in names if name in file.tensors]
        if architecture.biased and switch == "attention_bias":
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
                f"`{file.path}` has {len(existing)} biases of {len(names)} such as "
                f"`{existing[0]}`, which Transformers' `{architecture.model_type}` does not have."
            )
        switches[switch] = True
    return switches


_BIAS_SWITCHES = {"llama": ("attention_bias", "mlp_bias"), "qwen3": ("attention_bias",)}


def _ending_tokens(file: GgufFile) -> list[int]:
    """The ids of the file's control tokens that end an answer; see `_ENDS`."""
    tokens = file.metadata.get("tokenizer.ggml.tokens", [])
    types = file.metadata.get("tokenizer.ggml.token_type", [])
    if not isinstance(tokens, list) or not isinstance(types, list):
        return []  # `tokenizer.py` raises the error
    pairs = enumerate(zip(types, tokens, strict=False))
    return [i for i, (kind, token) in pairs if kind == _CONTROL and token in _ENDS]


def rope_parameters(file: GgufFile, keys: Keys, head_dim: int) -> dict[str, Any]:
    """The `rope_parameters` for `config.json`.

    Raises:
        CheckpointError: a value that no model can have.
        UnsupportedModelError: the type of RoPE, its factors or a multiplier are not served.
    """
    theta = keys.number("rope.freq_base", _THETA)
    kind = keys.get("rope.scaling.type", "none")
    factor_key = "rope.scaling.factor" if "rope.scaling.factor" in keys else "rope.scale_linear"
    if kind == "none" and factor_key == "rope.scale_linear" and keys.get(factor_key, 1.0) != 1.0:
        kind = "linear"  # in files older than the key `rope.scaling.type`
    for name, served in _MULTIPLIERS.items():
        if (value := keys.get(name, served)) != served:
            keys.refuse(name, value, f"{served}, or left out")
    if sections := keys.get("rope.dimension_sections"):
        keys.refuse("rope.dimension_sections", sections, "left out")
    if kind not in ("none", "linear", "yarn"):
        keys.refuse("rope.scaling.type", kind, "none, linear or yarn")
    if ROPE_FACTORS in file.tensors:
        if kind != "none":
            keys.refuse("rope.scaling.type", kind, f"none next to `{ROPE_FACTORS}`")
        return {"rope_theta": theta, **_llama3(file, theta, head_dim)}
    if kind == "none":
        return {"rope_theta": theta, "rope_type": "default"}
    factor = keys.number(factor_key)
    if factor < 1:
        keys.wrong(factor_key, factor, "at least 1")
    values = {"rope_theta": theta, "rope_type": kind, "factor": factor}
    if kind == "linear":
        return values
    values["original_max_position_embeddings"] = keys.whole("rope.scaling.original_context_length")
    for name in ("beta_fast", "beta_slow"):
        if f"rope.scaling.yarn_{name}" in keys:
            values[name] = keys.number(f"rope.scaling.yarn_{name}")
    return values


def _llama3(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    """The parameters of RoPE type `llama3` from which Transformers computes the file's factors.

    Raises:
        UnsupportedModelError: the factors are not those of a published Llama 3 model.
    """
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
        f"`{tensor.path}` has factors of RoPE (`{ROPE_FACTORS}`) that are not those of Llama 3 "
        f"({_LLAMA3}), which is not served."
    )


def llama3_factors(theta: float, head_dim: int, factor: float) -> NDArray[np.float64]:
    """The divisor of each RoPE frequency, float64 [head_dim / 2], as Llama 3.1 was published.

    It is 1 for short wavelengths, `factor` for long ones, and smooth between.
    """
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    length = _LLAMA3["original_max_position_embeddings"]
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (length / wavelength - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    is_short, is_long = wavelength < length / high, wavelength > length / low
    return np.where(is_short, 1.0, np.where(is_long, factor, between))


class Keys:
    """A file's metadata. Each value is checked when it is read.

    Names of keys are without the architecture's prefix: `context_length` for
    `llama.context_length`.
    """

    def __init__(self, file: GgufFile) -> None:
        self.path: Path = file.path
        self._metadata = file.metadata
        name = file.metadata.get("general.architecture")
        if not isinstance(name, str) or not name:
            raise CheckpointError(
                f"`{file.path}` gives `general.architecture` as {shown(name)}: must be a name. "
                "Is it a model?"
            )
        self.architecture = name

    def __contains__(self, name: str) -> bool:
        return self._full(name) in self._metadata

    def get(self, name: str, default: Any = None) -> Any:
        """A value of any type."""
        return self._metadata.get(self._full(name), default)

    def whole(self, name: str, default: int | None = None) -> int:
        """The value of a key that must be an integer >= 1.

        It may also be a list with one integer per layer, if all of them are equal.
        """
        value = self._required(name, default)
        if isinstance(value, list) and value:
            if any(item != value[0] for item in value):
                self.refuse(name, value, "the same for all layers")
            value = value[0]
        if type(value) is not int or not 1 <= value <= _MAX_SIZE:
            self.wrong(name, value, f"a whole number in 1..{_MAX_SIZE}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """The value of a key that must be a number above 0.

        A number that was rounded to float32 is returned as its author wrote it: 0.1 instead of
        0.10000000149.
        """
        value = self._required(name, default)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            self.wrong(name, value, "a number above 0")
        as_float32 = np.float32(value)
        return float(str(as_float32)) if float(as_float32) == value else float(value)

    def token(self, name: str) -> int | None:
        """The token id at a key of the tokenizer; None if the file does not state one.

        Raises:
            CheckpointError: it is not in the vocabulary.
        """
        value = self._metadata.get(_TOKENIZER + name)
        tokens = self._metadata.get(f"{_TOKENIZER}tokens")
        if value is None or value == 2**32 - 1:  # how llama.cpp writes that there is no such token
            return None
        count = len(tokens) if isinstance(tokens, list) else _MAX_SIZE
        if type(value) is not int or not 0 <= value < count:
            raise CheckpointError(
                f"`{self.path}` gives `{_TOKENIZER}{name}` as {shown(value)}: must be a token id "
                f"in 0..{count - 1}."
            )
        return value

    def wrong(self, name: str, value: Any, bound: str) -> NoReturn:
        """Raise `CheckpointError` for a value that no model can have."""
        raise CheckpointError(
            f"`{self.path}` gives `{self._full(name)}` as {shown(value)}: must be {bound}."
        )

    def refuse(self, name: str, value: Any, bound: str) -> NoReturn:
        """Raise `UnsupportedModelError` for a value that is possible, but not served."""
        raise UnsupportedModelError(
            f"`{self.path}` gives `{self._full(name)}` as {shown(value)}, which is not served: "
            f"must be {bound}."
        )

    def _full(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def _required(self, name: str, default: Any) -> Any:
        """The value of a key, or the default; `CheckpointError` if both are None."""
        value = self.get(name, default)
        if value is None:
            raise CheckpointError(
                f"`{self.path}` has no key `{self._full(name)}`: it holds no model, or a part of "
                "one."
            )
        return value

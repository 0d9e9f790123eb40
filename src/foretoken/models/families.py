"""The families that backends run themselves, and how their checkpoints become a `Stack`.

A stack is read together with its *twin*, Transformers' module of the same configuration. The twin
shows which layers have biases, and it has the frequencies of RoPE. Its weights become views of the
stack's weights, so that the twin can be run for comparison without a second copy of the weights.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from foretoken.models.checkpoint import has_file, reading
from foretoken.models.compressed_scheme import is_compressed, unsupported_reason
from foretoken.models.sizes import check_leftovers
from foretoken.ops.pinned import fill
from foretoken.ops.types import AttentionOptions

from foretoken.ops.stack import (  # isort: skip
    Attention, Dense, Gated, Layer, Linear, Rope, Stack, UnfitError, Weight,
)  # fmt: skip


class Family(NamedTuple):
    """How a family differs from Llama, which has RMSNorm, rotary attention, a gated SiLU layer."""

    qk_norm: bool = False  # each query and key is normed before RoPE
    slides: bool = True  # False: layers ignore the configuration's `sliding_window`


FAMILIES = {
    "llama": Family(slides=False),
    "ministral": Family(),
    "mistral": Family(),
    "qwen2": Family(),
    "qwen3": Family(qk_norm=True),
    "seed_oss": Family(slides=False),
}
"""The families by `model_type`."""

# RoPE types with constant frequencies. Other types depend on the longest position.
_FIXED_ROPE = ("default", "linear", "llama3", "yarn")

ReadTensor = Callable[[str], Tensor]
"""A function that reads a tensor of the checkpoint, by its name in Transformers' module."""


def check_family(module: Any) -> Family:
    """The family of a causal language model; `UnfitError` if no stack can run this model."""
    config = module.config
    if config.model_type not in FAMILIES:
        raise UnfitError(f"models of type `{config.model_type}` run through their own modules")
    rope = getattr(module.model.rotary_emb, "rope_type", None)
    if rope not in _FIXED_ROPE:
        raise UnfitError(f"RoPE of type `{rope}` changes its frequencies while running")
    if config.hidden_act not in ("silu", "swish"):
        raise UnfitError(f"the gated layer's activation is `{config.hidden_act}`, not SiLU")
    if module.lm_head.bias is not None:
        raise UnfitError("the output layer has a bias")
    return FAMILIES[config.model_type]


def stays_compressed(config: Any) -> bool:
    """Whether a checkpoint's weights are compressed-tensors that keep their stored format. (If not,
    Transformers' quantiser loads compressed-tensors.)"""
    quantization = getattr(config, "quantization_config", None)
    if config.model_type not in FAMILIES or not is_compressed(quantization):
        return False
    if unsupported_reason(quantization):
        return False
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default") if isinstance(rope, dict) else "default"
    return config.hidden_act in ("silu", "swish") and kind in _FIXED_ROPE


def windows(config: Any, count: int) -> list[int | None]:
    """The sliding window of each of `count` layers, in tokens; None: no window.

    There are no windows if the configuration has `layer_types`, but not `count` of them.
    """
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None) or ["sliding_attention"] * count
    if len(layer_types) != count:
        return [None] * count
    return [window if name == "sliding_attention" else None for name in layer_types]


class Source(Protocol):
    """A source of a stack's weights. Names and paths are those of Transformers' module."""

    def tensor(self, name: str) -> Tensor:
        """The gains of a norm, by the name of the parameter."""

    def embedding(self, path: str) -> Weight:
        """The vectors of tokens, by the path of the embedding module."""

    def linear(self, *paths: str) -> Linear:
        """Linear layers with the same input, joined to one layer.

        Raises:
            UnfitError: some of these layers have a bias, but not all.
        """


def read_stack(module: Any, read: ReadTensor | None = None) -> Stack:
    """The stack of a module. Afterwards the module's weights are views of the stack's weights.

    Args:
        read: reads the weights; None: take the module's own weights, without a second copy if
            possible.

    Raises:
        UnfitError: no stack can run the module.
    """
    check_family(module)
    return fill_stack(module, _Weights(module, read, module.model.rotary_emb.inv_freq.device))


def fill_stack(module: Any, weights: Source) -> Stack:
    """The stack of a module, with weights from this source; `UnfitError` as `read_stack`."""
    family, config, model = check_family(module), module.config, module.model
    num_layers = len(model.layers)
    layer_windows = windows(config, num_layers) if family.slides else [None] * num_layers
    if any(window is not None and window < 1 for window in layer_windows):
        raise UnfitError(f"`sliding_window` is {config.sliding_window}")
    is_tied = module.lm_head.weight is model.embed_tokens.weight
    rotary = model.rotary_emb
    rope = Rope(rotary.inv_freq.float(), float(rotary.attention_scaling))
    embedding = weights.embedding("model.embed_tokens")
    layers = []
    for i, window in enumerate(layer_windows):
        path = f"model.layers.{i}."
        attention = model.layers[i].self_attn
        names = [f"{path}self_attn.{name}_norm.weight" for name in "qk" if family.qk_norm]
        qk_norms = [weights.tensor(name) for name in names]
        qkv = weights.linear(*(f"{path}self_attn.{name}_proj" for name in "qkv"))
        head_size = attention.head_dim
        mixer = Attention(
            qkv, weights.linear(f"{path}self_attn.o_proj"), qkv.split[0] // head_size,
            qkv.split[1] // head_size, head_size, rope,
            AttentionOptions(attention.scaling, window), *qk_norms,
        )  # fmt: skip
        gate_up = weights.linear(f"{path}mlp.gate_proj", f"{path}mlp.up_proj")
        feed = Gated(gate_up, weights.linear(f"{path}mlp.down_proj"))
        mixer_norm = weights.tensor(f"{path}input_layernorm.weight")
        feed_norm = weights.tensor(f"{path}post_attention_layernorm.weight")
        layers.append(Layer(mixer_norm, mixer, feed_norm, feed))
    norm = weights.tensor("model.norm.weight")
    if is_tied:
        module.lm_head.weight = model.embed_tokens.weight
    head = Linear(embedding) if is_tied else weights.linear("lm_head")
    return Stack(
        embedding, tuple(layers), norm, head, model.norm.variance_epsilon, head.weight.shape[0]
    )


def check_biases(paths: Sequence[str], have_bias: Sequence[bool]) -> None:
    """Raise `UnfitError` if some of the layers have a bias, but not all."""
    if len({*have_bias}) > 1:
        raise UnfitError(f"some of {', '.join(paths)} have a bias, but not all")


class _Weights:
    """A `Source` that puts each tensor into a stack and into the stack's twin."""

    def __init__(self, module: Any, read: ReadTensor | None, device: torch.device) -> None:
        self._module, self._read, self._device = module, read, device
        self._dtype: torch.dtype = module.lm_head.weight.dtype

    def tensor(self, name: str) -> Tensor:
        return self._join(name)

    def embedding(self, path: str) -> Weight:
        return Dense(self._join(f"{path}.weight"))

    def _join(self, *names: str) -> Tensor:
        """One contiguous tensor of several parameters' rows, of which the twin gets views."""
        tensors = [self._module.get_parameter(name).detach() for name in names]
        sizes = [len(tensor) for tensor in tensors]
        joined: Tensor = tensors[0]
        if self._read is not None or len(names) > 1 or not joined.is_contiguous():
            shape = (sum(sizes), *tensors[0].shape[1:])
            joined = torch.empty(shape, dtype=self._dtype, device=self._device)
        for name, tensor, view in zip(names, tensors, torch.split(joined, sizes), strict=True):
            if self._read is not None:
                fill(view, self._read(name))
            elif joined is not tensor:
                view.copy_(tensor)
            path, _, leaf = name.rpartition(".")
            parameter = nn.Parameter(view, requires_grad=False)
            setattr(self._module.get_submodule(path), leaf, parameter)
        return joined

    def linear(self, *paths: str) -> Linear:
        linears = [self._module.get_submodule(path) for path in paths]
        check_biases(paths, [linear.bias is not None for linear in linears])
        split = tuple(linear.out_features for linear in linears) if len(linears) > 1 else ()
        weight = Dense(self._join(*(f"{path}.weight" for path in paths)))
        if linears[0].bias is None:
            return Linear(weight, None, split)
        return Linear(weight, self._join(*(f"{path}.bias" for path in paths)), split)


def tensor_reader(
    module: nn.Module, headers: Mapping[Path, Mapping[str, Any]]
) -> ReadTensor | None:
    """A function that reads a twin's weights from safetensors files.

    None if no stack can run the twin, if a tensor is missing, exists twice or has another shape
    than the twin's, or if there is an output layer that the twin lacks. Then Transformers should
    load the files, because its errors name the tensors.

    Args:
        headers: of the files, by path.

    Raises:
        CheckpointError: the files have tensors of another model; see `check_leftovers`.
    """
    from safetensors import safe_open

    try:
        check_family(module)
    except UnfitError:
        return None
    needed = {name: tuple(weight.shape) for name, weight in module.named_parameters()}
    names = [name for header in headers.values() for name in header if name != "__metadata__"]
    paths = {name: path for path, header in headers.items() for name in header}
    stored = {name: tuple(headers[path][name].get("shape", ())) for name, path in paths.items()}
    has_duplicates = len(set(names)) < len(names)
    differs = any(stored.get(name) != shape for name, shape in needed.items())
    class_ignores: Any = module._keys_to_ignore_on_load_unexpected
    ignored_patterns = ["rotary_emb.inv_freq", *(class_ignores or ())]
    leftovers = {
        name for name in set(names) - needed.keys()
        if not any(re.search(pattern, name) for pattern in ignored_patterns)
    }  # fmt: skip
    if has_duplicates or differs or "lm_head.weight" in leftovers:
        return None
    check_leftovers(module, leftovers, next(iter(headers)).parent)

    def read(name: str) -> Tensor:
        # Open the file for each tensor: its memory map is then freed with the tensor.
        with reading(path := paths[name]), safe_open(path, "pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    return read


def twin_of(
    model_class: Any, config: Any, dtype: torch.dtype, device: torch.device, attention: str
) -> Any:
    """Transformers' module of a configuration. Its weights have no memory (they are on the meta
    device); its RoPE frequencies are on `device`."""
    with torch.device("meta"):
        module = model_class._from_config(config, attn_implementation=attention, dtype=dtype)
    rotary = getattr(module.base_model, "rotary_emb", None)
    if rotary is not None:
        module.base_model.rotary_emb = type(rotary)(config=config.get_text_config()).to(device)
    return module.eval().requires_grad_(False)


def set_generation_config(module: Any, folder: Path) -> None:
    """Give a twin the checkpoint's `generation_config.json`, as `from_pretrained` does."""
    from transformers import GenerationConfig

    if has_file(folder / "generation_config.json"):
        module.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)


def miniature_of(model_class: Any, config: Any, attention: str) -> Any:
    """A small module with the switches of a configuration, one layer of each type, random weights.

    Sliding windows are shorter than the self-check's sequences, and norms and biases are random,
    too. So the module shows errors that a checkpoint's own weights may hide.
    """
    small = copy.deepcopy(config)
    shares_kv = config.num_attention_heads // config.num_key_value_heads > 1
    layer_types = list(dict.fromkeys(getattr(config, "layer_types", None) or [""]))
    changes: dict[str, Any] = {
        "hidden_size": 48, "intermediate_size": 80, "vocab_size": 128, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2 if shares_kv else 4,
        "num_hidden_layers": len(layer_types), "pad_token_id": None,
    }  # fmt: skip
    if getattr(config, "layer_types", None):
        changes["layer_types"] = layer_types
    if getattr(config, "sliding_window", None):
        changes["sliding_window"] = 5
    for name, value in changes.items():
        setattr(small, name, value)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # `torch.manual_seed` would also seed GPUs
        module = model_class._from_config(small, attn_implementation=attention, dtype=torch.float32)
        module.requires_grad_(False)
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return module.eval()

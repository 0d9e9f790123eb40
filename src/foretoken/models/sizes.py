"""Whether `config.json` fits the weights and this machine.

Belongs here: checks of sizes before a module is built, since an absurd one would otherwise be
looped over or allocated; and whether tensors that the model has no place for are harmless or
another model's. Tensors that Transformers itself declares ignorable for a class never get here.
"""

from __future__ import annotations

import copy
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from foretoken.config.checks import machine_bytes
from foretoken.errors import CheckpointError, EngineMemoryError
from foretoken.models.gguf.reader import is_gguf

_log = logging.getLogger(__name__)

Shape = tuple[int, ...]

_LAYERS = frozenset({"num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth"})
_SIZES = frozenset(
    """hidden_size n_embd d_model vocab_size num_attention_heads n_head n_heads num_heads
    num_key_value_heads head_dim""".split()
)
_OPTIONAL = frozenset(
    """intermediate_size moe_intermediate_size n_inner ffn_dim num_experts num_local_experts
    n_routed_experts""".split()
)  # 0 where a model has none
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_OF_TEXT = ("text_config", "transformer_layer_config")
# Sizes up to these are harmless: defaults for experts or vision layers that a model does not have.
_HARMLESS = 2**20
_HARMLESS_LAYERS = 2**12
_MODULE_BYTES = 30_000  # memory of a layer's modules without weights: GPT-2's; Qwen3's take 35 KB
_MAX_SIZE = 2**31 - 1
_SHOWN = 3
# Buffers that older versions of Transformers saved; a model computes them itself.
_BUFFERS = frozenset({"inv_freq", "original_inv_freq", "masked_bias"})
# Parts that only layers for predicting further tokens (MTP) have.
_FURTHER = re.compile(r"\.(eh_proj|enorm|hnorm|shared_head)\.|(^|[._])mtp[._]")


class StoredSizes(NamedTuple):
    """Sizes of a checkpoint's tensors: numbers in all, layers (by their names), shapes by name."""

    numbers: int
    layers: int
    shapes: dict[str, Shape]


def stored_sizes(headers: Iterable[Mapping[str, Any]]) -> StoredSizes:
    """The sizes by safetensors headers; a quantised number is counted as at least 1 bit."""
    numbers, layers, shapes = 0, set[str](), dict[str, Shape]()
    for header in headers:
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            shapes[name] = tuple(entry["shape"])
            first, last = entry["data_offsets"]
            is_plain = re.fullmatch("B?F(16|32|64)", entry["dtype"])
            numbers += math.prod(shapes[name]) if is_plain else 8 * (last - first)
            if number := re.search(r"(?:^|\.)(\d+)\.", name):
                layers.add(number[1])
    return StoredSizes(numbers, len(layers) or len(shapes), shapes)


def config_file(folder: Path) -> Path:
    """The file that states a checkpoint's configuration."""
    return folder if is_gguf(folder) else folder / "config.json"


def check_sizes(folder: Path, values: Mapping[str, Any], stored: StoredSizes | None) -> None:
    """Check the sizes that a configuration gives, before Transformers reads it.

    Args:
        values: `config.json` of `folder`.
        stored: sizes of its weights; None if they are random.

    Raises:
        CheckpointError: a size is below 1, or more than the weights or this machine can hold.
    """
    memory = machine_bytes() or 2**40
    for name, value, is_text in _sizes(values):
        given = f"`{config_file(folder)}` gives `{name}` as {value}"
        least = int(name in _LAYERS or name in _SIZES)
        if value < 0 or (value < least and is_text):
            raise CheckpointError(f"{given}: must be at least {least}.")
        if name in POSITIONS:  # of RoPE: no weights depend on it
            most = 2**63 - 1
            why = f"at most {most}"
        elif name not in _LAYERS:
            most = max(stored.numbers, _HARMLESS) if stored else _MAX_SIZE
            why = (
                f"the weights hold {stored.numbers} numbers in all" if stored else f"at most {most}"
            )
        elif stored is None:
            most = memory // _MODULE_BYTES
            why = f"at most {most} layers fit the {memory / 2**30:.3g} GiB of this machine's memory"
        else:
            most = stored.layers if is_text else max(stored.layers, _HARMLESS_LAYERS)
            why = f"the weights have {stored.layers} layers"
        if value > most:
            raise CheckpointError(f"{given}: {why}.")


def _sizes(values: Mapping[str, Any], is_text: bool = True) -> Iterator[tuple[str, int, bool]]:
    """Every size as its name, its value, and whether it belongs to the text model."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _sizes(value, is_text and name in _OF_TEXT)
        elif type(value) is int and name in {*_LAYERS, *_SIZES, *_OPTIONAL, *POSITIONS}:
            yield name, value, is_text


def parameter_shapes(model_class: Any, config: Any) -> dict[str, Shape] | None:
    """The shapes of a model's parameters, each once, without allocating them.

    None if it cannot be built: the loader then fails in the same way and reports it.
    """
    try:
        with torch.device("meta"):
            module = model_class._from_config(copy.deepcopy(config), attn_implementation="eager")
    except Exception:
        return None
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


def check_numbers(
    folder: Path, config: Any, shapes: Mapping[str, Shape] | None, stored: StoredSizes
) -> None:
    """Raise `CheckpointError` for a model of far more numbers than the weights hold.

    It prevents huge allocations. Smaller misfits are found by name when weights are loaded.
    """
    needed = sum(map(math.prod, shapes.values())) if shapes else 0
    if shapes and needed > max(2 * stored.numbers, _HARMLESS):  # twice: an untied output layer
        name = max(shapes, key=lambda name: math.prod(shapes[name]))
        found = f", and is {[*stored.shapes[name]]} there" if name in stored.shapes else ""
        raise CheckpointError(
            f"`{config_file(folder)}` {_cause(config, shapes[name], stored)}makes a model of "
            f"{needed} numbers, and the weights hold {stored.numbers}: `{name}` would be "
            f"{[*shapes[name]]}{found}."
        )


def check_room(
    folder: Path,
    config: Any,
    shapes: Mapping[str, Shape] | None,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Raise `EngineMemoryError` for random weights larger than the device's memory."""
    room = machine_bytes()
    if device.type != "cpu":
        room = torch.cuda.get_device_properties(device).total_memory
    needed = dtype.itemsize * sum(map(math.prod, shapes.values())) if shapes else 0
    if shapes and room is not None and needed > room:
        name = max(shapes, key=lambda name: math.prod(shapes[name]))
        raise EngineMemoryError(
            f"`{config_file(folder)}` {_cause(config, shapes[name], None)}makes random weights "
            f"of {needed / 2**30:.3g} GiB, and `{device.type}` has {room / 2**30:.3g} GiB of memory"
            f": `{name}` would be {[*shapes[name]]}."
        )


def _cause(config: Any, shape: Shape, stored: StoredSizes | None) -> str:
    """The field that makes a tensor so large: the largest one that divides a size not stored."""
    known = {size for shape in stored.shapes.values() for size in shape} if stored else set[int]()
    sizes = [size for size in shape if size not in known]
    fields = [
        (value, name)
        for name, value in config.to_dict().items()
        if type(value) is int and value > 1 and value not in known
        if any(size and size % value == 0 for size in sizes)
    ]
    return "gives `{1}` as {0}, which ".format(*max(fields)) if fields else ""


def check_leftovers(module: nn.Module, names: Iterable[str], folder: Path) -> None:
    """Warn of harmless tensors that the model does not use; refuse others.

    Harmless are saved masks and frequencies, layers after the last that predict further tokens, and
    whole modules next to the model (a value head). A tensor inside one of the model's own modules,
    such as a bias or a norm that its layers lack, means that another model was trained.

    Raises:
        CheckpointError: some are not harmless; it gives their number and some names.
    """
    names = sorted(names)
    further = {_layer(name) for name in names if _FURTHER.search(name)} - {""}
    harmless = [name for name in names if _is_harmless(module, name, further)]
    wrong = sorted(set(names) - set(harmless))
    check_fit(folder, {"unexpected": wrong})
    if harmless:
        message = "`%s` holds %d tensors that the model does not use, for example %s."
        _log.warning(message, folder, len(harmless), _some_names(harmless))


def check_fit(folder: Path, problems: Mapping[str, list[str]]) -> None:
    """Raise `CheckpointError` for the first problem that has tensors, with some of their names."""
    for problem, names in problems.items():
        if names:
            raise CheckpointError(
                f"The weights in `{folder}` do not fit its `config.json`: {len(names)} {problem} "
                f"tensors, for example {_some_names(names)}."
            )


def _some_names(names: list[str]) -> str:
    """The first few names, for a message."""
    return ", ".join(f"`{name}`" for name in names[:_SHOWN])


def _is_harmless(module: nn.Module, name: str, further: set[str]) -> bool:
    parent, rest = _nearest(module, name)
    if name.rpartition(".")[2] in _BUFFERS:
        return True
    if rest == "bias":  # a causal mask, if the module has no weight to which a bias could belong
        return parent is not module and not [*parent.parameters(recurse=False)]
    if isinstance(parent, nn.ModuleList):
        return _layer(name) in further
    if parent is module:
        return "." in rest
    return parent is getattr(module, "base_model", None) and bool(_FURTHER.search(rest))


def _nearest(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The innermost of the model's modules on a tensor's path, and the rest of the name.

    The base model's prefix may be missing: `layers.0…` means `model.layers.0…`.
    """
    base = getattr(module, "base_model", module)
    first = name.partition(".")[0]
    parent = base if first not in dict(module.named_children()) else module
    if parent is base and first not in dict(base.named_children()):
        return module, name
    while "." in name:
        first, _, rest = name.partition(".")
        child = dict(parent.named_children()).get(first)
        if child is None:
            break
        parent, name = child, rest
    return parent, name


def _layer(name: str) -> str:
    """`model.layers.7` for `model.layers.7.mlp.weight`; "" outside of numbered layers."""
    match = re.match(r".*?\.\d+(?=\.)", name)
    return match.group() if match else ""

"""Whether `config.json` fits the weights and this machine.

Sizes are checked before a module is built, because building it would loop over or allocate an
absurd size. Tensors that the model does not have are harmless, or they show that the weights belong
to another model.
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
)  # sizes that are 0 if a model has no such part
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_TEXT_PARTS = ("text_config", "transformer_layer_config")
# Sizes up to these bounds are never refused for being larger than the weights: a configuration may
# have default sizes of experts or vision layers that the model does not have.
_ALLOWED_SIZE = 2**20
_ALLOWED_LAYERS = 2**12
_MODULE_BYTES = 30_000  # of a layer's modules without weights, in GPT-2 (35 KB in Qwen3)
_MAX_SIZE = 2**31 - 1
_MAX_NAMES = 3  # in a message
# Buffers that older versions of Transformers saved; a model computes them itself.
_BUFFERS = frozenset({"inv_freq", "original_inv_freq", "masked_bias"})
# Names of parts that only MTP layers (layers that predict further tokens) have.
_MTP = re.compile(r"\.(eh_proj|enorm|hnorm|shared_head)\.|(^|[._])mtp[._]")


class StoredSizes(NamedTuple):
    """Sizes of a checkpoint's tensors."""

    numbers: int  # how many numbers all tensors hold together
    layers: int  # how many layers the names of tensors show
    shapes: dict[str, Shape]  # by name


def stored_sizes(headers: Iterable[Mapping[str, Any]]) -> StoredSizes:
    """The sizes of tensors, from safetensors headers. A quantised number may take a single bit, so
    each bit of quantised data counts as one number."""
    numbers, layers, shapes = 0, set[str](), dict[str, Shape]()
    for header in headers:
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            shapes[name] = tuple(entry["shape"])
            start, end = entry["data_offsets"]
            is_plain = re.fullmatch("B?F(16|32|64)", entry["dtype"])
            numbers += math.prod(shapes[name]) if is_plain else 8 * (end - start)
            if match := re.search(r"(?:^|\.)(\d+)\.", name):
                layers.add(match[1])
    return StoredSizes(numbers, len(layers) or len(shapes), shapes)


def config_file(folder: Path) -> Path:
    """The file that states a checkpoint's configuration."""
    return folder if is_gguf(folder) else folder / "config.json"


def check_sizes(folder: Path, values: Mapping[str, Any], stored: StoredSizes | None) -> None:
    """Check the sizes in a configuration, before Transformers reads it.

    Args:
        values: the content of `config.json` in `folder`.
        stored: sizes of the weights; None if the weights are random or their sizes do not matter.

    Raises:
        CheckpointError: a size is too small, or more than the weights or this machine can hold.
    """
    memory = machine_bytes() or 2**40
    for name, value, is_text in _sizes(values):
        statement = f"`{config_file(folder)}` gives `{name}` as {value}"
        smallest = int(name in _LAYERS or name in _SIZES)
        if value < 0 or (value < smallest and is_text):
            raise CheckpointError(f"{statement}: must be at least {smallest}.")
        if name in POSITIONS:  # RoPE has no weights that would bound the number of positions
            largest = 2**63 - 1
            bound = f"at most {largest}"
        elif name not in _LAYERS:
            largest = max(stored.numbers, _ALLOWED_SIZE) if stored else _MAX_SIZE
            bound = f"at most {largest}"
            if stored:
                bound = f"the weights hold {stored.numbers} numbers in all"
        elif stored is None:
            largest = memory // _MODULE_BYTES
            room = f"the {memory / 2**30:.3g} GiB of this machine's memory"
            bound = f"at most {largest} layers fit {room}"
        else:
            largest = stored.layers if is_text else max(stored.layers, _ALLOWED_LAYERS)
            bound = f"the weights have {stored.layers} layers"
        if value > largest:
            raise CheckpointError(f"{statement}: {bound}.")


def _sizes(values: Mapping[str, Any], is_text: bool = True) -> Iterator[tuple[str, int, bool]]:
    """Yield (name, value, whether the text model has this size) for all sizes, at any depth."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _sizes(value, is_text and name in _TEXT_PARTS)
        elif type(value) is int and name in {*_LAYERS, *_SIZES, *_OPTIONAL, *POSITIONS}:
            yield name, value, is_text


def parameter_shapes(model_class: Any, config: Any) -> dict[str, Shape] | None:
    """The shapes of a model's parameters by name, without allocating the parameters. A shared
    parameter is listed once. None if the model cannot be built: loading it raises the error."""
    try:
        with torch.device("meta"):
            module = model_class._from_config(copy.deepcopy(config), attn_implementation="eager")
    except Exception:
        return None
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


def check_numbers(
    folder: Path, config: Any, shapes: Mapping[str, Shape] | None, stored: StoredSizes
) -> None:
    """Raise `CheckpointError` for a model of far more numbers than the weights hold, to prevent
    huge allocations. (Loading finds smaller differences, and names the tensors.)

    Args:
        shapes: of the model's parameters; None if they are not known.
    """
    needed = sum(map(math.prod, shapes.values())) if shapes else 0
    # Twice as many numbers are allowed, because the weights may lack a tied output layer.
    if shapes and needed > max(2 * stored.numbers, _ALLOWED_SIZE):
        name = max(shapes, key=lambda name: math.prod(shapes[name]))
        stored_shape = f", but is {[*stored.shapes[name]]}" if name in stored.shapes else ""
        raise CheckpointError(
            f"`{config_file(folder)}` {_why_large(config, shapes[name], stored)}makes a model of "
            f"{needed} numbers, and the weights hold {stored.numbers}: `{name}` would be "
            f"{[*shapes[name]]}{stored_shape}."
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
            f"`{config_file(folder)}` {_why_large(config, shapes[name], None)}makes random weights "
            f"of {needed / 2**30:.3g} GiB, and `{device.type}` has {room / 2**30:.3g} GiB of memory"
            f": `{name}` would be {[*shapes[name]]}."
        )


def _why_large(config: Any, shape: Shape, stored: StoredSizes | None) -> str:
    """The part of a message that names the field that makes a tensor of this shape so large: the
    largest field that divides one of the shape's sizes. "" if there is no such field. Sizes that
    stored tensors have, too, are not considered."""
    stored_shapes = stored.shapes.values() if stored else ()
    usual = {size for stored_shape in stored_shapes for size in stored_shape}
    unusual = [size for size in shape if size not in usual]
    fields = [
        (value, name)
        for name, value in config.to_dict().items()
        if type(value) is int and value > 1 and value not in usual
        if any(size and size % value == 0 for size in unusual)
    ]
    return "gives `{1}` as {0}, which ".format(*max(fields)) if fields else ""


def check_leftovers(module: nn.Module, names: Iterable[str], folder: Path) -> None:
    """Raise `CheckpointError` for tensors that the model lacks; only warn of harmless tensors.

    Harmless are saved masks and RoPE frequencies, MTP layers after the model's last layer, and
    whole modules next to the model (a value head). A tensor inside one of the model's modules, such
    as a bias or a norm that the model's layers lack, means that another model was trained.

    Args:
        names: of the tensors that the model does not have.
    """
    names = sorted(names)
    mtp_layers = {_layer(name) for name in names if _MTP.search(name)} - {""}
    harmless = [name for name in names if _is_harmless(module, name, mtp_layers)]
    unexpected = sorted(set(names) - set(harmless))
    check_fit(folder, {"unexpected": unexpected})
    if harmless:
        message = "`%s` holds %d tensors that the model does not use, for example %s."
        _log.warning(message, folder, len(harmless), _some_names(harmless))


def check_fit(folder: Path, problems: Mapping[str, list[str]]) -> None:
    """Raise `CheckpointError` for the first problem that some tensors have.

    Args:
        problems: the names of these tensors, by a word for the problem such as "missing".
    """
    for problem, names in problems.items():
        if names:
            raise CheckpointError(
                f"The weights in `{folder}` do not fit its `config.json`: {len(names)} {problem} "
                f"tensors, for example {_some_names(names)}."
            )


def _some_names(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names[:_MAX_NAMES])


def _is_harmless(module: nn.Module, name: str, mtp_layers: set[str]) -> bool:
    """Whether a tensor that the model does not have is harmless; see `check_leftovers`."""
    parent, rest = _innermost_module(module, name)
    if name.rpartition(".")[2] in _BUFFERS:
        return True
    if rest == "bias":  # a causal mask, if the module has no weight to which a bias could belong
        return parent is not module and not [*parent.parameters(recurse=False)]
    if isinstance(parent, nn.ModuleList):
        return _layer(name) in mtp_layers
    if parent is module:
        return "." in rest  # a whole module next to the model
    return parent is getattr(module, "base_model", None) and bool(_MTP.search(rest))


def _innermost_module(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The innermost existing module on a tensor's path, and the rest of the tensor's name.

    The base model's prefix may be missing: `layers.0…` means `model.layers.0…`.
    """
    base = getattr(module, "base_model", module)
    child_name = name.partition(".")[0]
    parent = base if child_name not in dict(module.named_children()) else module
    if parent is base and child_name not in dict(base.named_children()):
        return module, name
    while "." in name:
        child_name, _, rest = name.partition(".")
        child = dict(parent.named_children()).get(child_name)
        if child is None:
            break
        parent, name = child, rest
    return parent, name


def _layer(name: str) -> str:
    """`model.layers.7` for `model.layers.7.mlp.weight`; "" for a tensor outside of layers."""
    match = re.match(r".*?\.\d+(?=\.)", name)
    return match.group() if match else ""

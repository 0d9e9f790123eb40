"""Tensors that a checkpoint holds and the model has no place for: harmless, or another model's?

Belongs here: that judgement, by where a tensor would have been. What Transformers itself declares
ignorable for a class never gets here.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import nn

from foretoken.errors import CheckpointError

_log = logging.getLogger(__name__)
_SHOWN = 3
# Buffers that older versions of Transformers saved, and that a model computes by itself.
_BUFFERS = frozenset({"inv_freq", "original_inv_freq", "masked_bias"})
# What layers that predict further tokens (MTP) have, and no other layer.
_FURTHER = re.compile(r"\.(eh_proj|enorm|hnorm|shared_head)\.|(^|[._])mtp[._]")


def check_leftovers(module: nn.Module, names: Iterable[str], folder: Path) -> None:
    """Warn of tensors that play no part in the model; refuse the others.

    Harmless are saved masks and frequencies, layers behind the last that predict further tokens,
    and whole modules beside the model (a value head). A tensor inside a module that the model does
    have, such as a bias or a norm that its layers lack, was trained into another model.

    Raises:
        CheckpointError: tensors of the second kind, with their number and some names.
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
    """Raise `CheckpointError` for the first problem that tensors have, with some of their names."""
    for problem, names in problems.items():
        if names:
            raise CheckpointError(
                f"The weights in `{folder}` do not fit its `config.json`: {len(names)} {problem} "
                f"tensors, for example {_some_names(names)}."
            )


def _some_names(names: list[str]) -> str:
    """The first few of them, as a message shows them."""
    return ", ".join(f"`{name}`" for name in names[:_SHOWN])


def _is_harmless(module: nn.Module, name: str, further: set[str]) -> bool:
    parent, rest = _nearest(module, name)
    if name.rpartition(".")[2] in _BUFFERS:
        return True
    if rest == "bias":  # a causal mask, if the module has no weight that a bias could go with
        return parent is not module and not [*parent.parameters(recurse=False)]
    if isinstance(parent, nn.ModuleList):
        return _layer(name) in further
    if parent is module:
        return "." in rest
    return parent is getattr(module, "base_model", None) and bool(_FURTHER.search(rest))


def _nearest(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The innermost module that the model has on the way to a tensor, and the rest of the name.

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
    """`model.layers.7` of `model.layers.7.mlp.weight`; "" outside of numbered layers."""
    match = re.match(r".*?\.\d+(?=\.)", name)
    return match.group() if match else ""

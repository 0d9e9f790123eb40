"""Which GGUF file is meant: by a name on the hub, by a quantisation, or the only one of a folder.

Belongs here: choosing among names. Does not: looking at a folder or the hub (`../locate.py`),
reading a file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from foretoken.errors import CheckpointError
from foretoken.models.gguf.split import parts_of

_REPOSITORY = r"(?P<repository>\w[\w.-]*/\w[\w.-]*)"
_FILE = re.compile(rf"{_REPOSITORY}/(?P<file>[^:]+\.gguf)", re.IGNORECASE)
_TAG = re.compile(rf"{_REPOSITORY}:(?P<tag>[\w.-]+)")
_OF_SET = re.compile(r"-\d{5}-of-\d{5}$")
_BESIDE = ("mmproj", "imatrix")  # what such names begin or end with is next to a model
_SHOWN = 8


class HubFile(NamedTuple):
    """A GGUF file of a repository: its path there, or the tag of its quantisation."""

    repository: str
    file: str = ""
    tag: str = ""


def hub_file(name: str) -> HubFile | None:
    """`owner/repository/file.gguf` or `owner/repository:Q4_K_M`, as llama.cpp has it; else None."""
    if match := _FILE.fullmatch(name):
        return HubFile(match["repository"], file=match["file"])
    if match := _TAG.fullmatch(name):
        return HubFile(match["repository"], tag=match["tag"])
    return None


def only_model(where: str, names: Iterable[str], tag: str = "") -> str:
    """The one model among file names, of a split set its first part.

    Args:
        where: what has them, for a message.
        tag: if given, what the name has to end with, such as `Q4_K_M`.

    Raises:
        CheckpointError: none, or several.
    """
    models = _models(names)
    found = [name for name in models if _has_tag(name, tag)] if tag else models
    if len(found) == 1:
        return found[0]
    listed = ", ".join(f"`{name}`" for name in (found or models)[:_SHOWN])
    listed += ", .." if len(found or models) > _SHOWN else ""
    if not models:
        raise CheckpointError(f"`{where}` has no GGUF model.")
    if not found:
        raise CheckpointError(f"`{where}` has no GGUF model of `{tag}`. It has {listed}.")
    kind = f" of `{tag}`" if tag else ""
    raise CheckpointError(
        f"`{where}` has {len(found)} GGUF models{kind}: name one of them. It has {listed}."
    )


def _models(names: Iterable[str]) -> list[str]:
    """The first parts of all models."""
    files = [name for name in names if name.lower().endswith(".gguf")]
    stems = {name: name.rpartition("/")[2][:-5].lower() for name in files}
    kept = {n for n, stem in stems.items() if not stem.startswith(_BESIDE)}
    kept -= {n for n, stem in stems.items() if stem.endswith(_BESIDE)}
    return sorted({parts_of(name)[0] for name in kept})


def _has_tag(name: str, tag: str) -> bool:
    stem = _OF_SET.sub("", name[:-5])
    return re.search(rf"(^|[^a-z0-9]){re.escape(tag)}$", stem, re.IGNORECASE) is not None

"""A GGUF model in one file or in several: `name-00001-of-00003.gguf` and the others of its set.

Belongs here: names of split sets, and their parts as one model. Does not: reading a file
(`reader.py`).
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from foretoken.errors import CheckpointError
from foretoken.models.gguf.reader import GgufPart, GgufTensor, read_part, shown

_SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<end>\.gguf)", re.I)


class GgufFile(NamedTuple):
    """A GGUF model: its only file, or all parts of its set.

    path:     of the first part
    metadata: of the first part; not to be changed, files are read once
    tensors:  of all parts, by their names in the file
    """

    path: Path
    parts: tuple[Path, ...]
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def parts_of(name: str) -> list[str]:
    """The names of a split set that a name belongs to, in order; of another file its own."""
    match = _SPLIT_NAME.fullmatch(name)
    if match is None or not 1 <= int(match["number"]) <= int(match["count"]):
        return [name]
    stem, count, end = match["stem"], int(match["count"]), match["end"]
    return [f"{stem}-{number:05d}-of-{count:05d}{end}" for number in range(1, count + 1)]


def read_gguf(path: Path) -> GgufFile:
    """Read the headers of a GGUF model; of a split set any part may be given.

    A header that was read before is not read again while the files are the same.

    Raises:
        CheckpointError: a file that is missing, truncated, or contradicts itself or its set.
        UnsupportedModelError: a tensor is stored in a kind that is not served.
    """
    try:
        paths = [path.with_name(name) for name in parts_of(path.name)]
        missing = [part for part in paths if not part.is_file()]
        if missing and path.is_file():
            raise CheckpointError(
                f"`{path}` is one of {len(paths)} parts, and {len(missing)} of them are missing: "
                f"`{missing[0]}`. Download the model again."
            )
        states = [(part.stat().st_mtime_ns, part.stat().st_size) for part in paths]
    except OSError as error:
        raise CheckpointError(f"`{path}` cannot be read: {error.strerror or error}") from error
    return _read(tuple(paths), tuple(states))


@lru_cache(maxsize=2)  # a target and a draft model; configuration, tokenizer, weights ask for each
def _read(paths: tuple[Path, ...], states: tuple[tuple[int, int], ...]) -> GgufFile:
    first = read_part(paths[0])
    count = _whole(first, "split.count", 1)
    if count > 1 or len(paths) > 1:
        _check_name(first, count, len(paths))
    tensors = dict(first.tensors)
    for number, path in enumerate(paths[1:], 1):
        part = read_part(path)
        if _whole(part, "split.count", 1) != count or _whole(part, "split.no", 0) != number:
            raise CheckpointError(
                f"`{path}` says that it is part {_whole(part, 'split.no', 0) + 1} of "
                f"{_whole(part, 'split.count', 1)}: must be {number + 1} of {count}."
            )
        for name in part.tensors:
            if name in tensors:
                raise CheckpointError(f"`{path}` and `{tensors[name].path}` both have `{name}`.")
        tensors.update(part.tensors)
    stated = _whole(first, "split.tensors.count", len(tensors))
    if stated != len(tensors):
        raise CheckpointError(
            f"`{paths[0]}` and its other parts have {len(tensors)} tensors: must be {stated}, as "
            "`split.tensors.count` says."
        )
    return GgufFile(paths[0], paths, first.metadata, tensors)


def _whole(part: GgufPart, key: str, default: int) -> int:
    """A whole number of the metadata about the set."""
    value = part.metadata.get(key, default)
    if type(value) is not int or value < 0:
        raise CheckpointError(f"`{part.path}` gives `{key}` as {shown(value)}: must be 0 or more.")
    return value


def _check_name(first: GgufPart, count: int, named: int) -> None:
    """Check that the name of a first part and what it says of its set agree."""
    if named == 1:
        raise CheckpointError(
            f"`{first.path}` is one of {count} parts, and its name does not say which: must end in "
            f"`-00001-of-{count:05d}.gguf`, as the others have it."
        )
    number = _whole(first, "split.no", 0)
    if count != named or number:
        raise CheckpointError(
            f"`{first.path}` says that it is part {number + 1} of {count}: must be 1 of {named}, "
            "as its name has it."
        )

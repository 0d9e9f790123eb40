"""The header of a GGUF model, in one file or in a split set: metadata, and where each tensor is.

Every count, length and offset is compared with the size of the file before anything is allocated or
looped over, and every error names the file. The files of a split set (`name-00001-of-00003.gguf`
and so on) are read as one model. The package `gguf` is not used: its reader takes 1.7 s for a
header of 98 000 strings, this reader 0.05 s.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from foretoken.errors import CheckpointError, UnsupportedModelError


class Kind(NamedTuple):
    """How the numbers of a tensor are stored: a block of `block` numbers takes `size` bytes."""

    name: str
    block: int
    size: int


KINDS = {
    0: Kind("F32", 1, 4),
    1: Kind("F16", 1, 2),
    2: Kind("Q4_0", 32, 18),
    3: Kind("Q4_1", 32, 20),
    6: Kind("Q5_0", 32, 22),
    7: Kind("Q5_1", 32, 24),
    8: Kind("Q8_0", 32, 34),
    12: Kind("Q4_K", 256, 144),
    13: Kind("Q5_K", 256, 176),
    14: Kind("Q6_K", 256, 210),
    30: Kind("BF16", 1, 2),
}
"""The supported kinds, by ggml's numbers."""

_OTHER_KINDS = {
    4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS",
    17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 31: "Q4_0_4_4",
    32: "Q4_0_4_8", 33: "Q4_0_8_8", 34: "TQ1_0", 35: "TQ2_0", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip

_PLAIN = {"F32": "<f4", "F16": "<f2"}
_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "<u1", 10: "<u8",
    11: "<i8", 12: "<f8",
}  # fmt: skip
_BOOL, _STRING, _ARRAY, _UINT32 = 7, 8, 9, 4

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_START_BYTES = 24  # of the magic bytes, the version and two counts
_MIN_PAIR = 14  # bytes of the shortest key with its value
_MIN_TENSOR = 33  # bytes of the shortest description of a tensor
# Bytes of a header. The largest known header, of 262 144 tokens with their merges, has 2**24.
_MAX_HEADER = 2**28
_MAX_TEXT = 2**24  # bytes of one string; chat templates have 2**14
_MAX_ITEMS = 2**22  # items of all arrays together; the largest known files have 2**20
_MAX_PAIRS, _MAX_TENSORS = 2**12, 2**17  # the largest known files have 60 and 50 000
_MAX_NAME, _MAX_DIMS = 64, 4  # of a tensor: bounds of the format itself
_MAX_KEY = 256  # bytes of a key; the format allows 65535, files have up to 60
_MAX_NUMBERS = 2**63 - 1
_REMEDY = "Download it again."
_SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<end>\.gguf)", re.I)


class GgufTensor(NamedTuple):
    """One tensor of the file `path`."""

    name: str
    kind: str  # how the numbers are stored: a name in `KINDS`
    shape: tuple[int, ...]  # rows first, as in NumPy and PyTorch: a matrix is [out, in]
    offset: int  # of the first byte in the file
    nbytes: int  # size in the file
    path: Path
    data: NDArray[np.uint8]  # the bytes as stored: a view of the file's read-only memory map

    def rows(self) -> NDArray[np.uint8]:
        """The bytes of each row: uint8 [rows, bytes per row], a view."""
        return self.data.reshape(math.prod(self.shape[:-1]), -1)

    def values(self) -> NDArray[Any]:
        """The numbers of a tensor of kind F32 or F16, in the tensor's shape: a view of the file."""
        if self.kind not in _PLAIN:
            raise CheckpointError(
                f"`{self.path}` stores `{self.name}` as {self.kind}: must be F32 or F16."
            )
        return self.data.view(_PLAIN[self.kind]).reshape(self.shape)


class GgufPart(NamedTuple):
    """One file: a whole model, or a part of a split set."""

    path: Path
    version: int
    alignment: int  # offsets of tensors are multiples of this many bytes
    metadata: dict[str, Any]  # Python values by key; arrays are lists
    tensors: dict[str, GgufTensor]  # by name


class GgufFile(NamedTuple):
    """A GGUF model: one file, or all parts of a split set."""

    path: Path  # the file, or the first part
    parts: tuple[Path, ...]  # the paths of all parts, in order
    metadata: dict[str, Any]  # of the first part; callers must not change it: it is cached
    tensors: dict[str, GgufTensor]  # of all parts, by the names in the files

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def is_gguf(path: Path) -> bool:
    """Whether the path of a checkpoint names a GGUF file, not a folder."""
    return path.suffix.lower() == ".gguf" and not path.is_dir()


def short_repr(value: Any) -> str:
    """The `repr` of a value of the metadata, cut to 60 characters for messages."""
    text = repr(value[:60] if isinstance(value, (str, list)) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def split_names(name: str) -> list[str]:
    """The file names of the split set that `name` belongs to, in order; only `name` itself if it
    does not belong to a split set."""
    match = _SPLIT_NAME.fullmatch(name)
    if match is None or not 1 <= int(match["number"]) <= int(match["count"]):
        return [name]
    stem, count, end = match["stem"], int(match["count"]), match["end"]
    return [f"{stem}-{number:05d}-of-{count:05d}{end}" for number in range(1, count + 1)]


def read_gguf(path: Path) -> GgufFile:
    """Read the headers of a GGUF model; `path` may be any part of a split set.

    A header is read again only if a file's size or modification time has changed.

    Raises:
        CheckpointError: a file is missing or truncated, or contradicts itself or the other files.
        UnsupportedModelError: a tensor is stored in a kind that is not supported.
    """
    try:
        paths = [path.with_name(name) for name in split_names(path.name)]
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


# The cache holds a target and a draft model. The same file is read for the configuration, the
# tokenizer and the weights.
@lru_cache(maxsize=2)
def _read(paths: tuple[Path, ...], states: tuple[tuple[int, int], ...]) -> GgufFile:
    """Read all parts of a model and check that they belong together. `states`, the modification
    time and size of each file, is only needed in the cache's key."""
    first_part = read_part(paths[0])
    count = _whole(first_part, "split.count", 1)
    if count > 1 or len(paths) > 1:
        _check_name(first_part, count, len(paths))
    tensors = dict(first_part.tensors)
    for index, path in enumerate(paths[1:], 1):
        part = read_part(path)
        if _whole(part, "split.count", 1) != count or _whole(part, "split.no", 0) != index:
            raise CheckpointError(
                f"`{path}` says that it is part {_whole(part, 'split.no', 0) + 1} of "
                f"{_whole(part, 'split.count', 1)}: must be {index + 1} of {count}."
            )
        for name in part.tensors:
            if name in tensors:
                raise CheckpointError(f"`{path}` and `{tensors[name].path}` both have `{name}`.")
        tensors.update(part.tensors)
    stated_count = _whole(first_part, "split.tensors.count", len(tensors))
    if stated_count != len(tensors):
        raise CheckpointError(
            f"`{paths[0]}` and the other parts have {len(tensors)} tensors: must be "
            f"{stated_count}, as `split.tensors.count` says."
        )
    return GgufFile(paths[0], paths, first_part.metadata, tensors)


def _whole(part: GgufPart, key: str, default: int) -> int:
    """The value of a key that must be an integer >= 0, or the default."""
    value = part.metadata.get(key, default)
    if type(value) is not int or value < 0:
        raise CheckpointError(f"`{part.path}` gives `{key}` as {short_repr(value)}: must be >= 0.")
    return value


def _check_name(first: GgufPart, count: int, count_in_name: int) -> None:
    """Raise `CheckpointError` unless the name and the metadata of the first part agree on the
    number of parts (`count_in_name`, `count`), and the metadata say that it is the first part."""
    if count_in_name == 1:
        raise CheckpointError(
            f"`{first.path}` is one of {count} parts, and its name does not say which: must end in "
            f"`-00001-of-{count:05d}.gguf`, `-00002-of-{count:05d}.gguf` and so on."
        )
    number = _whole(first, "split.no", 0)
    if count != count_in_name or number:
        raise CheckpointError(
            f"`{first.path}` says that it is part {number + 1} of {count}: must be 1 of "
            f"{count_in_name}, as in its name."
        )


def read_part(path: Path) -> GgufPart:
    """Read the header of one file; errors as in `read_gguf`."""
    try:
        with path.open("rb") as file:
            start = file.read(_START_BYTES)
            _check_start(path, start)
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(f"`{path}` cannot be read: {error.strerror or error}") from error
    return _Header(path, mapped).read()


def _check_start(path: Path, start: bytes) -> None:
    if start.startswith(b"version https"):
        raise CheckpointError(f"`{path}` is a Git LFS pointer: run `git lfs pull`.")
    if not start.startswith(b"GGUF"):
        problem = f"it begins with {start[:8]!r}" if start else "it is empty"
        raise CheckpointError(
            f"`{path}` is not a GGUF file: {problem} and does not begin with `GGUF`. {_REMEDY}"
        )
    if len(start) < _START_BYTES:
        raise CheckpointError(
            f"`{path}` is truncated: its header has {_START_BYTES} bytes or more, found "
            f"{len(start)}. {_REMEDY}"
        )
    (version,) = _U32.unpack_from(start, 4)
    if version in (2, 3):
        return
    if version & 0xFFFF == 0:
        raise CheckpointError(
            f"`{path}` is a big-endian GGUF file: must be little-endian. Convert it with "
            "`gguf_convert_endian.py` of llama.cpp."
        )
    raise CheckpointError(
        f"`{path}` is of GGUF version {version}: must be 2 or 3. Convert the model again."
    )


_TensorDescription = tuple[str, Kind, tuple[int, ...], int]  # name, kind, shape, offset


class _Header:
    """A reader of one file's header, from its first byte to its last.

    All methods that read raise `CheckpointError` if the header is not valid.
    """

    def __init__(self, path: Path, mapped: mmap.mmap) -> None:
        self._path, self._mapped = path, mapped
        self._size = len(mapped)
        self._end = min(self._size, _MAX_HEADER)
        self._bytes = memoryview(mapped)[: self._end]
        self._position = 4  # offset of the next byte to read, after the magic bytes
        self._items_left = _MAX_ITEMS  # how many further items of arrays may be read

    def read(self) -> GgufPart:
        """Read the whole header."""
        version, num_tensors, num_pairs = self._u32(), self._u64(), self._u64()
        self._check_count(num_pairs, "keys", _MIN_PAIR, _MAX_PAIRS)
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._name("a key", _MAX_KEY)
            if key in metadata:
                raise self._error(f"has the key `{key}` twice")
            metadata[key] = self._value(key)
        alignment = self._checked_alignment(metadata.get("general.alignment", 32))
        self._check_count(num_tensors, "tensors", _MIN_TENSOR, _MAX_TENSORS)
        descriptions = [self._tensor() for _ in range(num_tensors)]
        first_byte = -(-self._position // alignment) * alignment
        tensors = self._locate(descriptions, first_byte, alignment)
        return GgufPart(self._path, version, alignment, metadata, tensors)

    def _error(self, problem: str) -> CheckpointError:
        return CheckpointError(f"`{self._path}` {problem}. {_REMEDY}")

    def _raise_too_long(self, item: str) -> NoReturn:
        """Raise the error for an item that ends after the last byte that may be read."""
        if self._size > self._end:
            raise self._error(f"has a header of more than {self._end} bytes, which is the bound")
        raise self._error(f"is truncated or corrupt: {item} goes beyond its {self._size} bytes")

    def _take(self, size: int, item: str) -> int:
        """Move past the next `size` bytes and return their offset. `item` is a name of
        these bytes for messages."""
        start = self._position
        if size > self._end - start:
            self._raise_too_long(item)
        self._position = start + size
        return start

    def _u32(self) -> int:
        number: int = _U32.unpack_from(self._bytes, self._take(4, "the header"))[0]
        return number

    def _u64(self) -> int:
        number: int = _U64.unpack_from(self._bytes, self._take(8, "the header"))[0]
        return number

    def _check_count(self, count: int, items: str, min_bytes: int, max_count: int) -> None:
        """Check that `count` items of `min_bytes` or more fit into the rest of the header, and that
        there are at most `max_count`."""
        if count > (self._end - self._position) // min_bytes:
            self._raise_too_long(f"the list of {count} {items}")
        if count > max_count:
            raise self._error(f"has {count} {items}: must be at most {max_count}")

    def _text(self, item: str, max_bytes: int = _MAX_TEXT) -> str:
        """Read a string. `item` is a name of this string for messages."""
        size = self._u64()
        start = self._take(size, f"{item} of {size} bytes")
        if size > max_bytes:
            raise self._error(f"has {item} of {size} bytes: at most {max_bytes}")
        try:
            return str(self._bytes[start : start + size], "utf-8")
        except UnicodeDecodeError as error:
            raise self._error(f"has {item} that is not UTF-8, at byte {start}") from error

    def _name(self, item: str, max_bytes: int) -> str:
        """Read a string that must be printable, so that messages can show it."""
        name = self._text(item, max_bytes)
        if not name.isprintable():
            raise self._error(f"has {item} that is no name: {short_repr(name)}")
        return name

    def _value(self, key: str) -> Any:
        """Read the type of a value, and the value."""
        value_type = self._u32()
        if value_type == _STRING:
            return self._text(f"the value of `{key}`")
        if value_type != _ARRAY:
            return self._numbers(key, value_type, 1)[0]
        item_type, count = self._u32(), self._u64()
        if item_type == _ARRAY:
            raise self._error(f"has an array of arrays at `{key}`, which no model has")
        min_bytes = 8 if item_type == _STRING else 1
        self._check_count(count, f"items in the array `{key}`", min_bytes, _MAX_ITEMS)
        self._items_left -= count
        if self._items_left < 0:
            raise self._error(f"has arrays of more than {_MAX_ITEMS} items in all, up to `{key}`")
        if item_type == _STRING:
            return self._texts(key, count)
        return self._numbers(key, item_type, count)

    def _numbers(self, key: str, number_type: int, count: int) -> list[Any]:
        """Read `count` numbers or truth values."""
        if number_type not in _SCALARS:
            raise self._error(f"has a value of unknown type {number_type} at `{key}`")
        dtype = np.dtype(_SCALARS[number_type])
        start = self._take(count * dtype.itemsize, f"the value of `{key}`")
        numbers = np.frombuffer(self._bytes, dtype, count, start)
        if number_type != _BOOL:
            return list(numbers.tolist())
        if count and numbers.max() > 1:
            raise self._error(f"has a truth value of {numbers.max()} at `{key}`: must be 0 or 1")
        return list(numbers.astype(bool).tolist())

    def _texts(self, key: str, count: int) -> list[str]:
        """Read `count` strings. Local names make this loop faster, the slowest one of a header."""
        data, start, end, unpack = self._bytes, self._position, self._end, _U64.unpack_from
        texts: list[str] = []
        append = texts.append
        try:
            for _ in range(count):
                (size,) = unpack(data, start)
                start += 8
                stop = start + size
                if stop > end:
                    self._raise_too_long(f"item {len(texts)} of `{key}`")
                append(str(data[start:stop], "utf-8"))
                start = stop
        except struct.error:
            self._raise_too_long(f"item {len(texts)} of `{key}`")
        except UnicodeDecodeError as error:
            raise self._error(f"has text that is not UTF-8 at `{key}`, byte {start}") from error
        self._position = start
        return texts

    def _checked_alignment(self, stated: Any) -> int:
        if type(stated) is not int or stated < 8 or stated & (stated - 1):
            bound = "a power of two, 8 or more"
            raise self._error(f"gives `general.alignment` as {short_repr(stated)}: must be {bound}")
        return stated

    def _tensor(self) -> _TensorDescription:
        """Read the description of a tensor. `_locate` checks the offset."""
        name = self._name("a tensor's name", _MAX_NAME)
        num_dims = self._u32()
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self._error(f"gives `{name}` {num_dims} dimensions: must be in 1..{_MAX_DIMS}")
        shape = tuple(self._u64() for _ in range(num_dims))[::-1]
        kind_number, offset = self._u32(), self._u64()
        if not 0 < math.prod(shape) <= _MAX_NUMBERS:
            raise self._error(
                f"gives `{name}` the shape {[*shape]}: must hold 1 to {_MAX_NUMBERS} numbers"
            )
        kind = KINDS.get(kind_number)
        if kind is None and kind_number in _OTHER_KINDS:
            raise UnsupportedModelError(
                f"`{self._path}` has `{name}` stored as {_OTHER_KINDS[kind_number]}, which is not "
                f"supported: must be one of {', '.join(known.name for known in KINDS.values())}. "
                "Use a file of another quantisation of this model, for example Q4_K_M or Q8_0."
            )
        if kind is None:
            raise self._error(f"has `{name}` stored as unknown kind {kind_number}")
        if shape[-1] % kind.block:
            raise self._error(
                f"has `{name}` stored as {kind.name} in rows of {shape[-1]} numbers: must be a "
                f"multiple of {kind.block}"
            )
        return name, kind, shape, offset

    def _locate(
        self, descriptions: list[_TensorDescription], first_byte: int, alignment: int
    ) -> dict[str, GgufTensor]:
        """The tensors by name, with views of their bytes. Offsets count from `first_byte` and
        must be multiples of `alignment`. Tensors must be within the file and not overlap."""
        tensors: dict[str, GgufTensor] = {}
        data = np.frombuffer(self._mapped, np.uint8)
        for name, kind, shape, offset in descriptions:
            if name in tensors:
                raise self._error(f"has the tensor `{name}` twice")
            if offset % alignment:
                bound = f"a multiple of {alignment}"
                raise self._error(f"has `{name}` at offset {offset}: must be {bound}")
            size = math.prod(shape) // kind.block * kind.size
            start = first_byte + offset
            end = start + size
            if end > self._size:
                expected = f"expected {end} bytes or more for `{name}`"
                raise self._error(f"is truncated: {expected}, found {self._size}")
            tensors[name] = GgufTensor(
                name, kind.name, shape, start, size, self._path, data[start:end]
            )
        by_offset = sorted(tensors.values(), key=lambda tensor: tensor.offset)
        for tensor, following in pairwise(by_offset):
            if tensor.offset + tensor.nbytes > following.offset:
                raise self._error(f"has `{tensor.name}` and `{following.name}` in the same place")
        return tensors

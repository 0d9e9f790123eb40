"""Headers of GGUF files: right ones, as `gguf` itself writes them, and wrong ones."""

from __future__ import annotations

import random
import re
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from foretoken.errors import CheckpointError, ForetokenError, UnsupportedModelError
from foretoken.models.gguf.reader import KINDS, GgufFile, read_gguf, read_part, split_names
from tests.models.gguf_files import (
    NUMBERS,
    Stored,
    Typed,
    file_bytes,
    finish,
    model_metadata,
    model_tensors,
    real_file,
    text_bytes,
    write,
)

TEN = Stored((2, 5))


def read_bytes(folder: Path, data: bytes) -> GgufFile:
    path = folder / "m.gguf"
    path.write_bytes(data)
    return read_gguf(path)


def test_metadata_as_the_format_s_own_writer_has_it(tmp_path: Path) -> None:
    kinds = gguf.GGUFValueType
    values: dict[str, tuple[Any, Any]] = {
        "a.u8": (255, kinds.UINT8), "a.i8": (-128, kinds.INT8), "a.u16": (65535, kinds.UINT16),
        "a.i16": (-32768, kinds.INT16), "a.u32": (2**32 - 1, kinds.UINT32),
        "a.i32": (-(2**31), kinds.INT32), "a.f32": (0.5, kinds.FLOAT32),
        "a.true": (True, kinds.BOOL), "a.u64": (2**64 - 1, kinds.UINT64),
        "a.i64": (-(2**63), kinds.INT64), "a.f64": (0.1, kinds.FLOAT64),
        "a.text": ("größer 日本 🦙", kinds.STRING),
    }  # fmt: skip
    lists: dict[str, list[Any]] = {
        "a.texts": ["", "é", "x" * 300], "a.numbers": [1, -2, 3], "a.floats": [0.5, 2.0],
        "a.truths": [True, False],
    }  # fmt: skip
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for key, (value, kind) in values.items():
        writer.add_key_value(key, value, kind)
    for key, items in lists.items():
        writer.add_array(key, items)
    finish(writer)
    found = read_gguf(tmp_path / "m.gguf").metadata
    assert found == {
        "general.architecture": "llama", **{k: v for k, (v, _) in values.items()}, **lists,
    }  # fmt: skip
    assert all(type(found[key]) is type(value) for key, (value, _) in values.items())


@pytest.mark.parametrize("kind", [kind.name for kind in KINDS.values()])
def test_tensors_as_the_format_s_own_writer_has_them(tmp_path: Path, kind: str) -> None:
    rng, number = np.random.default_rng(0), gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[number]
    assert KINDS[number] == (kind, block, size)
    data = rng.integers(0, 256, (3, 2 * size), dtype=np.uint8)
    scalars = rng.standard_normal(7).astype(np.float32)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("scalars", scalars)
    writer.add_tensor("packed", data, raw_dtype=number)
    finish(writer)
    file = read_gguf(tmp_path / "m.gguf")
    oracle = {t.name: t for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    packed = file.tensors["packed"]
    assert (packed.kind, packed.shape) == (kind, (3, 2 * block))
    assert (packed.offset, packed.nbytes) == (oracle["packed"].data_offset, data.nbytes)
    assert np.array_equal(packed.rows(), data)
    assert not packed.data.flags.writeable
    assert np.array_equal(file.tensors["scalars"].values(), scalars)
    if kind not in ("F32", "F16"):
        with pytest.raises(CheckpointError, match=f"`packed` as {kind}: must be F32 or F16"):
            packed.values()


def test_version_2_and_alignment(tmp_path: Path) -> None:
    metadata = {"general.alignment": 64, "x": 1}
    data = file_bytes(metadata, {"a": TEN}, version=2)
    head = len(file_bytes(metadata, {}))
    data += bytes(-len(data) % 64 + 64)
    assert head < 256
    assert read_bytes(tmp_path, data).tensors["a"].offset % 64 == 0


def broken() -> dict[str, tuple[bytes, str]]:
    whole = file_bytes({"x": "text"}, {"a": TEN})
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)

    def told(dims: tuple[int, ...], kind: int = 0, offset: int = 0, name: str = "a") -> bytes:
        shape = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        return text_bytes(name) + shape + struct.pack("<IQ", kind, offset)

    def tensors(*infos: bytes) -> bytes:
        data = b"GGUF" + struct.pack("<IQQ", 3, len(infos), 0) + b"".join(infos)
        return data + bytes(-len(data) % 32) + bytes(256)

    array = text_bytes("k") + struct.pack("<II", 9, 8)
    return {
        "empty": (b"", "it is empty and does not begin with `GGUF`"),
        "text": (b"hello, world", "it begins with b'hello, w' and does not begin with `GGUF`"),
        "short": (b"GGUF\3\0\0\0", "is truncated: its header has 24 bytes or more, found 8"),
        "pointer": (b"version https://git-lfs\n", "Git LFS pointer"),
        "version": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1: must be 2 or 3"),
        "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is a big-endian GGUF file"),
        "keys": (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), f"the list of {2**60} keys"),
        "tensors": (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0), f"list of {2**63} tensors"),
        "key": (head + struct.pack("<Q", 2**40) + bytes(16), f"a key of {2**40} bytes"),
        "twice": (file_bytes({"x": 1})[:16] + struct.pack("<Q", 2)
                  + 2 * file_bytes({"x": 1})[24:41], "has the key `x` twice"),
        "line end": (file_bytes({"x\ny": 1}), "has a key that is no name"),
        "utf-8": (file_bytes({"x": b"\xff\xfe"}), "value of `x` that is not UTF-8"),
        "utf-8 in a list": (file_bytes({"x": ["a", b"\xff"]}), "not UTF-8 at `x`"),
        "type": (head + text_bytes("x") + struct.pack("<IQ", 13, 0), "unknown type 13 at `x`"),
        "truth": (head + text_bytes("x") + struct.pack("<IB", 7, 2) + bytes(9), "truth value of 2"),
        "items": (head + array + struct.pack("<Q", 2**60) + bytes(64), f"list of {2**60} items"),
        "item": (head + array + struct.pack("<QQ", 1, 2**50) + bytes(64), "item 0 of `k`"),
        "last item": (head + array + struct.pack("<QQ", 2, 8) + bytes(12), "item 1 of `k`"),
        "nested": (head + text_bytes("k") + struct.pack("<IIQ", 9, 9, 1), "array of arrays at `k`"),
        "alignment 0": (file_bytes({"general.alignment": 0}), "`general.alignment` as 0: must be"),
        "alignment 24": (file_bytes({"general.alignment": 24}), "as 24: must be a power of two"),
        "alignment text": (file_bytes({"general.alignment": "32"}), "as '32': must be a power"),
        "alignment huge": (file_bytes({"general.alignment": 2**31}, {"a": TEN}), "is truncated"),
        "no dimension": (tensors(told(())), "gives `a` 0 dimensions"),
        "dimensions": (tensors(told((1,) * 5)), "gives `a` 5 dimensions"),
        "dimension 0": (tensors(told((4, 0))), r"`a` the shape \[0, 4\]"),
        "overflow": (tensors(told((2**32, 2**32))), "must hold 1 to"),
        "name": (tensors(told((1,), name="a" * 65)), "tensor's name of 65 bytes: at most 64"),
        "number": (tensors(told((1,), kind=99)), "stored as unknown kind 99"),
        "rows": (tensors(told((33,), kind=2)), "Q4_0 in rows of 33 numbers: must be a multiple"),
        "offset": (tensors(told((1,), offset=4)), "at offset 4: must be a multiple of 32"),
        "outside": (tensors(told((1,), offset=2**40)), "is truncated: expected"),
        "far": (tensors(told((2**61,))), "is truncated: expected"),
        "overlap": (tensors(told((16,)), told((1,), offset=32, name="b")), "`a` and `b` in the"),
        "same tensor": (tensors(told((1,)), told((1,), offset=32)), "has the tensor `a` twice"),
        "cut data": (whole[:-40], "is truncated: expected"),
    }  # fmt: skip


@pytest.mark.parametrize("case", broken())
def test_a_file_that_is_wrong(tmp_path: Path, case: str) -> None:
    data, message = broken()[case]
    with pytest.raises(CheckpointError, match=message) as caught:
        read_bytes(tmp_path, data)
    assert str(tmp_path / "m.gguf") in str(caught.value)


@pytest.mark.parametrize(("number", "name"), [(10, "Q2_K"), (23, "IQ4_XS"), (39, "MXFP4")])
def test_kinds_that_are_not_supported(tmp_path: Path, number: int, name: str) -> None:
    data = bytearray(file_bytes({}, {"a": Stored((2, 32))}))
    at = data.index(text_bytes("a")) + 9 + 4 + 16
    data[at : at + 4] = struct.pack("<I", number)
    message = f"`a` stored as {name}, which is not supported: must be one of F32, F16, Q4_0"
    with pytest.raises(UnsupportedModelError, match=message):
        read_bytes(tmp_path, bytes(data))


def test_no_file(tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(CheckpointError, match=re.escape(f"`{path}` cannot be read")):
            read_part(path)


def mutated(data: bytes, head: int, rng: random.Random) -> bytes:
    """A file with a few faults in its header: bytes, numbers, a cut, a stretch twice or gone."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(min(head, len(changed)))
        kind = rng.randrange(5)
        if kind == 0:
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            number = rng.choice((0, 1, 2**31, 2**32, 2**60, 2**63, 2**64 - 1, len(data)))
            changed[at : at + 8] = struct.pack("<Q", number)
        elif kind == 2:
            changed = changed[: rng.randrange(len(changed))] or bytearray(b"G")
        elif kind == 3:
            changed[at:at] = changed[at : at + rng.randrange(40)]
        else:
            changed = changed[:at] + changed[at + rng.randrange(1, 40) :] or bytearray(b"G")
    return bytes(changed)


def test_damage_ends_in_typed_errors(tmp_path: Path) -> None:
    """Also in the configuration and the tokenizer, which are read from the header."""
    from foretoken.models.checkpoint import check_generation_config, parse_config, read_config
    from foretoken.models.tokenizer import load_tokenizer

    def read_all(with_tokenizer: bool) -> None:
        read_part(path)
        parse_config(path, read_config(path)["model_type"])
        check_generation_config(path)
        if with_tokenizer:
            load_tokenizer(path)

    tensors, path = model_tensors("llama", kind="Q8_0"), tmp_path / "m.gguf"
    data = file_bytes(model_metadata("llama"), tensors)
    head = len(data) - sum(len(tensor.written()) for tensor in tensors.values())
    path.write_bytes(data)
    read_all(True)
    rng, errors, began = random.Random(1), 0, time.monotonic()
    tracemalloc.start()
    for number in range(400):
        path.write_bytes(mutated(data, head, rng))
        try:
            read_all(number % 8 == 0)
        except ForetokenError:
            errors += 1
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert errors > 100
    assert peak < 16 * 2**20
    assert time.monotonic() - began < 120


def test_a_file_cut_anywhere(tmp_path: Path) -> None:
    data = file_bytes(model_metadata("qwen2"), model_tensors("qwen2", kind="Q4_0"))
    for size in {*range(0, 1500, 7), *range(1500, len(data), 611), len(data) - 1}:
        with pytest.raises(CheckpointError, match=r"truncated|does not begin"):
            read_bytes(tmp_path, data[:size])


def split_set(folder: Path, **changes: Any) -> list[Path]:
    """A model in three files; `changes` are keys of the second."""
    paths = [folder / name for name in split_names("m-00001-of-00003.gguf")]
    for number, path in enumerate(paths):
        own = {"general.architecture": "llama", "only.first": 1} if number == 0 else {}
        keys: dict[str, Any] = {
            "split.no": Typed(2, number), "split.count": Typed(2, 3),
            "split.tensors.count": Typed(5, 6), **own,
        }  # fmt: skip
        if number == 1:
            keys |= changes
        write(path, keys, {f"t{2 * number}": TEN, f"t{2 * number + 1}": TEN})
    return paths


def test_split_files(tmp_path: Path) -> None:
    paths = split_set(tmp_path)
    for given in paths:
        file = read_gguf(given)
        assert (file.path, [*file.parts]) == (paths[0], paths)
        assert [t.path for t in file.tensors.values()] == [p for p in paths for _ in range(2)]
        assert file.metadata["only.first"] == 1


def test_split_files_that_do_not_fit(tmp_path: Path) -> None:
    paths = split_set(tmp_path, **{"split.no": Typed(2, 2)})
    with pytest.raises(CheckpointError, match="says that it is part 3 of 3: must be 2 of 3"):
        read_gguf(paths[0])
    split_set(tmp_path, **{"split.count": Typed(2, 4)})
    with pytest.raises(CheckpointError, match="says that it is part 2 of 4: must be 2 of 3"):
        read_gguf(paths[0])
    split_set(tmp_path)
    write(paths[1], {"split.no": Typed(2, 1), "split.count": Typed(2, 3)}, {"t0": TEN})
    with pytest.raises(CheckpointError, match="both have `t0`"):
        read_gguf(paths[0])
    write(paths[1], {"split.no": Typed(2, 1), "split.count": Typed(2, 3)}, {"t2": TEN})
    with pytest.raises(CheckpointError, match="have 5 tensors: must be 6"):
        read_gguf(paths[0])
    split_set(tmp_path)
    alone = tmp_path / "alone.gguf"
    alone.write_bytes(paths[0].read_bytes())
    with pytest.raises(CheckpointError, match="one of 3 parts, and its name does not say which"):
        read_gguf(alone)
    paths[1].unlink()
    with pytest.raises(CheckpointError, match=r"one of 3 parts, and 1 of them are missing.*-00002"):
        read_gguf(paths[2])


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", {"x": 1}, {})
    assert read_gguf(path) is read_gguf(path)
    write(path, {"x": 1, "y": 2}, {})
    assert read_gguf(path).metadata == {"x": 1, "y": 2}


def test_the_numbers_of_all_kinds_are_ggml_s() -> None:
    assert {number: kind.name for number, kind in KINDS.items()} == {
        kind.value: kind.name for kind in gguf.GGMLQuantizationType if kind.name in NUMBERS
    }


def test_a_real_file() -> None:
    path = real_file()
    file, oracle = read_gguf(path), gguf.GGUFReader(path)
    assert file.metadata == {k: f.contents() for k, f in oracle.fields.items() if k[0] != "G"}
    told = {t.name: (t.tensor_type.name, t.data_offset, t.n_bytes) for t in oracle.tensors}
    assert {t.name: (t.kind, t.offset, t.nbytes) for t in file.tensors.values()} == told
    shapes = {t.name: tuple(t.shape.tolist())[::-1] for t in oracle.tensors}
    assert {t.name: t.shape for t in file.tensors.values()} == shapes

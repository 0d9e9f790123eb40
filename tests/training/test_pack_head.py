"""A head in four or eight bits: what is written is what is read, no farther off than rounding."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.heads import save_head
from foretoken.errors import CheckpointError
from foretoken.models.checkpoint import check_weights
from foretoken.models.compressed import CompressedTensors
from foretoken.models.compressed_scheme import is_compressed, unsupported_reason
from foretoken.models.eagle3 import read_head
from foretoken.models.eagle3_config import read_eagle3_config
from foretoken.models.stored import numbers_of
from foretoken.ops.stack import Dense, Grouped, linears, parts_of
from tests.models.families import change_tensors
from training import pack_head

GROUP = pack_head.GROUP
ROWS, INPUTS = 48, 160
HIDDEN, VOCABULARY, DRAFTED = 64, 60, 40


def matrix() -> Tensor:
    """Rows of several sizes; groups of zeros, of one number, of one sign."""
    random = torch.Generator().manual_seed(5)
    weight = torch.randn(ROWS, INPUTS, generator=random)
    weight *= torch.logspace(-4, 1, ROWS)[:, None]
    weight[0, :GROUP] = 0
    weight[1, GROUP + 1 : 2 * GROUP] = 0
    weight[2].abs_()
    weight[3] = -weight[3].abs()
    return weight


def read(folder: Path, tensors: dict[str, Tensor]) -> CompressedTensors:
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return CompressedTensors(check_weights(folder, plain=False))


@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_read_is_codes_times_scales(tmp_path: Path, bits: int) -> None:
    weight = matrix()
    stored = read(tmp_path, pack_head.pack({"w": weight}, bits))
    codes, scale = pack_head.quantise(weight, bits)
    assert (int(codes.min()), int(codes.max())) == (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    assert bool((scale < 0).any())
    assert bool((scale > 0).any())
    wanted = codes.float() * scale.float().repeat_interleave(GROUP, dim=1)
    found = stored.weight("w")
    assert isinstance(found, Grouped)
    assert found.codes.dtype is (torch.uint8 if bits == 4 else torch.int8)
    assert torch.equal(numbers_of(found), wanted)
    assert not wanted[0, :GROUP].any()


def error_of(numbers: Tensor, weight: Tensor) -> Tensor:
    """Squared, of each group."""
    return (numbers - weight).double().square().unflatten(1, (-1, GROUP)).sum(-1)


@pytest.mark.parametrize("bits", [4, 8])
def test_no_group_is_farther_off_than_plain_rounding(tmp_path: Path, bits: int) -> None:
    """Whose scale is that which its largest number asks for, in half precision, too."""
    weight, most = matrix(), 2 ** (bits - 1) - 1
    found = numbers_of(read(tmp_path, pack_head.pack({"w": weight}, bits)).weight("w"))
    grouped = weight.unflatten(1, (-1, GROUP))
    scale = (grouped.abs().amax(-1, keepdim=True) / most).half().float()
    codes = (grouped / torch.where(scale == 0, 1, scale)).round().clamp(-most, most)
    plain = error_of((codes * scale).flatten(1), weight)
    error = error_of(found, weight)
    assert bool((error <= plain * 1.001 + 1e-30).all())
    assert error.sum() < 0.95 * plain.sum()
    assert error_of(found.roll(1, 1), weight).sum() > 10 * error.sum()


def save_mapped(folder: Path) -> dict[str, Tensor]:
    """A head with the map of ids in both directions, and what its file has."""
    save_head(folder, hidden=HIDDEN, vocabulary=VOCABULARY, drafted=DRAFTED, aux_layers=(0, 1, 2))
    tensors = load_file(folder / "model.safetensors")
    drafted = torch.arange(DRAFTED) + tensors["d2t"]
    tensors["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill_(0, drafted, True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return tensors


@pytest.mark.parametrize("bits", [4, 8])
def test_a_head_goes_through_the_command(tmp_path: Path, bits: int) -> None:
    source, out = tmp_path / "head", tmp_path / "out" / "packed"
    tensors = save_mapped(source)
    pack_head.main([str(source), str(out), "--bits", str(bits)])
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert is_compressed(config)
    assert unsupported_reason(config) is None
    assert not {name for name in load_file(out / "model.safetensors") if "t2d" in name}
    embedding = Dense(torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(1)))
    plain, packed = (
        read_head(folder, read_eagle3_config(folder), embedding) for folder in (source, out)
    )
    assert plain.target_ids is not None
    assert packed.target_ids is not None
    assert torch.equal(plain.target_ids, packed.target_ids)
    assert torch.equal(plain.norm_C, packed.norm_C)
    for (name, one), (_, other) in zip(linears(plain), linears(packed), strict=True):
        assert all(isinstance(part, Grouped) for part in parts_of(other.weight)), name
        wanted = torch.cat([numbers_of(part) for part in parts_of(one.weight)])
        found = torch.cat([numbers_of(part) for part in parts_of(other.weight)])
        assert (found - wanted).norm() <= (0.12 if bits == 4 else 0.01) * wanted.norm(), name
    assert sum(t.dim() == 2 for t in tensors.values()) == 9


DAMAGES: list[tuple[str, Callable[[Tensor], Tensor]]] = [
    ("_scale", lambda scale: scale[:-1]),
    ("_scale", lambda scale: scale * torch.nan),
    ("_packed", lambda words: words[:, :-1]),
    ("_packed", Tensor.flatten),
    ("_packed", Tensor.long),
    ("_shape", lambda shape: shape[:1]),
    ("_shape", lambda shape: shape * 1.5),
]


@pytest.mark.parametrize(("part", "change"), DAMAGES)
def test_a_damaged_head_is_refused_by_name(
    tmp_path: Path, part: str, change: Callable[[Tensor], Tensor]
) -> None:
    name = "midlayer.mlp.up_proj.weight"
    tensors = save_mapped(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"quantization_config": pack_head.scheme(4)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    stored = pack_head.pack(tensors, 4)
    embedding = Dense(torch.zeros(VOCABULARY, HIDDEN))
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    read_head(tmp_path, read_eagle3_config(tmp_path), embedding)

    def damage(tensors: dict[str, Tensor]) -> None:
        tensors[name + part] = change(tensors[name + part]).contiguous()

    change_tensors(tmp_path, damage)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        read_head(tmp_path, read_eagle3_config(tmp_path), embedding)

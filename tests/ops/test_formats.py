"""The numbers of weight formats, against `gguf` and plain NumPy; rows that are rounded to 8 bits.

That products use them is shown in `native/test_quantised.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from foretoken.ops.backends.torch.stack import decoded, multiply, vectors
from foretoken.ops.formats import BLOCKS, GROUP, decode_blocks, decode_groups, round_rows
from foretoken.ops.stack import Blocks, Dense, Grouped, Joined, Linear, first_rows
from tests.ops.weights import (
    GROUPS,
    MINIMUM_AT,
    NIBBLES_AT,
    SCALE_AT,
    nibbles,
    numbers_of,
    put_half,
    random_weight,
)

NAN, INF = math.nan, math.inf


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def expected_blocks(kind: str, rows: Tensor) -> Tensor:
    """float32, by `gguf`."""
    with np.errstate(all="ignore"):  # of scales that are not finite
        found = gguf.quants.dequantize(rows.numpy(), gguf.GGMLQuantizationType[kind])
    return torch.from_numpy(found)


def any_bytes(kind: str, rows: int = 40, blocks: int = 3) -> Tensor:
    """Any bytes: scales are also subnormal, negative, infinite and NaN."""
    nbytes = blocks * BLOCKS[kind].nbytes
    return torch.randint(256, (rows, nbytes), dtype=torch.uint8, generator=generator(1))


def differs(kind: str, change: Callable[[str, Tensor], Any] = lambda kind, blocks: None) -> bool:
    """Whether we read blocks, after a change of their bytes, otherwise than `gguf` reads them."""
    rows = any_bytes(kind)
    wanted = expected_blocks(kind, rows)
    change(kind, rows.unflatten(1, (-1, BLOCKS[kind].nbytes)))
    found = decode_blocks(kind, rows)
    is_finite = wanted.isfinite()
    assert is_finite.float().mean().item() > 0.8
    if found.shape != wanted.shape or not torch.equal(found.isfinite(), is_finite):
        return True
    return not torch.equal(found[is_finite], wanted[is_finite])


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_have_the_numbers_of_the_format_s_own_package(kind: str) -> None:
    assert not differs(kind)


@pytest.mark.parametrize("kind", BLOCKS)
def test_sizes_are_those_of_the_format_s_own_package(kind: str) -> None:
    assert tuple(BLOCKS[kind]) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]


def swapped_halves(kind: str, blocks: Tensor) -> None:
    packed = nibbles(kind, blocks)
    packed.copy_(packed >> 4 | packed << 4)


def neighbours(kind: str, blocks: Tensor) -> None:
    """Both codes of a byte are next to each other, not half a block apart."""
    packed = nibbles(kind, blocks)
    low, high = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2).chunk(2, dim=-1)
    packed.copy_(low | high << 4)


def reversed_bits(kind: str, blocks: Tensor) -> None:
    at = {"Q5_0": 2, "Q5_1": 4}[kind]
    fifth = blocks[..., at : at + 4].clone()
    blocks[..., at : at + 4] = sum((fifth >> i & 1) << 7 - i for i in range(8))


def no_minimum(kind: str, blocks: Tensor) -> None:
    put_half(blocks, MINIMUM_AT[kind], torch.zeros(blocks.shape[:2]))


def swapped_bytes(kind: str, blocks: Tensor) -> None:
    at = SCALE_AT[kind]
    blocks[..., at : at + 2] = blocks[..., at : at + 2].flip(-1)


def swapped_scales(kind: str, blocks: Tensor) -> None:
    """The small scales in place of the small minima."""
    first, second, last = blocks[..., 4:16].clone().split(4, dim=-1)
    blocks[..., 4:16] = torch.cat([second, first, last >> 4 | last << 4], dim=-1)


MISREADINGS: dict[Callable[[str, Tensor], None], Any] = {
    swapped_halves: NIBBLES_AT, neighbours: NIBBLES_AT, reversed_bits: ("Q5_0", "Q5_1"),
    no_minimum: MINIMUM_AT, swapped_bytes: BLOCKS, swapped_scales: ("Q4_K", "Q5_K"),
}  # fmt: skip


@pytest.mark.parametrize("misreading", MISREADINGS)
def test_the_comparison_sees_a_wrong_reading(misreading: Callable[[str, Tensor], None]) -> None:
    """The order of nibbles, bits and bytes, or a minimum left out, in every format that has it."""
    assert all(differs(kind, misreading) for kind in MISREADINGS[misreading])


@pytest.mark.parametrize("name", [*BLOCKS, *GROUPS])
def test_a_weight_s_numbers_and_its_shape(name: str) -> None:
    weight = random_weight(name, 7, 512, generator())
    assert weight.shape == (7, 512)
    wanted = torch.from_numpy(numbers_of(weight))
    assert 0.5 < wanted.std().item() * 512**0.5 < 2, "of the size of a model's weights"
    found = decoded(weight)
    assert found.rounds
    torch.testing.assert_close(found.values.double(), wanted, atol=0, rtol=1e-6)
    assert torch.equal(decoded(first_rows(weight, 3)).values, found.values[:3])


@pytest.mark.parametrize("kind", BLOCKS)
def test_rows_in_an_order(kind: str) -> None:
    """Some rows occur twice, others never."""
    rows = random_weight(kind, 9, 512, generator()).rows
    order_N = torch.tensor([8, 0, 3, 3, 7])
    weight, whole = Blocks(kind, rows, order_N), decode_blocks(kind, rows)
    assert weight.shape == (5, 512)
    assert weight.nbytes == 5 * rows.shape[1]
    assert torch.equal(decoded(weight).values, whole[order_N])
    assert torch.equal(decoded(first_rows(weight, 2)).values, whole[order_N[:2]])
    token_T = torch.tensor([4, 1, 4])
    assert torch.equal(vectors(weight, token_T), whole[order_N[token_T]])
    assert torch.equal(vectors(Blocks(kind, rows), token_T), whole[token_T])


def test_groups_of_a_case_worked_out_by_hand() -> None:
    """Two codes of four bits in a byte, the first in its low half, each stored as its value + 8."""
    packed = torch.tensor([[0x80, 0xF7, 0x18, 0x0F]], dtype=torch.uint8)
    scale_NG = torch.tensor([[0.5, 2.0]])
    assert decode_groups(packed, scale_NG).tolist() == [[-4, 0, -0.5, 3.5, 0, -14, 14, -16]]
    codes = torch.tensor([[-128, 127, 1, -1]], dtype=torch.int8)
    assert decode_groups(codes, scale_NG).tolist() == [[-64, 63.5, 2, -2]]


def test_an_embedding_of_groups_is_read_by_its_rows() -> None:
    weight = random_weight("int8 by 32", 4, 64, generator())
    assert isinstance(weight, Grouped)
    token_T = torch.tensor([3, 0, 3])
    assert torch.equal(vectors(weight, token_T), decode_groups(*weight)[token_T])


@pytest.mark.parametrize("name", [*BLOCKS, *GROUPS, "float32"])
def test_a_product_is_that_of_rounded_rows_and_the_numbers(name: str) -> None:
    """Plain numbers multiply rows that are not rounded."""
    weight, x = random_weight(name, 11, 512, generator()), torch.randn(5, 512)
    bias, rows = torch.randn(11), x if name == "float32" else round_rows(x)
    wanted = rows.double() @ torch.from_numpy(numbers_of(weight)).T + bias
    found = multiply(x, Linear(weight, bias))
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)
    joined = Joined((weight, Dense(torch.ones(1, 512))))
    found = multiply(x, Linear(joined, torch.cat([bias, torch.zeros(1)])))
    torch.testing.assert_close(found[:, :11].double(), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[:, 11], x.sum(-1), atol=1e-4, rtol=1e-4)


def naive_rounding(row: list[float]) -> list[float]:
    """One number after the other, in float32, as kernels compute."""
    found = []
    for first in range(0, len(row), GROUP):
        group = np.array(row[first : first + GROUP], dtype=np.float32)
        most = np.abs(group).max()
        for number in group:
            code = round(float(number * (np.float32(127) / most))) if most > 0 else 0  # to even
            found.append(float(np.float32(code) * (most / np.float32(127))))
    return found


def test_rows_are_rounded_as_a_naive_loop_rounds_them() -> None:
    x = torch.randn(6, 96, generator=generator()) * torch.logspace(-20, 20, 6)[:, None]
    assert round_rows(x).tolist() == [naive_rounding(row) for row in x.tolist()]


def test_halves_are_rounded_to_even_and_the_largest_number_stays() -> None:
    """With 127 as the largest the scale is 1, and numbers are their codes."""
    x = torch.zeros(32)
    x[:8] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5])
    assert round_rows(x)[:8].tolist() == [127, 0, 2, 2, 0, -2, -2, 126]
    assert round_rows(-x)[:8].tolist() == [-127, 0, -2, -2, 0, 2, 2, -126]
    assert round_rows(x / 1024).tolist() == (round_rows(x) / 1024).tolist()


def test_no_rows_are_no_rows() -> None:
    """As in a pass without logits."""
    assert round_rows(torch.zeros(0, 64)).shape == (0, 64)
    weight = random_weight("Q4_K", 3, 256, generator())
    assert multiply(torch.zeros(0, 256), Linear(weight)).shape == (0, 3)


def test_zeros_stay_zeros() -> None:
    x = torch.zeros(2, 64)
    x[1, 40] = 3.0
    assert round_rows(x).tolist() == x.tolist()


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_number_that_is_not_finite_stays_in_its_group(value: float) -> None:
    x = torch.randn(3, 128, generator=generator())
    wanted = round_rows(x)
    x[1, 70] = value
    found = round_rows(x)
    assert bool(found[1, 64:96].isnan().all())
    found[1, 64:96] = wanted[1, 64:96]
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("largest", [1e-37, 1e-38, 1e-40, 1e-45, 3e38])
def test_the_smallest_and_largest_floats_are_no_exception(largest: float) -> None:
    """Activations so small that a 127th of them is no normal float become 0, not NaN."""
    x = torch.zeros(64)
    x[3], x[4], x[40] = largest, -largest / 2, 1.0
    found = round_rows(x)
    assert bool(found.isfinite().all())
    assert found[40] == 1.0
    torch.testing.assert_close(found[:32], x[:32], atol=1e-36, rtol=0.01)


def test_a_row_is_rounded_alike_in_any_batch() -> None:
    x = torch.randn(17, 96, generator=generator())
    wanted = round_rows(x)
    for row in range(17):
        assert torch.equal(round_rows(x[row]), wanted[row])
        assert torch.equal(round_rows(x[row:]), wanted[row:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_keep_their_dtype(dtype: torch.dtype) -> None:
    x = torch.randn(4, 64, generator=generator()).to(dtype)
    found = round_rows(x)
    assert found.dtype is dtype
    assert torch.equal(found, round_rows(x.float()).to(dtype))


def test_where_scales_lie_is_known_for_every_kind() -> None:
    """The tests of damaged files change these bytes."""
    for kind in BLOCKS:
        rows = torch.zeros(1, BLOCKS[kind].nbytes, dtype=torch.uint8)
        for at in (SCALE_AT[kind], MINIMUM_AT.get(kind, SCALE_AT[kind])):
            broken = rows.clone()
            broken[0, at : at + 2] = torch.tensor([0x00, 0x7C])  # infinity
            assert not bool(decode_blocks(kind, broken).isfinite().all())
        assert bool(decode_blocks(kind, rows).isfinite().all())


def test_four_bits_are_told_from_eight_by_their_dtype() -> None:
    codes = torch.zeros(2, 64, dtype=torch.int8)
    assert Grouped(codes, torch.ones(2, 2)).shape == (2, 64)
    assert Grouped(codes.to(torch.uint8), torch.ones(2, 2)).shape == (2, 128)

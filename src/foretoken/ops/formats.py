"""Quantised weights: how their blocks lie in memory, and their values.

Belongs here: the block formats of GGUF files and the grouped integers of compressed-tensors: tables
of their sizes, and decoding to float32. Does not: their products (`multiply` of each backend),
reading files (`models/`).

Every format stores small integers (*codes*) and, for each group of them, a scale and an offset or a
minimum: number = scale * (code - offset) - minimum.

Shape suffixes: N rows, G blocks of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

GROUP, SUPER = 32, 256
"""Inputs that share a scale of rounded activations; numbers in a block of the largest formats."""

_MIN_MAGNITUDE = 2.0**-100  # 127 / this is finite


class BlockKind(NamedTuple):
    """A block format: how many numbers a block holds (`size`), and in how many bytes."""

    size: int
    nbytes: int


BLOCKS = {
    "Q8_0": BlockKind(32, 34),
    "Q4_0": BlockKind(32, 18),
    "Q4_1": BlockKind(32, 20),
    "Q5_0": BlockKind(32, 22),
    "Q5_1": BlockKind(32, 24),
    "Q4_K": BlockKind(256, 144),
    "Q5_K": BlockKind(256, 176),
    "Q6_K": BlockKind(256, 210),
}
"""The block formats that are served, by GGUF's name."""
_WITH_MINIMUM = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")


def decode_blocks(kind: str, rows: Tensor) -> Tensor:
    """Rows of blocks, uint8 [N, bytes], in a format of `BLOCKS`, as float32 [N, numbers]."""
    size, nbytes = BLOCKS[kind]
    blocks = rows.reshape(len(rows), -1, nbytes)
    decode = _decode_256 if size == 256 else _decode_32
    return decode(kind, blocks).reshape(len(rows), -1)


def has_finite_scales(kind: str, rows: Tensor) -> bool:
    """Whether every scale and minimum of rows of blocks is a finite number."""
    nbytes = BLOCKS[kind].nbytes
    blocks = rows.reshape(-1, nbytes)
    # Offsets of the block's float16 numbers. Their upper bytes hold all bits of the exponent, which
    # are all 1 in NaN and infinities.
    offsets = [nbytes - 2] if kind == "Q6_K" else [0, 2] if kind in _WITH_MINIMUM else [0]
    upper_bytes = [blocks[:, offset + 1] for offset in offsets]
    return not any(bool(((byte & 0x7C) == 0x7C).any()) for byte in upper_bytes)


def decode_groups(codes: Tensor, scale_NG: Tensor) -> Tensor:
    """The weights that grouped integers stand for: code * scale of its group, float32 [N, numbers].

    Args:
        codes: int8 [N, numbers]; or uint8 [N, numbers / 2] with two codes per byte, the first one
            in the low half, each stored as its value + 8.
        scale_NG: float32, one per group; all groups of a row are equally large.
    """
    if codes.dtype is torch.uint8:
        codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1).to(torch.int8) - 8
    grouped = codes.reshape(*scale_NG.shape, -1).float()
    return (grouped * scale_NG[..., None]).flatten(1)


def round_rows(x: Tensor) -> Tensor:
    """Activations [.., in], rounded as they are before a product with blocks: to 8 bits per number
    and a scale per 32.

    A number becomes scale * code, with scale = the group's largest magnitude / 127 and codes
    rounded to the nearest, ties to even. NaN and infinities make their group NaN. A group with all
    magnitudes below 1e-30 becomes 0, since its scale cannot be inverted.
    """
    grouped = x.float().reshape(*x.shape[:-1], x.shape[-1] // GROUP, GROUP)
    largest = grouped.abs().amax(-1, keepdim=True)
    code = torch.round(grouped * torch.where(largest > _MIN_MAGNITUDE, 127.0 / largest, 0.0))
    rounded = torch.where(largest.isfinite(), code * (largest / 127.0), torch.nan)
    return rounded.flatten(-2).to(x.dtype)


def _halves(blocks: Tensor, offset: int) -> Tensor:
    """The half-precision number (float16) at byte `offset` of each block, as float32 [N, G, 1]."""
    return blocks[..., offset : offset + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """The low halves of bytes [.., n], then the high halves: [.., 2n]."""
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def _bits(packed: Tensor) -> Tensor:
    """The bits of bytes [.., n], lowest first: [.., 8n]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed[..., None] >> shifts & 1).flatten(-2)


def _decode_32(kind: str, blocks: Tensor) -> Tensor:
    """Blocks of 32 numbers [N, G, bytes] as float32 [N, G, 32]."""
    scale = _halves(blocks, 0)
    if kind == "Q8_0":
        return scale * blocks[..., 2:].view(torch.int8).float()
    has_minimum, has_fifth_bits = kind.endswith("_1"), kind.startswith("Q5")
    offset = 4 if has_minimum else 2
    codes = _nibbles(blocks[..., -16:])
    if has_fifth_bits:
        codes = codes | _bits(blocks[..., offset : offset + 4]) << 4
    if has_minimum:
        return scale * codes.float() + _halves(blocks, 2)
    return scale * (codes.float() - (16 if has_fifth_bits else 8))


def _decode_256(kind: str, blocks: Tensor) -> Tensor:
    """Blocks of 256 numbers [N, G, bytes] as float32."""
    if kind == "Q6_K":
        return _decode_q6(blocks)
    scale_NG8, minimum_NG8 = _small_integers(blocks[..., 4:16])
    shape = blocks.shape[:2]
    # Each run of 32 bytes holds 32 codes in the low halves, and the next 32 in the high halves.
    codes = _nibbles(blocks[..., -128:].reshape(*shape, 4, 32)).reshape(*shape, 8, 32)
    if kind == "Q5_K":
        shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
        codes = codes | (blocks[..., None, 16:48] >> shifts & 1) << 4
    scale_NG8 = _halves(blocks, 0) * scale_NG8
    minimum_NG8 = _halves(blocks, 2) * minimum_NG8
    return scale_NG8[..., None] * codes.float() - minimum_NG8[..., None]


def _small_integers(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minima of six bits each, from twelve bytes: float32 [N, G, 8]."""
    first, second, last = torch.split(packed, 4, dim=-1)
    scales = torch.cat([first & 63, (last & 15) | (first >> 6) << 4], dim=-1)
    minima = torch.cat([second & 63, (last >> 4) | (second >> 6) << 4], dim=-1)
    return scales.float(), minima.float()


def _decode_q6(blocks: Tensor) -> Tensor:
    """Blocks of Q6_K [N, G, bytes] as float32 [N, G, 16, 16]."""
    shape = blocks.shape[:2]
    low, high = blocks[..., :128].reshape(*shape, 2, 64), blocks[..., 128:192]
    shifts = 2 * torch.arange(4, dtype=torch.uint8, device=blocks.device)[:, None]
    # Each half of a block has four quarters of 32 codes. The lower four bits of the first two
    # quarters are the low halves of its 64 bytes, those of the last two are the high halves.
    codes = _nibbles(low).reshape(*shape, 2, 4, 32)
    codes = codes | (high.reshape(*shape, 2, 1, 32) >> shifts & 3) << 4
    factor = blocks[..., 192:208].contiguous().view(torch.int8).float()  # of 16 numbers each
    scale_NGS = (_halves(blocks, 208) * factor)[..., None]
    return scale_NGS * (codes.reshape(*shape, 16, 16).float() - 32)

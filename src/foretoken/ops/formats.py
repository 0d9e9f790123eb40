"""Quantised weights: sizes of the block formats of GGUF files, and decoding of these and of the
grouped integers of compressed-tensors to float32.

Every format stores small integers (*codes*) and, for each group of codes, a scale and an offset or
a minimum: number = scale * (code - offset) - minimum.

Shape suffixes: N rows, G blocks of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

GROUP, SUPER = 32, 256
"""Number of activations with one scale when they are rounded; numbers in the largest block."""

_MIN_MAGNITUDE = 2.0**-100  # so that 127 / magnitude is finite


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
    """Decode rows of blocks, uint8 [N, bytes], to float32 [N, numbers]."""
    size, nbytes = BLOCKS[kind]
    blocks = rows.reshape(len(rows), -1, nbytes)
    decode = _decode_256 if size == 256 else _decode_32
    return decode(kind, blocks).reshape(len(rows), -1)


def has_finite_scales(kind: str, rows: Tensor) -> bool:
    """Whether all scales and minima in rows of blocks are finite."""
    nbytes = BLOCKS[kind].nbytes
    blocks = rows.reshape(-1, nbytes)
    # Offsets of a block's float16 numbers. Each upper byte has the five bits of the exponent, which
    # are all 1 in NaN and infinities.
    offsets = [nbytes - 2] if kind == "Q6_K" else [0, 2] if kind in _WITH_MINIMUM else [0]
    upper_bytes = [blocks[:, offset + 1] for offset in offsets]
    return not any(bool(((byte & 0x7C) == 0x7C).any()) for byte in upper_bytes)


def decode_groups(codes: Tensor, scale_NG: Tensor) -> Tensor:
    """Decode grouped integers, as in `ops.stack.Grouped`, to float32 [N, numbers]."""
    if codes.dtype is torch.uint8:
        codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1).to(torch.int8) - 8
    grouped = codes.reshape(*scale_NG.shape, -1).float()
    return (grouped * scale_NG[..., None]).flatten(1)


def round_rows(x: Tensor) -> Tensor:
    """Round activations [.., in] to 8 bits, one scale per 32, as before a product with blocks.

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
    """The float16 number at byte `offset` of each block, as float32 [N, G, 1]."""
    return blocks[..., offset : offset + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """The low halves of bytes [.., n], then the high halves: [.., 2n]."""
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def _bits(packed: Tensor) -> Tensor:
    """The bits of bytes [.., n], lowest first: [.., 8n]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed[..., None] >> shifts & 1).flatten(-2)


def _decode_32(kind: str, blocks: Tensor) -> Tensor:
    """Decode blocks of 32 numbers, uint8 [N, G, bytes], to float32 [N, G, 32]."""
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
    """Decode blocks of 256 numbers, uint8 [N, G, bytes], to float32."""
    if kind == "Q6_K":
        return _decode_q6(blocks)
    scale_NG8, minimum_NG8 = _small_integers(blocks[..., 4:16])
    shape = blocks.shape[:2]
    # Each 32 bytes hold 32 codes in their low halves, and the next 32 codes in their high halves.
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
    shape = blocks.shape[:2]
    low, high = blocks[..., :128].reshape(*shape, 2, 64), blocks[..., 128:192]
    shifts = 2 * torch.arange(4, dtype=torch.uint8, device=blocks.device)[:, None]
    # Each half of a block has four quarters of 32 codes. 64 bytes have the lower four bits of the
    # first two quarters in their low halves, and those of the last two in their high halves.
    codes = _nibbles(low).reshape(*shape, 2, 4, 32)
    codes = codes | (high.reshape(*shape, 2, 1, 32) >> shifts & 3) << 4
    factor = blocks[..., 192:208].contiguous().view(torch.int8).float()  # one per 16 numbers
    scale_NGS = (_halves(blocks, 208) * factor)[..., None]
    return scale_NGS * (codes.reshape(*shape, 16, 16).float() - 32)

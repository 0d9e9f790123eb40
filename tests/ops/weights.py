"""Random weights in every format that a stack may have, and their numbers stated plainly.

Belongs here: bytes that are valid in a format, of about the size of a model's weights. Does not:
stacks (`native/test_quantised.py`), files (`models/gguf_models.py`).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretoken.ops.formats import BLOCKS
from foretoken.ops.stack import Blocks, Dense, Grouped

# Offsets of a block's float16 numbers, its scale and its minimum, and of codes of four bits, of
# which a byte has two.
SCALE_AT = {kind: 208 if kind == "Q6_K" else 0 for kind in BLOCKS}
MINIMUM_AT = {"Q4_1": 2, "Q5_1": 2, "Q4_K": 2, "Q5_K": 2}
NIBBLES_AT = {"Q4_0": 2, "Q4_1": 4, "Q5_0": 6, "Q5_1": 8, "Q4_K": 16, "Q5_K": 48, "Q6_K": 0}
# The deviation of numbers of random codes with a scale of 1, and the minimum that centres them.
_SPREAD = {
    "Q8_0": 74, "Q4_0": 4.6, "Q4_1": 4.6, "Q5_0": 9.2, "Q5_1": 9.2, "Q4_K": 230, "Q5_K": 460,
    "Q6_K": 1370,
}  # fmt: skip
_MINIMUM = {"Q4_1": -7.5, "Q5_1": -15.5, "Q4_K": 7.5, "Q5_K": 15.5}
GROUPS = {
    "int8 by 32": 32, "int8 by 64": 64, "int8 by 128": 128, "int8 by row": 0,
    "int4 by 32": 32, "int4 by 64": 64, "int4 by 128": 128, "int4 by row": 0,
}  # fmt: skip
"""Formats of `Grouped`: numbers of a group, 0: all of a row."""

PLAIN = ("float32", "float32 of bfloat16", "bfloat16", "float16")
"""Formats of `Dense`; the lower half of the second's numbers is zero."""

FORMATS = (*BLOCKS, *GROUPS, *PLAIN)


def multiple_of(name: str) -> int:
    return BLOCKS[name].size if name in BLOCKS else GROUPS.get(name, 0) or 32


def random_blocks(kind: str, rows: int, numbers: int, random: torch.Generator) -> Tensor:
    """uint8 [rows, bytes]: any codes and small scales; numbers of deviation 1 / sqrt(numbers)."""
    size, nbytes = BLOCKS[kind]
    count = numbers // size
    blocks = torch.randint(256, (rows, count, nbytes), dtype=torch.uint8, generator=random)
    scale = torch.rand(rows, count, generator=random) + 0.5
    scale = scale * torch.where(torch.rand(rows, count, generator=random) < 0.5, -1, 1)
    scale = scale / (_SPREAD[kind] * numbers**0.5)
    put_half(blocks, SCALE_AT[kind], scale)
    if kind in MINIMUM_AT:
        noise = 0.8 + 0.4 * torch.rand(rows, count, generator=random)
        put_half(blocks, MINIMUM_AT[kind], scale * _MINIMUM[kind] * noise)
    return blocks.flatten(1)


def put_half(blocks: Tensor, at: int, values: Tensor) -> None:
    """Write a half into each block, uint8 [.., bytes of a block]."""
    blocks[..., at : at + 2] = values.half()[..., None].view(torch.uint8)


def nibbles(kind: str, blocks: Tensor) -> Tensor:
    """The bytes with codes of four bits, uint8 [.., numbers / 2]: a view of blocks [.., bytes]."""
    at = NIBBLES_AT[kind]
    return blocks[..., at : at + BLOCKS[kind].size // 2]


def random_weight(
    name: str, rows: int, numbers: int, random: torch.Generator
) -> Blocks | Grouped | Dense:
    """A weight [rows, numbers] in one of `FORMATS`."""
    if name in BLOCKS:
        return Blocks(name, random_blocks(name, rows, numbers, random))
    if name in GROUPS:
        groups = numbers // (GROUPS[name] or numbers)
        scale_NG = (torch.rand(rows, groups, generator=random) + 0.5) / numbers**0.5
        if name.startswith("int8"):
            codes = torch.randint(-128, 128, (rows, numbers), dtype=torch.int8, generator=random)
            return Grouped(codes, scale_NG / 74)
        packed = torch.randint(256, (rows, numbers // 2), dtype=torch.uint8, generator=random)
        return Grouped(packed, scale_NG / 4.6)
    values = torch.randn(rows, numbers, generator=random) / numbers**0.5
    if name == "float32":
        return Dense(values)
    if name == "float32 of bfloat16":
        return Dense(values.bfloat16().float())
    return Dense(values.to(getattr(torch, name)))


def numbers_of(weight: Blocks | Grouped | Dense) -> NDArray[np.float64]:
    """The numbers of a weight, read by `gguf` and by plain NumPy, without our code."""
    if isinstance(weight, Dense):
        return weight.values.double().numpy()
    if isinstance(weight, Blocks):
        import gguf

        rows = weight.rows if weight.order_N is None else weight.rows[weight.order_N]
        kind = gguf.GGMLQuantizationType[weight.kind]
        return gguf.quants.dequantize(rows.numpy(), kind).astype(np.float64)
    codes, scales = weight.codes.numpy(), weight.scale_NG.numpy()
    found = np.zeros(weight.shape, dtype=np.float64)
    size = weight.shape[1] // scales.shape[1]
    for row in range(found.shape[0]):
        for i in range(found.shape[1]):
            if codes.dtype == np.int8:
                code = int(codes[row, i])
            else:
                byte = int(codes[row, i // 2])
                code = (byte % 16 if i % 2 == 0 else byte // 16) - 8
            found[row, i] = code * float(scales[row, i // size])
    return found

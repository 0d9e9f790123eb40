"""How attention kernels are cut, by the size of a step and of a head. Measured on an H200."""

from __future__ import annotations

from typing import NamedTuple

import torch

SAME_BITS = 16  # up to so many rows of a step, none depends on how many others there are
LARGEST_HEAD = 256


class Decoding(NamedTuple):
    """Of `decode.py`. Bits depend on size, count, groups and keys.

    size, count: of pieces, see `plan.py`
    groups:      of warps, each with its own keys
    keys:        of a warp at a time
    rows:        of a tile; sets: of warps that share its rows
    programs:    per multiprocessor
    registers:   of a thread at most
    """

    size: int
    count: int
    groups: int
    keys: int
    rows: int
    sets: int
    stages: int
    programs: int
    registers: int

    @property
    def warps(self) -> int:
        return self.groups * self.sets


class Prefilling(NamedTuple):
    """Of `prefill.py`: rows of a tile, keys at a time."""

    rows: int
    keys: int
    stages: int
    warps: int


def decoding(
    tokens: int, requests: int, tile_rows: int, size: int, dtype: torch.dtype
) -> Decoding:
    """For a step of so many tokens and requests, of `tile_rows` rows of a request at most."""
    if tokens <= SAME_BITS:
        cut = (64, 64)
    elif requests <= 16:
        cut = (256, 16)
    else:
        cut = (2048, 4)
    if dtype == torch.float32:  # products without tensor cores: operands pass through registers
        groups = 4 if size <= 128 else 2
        return Decoding(*cut, groups, 16, rows=16, sets=1, stages=1, programs=2, registers=255)
    rows, sets = (16, 1) if tile_rows <= 16 else (32, 2) if tile_rows <= 32 else (64, 2)
    if size > 128:
        rows = min(rows, 32)
        return Decoding(*cut, 4, 16, rows, sets, stages=1, programs=1, registers=255)
    return Decoding(*cut, 4, 16, rows, sets, stages=2, programs=4 // sets, registers=128)


def prefilling(size: int, dtype: torch.dtype) -> Prefilling:
    """For heads of this size."""
    if dtype == torch.float32:
        return Prefilling(rows=32, keys=32, stages=1, warps=8)
    if size > 128:
        return Prefilling(rows=128, keys=64, stages=2, warps=8)
    return Prefilling(rows=128, keys=64, stages=3, warps=8)

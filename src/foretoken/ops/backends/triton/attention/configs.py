"""Tiles and pieces of attention, by the sizes of a step and of a head. Measured on an H200."""

from __future__ import annotations

from typing import NamedTuple

import torch

SAME_BITS = 16  # in steps of up to so many rows, a row's bits do not depend on other rows
LARGEST_HEAD = 256


class Decoding(NamedTuple):
    """Configuration of `decode_kernel`.

    The bits of results depend on size, count, groups, keys, and how pieces are merged.

    size, count: see `plan.py`; size is a multiple of groups * keys, by which pieces grow
    groups:      groups of warps; each group reads its own keys, each warp `keys` of them at a time
    rows, sets:  rows of a tile; sets of warps, each with its own part of the rows. With one
                 group and one set, each of four warps has all keys and a quarter of 64 rows
    stages:      of the pipeline that loads tiles
    programs, registers: programs per multiprocessor, limit of the registers of a thread
    merged_heads, merged_pieces, merged_warps: what a program of `merge_kernel` loads; its warps
    ahead:       tokens of an item that are prefetched, see `decode_kernel`
    """

    size: int
    count: int  # type: ignore[assignment]
    groups: int
    keys: int
    rows: int
    sets: int
    stages: int
    programs: int
    registers: int
    merged_heads: int = 1
    merged_pieces: int = 32
    merged_warps: int = 4
    ahead: int = 0

    @property
    def warps(self) -> int:
        return self.groups * self.sets if self.groups * self.sets > 1 else 4


class Prefilling(NamedTuple):
    """Configuration of `prefill_kernel`: rows of a tile, keys of one load, pipeline stages."""

    rows: int
    keys: int
    stages: int
    warps: int


# Heads of up to 128 dimensions. Warps that share all keys read each key once for all rows. Times of
# a layer (8B shape) with shared keys, and with keys per warp: 45.7 and 50.0 us for one row at 32k
# tokens, 43.2 and 59.5 for five; at 1150 tokens 11.7 and 10.4 for one row, 50.4 and 69.2 for 32
# requests of five rows. The first two configurations differ only in values that change no bit.
_ONE_REQUEST = Decoding(256, 33, 1, 32, 64, 1, 4, 2, 255, 1, 32, 2, ahead=64)
_REQUESTS = _ONE_REQUEST._replace(stages=3, programs=3, registers=168, ahead=0)
_MEDIUM = Decoding(576, 16, 1, 32, 64, 1, 3, 3, 168, 8, 8, 4)
_MANY = Decoding(2048, 4, 1, 64, 64, 1, 3, 2, 255, 8, 8, 4)


def decoding(
    tokens: int, requests: int, kv_heads: int, tile_rows: int, size: int, dtype: torch.dtype
) -> Decoding:
    """The configuration for a step: `requests` requests of up to `tile_rows` rows (token, head)."""
    few = _ONE_REQUEST if requests == 1 else _REQUESTS
    # One long context gives two programs per multiprocessor a piece each: 33 for 8 K/V heads.
    few = few._replace(count=min(128, max(16, few.count * 8 // kv_heads)))
    many = _MANY if requests > 16 else _MEDIUM
    shared_keys = few if tokens <= SAME_BITS else many
    piece_limits, last_fields = shared_keys[:2], shared_keys[9:]
    if dtype == torch.float32:  # products without tensor cores: operands pass through registers
        groups = 4 if size <= 128 else 2
        return Decoding(*piece_limits, groups, 16, 16, 1, 2, 2, 255, *last_fields)
    if size > 128:
        rows, sets = (16, 1) if tile_rows <= 16 else (32, 2)
        return Decoding(*piece_limits, 4, 16, rows, sets, 2, 1, 255, *last_fields)
    # 64 requests of one row: 81.7 us a layer, 83.8 with `shared_keys`.
    if tokens > SAME_BITS and tile_rows <= 16:
        return Decoding(*piece_limits, 2, 16, 16, 1, 3, 4, 255, *last_fields)
    if tokens > SAME_BITS and 2 < requests <= 8:
        # 8 requests of 5 rows at 1024 tokens: a pass takes 4.88 ms, with _MEDIUM 5.15. At 16k
        # tokens a layer takes 172 us with contexts cut into 33 pieces, 152 with 16.
        return few._replace(count=few.count // 2)
    return few if requests <= 2 else shared_keys


def prefilling(size: int, dtype: torch.dtype) -> Prefilling:
    """The configuration for heads of this size."""
    if dtype == torch.float32:
        return Prefilling(rows=32, keys=32, stages=1, warps=8)
    return Prefilling(rows=128, keys=64, stages=2 if size > 128 else 3, warps=8)

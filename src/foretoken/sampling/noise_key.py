"""Noise keys: 64 bits that name a sample, from the seeds a user sees. No torch."""

from __future__ import annotations

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix(seed: int, j: int) -> int:
    """Key of item j under `seed`: the seed itself for j = 0, else splitmix64's finaliser.

    The finaliser (Steele, Lea and Flood 2014) is a bijection of seed + j * golden ratio, so the
    keys of one seed never collide with each other.
    """
    if j == 0:
        return seed & _MASK
    z = (seed + j * _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def to_int64(key: int) -> int:
    """The same 64 bits as a signed integer, for an int64 tensor."""
    return key - 2**64 if key >= 2**63 else key

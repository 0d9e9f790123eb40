"""Noise keys: 64 bits that name the noise of one sample, made from seeds. No torch."""

from __future__ import annotations

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_ENGINE = int.from_bytes(b"foretokn", "big")


def mix(seed: int, j: int) -> int:
    """The key of item j under `seed`: the seed itself for j = 0, else a hash of seed and j.

    The hash is the finaliser of splitmix64 (Steele, Lea and Flood 2014), applied to seed + j *
    golden ratio. It is a bijection, so no two items j >= 1 of one seed share a key.
    """
    if j == 0:
        return seed & _MASK
    z = (seed + j * _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def unseeded(engine_seed: int, admission: int) -> int:
    """The seed of a request without its own seed; `admission` counts admitted requests from 1.

    The engine's seed is first made distinct from users' seeds. Otherwise request j of an engine
    with seed 0 would share its noise with sample j of a request with seed 0.
    """
    return mix(mix(engine_seed ^ _ENGINE, 1), admission)


def to_int64(key: int) -> int:
    """The same 64 bits as a signed integer, for an int64 tensor."""
    return key - 2**64 if key >= 2**63 else key

"""Noise keys: reproducible, distinct, and the seed itself for sample 0."""

from __future__ import annotations

from foretoken.sampling.noise_key import mix, to_int64, unseeded


def test_sample_zero_uses_the_seed_itself_so_reported_seeds_reproduce() -> None:
    assert mix(123, 0) == 123
    assert mix(mix(5, 3), 0) == mix(5, 3)


def test_keys_are_distinct_over_samples_and_near_seeds() -> None:
    keys = {mix(seed, j) for seed in range(200) for j in range(200)}
    assert len(keys) == 200 * 200
    assert all(0 <= key < 2**64 for key in keys)


def test_splitmix64_known_answers() -> None:
    # The generator of Steele, Lea and Flood with seed 1234567: its first three outputs.
    assert [mix(1234567, j) for j in (1, 2, 3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_unseeded_requests_share_no_key_with_seeded_samples() -> None:
    own = {unseeded(0, n) for n in range(1, 500)}
    assert len(own) == 499
    assert not own & {mix(seed, j) for seed in range(20) for j in range(100)}


def test_the_bits_survive_a_signed_integer() -> None:
    for key in (0, 1, 2**63 - 1, 2**63, 2**64 - 1):
        assert to_int64(key) % 2**64 == key
        assert -(2**63) <= to_int64(key) < 2**63

"""Synthetic acceptance: the three ways to state it, converted to conditional rates. No torch.

The rule `synthetic` accepts draft i with a chosen probability c_i once all drafts before it are
accepted, whatever p and q are. It measures how fast an engine would be with a drafter of that
acceptance, without such a drafter. The text that it makes is meaningless by design.

Notation: draft i = 0..K-1 has the conditional rate c_i. joint_i = c_0 c_1 .. c_i is the probability
that the first i + 1 drafts are all accepted, g the factor from c_i to c_{i+1}.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import floor
from operator import mul
from typing import cast

from foretoken.config import MAX_SPECULATIVE_TOKENS, SpeculativeConfig, check_int, check_synthetic

DECAY = 0.85  # g: conditional rates fall by this factor from one draft to the next


def conditional_rates(
    num_speculative_tokens: int,
    *,
    synthetic_acceptance_rate: float | None = None,
    synthetic_acceptance_rates: Sequence[float] | None = None,
    synthetic_acceptance_length: float | None = None,
) -> tuple[float, ...]:
    """The conditional rates c_0..c_{K-1}, K = `num_speculative_tokens`, from one of the options.

    As a float64 tensor this is `VerifyBatch.synthetic_rate_K`.

    Args:
        synthetic_acceptance_rate: r in [0, 1], the mean of all joint_i. The rates decay: c_i = c_0
            g^i, so joint_i = c_0^(i+1) g^(i(i+1)/2). g is 0.85 if some c_0 <= 1 then gives the mean
            r, else the smallest g in [0.85, 1] that gives r with c_0 = 1. |mean - r| < 1e-8.
        synthetic_acceptance_rates: the K numbers joint_i, in [0, 1] and never rising. c_i = joint_i
            / joint_{i-1}, or 0 if joint_{i-1} is 0.
        synthetic_acceptance_length: L in [1, K + 1], L = 1 + sum of joint_i. The rates are floor(L
            - 1) ones, then the fraction of L, then zeros. No other rates with the mean L have less
            variance of the accepted length.

    Raises:
        ConfigError: not exactly one option is set, or it is out of range; the error names it.

    Example:
        >>> from foretoken.sampling import conditional_rates, joint_rates
        >>> rates = conditional_rates(3, synthetic_acceptance_rates=[0.8, 0.4, 0.0])
        >>> rates, joint_rates(rates)
        ((0.8, 0.5, 0.0), (0.8, 0.4, 0.0))
        >>> conditional_rates(3, synthetic_acceptance_length=2.25)
        (1.0, 0.25, 0.0)
    """
    check_int("num_speculative_tokens", num_speculative_tokens, 1, MAX_SPECULATIVE_TOKENS)
    options = {
        "synthetic_acceptance_rate": synthetic_acceptance_rate,
        "synthetic_acceptance_rates": synthetic_acceptance_rates,
        "synthetic_acceptance_length": synthetic_acceptance_length,
    }
    check_synthetic("", num_speculative_tokens, options)
    if synthetic_acceptance_rate is not None:
        return _decaying_rates(synthetic_acceptance_rate, num_speculative_tokens)
    if synthetic_acceptance_length is not None:
        ones = floor(synthetic_acceptance_length - 1)
        rates = [1.0] * ones + [synthetic_acceptance_length - 1 - ones]
        return tuple((rates + [0.0] * num_speculative_tokens)[:num_speculative_tokens])
    joint = [float(rate) for rate in cast(Sequence[float], synthetic_acceptance_rates)]
    pairs = zip(joint, [1.0, *joint], strict=False)
    return tuple(rate / before if before else 0.0 for rate, before in pairs)


def rates_of(config: SpeculativeConfig) -> tuple[float, ...]:
    """`conditional_rates` for these options; () unless the rule is `synthetic`."""
    if config.rejection_sample_method != "synthetic":
        return ()
    return conditional_rates(
        config.num_drafts,
        synthetic_acceptance_rate=config.synthetic_acceptance_rate,
        synthetic_acceptance_rates=config.synthetic_acceptance_rates,
        synthetic_acceptance_length=config.synthetic_acceptance_length,
    )


def joint_rates(conditional: Sequence[float]) -> tuple[float, ...]:
    """The probability that drafts 0..i are all accepted, for each i."""
    return tuple(accumulate(conditional, mul))


def _decaying_rates(rate: float, count: int) -> tuple[float, ...]:
    """`count` conditional rates c_i = c_0 g^i with the mean joint rate `rate`."""

    def mean_joint(first: float, decay: float) -> float:
        joint = joint_rates([first * decay**i for i in range(count)])
        return sum(joint) / count

    decay = _smallest_argument(lambda g: mean_joint(1.0, g), rate, DECAY)
    first = _smallest_argument(lambda c_0: mean_joint(c_0, decay), rate, 0.0)
    return tuple(first * decay**i for i in range(count))


def _smallest_argument(rising: Callable[[float], float], min_value: float, low: float) -> float:
    """The smallest x in [low, 1] with rising(x) >= min_value; 1 if there is no such x."""
    if rising(low) >= min_value:
        return low
    high = 1.0
    for _ in range(100):  # bisection: the last interval is far below the spacing of floats
        middle = (low + high) / 2
        if rising(middle) >= min_value:
            high = middle
        else:
            low = middle
    return high

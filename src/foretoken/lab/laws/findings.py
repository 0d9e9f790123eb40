"""A law's result, one number and the bounds that a correct backend keeps; chi-square tests."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MIN_EXPECTED = 5.0  # the usual rule for the chi-square approximation to hold in a cell


@dataclass(frozen=True, slots=True)
class ChiSquare:
    """A statistic, its degrees of freedom, and the chance of a larger one under the hypothesis."""

    statistic: float
    degrees: int
    p_value: float


def upper_tail(statistic: float, degrees: int) -> float:
    """P(X > statistic) for X chi-square distributed: Q(degrees/2, statistic/2), to 8 digits.

    Q is the upper regularised incomplete gamma function (Abramowitz & Stegun 6.5.3).
    """
    shape, x = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(shape, x))


def poisson(count: int, mean: float) -> float:
    """Two-sided p-value of a count: twice the lesser of P(X <= count) and P(X >= count)."""
    at_most = upper_tail(2 * mean, 2 * count + 2)
    at_least = 1 - upper_tail(2 * mean, 2 * count) if count else 1.0
    return min(1.0, 2 * min(at_most, at_least))


def goodness_of_fit(counts: Sequence[int], probabilities: Sequence[float]) -> ChiSquare:
    """Pearson's test of counts against known probabilities; cells expected below 5 are pooled.

    A count where the probability is 0 gives p = 0, whatever the other counts. A single cell (too
    few observations, or one outcome only) gives p = 1.
    """
    return _test(counts, probabilities, lambda n, expected: (n - expected) ** 2 / expected)


def g_test(counts: Sequence[int], probabilities: Sequence[float]) -> ChiSquare:
    """`goodness_of_fit` by the likelihood ratio instead of Pearson's (Sokal & Rohlf, ch. 17)."""
    return _test(
        counts, probabilities, lambda n, expected: 2 * n * math.log(n / expected) if n else 0.0
    )


def _test(
    counts: Sequence[int], probabilities: Sequence[float], part: Callable[[float, float], float]
) -> ChiSquare:
    total = sum(counts)
    cells = [(n, total * chance) for n, chance in zip(counts, probabilities, strict=True)]
    if any(n and not expected for n, expected in cells):
        return ChiSquare(math.inf, len(cells) - 1, 0.0)
    kept = [cell for cell in cells if cell[1] >= MIN_EXPECTED]
    rare = [cell for cell in cells if 0 < cell[1] < MIN_EXPECTED]
    if rare:
        pool = sum(n for n, _ in rare), sum(expected for _, expected in rare)
        if pool[1] < MIN_EXPECTED and kept:  # the pool is too small as well: join the last cell
            n, expected = kept.pop()
            pool = pool[0] + n, pool[1] + expected
        kept.append(pool)
    statistic = max(sum(part(n, expected) for n, expected in kept), 0.0)
    degrees = len(kept) - 1
    return ChiSquare(statistic, degrees, upper_tail(statistic, degrees) if degrees > 0 else 1.0)


CORRECT_P, MUTANT_P = 1e-4, 1e-6  # a correct backend is above the first, a mutant below the second
SIGMAS = 4.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One number that a law bounds.

    Attributes:
        case: what was tried; `case` and `statistic` name the finding in a results file.
        statistic: what `value` is: a p-value, a z-score, a share, a count.
        trials: number of samples.
    """

    case: str
    statistic: str
    value: float
    low: float
    high: float
    trials: int

    @property
    def passed(self) -> bool:
        return self.low < self.value < self.high

    def __str__(self) -> str:
        found = f"{self.statistic} {self.value:.3g} in ({self.low:.3g}, {self.high:.3g})"
        return f"{self.case}: {found}, {self.trials} trials"


def p_finding(case: str, p: float, trials: int) -> Finding:
    """A p-value, which must be above `CORRECT_P`."""
    return Finding(case, "p_value", p, CORRECT_P, 1.0 + 1e-9, trials)


def z_finding(case: str, found: float, expected: float, error: float, trials: int) -> Finding:
    """A mean, which must be within four standard errors; exact where the error is 0."""
    z = (found - expected) / error if error > 0 else (found != expected) * math.inf
    return Finding(case, "z", 0.0 if math.isnan(z) else z, -SIGMAS, SIGMAS, trials)


def none_finding(case: str, what: str, count: int, trials: int) -> Finding:
    """A count of events that must not occur at all."""
    return Finding(case, what, count, -1, 1, trials)


def fit(counts: Tensor, probability: Tensor) -> float:
    """p-value of counts of outcomes with known probabilities."""
    return goodness_of_fit(counts.tolist(), probability.double().tolist()).p_value

"""Chi-square tests, and `Finding`: a number with the bounds that a correct backend keeps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MIN_EXPECTED = 5.0  # the usual rule for the chi-square approximation to hold in a cell


@dataclass(frozen=True, slots=True)
class ChiSquare:
    """The result of a chi-square test; `degrees` are degrees of freedom."""

    statistic: float
    degrees: int
    p_value: float


def upper_tail(statistic: float, degrees: int) -> float:
    """P(X > statistic) for a chi-square distributed X, to 8 digits (Abramowitz & Stegun 6.5.3)."""
    shape, x = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(shape, x))


def poisson(count: int, mean: float) -> float:
    """Two-sided p-value of a Poisson count: twice the lesser of P(X <= count) and P(X >= count)."""
    at_most = upper_tail(2 * mean, 2 * count + 2)
    at_least = 1 - upper_tail(2 * mean, 2 * count) if count else 1.0
    return min(1.0, 2 * min(at_most, at_least))


def goodness_of_fit(counts: Sequence[int], probabilities: Sequence[float]) -> ChiSquare:
    """Pearson's test of counts against known probabilities.

    Cells with an expected count below 5 are pooled; p = 1 if one cell remains. A count in a cell
    with probability 0 gives p = 0.
    """
    return _test(counts, probabilities, lambda n, expected: (n - expected) ** 2 / expected)


def g_test(counts: Sequence[int], probabilities: Sequence[float]) -> ChiSquare:
    """The likelihood-ratio test of counts against known probabilities (Sokal & Rohlf, ch. 17).

    Cells are pooled as in `goodness_of_fit`.
    """
    return _test(
        counts, probabilities, lambda n, expected: 2 * n * math.log(n / expected) if n else 0.0
    )


def _test(
    counts: Sequence[int], probabilities: Sequence[float], part: Callable[[float, float], float]
) -> ChiSquare:
    """A chi-square test; `part` is a cell's term of the statistic, from (count, expected count)."""
    total = sum(counts)
    cells = [(n, total * chance) for n, chance in zip(counts, probabilities, strict=True)]
    if any(n and not expected for n, expected in cells):
        return ChiSquare(math.inf, len(cells) - 1, 0.0)
    kept = [cell for cell in cells if cell[1] >= MIN_EXPECTED]
    rare = [cell for cell in cells if 0 < cell[1] < MIN_EXPECTED]
    if rare:
        pool = sum(n for n, _ in rare), sum(expected for _, expected in rare)
        if pool[1] < MIN_EXPECTED and kept:  # still too small: join it with the last cell
            n, expected = kept.pop()
            pool = pool[0] + n, pool[1] + expected
        kept.append(pool)
    statistic = max(sum(part(n, expected) for n, expected in kept), 0.0)
    degrees = len(kept) - 1
    return ChiSquare(statistic, degrees, upper_tail(statistic, degrees) if degrees > 0 else 1.0)


CORRECT_P, MUTANT_P = 1e-4, 1e-6  # the p-value of a correct backend is higher, of a mutant lower
SIGMAS = 4.0  # bound of a z-score


@dataclass(frozen=True, slots=True)
class Finding:
    """A number that a law measured, and its exclusive bounds."""

    case: str  # name of the experiment
    statistic: str  # what `value` is: a p-value, a z-score, a share, a count
    value: float
    low: float
    high: float
    trials: int

    @property
    def passed(self) -> bool:
        return self.low < self.value < self.high

    def __str__(self) -> str:
        bounded = f"{self.statistic} {self.value:.3g} in ({self.low:.3g}, {self.high:.3g})"
        return f"{self.case}: {bounded}, {self.trials} trials"


def p_finding(case: str, p: float, trials: int) -> Finding:
    """The finding of a p-value, which must be above `CORRECT_P`."""
    return Finding(case, "p_value", p, CORRECT_P, 1.0 + 1e-9, trials)


def z_finding(case: str, observed: float, expected: float, error: float, trials: int) -> Finding:
    """The finding of a mean, which must be within four standard errors of the expected mean."""
    z = (observed - expected) / error if error > 0 else (observed != expected) * math.inf
    return Finding(case, "z", 0.0 if math.isnan(z) else z, -SIGMAS, SIGMAS, trials)


def none_finding(case: str, event: str, count: int, trials: int) -> Finding:
    """The finding of an event that must never occur."""
    return Finding(case, event, count, -1, 1, trials)


def fit(counts: Tensor, probability: Tensor) -> float:
    """The p-value of `goodness_of_fit` for tensors."""
    return goodness_of_fit(counts.tolist(), probability.double().tolist()).p_value

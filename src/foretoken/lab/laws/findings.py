"""What a law finds: one number, and the bounds that a correct backend keeps."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from foretoken.lab.chi_square import goodness_of_fit

CORRECT_P, MUTANT_P = 1e-4, 1e-6  # a correct backend is above the first, a mutant below the second
SIGMAS = 4.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One number that a law bounds.

    Attributes:
        case: what was tried; with `statistic` its name in a results file.
        statistic: what `value` is: a p-value, a z-score, a share, a count.
        trials: how many samples it is made of.
    """

    case: str
    statistic: str
    value: float
    low: float
    high: float
    trials: int

    @property
    def passed(self) -> bool:
        """Whether low < value < high."""
        return self.low < self.value < self.high

    def __str__(self) -> str:
        found = f"{self.statistic} {self.value:.3g} in ({self.low:.3g}, {self.high:.3g})"
        return f"{self.case}: {found}, {self.trials} trials"


def p_finding(case: str, p: float, trials: int) -> Finding:
    """A p-value, of a correct backend above `CORRECT_P`."""
    return Finding(case, "p_value", p, CORRECT_P, 1.0 + 1e-9, trials)


def z_finding(case: str, found: float, expected: float, error: float, trials: int) -> Finding:
    """A mean within four standard errors; one without any spread must be met exactly."""
    z = (found - expected) / error if error > 0 else (found != expected) * math.inf
    return Finding(case, "z", 0.0 if math.isnan(z) else z, -SIGMAS, SIGMAS, trials)


def none_finding(case: str, what: str, count: int, trials: int) -> Finding:
    """A count of what must not occur at all."""
    return Finding(case, what, count, -1, 1, trials)


def fit(counts: Tensor, probability: Tensor) -> float:
    """p-value of whole-number counts of outcomes whose probabilities are known."""
    return goodness_of_fit(counts.tolist(), probability.double().tolist()).p_value

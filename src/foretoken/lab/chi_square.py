"""Chi-square tests: of counts against known probabilities, and of two samples against each other.

Pure arithmetic, no scipy.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

MIN_EXPECTED = 5.0  # the usual rule for the chi-square approximation to hold in a cell


@dataclass(frozen=True, slots=True)
class ChiSquare:
    """A statistic, its degrees of freedom, and the chance of a larger one without a difference."""

    statistic: float
    degrees: int
    p_value: float


def upper_tail(statistic: float, degrees: int) -> float:
    """P(X > statistic) for X chi-square distributed: Q(degrees/2, statistic/2).

    The regularised incomplete gamma function, by its series below a+1 and by Lentz's continued
    fraction above (Abramowitz & Stegun 6.5.29 and 6.5.31).
    """
    a, x = degrees / 2.0, statistic / 2.0
    if x <= 0.0:
        return 1.0
    scale = math.exp(a * math.log(x) - x - math.lgamma(a))
    if x < a + 1.0:
        term = total = 1.0 / a
        n = a
        while abs(term) > abs(total) * 1e-16:
            n += 1.0
            term *= x / n
            total += term
        return max(0.0, 1.0 - scale * total)
    tiny = 1e-300
    b = x + 1.0 - a
    c, d = 1.0 / tiny, 1.0 / b
    h = d
    for i in range(1, 10_000):
        step = -i * (i - a)
        b += 2.0
        d = 1.0 / (step * d + b or tiny)
        c = b + step / c or tiny
        h *= c * d
        if abs(c * d - 1.0) < 1e-15:
            break
    return scale * h


def goodness_of_fit(
    counts: Sequence[int], probabilities: Sequence[float], least: float = MIN_EXPECTED
) -> ChiSquare:
    """Test of counts against known probabilities; cells expected below `least` are pooled.

    A count where the probability is 0 has p = 0, whatever else was counted. One cell alone, for
    want of observations or of outcomes, has p = 1.
    """
    total = sum(counts)
    cells = [(n, total * chance) for n, chance in zip(counts, probabilities, strict=True)]
    if any(n and not expected for n, expected in cells):
        return ChiSquare(math.inf, len(cells) - 1, 0.0)
    kept = [cell for cell in cells if cell[1] >= least]
    rare = [cell for cell in cells if 0 < cell[1] < least]
    if rare:
        pool = sum(n for n, _ in rare), sum(expected for _, expected in rare)
        if pool[1] < least and kept:  # the pool itself is rare: the last cell takes it
            n, expected = kept.pop()
            pool = pool[0] + n, pool[1] + expected
        kept.append(pool)
    statistic = sum((n - expected) ** 2 / expected for n, expected in kept)
    degrees = len(kept) - 1
    return ChiSquare(statistic, degrees, upper_tail(statistic, degrees) if degrees > 0 else 1.0)


def pool_by_prefix(
    first: Iterable[Sequence[Hashable]], second: Iterable[Sequence[Hashable]], least: float
) -> list[tuple[int, int]]:
    """Counts of both samples per cell; rare sequences are pooled under their longest prefix.

    A sequence seen fewer than `least` times in both samples together joins the cell of its prefix
    (`a b c` joins `a b`, then `a`, then the cell of everything else). Cells depend on the two
    samples' union alone, so pooling favours neither.
    """
    counts: dict[tuple[Hashable, ...], list[int]] = {}
    for side, sample in enumerate((first, second)):
        for sequence in sample:
            counts.setdefault(tuple(sequence), [0, 0])[side] += 1
    cells: list[tuple[int, int]] = []
    for length in range(max(map(len, counts), default=0), -1, -1):
        shorter: dict[tuple[Hashable, ...], list[int]] = {}
        for key, (a, b) in counts.items():
            if a + b >= least:
                cells.append((a, b))
            else:
                cell = shorter.setdefault(key[: max(length - 1, 0)], [0, 0])
                cell[0] += a
                cell[1] += b
        counts = shorter
    if counts and cells:  # what is left over is itself rare: the smallest cell takes it
        ((a, b),) = counts.values()
        smallest = min(range(len(cells)), key=lambda i: sum(cells[i]))
        cells[smallest] = (cells[smallest][0] + a, cells[smallest][1] + b)
    return cells or [(a, b) for a, b in counts.values()]


def homogeneity(
    first: Sequence[Sequence[Hashable]], second: Sequence[Sequence[Hashable]]
) -> ChiSquare:
    """Test that two samples of sequences have one joint distribution (a 2 x cells table)."""
    share = min(len(first), len(second)) / (len(first) + len(second))
    cells = pool_by_prefix(first, second, MIN_EXPECTED / share)
    total, mine = len(first) + len(second), len(first)
    statistic = 0.0
    for a, b in cells:
        for seen, size in ((a, mine), (b, total - mine)):
            expected = (a + b) * size / total
            statistic += (seen - expected) ** 2 / expected
    degrees = len(cells) - 1
    return ChiSquare(statistic, degrees, upper_tail(statistic, degrees) if degrees else 1.0)

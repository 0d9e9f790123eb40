"""Chi-square tests: counts against known probabilities, and two samples against each other."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch

MIN_EXPECTED = 5.0  # the usual rule for the chi-square approximation to hold in a cell


@dataclass(frozen=True, slots=True)
class ChiSquare:
    """A statistic, its degrees of freedom, and the chance of a larger one without a difference."""

    statistic: float
    degrees: int
    p_value: float


def upper_tail(statistic: float, degrees: int) -> float:
    """P(X > statistic) for X chi-square distributed: Q(degrees/2, statistic/2), to 8 digits.

    Q is the upper regularised incomplete gamma function (Abramowitz & Stegun 6.5.3).
    """
    shape, x = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(shape, x))


def goodness_of_fit(counts: Sequence[int], probabilities: Sequence[float]) -> ChiSquare:
    """Test of counts against known probabilities; cells expected below 5 are pooled.

    A count where the probability is 0 has p = 0, whatever else was counted. One cell alone, for
    want of observations or of outcomes, has p = 1.
    """
    total = sum(counts)
    cells = [(n, total * chance) for n, chance in zip(counts, probabilities, strict=True)]
    if any(n and not expected for n, expected in cells):
        return ChiSquare(math.inf, len(cells) - 1, 0.0)
    kept = [cell for cell in cells if cell[1] >= MIN_EXPECTED]
    rare = [cell for cell in cells if 0 < cell[1] < MIN_EXPECTED]
    if rare:
        pool = sum(n for n, _ in rare), sum(expected for _, expected in rare)
        if pool[1] < MIN_EXPECTED and kept:  # the pool itself is rare: the last cell takes it
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

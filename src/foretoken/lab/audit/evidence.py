"""The evidence against losslessness, draw by draw: an average of e-values, valid at any time.

An e-value is a product of factors, each with mean 1 (or less) if the subject is lossless, like the
gains of fair bets. Therefore the product *ever* exceeds 1/alpha with probability at most alpha
(Ville's inequality). An average of e-values is an e-value, too. The average here is over:

- for each bug of the gallery, the likelihood ratio of the bug to the target, over all sources;
- for each source, the ratio of a Dirichlet mixture of all distributions, for unknown bugs;
- bets that more drafts are accepted than any lossless rule could accept.

If a source allows for a distance `delta`, likelihoods are compared with the largest likelihood of
any distribution within that distance. This is at least the likelihood of the true distribution, so
that the bound on e holds (universal inference, Wasserman et al. 2020).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from foretoken.lab.laws.findings import g_test, upper_tail

ALPHA = 1e-3
CONFIDENCE = 0.99  # of all bounds
UNKNOWN, TOO_MUCH = "unknown", "accepts_too_much"
WEIGHTS = {"bugs": 0.4, UNKNOWN: 0.4, TOO_MUCH: 0.2}  # in the average
# Pseudo-counts of the Dirichlet mixtures. Few pseudo-counts detect large differences quickly; many
# detect small differences that few would miss.
CONCENTRATIONS = (8.0, 300.0, 10_000.0)
STAKES = (0.05, 0.1, 0.2, 0.4, 0.8)  # of the bets on acceptance
TINY = 1e-30  # used as the probability of impossible outcomes
BUG_WEIGHT = 0.98  # in a mixture with the target, since a bug may act only in some rounds
NAMING_SHARE = 0.99  # share of the evidence that a bug needs to be named


class PlotText(NamedTuple):
    """The texts in a plot of outcomes."""

    axis: str = "number of the outcome"  # what the names of outcomes mean
    about: str = ""  # what an outcome is, and where the target's share of it comes from
    names: Sequence[str] = ()  # names of the outcomes in order; (): the indices of outcomes


class Source(NamedTuple):
    """A kind of outcome that a subject gives, and its distribution if the subject is lossless.

    An outcome is counted in a cell, for example the rank of a token in a sixteenth of [0, 1).
    """

    name: str
    null: Any  # P(cell) of a lossless subject, [cells]
    bugs: Mapping[str, Any]  # P(cell) under each bug, or `null` if `Evidence.add` gets its ratios
    num_drafts: int = 0  # number of drafts of a round; 0: acceptance is unknown
    # Mean number of drafts per round that the best lossless rule accepts.
    most_accepted: float = 0.0
    usual_accepted: float = 0.0  # mean number that `usual_rule` accepts; 0: as the best rule
    cluster: int = 1  # number of outcomes that may depend on each other, such as tokens of one text
    delta: float = 0.0  # total variation from `null` that other arithmetic may cause without a bug
    usual_rule: str = "standard"
    closed: bool = False  # whether the last cell is for impossible outcomes, even with `delta`
    groups: int = 1  # number of equal groups of consecutive cells; `null` is then P(cell | group)
    plot: PlotText = PlotText()


@dataclass
class Tally:
    """The outcomes drawn from one source, counted by cell."""

    source: Source
    counts: Any
    draws: int = 0
    accepted: int = 0  # number of drafts accepted in all draws
    best: float = 0.0  # mean number of drafts that the best lossless rule accepts in as many draws

    @property
    def distance(self) -> float:
        """Total variation between the shares of the drawn outcomes and `null`."""
        if self.draws == 0:
            return 1.0
        return float(np.abs(self.counts - self.expected).sum() / 2 / self.draws)

    @property
    def expected(self) -> Any:
        """The expected counts of a lossless subject, given the number of draws in each group."""
        grouped = self.counts.reshape(self.source.groups, -1)
        null = self.source.null.reshape(grouped.shape)
        return (grouped.sum(axis=1, keepdims=True) * null).ravel()

    @property
    def half_widths(self) -> Any:
        """Half-widths of the intervals around expected shares of outcomes, [cells].

        A lossless subject's share is in its interval with probability `CONFIDENCE` (normal
        approximation).
        """
        grouped = self.counts.reshape(self.source.groups, -1).sum(axis=1, keepdims=True)
        null = self.source.null.reshape(self.source.groups, -1)
        spread = np.sqrt(grouped * null * (1 - null)).ravel() / max(self.draws, 1)
        return NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * spread + self.source.delta

    def distance_bound(self, num_sources: int) -> float:
        """Upper bound of the true total variation, for a number of draws that was fixed beforehand.

        With probability `CONFIDENCE` the bounds of `num_sources` sources hold together. The mean of
        `distance` is not below the true value, since `distance` is convex in the counts. `distance`
        is e below this mean with probability <= exp(-2 n e^2) for n independent draws (McDiarmid).
        """
        if self.draws == 0:
            return 1.0
        independent = self.draws / self.source.cluster
        slack = math.sqrt(math.log(num_sources / (1 - CONFIDENCE)) / (2 * independent))
        return min(1.0, self.distance + slack)

    @property
    def p_value(self) -> float:
        """p-value of the G-test, for a number of draws that was fixed beforehand.

        The statistics of groups are added.
        """
        shape = self.source.groups, -1
        rows = zip(self.counts.reshape(shape), self.source.null.reshape(shape), strict=True)
        tests = [g_test(counts.tolist(), null.tolist()) for counts, null in rows]
        degrees = sum(max(test.degrees, 0) for test in tests)
        return upper_tail(sum(t.statistic for t in tests), degrees) if degrees else 1.0

    @property
    def allowance(self) -> float:
        """The largest log-likelihood ratio to `null` of the distributions within `delta` of `null`.

        The best distribution is higher than `null` where share / null is above some level, and
        lower where that ratio is below another level: there share / probability equals the level.
        Each change sums to `delta`. In a `closed` source the last cell does not become likelier.
        """
        delta, null = self.source.delta, np.maximum(self.source.null, TINY)
        if delta == 0 or self.draws == 0:
            return 0.0
        share = self.counts / self.draws
        if self.source.closed and share[-1] > null[-1]:
            share[:-1] *= (1 - null[-1]) / max(1 - share[-1], TINY)
            share[-1] = null[-1]
        if np.abs(share - null).sum() / 2 <= delta:
            best = share
        else:
            ratio = share / null
            high = _level(lambda c: np.maximum(share / c - null, 0).sum(), 1e-9, ratio.max(), delta)
            low = _level(lambda c: -np.maximum(null - share / c, 0).sum(), 1e-9, 1 / TINY, -delta)
            best = np.where(ratio > high, share / high, null)
            best = np.where(ratio < low, share / low, best)
        seen = self.counts > 0
        return float((self.counts * np.log(best / null, where=seen, out=np.zeros_like(null))).sum())

    @property
    def acceptance(self) -> tuple[float, float, float]:
        """Accepted drafts per draw, half-width of the confidence interval, best rule's mean.

        The interval is Hoeffding's (Azuma's for dependent draws).
        """
        draws = max(self.draws, 1)
        half_width = math.sqrt(math.log(2 / (1 - CONFIDENCE)) / (2 * draws))
        return self.accepted / draws, self.source.num_drafts * half_width, self.best / draws

    @property
    def usual(self) -> float:
        """Mean number of drafts per draw that the source's `usual_rule` accepts."""
        return self.source.usual_accepted or self.best / max(self.draws, 1)


@dataclass
class Evidence:
    """The e-values of one subject; `add` consumes draws in order."""

    sources: Sequence[Source]
    alpha: float = ALPHA
    draws: int = 0  # number of draws from all sources
    refuted_at: int | None = None  # number of draws when the average first exceeded 1/alpha
    highest: float = 0.0  # log of the highest average
    path: list[tuple[int, float]] = field(default_factory=list)  # (draws, log10 of the average)

    def __post_init__(self) -> None:
        self.tallies = [Tally(source, np.zeros(len(source.null))) for source in self.sources]
        self._bugs = list(dict.fromkeys(bug for source in self.sources for bug in source.bugs))
        self._ratios = [self._ratios_of(source) for source in self.sources]
        # The (name, weight) of each e-value, in the order of `_logs`.
        weighted = [(bug, WEIGHTS["bugs"] / len(self._bugs)) for bug in self._bugs]
        num_mixtures = len(self.sources) * len(CONCENTRATIONS)
        weighted += [(UNKNOWN, WEIGHTS[UNKNOWN] / max(num_mixtures, 1))] * num_mixtures
        weighted += [(TOO_MUCH, WEIGHTS[TOO_MUCH] / len(STAKES))] * len(STAKES)
        self._names = [name for name, _ in weighted]
        weights = np.array([weight for _, weight in weighted])
        self._log_weights = np.log(weights / weights.sum())
        self._logs = np.zeros(len(weighted))

    def _ratios_of(self, source: Source) -> Any:
        """Log-likelihood ratios of each bug to `null`, [bugs, cells]."""
        null = np.maximum(source.null, TINY)
        rows = [
            np.log(BUG_WEIGHT * np.maximum(source.bugs.get(bug, null), 0) / null + 1 - BUG_WEIGHT)
            for bug in self._bugs
        ]
        return np.array(rows).reshape(len(self._bugs), len(null))

    def add(
        self, number: int, cells: Any, accepted: Any = None, optimum: Any = None, ratios: Any = None
    ) -> None:
        """Consume outcomes of the source at index `number`.

        If several sources read one text, only the product of all factors of the text has mean 1:
        the average is compared with 1/alpha after the last source.

        Args:
            cells: the cell of each outcome.
            accepted: number of accepted drafts in each outcome's first round.
            optimum: the mean number that the best lossless rule accepts in that round; None: the
                source's `most_accepted`.
            ratios: bug -> likelihood ratio of each outcome, given all earlier outcomes.
        """
        tally, source = self.tallies[number], self.sources[number]
        steps = np.zeros((len(self._logs), len(cells)))
        steps[: len(self._bugs)] = self._ratios[number][:, cells]
        for bug, ratio in (ratios or {}).items():
            steps[self._bugs.index(bug)] += np.log(BUG_WEIGHT * ratio + 1 - BUG_WEIGHT)
        start = len(self._bugs) + number * len(CONCENTRATIONS)
        steps[start : start + len(CONCENTRATIONS)] = self._mixtures(tally, cells)
        if accepted is not None and source.num_drafts:
            optimum = np.full(len(cells), source.most_accepted) if optimum is None else optimum
            gain = (accepted - optimum) / source.num_drafts
            tally.best += float(optimum.sum())
            steps[-len(STAKES) :] = np.log1p(np.array(STAKES)[:, None] * gain)
            tally.accepted += int(accepted.sum())
        # Columns: before these outcomes, then after each outcome; `after` is the number of draws.
        logs = np.column_stack([self._logs, steps]).cumsum(axis=1)
        self._logs, after = logs[:, -1], np.arange(len(cells) + 1) + self.draws
        tally.counts += np.bincount(cells, minlength=len(source.null))
        tally.draws += len(cells)
        self.draws += len(cells)
        if any(source.cluster > 1 for source in self.sources):
            if number < len(self.sources) - 1:
                return
            logs, after = logs[:, -1:], after[-1:]
        if any(source.delta for source in self.sources):
            logs, after = self._logs_within_delta()[:, None], after[-1:]
        total = _log_sum(logs + self._log_weights[:, None])
        above = np.flatnonzero(total >= -math.log(self.alpha))
        if self.refuted_at is None and len(above):
            self.refuted_at = int(after[above[0]])
        self.highest = max(self.highest, float(total.max()))
        self.path.append((self.draws, float(total[-1]) / math.log(10)))

    def _mixtures(self, tally: Tally, cells: Any) -> Any:
        """Log-likelihood ratios of the Dirichlet mixtures to `null`, given earlier outcomes."""
        null, index = np.maximum(tally.source.null, TINY), np.arange(len(cells))
        one_hot = np.zeros((len(cells) + 1, len(null)))
        one_hot[index + 1, cells] = 1
        earlier = tally.counts + one_hot.cumsum(axis=0)[:-1]  # counts before each outcome
        groups, size = tally.source.groups, len(null) // tally.source.groups
        in_group = earlier.reshape(len(cells), groups, size).sum(axis=2)[index, cells // size]
        prior = np.array(CONCENTRATIONS)[:, None]
        chance = (prior * null[cells] + earlier[index, cells]) / (prior + in_group)
        return np.log(chance / null[cells])

    def _logs_within_delta(self) -> Any:
        """Logs of all e-values, relative to the best distribution within `delta` of `null`."""
        gains = [tally.allowance for tally in self.tallies]
        logs = self._logs.copy()
        logs[: len(self._bugs)] -= sum(gains)
        start = len(self._bugs)
        for gain in gains:
            logs[start : start + len(CONCENTRATIONS)] -= gain
            start += len(CONCENTRATIONS)
        return logs

    @property
    def shares(self) -> dict[str, float]:
        """The share of each bug in the average, without `TOO_MUCH` if another summand exceeds 1."""
        logs: dict[str, float] = {}
        for name, log in zip(self._names, self._logs + self._log_weights, strict=True):
            logs[name] = np.logaddexp(logs.get(name, -math.inf), log)
        if max(value for name, value in logs.items() if name != TOO_MUCH) > 0:
            logs.pop(TOO_MUCH)
        top = max(logs.values())
        chances = {name: math.exp(log - top) for name, log in logs.items()}
        total = sum(chances.values())
        return {name: chance / total for name, chance in chances.items()}

    @property
    def name(self) -> str | None:
        """The bug with a share of at least `NAMING_SHARE` in the average, or None.

        An unknown bug is `TOO_MUCH` if a bet on acceptance outweighs every mixture, else `UNKNOWN`.
        """
        best, share = max(self.shares.items(), key=lambda item: item[1])
        if share < NAMING_SHARE:
            return None
        logs = zip(self._logs + self._log_weights, self._names, strict=True)
        _, strongest = max((log, name) for log, name in logs if name in (UNKNOWN, TOO_MUCH))
        return strongest if best == UNKNOWN else best

    @property
    def log10_e(self) -> float:
        return self.highest / math.log(10)

    @property
    def accepts_less(self) -> Tally | None:
        """The first tally with significantly fewer accepted drafts than `usual`, or None."""
        for tally in self.tallies:
            mean, half_width, _ = tally.acceptance
            if tally.source.num_drafts and mean + half_width < tally.usual:
                return tally
        return None


def _log_sum(logs: Any) -> Any:
    top = logs.max(axis=0)
    return top + np.log(np.exp(logs - top).sum(axis=0))


def _level(falling: Callable[[float], float], low: float, high: float, goal: float) -> float:
    """The argument in [low, high] at which a non-increasing function is `goal`, by bisection."""
    for _ in range(100):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if falling(middle) > goal else (low, middle)
    return high

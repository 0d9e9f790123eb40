"""The evidence against losslessness, draw by draw: an average of e-values, valid at any time.

An e-value is a product of betting factors, each with mean 1 if the subject is lossless. Therefore
the product *ever* exceeds 1/alpha with probability at most alpha (Ville's inequality). An average
of e-values is an e-value, too. The average here is over:

- for each bug of the gallery, the likelihood ratio of its distribution to the target's, over all
  toys;
- for each toy, a Dirichlet mixture of all distributions, for unknown bugs;
- bets that more drafts are accepted than any lossless rule could accept.

If a model allows for a distance `delta`, likelihoods are compared with the largest likelihood of
any distribution within that distance. This is at least the likelihood of the true distribution, so
that the bound on e holds (universal inference, Wasserman et al. 2020). Such evidence is read once
per call of `add`.

The verdict names the bug with the largest share of the evidence. For each source there are also a
bound on total variation and a G-test.
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
WEIGHTS = {"bugs": 0.4, UNKNOWN: 0.4, TOO_MUCH: 0.2}
# Pseudo-counts of the Dirichlet mixtures. Few pseudo-counts detect large differences quickly; many
# detect small differences that few would miss.
CONCENTRATIONS = (8.0, 300.0, 10_000.0)
STAKES = (0.05, 0.1, 0.2, 0.4, 0.8)  # of the bets on acceptance
LEAST = 1e-30  # used as the probability of impossible outcomes
# Weight of a bug's own distribution; the rest is the target's, since a bug may act only in part.
OWN = 0.98
SURE = 0.99  # share of the evidence that a bug needs to be named


class PlotText(NamedTuple):
    """The texts in a plot of a source's outcomes.

    Attributes:
        axis: the meaning of the outcomes' names.
        about: sentences that say what an outcome is, and where the target's share comes from.
        names: names of the outcomes in order; (): their numbers.
    """

    axis: str = "number of the outcome"
    about: str = ""
    names: Sequence[str] = ()


class Model(NamedTuple):
    """What is known about one source of outcomes before the draws.

    Attributes:
        null: P(outcome) of a lossless subject, [cells].
        bugs: P(outcome) under each bug; `null` for bugs whose likelihood ratios come with outcomes.
        rounds: number of drafts of a round; 0: acceptance is unknown.
        most_accepted: mean number of drafts of a round that the best lossless rule accepts.
        usual_accepted: mean number that `usual_rule` accepts; 0: the number that comes with
            each outcome.
        together: number of outcomes that may depend on each other, such as tokens of one text.
        delta: total variation from `null` that may be due only to arithmetic.
        closed: whether the last cell is for impossible outcomes; `delta` then does not add to its
            probability.
        groups: number of groups, each of equally many consecutive cells. The test is about an
            outcome's cell given its group: `null` is P(cell | group), and the frequencies of groups
            do not matter.
        shown: texts for plots.
    """

    name: str
    null: Any
    bugs: Mapping[str, Any]
    rounds: int = 0
    most_accepted: float = 0.0
    usual_accepted: float = 0.0
    together: int = 1
    delta: float = 0.0
    usual_rule: str = "standard"
    closed: bool = False
    groups: int = 1
    shown: PlotText = PlotText()


@dataclass
class Source:
    """The outcomes drawn from one model, as counts; for example the tokens of an engine.

    Attributes:
        counts: number of draws by cell.
        accepted: number of drafts accepted in all draws.
        best: mean number of drafts that the best lossless rule accepts in as many draws.
    """

    model: Model
    counts: Any
    draws: int = 0
    accepted: int = 0
    best: float = 0.0

    @property
    def distance(self) -> float:
        """Total variation between the drawn outcomes and `null`."""
        if self.draws == 0:
            return 1.0
        return float(np.abs(self.counts - self.expected).sum() / 2 / self.draws)

    @property
    def expected(self) -> Any:
        """The expected counts of a lossless subject, for the observed number of draws per group."""
        grouped = self.counts.reshape(self.model.groups, -1)
        return (grouped.sum(axis=1, keepdims=True) * self.model.null.reshape(grouped.shape)).ravel()

    @property
    def half_widths(self) -> Any:
        """Half-widths of intervals around the expected shares of outcomes.

        Each interval contains the share that a lossless subject shows with probability
        `CONFIDENCE` (normal approximation).
        """
        grouped = self.counts.reshape(self.model.groups, -1).sum(axis=1, keepdims=True)
        null = self.model.null.reshape(self.model.groups, -1)
        spread = np.sqrt(grouped * null * (1 - null)).ravel() / max(self.draws, 1)
        return NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * spread + self.model.delta

    def distance_bound(self, sources: int) -> float:
        """Upper bound of the true total variation.

        The bounds of all `sources` sources hold together with `CONFIDENCE`. The mean of `distance`
        is not below the true value, since `distance` is convex in the counts. `distance` falls
        short of its mean by e with probability at most exp(-2 n e^2) (McDiarmid), where n is the
        number of independent draws. The bound assumes that the number of draws was fixed
        beforehand.
        """
        if self.draws == 0:
            return 1.0
        independent = self.draws / self.model.together
        slack = math.sqrt(math.log(sources / (1 - CONFIDENCE)) / (2 * independent))
        return min(1.0, self.distance + slack)

    @property
    def p_value(self) -> float:
        """p-value of the G-test; with groups, of the sum of the groups' statistics.

        It assumes that the number of draws was fixed beforehand.
        """
        shape = self.model.groups, -1
        rows = zip(self.counts.reshape(shape), self.model.null.reshape(shape), strict=True)
        tests = [g_test(counts.tolist(), null.tolist()) for counts, null in rows]
        degrees = sum(max(test.degrees, 0) for test in tests)
        return upper_tail(sum(t.statistic for t in tests), degrees) if degrees else 1.0

    @property
    def allowance(self) -> float:
        """The largest gain in log-likelihood over `null` of any distribution within `delta`.

        The best distribution differs from `null` in two sets of cells. In cells with many draws for
        their probability, the probability is raised until their ratios of draws to probability are
        equal; in cells with few draws it is lowered in the same way. Each set changes by `delta` in
        total. If the model is `closed`, the probability of the last cell is not raised.
        """
        delta, null = self.model.delta, np.maximum(self.model.null, LEAST)
        if delta == 0 or self.draws == 0:
            return 0.0
        share = self.counts / self.draws
        if self.model.closed and share[-1] > null[-1]:
            share[:-1] *= (1 - null[-1]) / max(1 - share[-1], LEAST)
            share[-1] = null[-1]
        if np.abs(share - null).sum() / 2 <= delta:
            best = share
        else:
            ratio = share / null
            high = _level(lambda c: np.maximum(share / c - null, 0).sum(), 1e-9, ratio.max(), delta)
            low = _level(lambda c: -np.maximum(null - share / c, 0).sum(), 1e-9, 1 / LEAST, -delta)
            best = np.where(ratio > high, share / high, null)
            best = np.where(ratio < low, share / low, best)
        seen = self.counts > 0
        return float((self.counts * np.log(best / null, where=seen, out=np.zeros_like(null))).sum())

    @property
    def acceptance(self) -> tuple[float, float, float]:
        """Accepted drafts per draw, its confidence half-width (Hoeffding, Azuma), the optimum."""
        draws = max(self.draws, 1)
        reach = math.sqrt(math.log(2 / (1 - CONFIDENCE)) / (2 * draws))
        return self.accepted / draws, self.model.rounds * reach, self.best / draws

    @property
    def usual(self) -> float:
        """Drafts per draw that the model's `usual_rule` accepts."""
        return self.model.usual_accepted or self.best / max(self.draws, 1)


@dataclass
class Evidence:
    """The e-values of one subject; `add` consumes draws in order.

    Attributes:
        draws: number of draws so far.
        refuted_at: number of draws after which the average first exceeded 1/alpha, or None.
        highest: log of the highest average so far.
        path: (number of draws, log10 of the average), for plots.
    """

    models: Sequence[Model]
    alpha: float = ALPHA
    draws: int = 0
    refuted_at: int | None = None
    highest: float = 0.0
    path: list[tuple[int, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sources = [Source(model, np.zeros(len(model.null))) for model in self.models]
        self._bugs = list(dict.fromkeys(bug for model in self.models for bug in model.bugs))
        self._ratios = [self._ratios_of(model) for model in self.models]
        groups = [(bug, WEIGHTS["bugs"] / len(self._bugs)) for bug in self._bugs]
        num = len(self.models) * len(CONCENTRATIONS)
        groups += [(UNKNOWN, WEIGHTS[UNKNOWN] / max(num, 1))] * num
        groups += [(TOO_MUCH, WEIGHTS[TOO_MUCH] / len(STAKES))] * len(STAKES)
        self._names = [name for name, _ in groups]
        weights = np.array([weight for _, weight in groups])
        self._prior = np.log(weights / weights.sum())
        self._logs = np.zeros(len(groups))

    def _ratios_of(self, model: Model) -> Any:
        """Log-likelihood ratios of each bug to `null`, [bugs, cells]."""
        null = np.maximum(model.null, LEAST)
        rows = [
            np.log(OWN * np.maximum(model.bugs.get(bug, null), 0) / null + 1 - OWN)
            for bug in self._bugs
        ]
        return np.array(rows).reshape(len(self._bugs), len(null))

    def add(
        self,
        number: int,
        cells: Any,
        accepted: Any = None,
        chance: Any = None,
        ratios: Mapping[str, Any] | None = None,
    ) -> None:
        """Consume outcomes of model `number`.

        If tokens of one text are outcomes of several models, their betting factors are not
        independent: the factors of a whole wave of texts have mean 1, but not those of single
        outcomes. The evidence of such models is therefore read only after the last model of a wave.

        Args:
            cells: the outcomes' cells.
            accepted: number of drafts accepted in each outcome's first round.
            chance: for each outcome, the mean number that the best lossless rule accepts in that
                round; None: the model's `most_accepted`.
            ratios: for some bugs, the likelihood ratio of each outcome, given all earlier outcomes.
        """
        source, model = self.sources[number], self.models[number]
        steps = np.zeros((len(self._logs), len(cells)))
        steps[: len(self._bugs)] = self._ratios[number][:, cells]
        for bug, ratio in (ratios or {}).items():
            steps[self._bugs.index(bug)] += np.log(OWN * ratio + 1 - OWN)
        first = len(self._bugs) + number * len(CONCENTRATIONS)
        steps[first : first + len(CONCENTRATIONS)] = self._mixtures(source, cells)
        if accepted is not None and model.rounds:
            optimum = np.full(len(cells), model.most_accepted) if chance is None else chance
            gain = (accepted - optimum) / model.rounds
            source.best += float(optimum.sum())
            steps[-len(STAKES) :] = np.log1p(np.array(STAKES)[:, None] * gain)
            source.accepted += int(accepted.sum())
        # Columns: before these outcomes, and after each of them; `after` counts the draws.
        logs = np.column_stack([self._logs, steps]).cumsum(axis=1)
        self._logs, after = logs[:, -1], np.arange(len(cells) + 1) + self.draws
        source.counts += np.bincount(cells, minlength=len(model.null))
        source.draws += len(cells)
        self.draws += len(cells)
        if any(model.together > 1 for model in self.models):
            if number < len(self.models) - 1:
                return
            logs, after = logs[:, -1:], after[-1:]
        if any(model.delta for model in self.models):
            logs, after = self._logs_within_delta()[:, None], after[-1:]
        total = _log_sum(logs + self._prior[:, None])
        above = np.flatnonzero(total >= -math.log(self.alpha))
        if self.refuted_at is None and len(above):
            self.refuted_at = int(after[above[0]])
        self.highest = max(self.highest, float(total.max()))
        self.path.append((self.draws, float(total[-1]) / math.log(10)))

    def _mixtures(self, source: Source, cells: Any) -> Any:
        """Log-likelihood ratios of each outcome: the Dirichlet mixtures to `null`.

        A mixture's probability of an outcome depends on the earlier outcomes.
        """
        null, index = np.maximum(source.model.null, LEAST), np.arange(len(cells))
        one_hot = np.zeros((len(cells) + 1, len(null)))
        one_hot[index + 1, cells] = 1
        earlier = source.counts + one_hot.cumsum(axis=0)[:-1]  # counts before each outcome
        groups, size = source.model.groups, len(null) // source.model.groups
        in_group = earlier.reshape(len(cells), groups, size).sum(axis=2)[index, cells // size]
        prior = np.array(CONCENTRATIONS)[:, None]
        chance = (prior * null[cells] + earlier[index, cells]) / (prior + in_group)
        return np.log(chance / null[cells])

    def _logs_within_delta(self) -> Any:
        """Logs of all e-values, with the best distribution within `delta` in place of `null`."""
        gains = [source.allowance for source in self.sources]
        logs = self._logs.copy()
        logs[: len(self._bugs)] -= sum(gains)
        first = len(self._bugs)
        for gain in gains:
            logs[first : first + len(CONCENTRATIONS)] -= gain
            first += len(CONCENTRATIONS)
        return logs

    @property
    def shares(self) -> dict[str, float]:
        """The share of each bug in the evidence.

        Bets on acceptance count only if no likelihood ratio speaks for a bug.
        """
        logs: dict[str, float] = {}
        for name, log in zip(self._names, self._logs + self._prior, strict=True):
            logs[name] = np.logaddexp(logs.get(name, -math.inf), log)
        if max(value for name, value in logs.items() if name != TOO_MUCH) > 0:
            logs.pop(TOO_MUCH)
        top = max(logs.values())
        chances = {name: math.exp(log - top) for name, log in logs.items()}
        total = sum(chances.values())
        return {name: chance / total for name, chance in chances.items()}

    @property
    def name(self) -> str | None:
        """The bug (or `UNKNOWN`) with a share of at least `SURE` in the evidence, or None.

        An unknown bug is called `TOO_MUCH` if the bets on acceptance are stronger evidence.
        """
        best, share = max(self.shares.items(), key=lambda item: item[1])
        if share < SURE:
            return None
        logs = zip(self._logs + self._prior, self._names, strict=True)
        _, strongest = max((log, name) for log, name in logs if name in (UNKNOWN, TOO_MUCH))
        return strongest if best == UNKNOWN else best

    @property
    def log10_e(self) -> float:
        """log10 of the highest average so far."""
        return self.highest / math.log(10)

    @property
    def accepts_less(self) -> Source | None:
        """The first source that accepts fewer drafts than usual, with `CONFIDENCE`; or None."""
        for source in self.sources:
            mean, reach, _ = source.acceptance
            if source.model.rounds and mean + reach < source.usual:
                return source
        return None


def _log_sum(logs: Any) -> Any:
    top = logs.max(axis=0)
    return top + np.log(np.exp(logs - top).sum(axis=0))


def _level(falling: Callable[[float], float], low: float, high: float, goal: float) -> float:
    """The argument between `low` and `high` at which a non-increasing function reaches `goal`.

    Found by bisection of logarithms.
    """
    for _ in range(100):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if falling(middle) > goal else (low, middle)
    return high

"""How many drafts are worth their cost: acceptance, step times, and the choice of K. No torch.

`Acceptance` estimates how likely each draft is to be accepted, `StepCosts` how long a step takes.
`by_gain` or `by_width` gives each request of the next step the number of drafts that maximises the
expected tokens per second. Only completed rounds are used: the output would be biased if a choice
depended on a token of the round that it is for, even if only through the batch's total number of
drafts (`lab/laws/mutants.py` has mutants with this bug).

Shape suffixes: B requests that decode, K drafts, S slots, R rounds, J measured batch sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import log
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]

ADAPTS = -1
"""Stands for a number of drafts that is still to be chosen."""

# Priors of estimates. Weights are numbers of rounds.
_FIRST_CHANCE = 0.8  # assumed acceptance of the first draft; high, so that drafts are tried
_FIRST_ROUNDS = 4.0  # weight of that assumption
_PRECEDING_ROUNDS = 2.0  # weight of the preceding draft's estimate in the next draft's estimate
_SHARED_ROUNDS = 8.0  # weight of the estimate over all requests in the estimate of one request
# Factors by which earlier counts decay.
_SHARED_DECAY = 1 - 1 / 256  # counts over all requests, per round of any request
_OWN_DECAY = 1 - 1 / 48  # counts of a request, per round of this request
_AGING = 1 - 1 / 48  # all counts, per choice of K: without drafts hardly any rounds renew them


class Acceptance:
    """Estimates how likely drafts are accepted, by request and draft index.

    The estimate for a request has the estimate over all requests as its prior, and uses the
    request's rounds, recent rounds most. Drafts asked for but not made count as rejected.
    """

    def __init__(self, num_slots: int, max_drafts: int) -> None:
        self._index_K = np.arange(max_drafts)
        self._tried_SK = np.zeros((num_slots, max_drafts))
        self._accepted_SK = np.zeros((num_slots, max_drafts))
        # Over all slots: drafts asked of the drafter, drafts made, tried, accepted. A draft asked
        # for counts as tried if all drafts before it were accepted.
        self._shared_4K = np.zeros((4, max_drafts))

    def observe(self, rounds: Iterable[tuple[int, int, int, int]]) -> None:
        """Count completed rounds: (slot, drafts asked for, drafts made, drafts accepted)."""
        columns = np.array([*rounds], dtype=np.int64).reshape(-1, 4).T
        slot_R, asked_R, made_R, accepted_R = columns
        if not len(slot_R):
            return
        index_K = self._index_K
        asked_RK = index_K < asked_R[:, None]
        tried_RK = asked_RK & (index_K <= accepted_R[:, None])
        accepted_RK = index_K < accepted_R[:, None]
        made_RK = index_K < made_R[:, None]
        counts_4K = [x.sum(axis=0) for x in (asked_RK, made_RK, tried_RK, accepted_RK)]
        # Decay the counts of each draft index by how often this draft was asked for, or tried.
        self._shared_4K[:2] *= _SHARED_DECAY ** counts_4K[0]
        self._shared_4K[2:] *= _SHARED_DECAY ** counts_4K[2]
        self._shared_4K += counts_4K
        slots, num_rounds = np.unique(slot_R, return_counts=True)
        for count_SK, new_RK in ((self._tried_SK, tried_RK), (self._accepted_SK, accepted_RK)):
            count_SK[slots] *= _OWN_DECAY ** num_rounds[:, None]
            np.add.at(count_SK, slot_R, new_RK)

    def age(self) -> None:
        """Reduce the weight of all earlier rounds."""
        for counts in (self._tried_SK, self._accepted_SK, self._shared_4K):
            counts *= _AGING

    def shared(self) -> Array:
        """The probability [K], over all requests, that a draft is accepted if all before it are."""
        _, _, tried_K, accepted_K = self._shared_4K.tolist()
        chance, weight, chances = _FIRST_CHANCE, _FIRST_ROUNDS, []
        for tried, accepted in zip(tried_K, accepted_K, strict=True):
            chance, weight = (accepted + weight * chance) / (tried + weight), _PRECEDING_ROUNDS
            chances.append(chance)
        return np.array(chances)

    def offered(self) -> Array:
        """The probability [K] that the drafter makes a draft that was asked for."""
        asked_K, made_K, _, _ = self._shared_4K
        return (made_K + 1) / (asked_K + 1)

    def joint(self, slots: Sequence[int]) -> Array:
        """The probability [B, K] that a draft and all drafts before it are accepted."""
        tried_BK, accepted_BK = self._tried_SK[slots], self._accepted_SK[slots]
        prior_K = _SHARED_ROUNDS * self.shared()
        conditional_BK = (accepted_BK + prior_K) / (tried_BK + _SHARED_ROUNDS)
        return np.cumprod(conditional_BK, axis=1)

    def release(self, slot: int) -> None:
        self._tried_SK[slot] = self._accepted_SK[slot] = 0

    def held_slots(self) -> list[int]:
        held: list[int] = np.flatnonzero(self._tried_SK.any(axis=1)).tolist()
        return held


@dataclass(frozen=True)
class StepTable:
    """Measured seconds of decoding steps. The suffix K1 stands for 0 to K drafts per request.

    batches: numbers of requests in the measured steps, [J], rising.
    rest_JK1: seconds of a step without its drafting.
    draft_JK1: seconds of the drafting.
    context_K1: seconds for each token of the requests' contexts. The seconds jump where one more
        draft needs another tile of rows.
    missed: seconds for each token that the drafter must compute before it drafts, because the token
        was drawn in a step without drafts.
    """

    batches: Array
    rest_JK1: Array
    draft_JK1: Array
    context_K1: Array
    missed: float = 0.0

    def shown(self) -> str:
        """One line per batch size: milliseconds with 0, 1, .. drafts per request."""
        step_JK1 = 1e3 * (self.rest_JK1 + self.draft_JK1)
        rows = zip(self.batches.tolist(), step_JK1.tolist(), strict=True)
        return "\n".join(f"batch {b}: {' '.join(f'{ms:.2f}' for ms in row)} ms" for b, row in rows)


class Curve(NamedTuple):
    """Seconds of a step at one batch size. K1: by drafts per request; K: by draft index.

    rest_K1: the step without the drafter's passes
    first_K: the drafter's pass for draft i, with one request
    more_K: what each further request adds to this pass
    context_K1: what each token of the requests' contexts adds to the step
    deviation_K1: log (measured / expected seconds), without the slowdown of all steps
    """

    rest_K1: Array
    first_K: Array
    more_K: Array
    context_K1: Array
    deviation_K1: Array

    def seconds(self, per_request: Any, draft: Any, context: int) -> Any:
        """Seconds of a step with `per_request` drafts per request on average and `draft` seconds of
        drafting (two numbers or two arrays). `context`: tokens of all requests together."""
        index_K1 = np.arange(len(self.rest_K1))
        rest = np.interp(per_request, index_K1, self.rest_K1)
        rest = rest + context * np.interp(per_request, index_K1, self.context_K1)
        return (rest + draft) * np.exp(np.interp(per_request, index_K1, self.deviation_K1))

    def drafting(self, live_K: Array) -> Any:
        """Seconds of drafting [...] if `live_K[..., i]` requests are in the pass for draft i."""
        return ((live_K > 0) * self.first_K + np.maximum(live_K - 1, 0) * self.more_K).sum(axis=-1)


class StepCosts:
    """Seconds of a step, from the measurements at start and from the steps since.

    Measured steps deviate from the table in two ways. A slowdown of all steps (the machine is busy,
    contexts are long) changes no choice of K; it is learned quickly. Deviations by number of drafts
    and batch size are learned slowly, within bounds, and decay.
    """

    _QUICK, _SLOW = 0.2, 0.03  # weights of a step: in slowdown and host's time, in a deviation
    _DECAY = 0.995  # of deviations, per step
    _MOST_PER_STEP, _MOST = log(1.25), log(1.2)  # bounds of a step's log error, and of a deviation

    def __init__(self, table: StepTable) -> None:
        self.table = table
        self.log_slowdown = 0.0  # log (measured / expected seconds), of all steps
        self._host: float | None = None  # seconds of the host's work for one request in one step
        self._deviations: dict[int, Array] = {}

    def curve(self, batch: int) -> Curve:
        table = self.table
        rest_K1 = _interpolate(table.batches, table.rest_JK1, batch)
        draft_K1 = _interpolate(table.batches, table.draft_JK1, batch)
        first_K = np.maximum(np.diff(table.draft_JK1[0]) / table.batches[0], 0)
        pass_K = np.maximum(np.diff(draft_K1), 0)
        first_K = np.minimum(first_K, pass_K)
        rest_K1 = rest_K1 + draft_K1[0] + batch * (self._host or 0.0)
        return Curve(
            rest_K1, first_K, (pass_K - first_K) / max(batch - 1, 1),
            table.context_K1, self._deviation(batch),
        )  # fmt: skip

    def learn(self, batch: int, per_request: float, expected: float, measured: float) -> None:
        """Update the slowdown and the deviations from a step with `per_request` drafts per request
        on average: from the step's `measured` seconds and the seconds `expected` by `curve`."""
        deviation_K1 = self._deviation(batch)
        error = log(max(measured, 1e-9) / max(expected, 1e-9)) - self.log_slowdown
        error = min(max(error, -self._MOST_PER_STEP), self._MOST_PER_STEP)
        self.log_slowdown += self._QUICK * error
        deviation_K1 *= self._DECAY
        nearest = round(per_request)
        deviation = deviation_K1[nearest] + self._SLOW * error
        deviation_K1[nearest] = min(max(deviation, -self._MOST), self._MOST)

    def learn_host(self, batch: int, measured: float) -> None:
        """Learn from the seconds `measured` outside the runner in a step of `batch` requests."""
        measured = max(measured, 0.0) / batch
        known = measured if self._host is None else self._host
        max_rise = known + 1e-5  # an outlier counts as about twice the known time
        self._host = known + self._QUICK * min(measured - known, max_rise)

    def _deviation(self, batch: int) -> Array:
        """`Curve.deviation_K1`. Batch sizes with the same number of bits share one array, which
        `learn` changes in place."""
        width = self.table.rest_JK1.shape[1]
        return self._deviations.setdefault(batch.bit_length(), np.zeros(width))


def _interpolate(batches: Array, table_JK1: Array, batch: int) -> Array:
    """The row for a batch size: interpolated; above the largest size, proportional to the size."""
    if batch >= batches[-1]:
        return np.asarray(table_JK1[-1] * (batch / batches[-1]))
    # The smallest measured size is 1, so one measured size is at most `batch`.
    j = int(np.searchsorted(batches, batch, side="right"))
    part = (batch - batches[j - 1]) / (batches[j] - batches[j - 1])
    return np.asarray((1 - part) * table_JK1[j - 1] + part * table_JK1[j])


class Load(NamedTuple):
    """The requests of a step.

    joint_BK: `Acceptance.joint`.
    fixed_B: number of drafts of each request; `ADAPTS` where it is to be chosen.
    offered_K: `Acceptance.offered`.
    context: tokens of all requests together.
    """

    joint_BK: Array
    fixed_B: Array
    offered_K: Array
    context: int


class Choice(NamedTuple):
    """The number of drafts of each request in a step, and the expected result.

    asked_B: number of drafts to ask the drafter for, by request
    tokens: expected tokens of all requests together
    seconds: expected duration of the step
    per_request: drafts that the drafter is expected to make per request, on average
    """

    asked_B: Array
    tokens: float
    seconds: float
    per_request: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def draft_widths(num_drafts: int, *, adapts: bool) -> tuple[int, ...]:
    """Numbers of drafts per request to which captured steps are padded: 0, `num_drafts`, and if K
    `adapts` some between. Without the number 3 a model of 8B parameters lost 4 to 11 % of its speed
    on an H200, because a tile of attention holds 4 rows of each request."""
    between = [k for k in (1, 2, 3, 4, 6, 8, 12, 16, 24) if k < num_drafts] if adapts else []
    return (0, *between, num_drafts) if num_drafts else (0,)


def expect(curve: Curve, load: Load, asked_B: Array, *, in_lockstep: bool = False) -> Choice:
    """The expected result of a step in which the drafter is asked for `asked_B` drafts.

    Args:
        in_lockstep: True for a GPU: every request takes part in as many passes, and has as many
            rows, as the request with the most drafts.
    """
    batch, max_drafts = load.joint_BK.shape
    asked_BK = np.arange(max_drafts) < asked_B[:, None]
    tokens = batch + float((load.joint_BK * asked_BK).sum())
    if in_lockstep:
        per_request = int(asked_B.max(initial=0))
        live_K = np.where(np.arange(max_drafts) < per_request, batch, 0)
    else:
        live_K = asked_BK.sum(axis=0)
        per_request = float((live_K * load.offered_K).sum()) / batch
    drafting = curve.drafting(live_K)
    seconds = float(curve.seconds(per_request, drafting, load.context))
    return Choice(asked_B, tokens, seconds, per_request)


def by_gain(curve: Curve, load: Load) -> Choice:
    """Add drafts one by one, the likeliest first; take the number with the most tokens per second.

    Shape suffixes: A requests that adapt, N their possible drafts (A x K), M = N + 1 numbers of
    drafts that may be added.
    """
    batch, max_drafts = load.joint_BK.shape
    adapts_B = load.fixed_B == ADAPTS
    base_B = np.where(adapts_B, 0, load.fixed_B)
    base_BK = np.arange(max_drafts) < base_B[:, None]
    index_A = np.flatnonzero(adapts_B)
    gain_N = load.joint_BK[index_A].ravel()
    # A draft comes after all earlier drafts of its request, because joint chances never rise and a
    # stable sort keeps the order of ties.
    order_N = np.argsort(-gain_N, kind="stable")
    draft_N = np.tile(np.arange(max_drafts), len(index_A))[order_N]  # draft index
    live_K = base_BK.sum(axis=0)
    opens_pass_N = np.zeros(len(draft_N), dtype=bool)
    opens_pass_N[np.unique(draft_N, return_index=True)[1]] = True
    opens_pass_N &= live_K[draft_N] == 0
    pass_s_N = np.where(opens_pass_N, curve.first_K[draft_N], curve.more_K[draft_N])

    def sums(start: float, added_N: Array) -> Array:
        return start + np.concatenate(([0.0], np.cumsum(added_N)))

    tokens_M = sums(batch + float((load.joint_BK * base_BK).sum()), gain_N[order_N])
    per_request_M = sums(float((live_K * load.offered_K).sum()), load.offered_K[draft_N]) / batch
    drafting_s_M = sums(float(curve.drafting(live_K)), pass_s_N)
    seconds_M = curve.seconds(per_request_M, drafting_s_M, load.context)
    best = int(np.argmax(tokens_M / seconds_M))
    asked_B = base_B.copy()
    asked_B[index_A] = np.bincount(order_N[:best] // max_drafts, minlength=len(index_A))
    expected = (float(x_M[best]) for x_M in (tokens_M, seconds_M, per_request_M))
    return Choice(asked_B, *expected)


def by_width(curve: Curve, load: Load, widths: Sequence[int]) -> Choice:
    """Give all requests that adapt the same number of drafts: that of `widths`, at which steps of a
    GPU are captured, with the most expected tokens per second."""
    choices = (
        expect(curve, load, np.where(load.fixed_B == ADAPTS, width, load.fixed_B), in_lockstep=True)
        for width in widths
    )
    return max(choices, key=lambda choice: choice.rate)

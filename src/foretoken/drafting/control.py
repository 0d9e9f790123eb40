"""How many drafts pay: acceptance from past rounds, costs of steps, and the choice. No torch.

Charter: numbers in, numbers out; no request is known here. `Acceptance` estimates how likely each
draft is to be accepted, `StepCosts` how long a step takes. `by_gain` or `by_width` gives each
request of the next step the number of drafts that maximises the expected tokens per second. Only
completed rounds are used: if a choice had seen a token that it decides about, the output would be
biased, even if only the batch's total depended on that token (`lab/laws/mutants.py` has both).

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

_FIRST_GUESS = 0.8  # assumed chance of the first draft; high, so that drafts get tried
_FIRST = 4.0  # rounds that this assumption counts for
_NEIGHBOUR = 2.0  # rounds that the estimate of the preceding draft counts for
_SHARED = 8.0  # rounds that the estimate over all requests counts for in a request's own
_SHARED_DECAY = 1 - 1 / 256  # per round of any request
_OWN_DECAY = 1 - 1 / 48  # per round of the request itself
_FORGETTING = 1 - 1 / 48  # of both, per choice: there are few rounds where drafts do not pay


class Acceptance:
    """How likely one drafter's drafts are accepted, by request and draft index.

    A request's estimate is from its own rounds, recent ones weighing most, with the estimate over
    all requests as a prior. A draft that was asked for but not made counts as rejected.
    """

    def __init__(self, num_slots: int, max_drafts: int) -> None:
        self._index_K = np.arange(max_drafts)
        self._tried_SK = np.zeros((num_slots, max_drafts))
        self._accepted_SK = np.zeros((num_slots, max_drafts))
        # Over all requests: drafts asked for, offered, tried (those before accepted), accepted.
        self._shared_4K = np.zeros((4, max_drafts))

    def observe(self, rounds: Iterable[tuple[int, int, int, int]]) -> None:
        """Count completed rounds, given as (slot, drafts asked for, drafted, accepted)."""
        columns = np.array([*rounds], dtype=np.int64).reshape(-1, 4).T
        slot_R, asked_R, drafted_R, accepted_R = columns
        if not len(slot_R):
            return
        index_K = self._index_K
        asked_RK = index_K < asked_R[:, None]
        tried_RK = asked_RK & (index_K <= accepted_R[:, None])
        accepted_RK = index_K < accepted_R[:, None]
        offered_RK = index_K < drafted_R[:, None]
        counts = [x.sum(axis=0) for x in (asked_RK, offered_RK, tried_RK, accepted_RK)]
        # Decay each index by its own number of trials: what is tried seldom is forgotten slowly.
        self._shared_4K[:2] *= _SHARED_DECAY ** counts[0]
        self._shared_4K[2:] *= _SHARED_DECAY ** counts[2]
        self._shared_4K += counts
        slots, of_R = np.unique(slot_R, return_inverse=True)
        for table_SK, new_RK in ((self._tried_SK, tried_RK), (self._accepted_SK, accepted_RK)):
            table_SK[slots] *= _OWN_DECAY ** np.bincount(of_R)[:, None]
            np.add.at(table_SK, slot_R, new_RK)

    def age(self) -> None:
        """Make everything counted so far weigh less."""
        for table in (self._tried_SK, self._accepted_SK, self._shared_4K):
            table *= _FORGETTING

    def shared(self) -> Array:
        """Each draft's chance to be accepted if those before it are, [K]."""
        _, _, tried_K, accepted_K = self._shared_4K.tolist()
        chance, weight, chances = _FIRST_GUESS, _FIRST, []
        for tried, accepted in zip(tried_K, accepted_K, strict=True):
            chance, weight = (accepted + weight * chance) / (tried + weight), _NEIGHBOUR
            chances.append(chance)
        return np.array(chances)

    def offered(self) -> Array:
        """How likely the drafter makes each draft that it is asked for, [K]."""
        asked_K, offered_K, _, _ = self._shared_4K
        return (offered_K + 1) / (asked_K + 1)

    def joint(self, slots: Sequence[int]) -> Array:
        """Chances [B, K] that a request's draft and all before it are accepted."""
        own = self._tried_SK[slots], self._accepted_SK[slots]
        conditional_BK = (own[1] + _SHARED * self.shared()) / (own[0] + _SHARED)
        return np.cumprod(conditional_BK, axis=1)

    def release(self, slot: int) -> None:
        """Forget a slot's request."""
        self._tried_SK[slot] = self._accepted_SK[slot] = 0

    def held_slots(self) -> list[int]:
        """Slots of requests that were tried."""
        held: list[int] = np.flatnonzero(self._tried_SK.any(axis=1)).tolist()
        return held


@dataclass(frozen=True)
class StepTable:
    """Measured seconds of decoding steps.

    Attributes:
        batches: requests of the measured steps, [J], rising.
        rest_JK1: steps without drafting, by K = 0...
        draft_JK1: drafting alone.
        context_K1: per token of a request's context, by K: it jumps where one more draft needs
            another tile of rows.
        missed: drafting, per token of a request that the drafter has not seen since it was last
            asked.
    """

    batches: Array
    rest_JK1: Array
    draft_JK1: Array
    context_K1: Array
    missed: float = 0.0

    def shown(self) -> str:
        """A line per batch size: milliseconds of steps with 0, 1, .. drafts per request."""
        step_JK1 = 1e3 * (self.rest_JK1 + self.draft_JK1)
        rows = zip(self.batches.tolist(), step_JK1.tolist(), strict=True)
        return "\n".join(f"batch {b}: {' '.join(f'{ms:.2f}' for ms in row)} ms" for b, row in rows)


class Curve(NamedTuple):
    """Costs at one batch size, in seconds: by drafts per request, and by draft index.

    A pass for draft i takes `first_K[i]` for one request and `more_K[i]` for each further one.
    """

    rest_K1: Array
    first_K: Array
    more_K: Array
    context_K1: Array
    deviation_K1: Array

    def seconds(self, per_request: Any, draft: Any, context: int) -> Any:
        """Seconds of a step, drafting included.

        Args:
            per_request: drafts per request on average, a number or an array.
            draft: seconds of drafting, a number or an array like it.
            context: tokens of all requests together.
        """
        index_K1 = np.arange(len(self.rest_K1))
        rest = np.interp(per_request, index_K1, self.rest_K1)
        rest = rest + context * np.interp(per_request, index_K1, self.context_K1)
        return (rest + draft) * np.exp(np.interp(per_request, index_K1, self.deviation_K1))

    def drafting(self, live_K: Array) -> Any:
        """Seconds of drafting if `live_K` requests take part in each pass, [..., K]."""
        return ((live_K > 0) * self.first_K + np.maximum(live_K - 1, 0) * self.more_K).sum(axis=-1)


class StepCosts:
    """Seconds of a step, from the measurements at start and from the steps since.

    Measured steps differ from the table in two ways. `off` is common to all steps (the machine is
    busy, contexts are long) and changes no choice; it is followed quickly. Deviations by number of
    drafts and batch size are followed slowly, within bounds, and decay.
    """

    _QUICK, _SLOW, _KEPT = 0.2, 0.03, 0.995
    _MOST_AT_ONCE, _MOST = log(1.25), log(1.2)

    def __init__(self, table: StepTable) -> None:
        self.table = table
        self.off = 0.0  # logarithm of measured to expected
        self._host: float | None = None  # seconds of the host's work for one request in one step
        self._deviations: dict[int, Array] = {}

    def curve(self, batch: int) -> Curve:
        """Costs of steps of `batch` requests."""
        table = self.table
        rest_K1, draft_K1 = (
            _at(table.batches, x, batch) for x in (table.rest_JK1, table.draft_JK1)
        )
        first_K = np.maximum(np.diff(table.draft_JK1[0]) / table.batches[0], 0)
        pass_K = np.maximum(np.diff(draft_K1), 0)
        first_K = np.minimum(first_K, pass_K)
        rest_K1 = rest_K1 + draft_K1[0] + batch * (self._host or 0.0)
        return Curve(
            rest_K1, first_K, (pass_K - first_K) / max(batch - 1, 1),
            table.context_K1, self._deviation(batch),
        )  # fmt: skip

    def learn(self, batch: int, per_request: float, expected: float, measured: float) -> None:
        """Compare a step's measured seconds with those expected without `off`."""
        deviation_K1 = self._deviation(batch)
        gap = log(max(measured, 1e-9) / max(expected, 1e-9)) - self.off
        gap = min(max(gap, -self._MOST_AT_ONCE), self._MOST_AT_ONCE)
        self.off += self._QUICK * gap
        deviation_K1 *= self._KEPT
        at = round(per_request)
        moved = deviation_K1[at] + self._SLOW * gap
        deviation_K1[at] = min(max(moved, -self._MOST), self._MOST)

    def learn_host(self, batch: int, measured: float) -> None:
        """Learn from the seconds that a step took outside the runner."""
        measured = max(measured, 0.0) / batch
        known = measured if self._host is None else self._host
        most = known + 1e-5  # an outlier counts as about twice the known time
        self._host = known + self._QUICK * min(measured - known, most)

    def _deviation(self, batch: int) -> Array:
        """Logarithms of measured to expected by drafts per request, at about this batch size."""
        width = self.table.rest_JK1.shape[1]
        return self._deviations.setdefault(batch.bit_length(), np.zeros(width))


def _at(batches: Array, table_JK1: Array, batch: int) -> Array:
    """A table's row for a batch size: interpolated, and in proportion above the largest one."""
    if batch >= batches[-1]:
        return np.asarray(table_JK1[-1] * (batch / batches[-1]))
    j = int(np.searchsorted(batches, batch, side="right"))  # 1 is the first, so there is one below
    part = (batch - batches[j - 1]) / (batches[j] - batches[j - 1])
    return np.asarray((1 - part) * table_JK1[j - 1] + part * table_JK1[j])


class Load(NamedTuple):
    """The requests of a step.

    Attributes:
        joint_BK: `Acceptance.joint`.
        fixed_B: drafts of each request; `ADAPTS` where the number is to be chosen.
        offered_K: `Acceptance.offered`.
        context: tokens of all requests together.
    """

    joint_BK: Array
    fixed_B: Array
    offered_K: Array
    context: int


class Choice(NamedTuple):
    """The numbers of drafts of a step's requests, and what they are expected to yield.

    asked_B:     drafts to ask for
    per_request: drafts that the drafter is expected to make per request, on average
    """

    asked_B: Array
    tokens: float
    seconds: float
    per_request: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def draft_widths(num_drafts: int, *, adapts: bool) -> tuple[int, ...]:
    """Numbers of drafts that captured steps are padded to: none and all, and some between if K is
    chosen step by step. Without 3 the 8B shape lost 4 to 11 % on an H200, because a tile of
    attention holds 4 rows of each request."""
    between = [k for k in (1, 2, 3, 4, 6, 8, 12, 16, 24) if k < num_drafts] if adapts else []
    return (0, *between, num_drafts) if num_drafts else (0,)


def expect(curve: Curve, load: Load, asked_B: Array, *, in_lockstep: bool = False) -> Choice:
    """The expected result of a step with `asked_B` drafts.

    Args:
        in_lockstep: on a GPU, where every request takes part in as many passes and has as many rows
            as the one that asks for most.
    """
    batch, most = load.joint_BK.shape
    asked_BK = np.arange(most) < asked_B[:, None]
    tokens = batch + float((load.joint_BK * asked_BK).sum())
    if in_lockstep:
        per_request = int(asked_B.max(initial=0))
        live_K = np.where(np.arange(most) < per_request, batch, 0)
    else:
        live_K = asked_BK.sum(axis=0)
        per_request = float((live_K * load.offered_K).sum()) / batch
    drafting = curve.drafting(live_K)
    seconds = float(curve.seconds(per_request, drafting, load.context))
    return Choice(asked_B, tokens, seconds, per_request)


def by_gain(curve: Curve, load: Load) -> Choice:
    """Add drafts one by one, the likeliest first, and take the number at which the rate peaks."""
    batch, most = load.joint_BK.shape
    adapts_B = load.fixed_B == ADAPTS
    base_B = np.where(adapts_B, 0, load.fixed_B)
    base_BK = np.arange(most) < base_B[:, None]
    of_N = np.flatnonzero(adapts_B)
    gain_N = load.joint_BK[of_N].ravel()
    index_N = np.tile(np.arange(most), len(of_N))
    # A draft comes after those before it: joint chances never rise, and ties keep their order.
    order_N = np.argsort(-gain_N, kind="stable")
    index_N = index_N[order_N]
    live_K = base_BK.sum(axis=0)
    is_first_N = np.zeros(len(index_N), dtype=bool)
    is_first_N[np.unique(index_N, return_index=True)[1]] = True
    is_first_N &= live_K[index_N] == 0
    pass_N = np.where(is_first_N, curve.first_K[index_N], curve.more_K[index_N])

    def sums(start: float, added_N: Array) -> Array:
        return start + np.concatenate(([0.0], np.cumsum(added_N)))

    tokens_M = sums(batch + float((load.joint_BK * base_BK).sum()), gain_N[order_N])
    rows_M = sums(float((live_K * load.offered_K).sum()), load.offered_K[index_N]) / batch
    draft_M = sums(float(curve.drafting(live_K)), pass_N)
    seconds_M = curve.seconds(rows_M, draft_M, load.context)
    best = int(np.argmax(tokens_M / seconds_M))
    asked_B = base_B.copy()
    asked_B[of_N] = np.bincount(order_N[:best] // most, minlength=len(of_N))
    found = (float(x_M[best]) for x_M in (tokens_M, seconds_M, rows_M))
    return Choice(asked_B, *found)


def by_width(curve: Curve, load: Load, widths: Sequence[int]) -> Choice:
    """One of a few K for all requests that adapt: a GPU replays steps captured at these."""
    asked = (np.where(load.fixed_B == ADAPTS, width, load.fixed_B) for width in widths)
    return max((expect(curve, load, a, in_lockstep=True) for a in asked), key=lambda c: c.rate)

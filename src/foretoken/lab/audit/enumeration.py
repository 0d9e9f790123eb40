"""The exact distribution of a Python function of random numbers: every branch, with its weight.

The function is run again and again with a generator whose numbers are not numbers: a `Uniform`
knows the interval that it lies in, and each comparison with a threshold inside it forks the run in
two, weighted by where the threshold lies. What comes out is what the function does for *all*
uniforms, with no grid and no sample. Thresholds may be floats, or `Fraction`s for an exact result.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import numpy as np

MOST_RUNS = 200_000
_T = TypeVar("_T", bound=Hashable)


class NotEnumerableError(Exception):
    """The function does with its random numbers what no interval can answer: sample it instead."""


class Uniform:
    """A number in [0, 1) of which no more is known than what comparisons have said."""

    __array_ufunc__ = None  # numpy leaves comparisons with it to us
    __slots__ = ("high", "low", "run")

    def __init__(self, run: SymbolicRandom) -> None:
        self.run, self.low, self.high = run, 0, 1

    def _below(self, threshold: Any) -> Any:
        if isinstance(threshold, np.ndarray):
            return np.array([self._below(x) for x in threshold.flat]).reshape(threshold.shape)
        if not threshold > self.low:
            return False
        if threshold >= self.high:
            return True
        share = (threshold - self.low) / (self.high - self.low)
        if self.run.fork((share, 1 - share)) == 0:
            self.high = threshold
            return True
        self.low = threshold
        return False

    __lt__ = __le__ = _below  # a single number has no weight

    def __gt__(self, threshold: Any) -> Any:
        below = self._below(threshold)
        return ~below if isinstance(below, np.ndarray) else not below

    __ge__ = __gt__

    def __bool__(self) -> bool:
        raise NotEnumerableError("it asks whether a uniform is zero")


class SymbolicRandom:
    """One run's generator: `random`, `uniform` and `choice` as numpy's, each draw a fork."""

    def __init__(self, taken: list[int]) -> None:
        self.taken, self.weight, self.others = taken, 1, list[list[int]]()
        self._at = 0

    def fork(self, weights: Sequence[Any]) -> int:
        """The branch that this run takes; the others that have weight are left for later."""
        live = [k for k, weight in enumerate(weights) if weight > 0]
        if self._at == len(self.taken):
            self.others += [[*self.taken, k] for k in live[1:]]
            self.taken = [*self.taken, live[0]]
        branch = self.taken[self._at]
        if branch not in live:
            raise NotEnumerableError("the same numbers led it elsewhere: it has others of its own")
        self._at += 1
        self.weight = self.weight * weights[branch]
        return branch

    def random(self, size: int | None = None) -> Any:
        """One uniform, or a list of them."""
        return Uniform(self) if size is None else [Uniform(self) for _ in range(size)]

    def uniform(self, low: float = 0.0, high: float = 1.0, size: int | None = None) -> Any:
        """As `random`: of [0, 1) alone."""
        if (low, high) != (0, 1):
            raise NotEnumerableError(f"it draws from [{low}, {high})")
        return self.random(size)

    def choice(self, a: Any, size: None = None, replace: bool = True, p: Any = None) -> Any:
        """One of `a`, or of range(a), with probabilities `p`."""
        options = range(int(a)) if np.ndim(a) == 0 else a
        if size is not None:
            raise NotEnumerableError("it draws several at once by `choice`")
        return options[self.fork([1 / len(options)] * len(options) if p is None else list(p))]

    def __getattr__(self, name: str) -> Any:
        raise NotEnumerableError(f"it calls `rng.{name}`")


def enumerate_runs(function: Callable[[Any], _T]) -> dict[_T, Any]:
    """P(outcome) of `function(rng)`; `NotEnumerableError` if that cannot be told.

    Every run is made twice: a function with random numbers of its own differs sooner or later.
    """
    law: dict[_T, Any] = {}
    todo, runs = [list[int]()], 0
    while todo:
        taken, runs = todo.pop(), runs + 1
        first, again = SymbolicRandom(taken), SymbolicRandom(taken)
        try:
            outcome = function(first)
            same = function(again) == outcome and again.taken == first.taken
        except NotEnumerableError:
            raise
        except Exception as error:  # arithmetic, or a library's own conversion
            said = f"given intervals for its uniforms it ends in {type(error).__name__}: {error}"
            raise NotEnumerableError(said) from error
        if not same or runs > MOST_RUNS:
            what = "has random numbers of its own" if not same else f"takes {runs} runs and more"
            raise NotEnumerableError(f"it {what}")
        law[outcome] = law.get(outcome, 0) + first.weight
        todo += first.others
    return law

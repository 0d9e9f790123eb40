"""The exact distribution of a Python function of random numbers: every branch, with its weight.

The function runs many times with a symbolic generator of `Uniform`s, which only know the interval
that they lie in. A comparison with a threshold inside the interval forks the run in two,
weighted by the threshold's position. The result covers *all* uniforms, without a grid or a sample.
Thresholds may be floats, `Fraction`s (for an exact result), numpy numbers and torch tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

MAX_RUNS = 200_000
REPEATED_RUNS = 500  # the first runs, which are made twice
MAX_INTEGERS = 4096  # `int(u * n)` may give integers below this
MIN_WIDTH = 1e-14  # narrower branches are ignored: a cumulative sum in float64 may end at 1 - 1e-16
REMEDY = (
    "For an enumeration draw every random number from `rng`, and use it only in comparisons such "
    "as `rng.random() < p[i][x] / q[i][x]`, or draw by `rng.choice(V, p=...)`"
)
_T = TypeVar("_T", bound=Hashable)


class NotEnumerableError(Exception):
    """The function uses random numbers in a way that intervals cannot follow."""


class Interval:
    """The part of [0, 1) in which a drawn number lies, given the comparisons so far."""

    __slots__ = ("high", "low", "run")

    def __init__(self, run: SymbolicRandom) -> None:
        self.run, self.low, self.high = run, 0, 1

    def below(self, threshold: Any) -> bool:
        """Whether the number is below a threshold; if both answers are possible, the run forks."""
        if not threshold - self.low > MIN_WIDTH:
            return False
        if not self.high - threshold > MIN_WIDTH:
            return True
        share = (threshold - self.low) / (self.high - self.low)
        if self.run.fork((share, 1 - share)) == 0:
            self.high = threshold
            return True
        self.low = threshold
        return False


class Uniform:
    """A strictly monotone function of a random number of which only an interval is known.

    `inverse` is the inverse of the function (None: the identity), `rises` whether it increases.
    """

    __slots__ = ("interval", "inverse", "rises")

    def __init__(
        self, interval: Interval, inverse: Callable[[Any], Any] | None = None, rises: bool = True
    ) -> None:
        self.interval, self.inverse, self.rises = interval, inverse, rises

    def _is_past(self, above: bool, threshold: Any) -> bool:
        """Whether the value is above (or below, if not `above`) a threshold; the run may fork."""
        if threshold is self:  # `np.searchsorted` compares a uniform with itself
            return False
        if isinstance(threshold, Uniform):
            raise NotEnumerableError("the function compares or combines two random numbers")
        if threshold != threshold:  # nan
            return False
        limit = threshold if self.inverse is None else self.inverse(threshold)
        return self.interval.below(limit) == (self.rises != above)

    def _compare(self, above: bool, other: Any) -> Any:
        """Compare with a number, array or tensor; returns the type that a float would return."""
        if isinstance(other, torch.Tensor):
            truths = [self._is_past(above, x) for x in other.flatten().tolist()]
            return torch.tensor(truths, dtype=torch.bool).reshape(other.shape)
        if isinstance(other, np.ndarray):
            return NotImplemented  # numpy compares each element
        if isinstance(other, np.generic):
            return np.bool_(self._is_past(above, other.item()))  # not a bool, since `~True` is -2
        return self._is_past(above, other)

    def __lt__(self, other: Any) -> Any:
        return self._compare(False, other)

    def __gt__(self, other: Any) -> Any:
        return self._compare(True, other)

    def __le__(self, other: Any) -> Any:  # like `<`: a single number has probability 0
        return True if other is self else self._compare(False, other)

    def __ge__(self, other: Any) -> Any:
        return True if other is self else self._compare(True, other)

    def _combine(self, other: Any, change: Callable[[Any], Any]) -> Any:
        """Apply `change` to a number or to each number of a tensor; numpy loops over arrays."""
        if isinstance(other, torch.Tensor) and other.ndim:
            values = np.array([change(x) for x in other.flatten().tolist()], dtype=object)
            return values.reshape(other.shape)
        if isinstance(other, np.ndarray):
            return NotImplemented
        if isinstance(other, Uniform):
            raise NotEnumerableError("the function compares or combines two random numbers")
        return change(other.item() if isinstance(other, (np.generic, torch.Tensor)) else other)

    def _apply(self, inverse: Callable[[Any], Any], rises: bool = True) -> Uniform:
        """A monotone function of this value, given by the inverse of that function."""
        inner = self.inverse
        combined = inverse if inner is None else lambda value: inner(inverse(value))
        return Uniform(self.interval, combined, self.rises == rises)

    def __add__(self, other: Any) -> Any:
        return self._combine(other, lambda b: self._apply(lambda value: value - b))

    def __sub__(self, other: Any) -> Any:
        return self._combine(other, lambda b: self._apply(lambda value: value + b))

    def __rsub__(self, other: Any) -> Any:
        return self._combine(other, lambda b: self._apply(lambda value: b - value, False))

    def __mul__(self, other: Any) -> Any:
        def multiply(a: float) -> Any:
            if a == 0 or math.isnan(a):
                return 0 * a
            return self._apply(lambda value: value / a, a > 0)

        return self._combine(other, multiply)

    def __truediv__(self, other: Any) -> Any:
        def divide(a: float) -> Any:
            if a == 0:  # as in NumPy; p of a draft outside the filters is 0
                return math.inf if self > 0 else -math.inf
            return a if math.isnan(a) else self._apply(lambda value: value * a, a > 0)

        return self._combine(other, divide)

    def __neg__(self) -> Uniform:
        return self._apply(lambda value: -value, False)

    __radd__, __rmul__ = __add__, __mul__

    def log(self) -> Uniform:
        """Called by `np.log`."""
        return self._apply(lambda value: math.exp(min(value, 700.0)))

    def __int__(self) -> int:
        """The number rounded down: the run forks for each possible integer."""
        if self < 0:
            raise NotEnumerableError("the function rounds a negative random number to an integer")
        for whole in range(MAX_INTEGERS):
            if self < whole + 1:
                return whole
        raise NotEnumerableError(f"the function makes integers above {MAX_INTEGERS} of a uniform")

    __floor__ = __trunc__ = floor = __int__

    def __float__(self) -> float:
        raise NotEnumerableError("the function turns a uniform into a plain float, as `float(u)`")

    def __bool__(self) -> bool:
        raise NotEnumerableError("the function asks whether a uniform is zero")


class SymbolicRandom:
    """The generator of one run, with those methods of numpy's generator that verifiers use.

    branches: the branches to take at the first forks
    """

    def __init__(self, branches: list[int]) -> None:
        self.branches = branches  # becomes all branches that the run takes
        self.weight: Any = 1  # the probability of the branches taken
        self.unexplored = list[list[int]]()  # `branches` of runs that take another branch at a fork
        self._num_forks = 0

    def fork(self, weights: Sequence[Any]) -> int:
        """Fork into branches with these probabilities; returns the branch that this run takes."""
        if self._num_forks == len(self.branches):
            possible = [k for k, weight in enumerate(weights) if weight > 0]
            self.unexplored += [[*self.branches, k] for k in possible[1:]]
            self.branches = [*self.branches, possible[0]]
        branch = self.branches[self._num_forks]
        if branch >= len(weights) or not weights[branch] > 0:
            raise NotEnumerableError("the function draws random numbers from elsewhere than `rng`")
        self._num_forks += 1
        self.weight = self.weight * weights[branch]
        return branch

    def random(self, size: Any = None, dtype: Any = np.float64) -> Any:
        return _array(lambda: Uniform(Interval(self)), size, object)

    def uniform(self, low: float = 0.0, high: float = 1.0, size: Any = None) -> Any:
        if (low, high) == (0, 1):
            return self.random(size)
        return self.random(size) * (high - low) + low

    def exponential(self, scale: float = 1.0, size: Any = None) -> Any:
        return _array(lambda: -(1 - self.random()).log() * scale, size, object)

    def integers(
        self, low: int, high: int | None = None, size: Any = None, *, endpoint: bool = False
    ) -> Any:
        first, last = (0, low) if high is None else (low, high)
        count = int(last) - int(first) + endpoint
        return _array(lambda: np.int64(first + self.fork([1 / count] * count)), size, np.int64)

    def choice(self, a: Any, size: Any = None, replace: bool = True, p: Any = None) -> Any:
        if size is not None and not replace:
            raise NotEnumerableError("the function calls `rng.choice` without replacement")
        options = np.arange(a) if np.ndim(a) == 0 else np.asarray(a)
        weights = [1] * len(options) if p is None else list(np.asarray(p).tolist())
        chances = [weight / sum(weights) for weight in weights]
        return _array(lambda: options[self.fork(chances)], size, options.dtype)

    def multinomial(self, n: int, pvals: Any, size: Any = None) -> Any:
        if size is not None:
            raise NotEnumerableError("the function gives `rng.multinomial` a size")
        drawn = self.choice(len(pvals), n, p=pvals)
        return np.bincount(drawn, minlength=len(pvals))

    def binomial(self, n: int, p: float) -> Any:
        return sum(self.fork((p, 1 - p)) == 0 for _ in range(n))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # looked up by Python and numpy themselves
            raise AttributeError(name)
        raise NotEnumerableError(f"the function calls `rng.{name}`")


def _array(draw: Callable[[], Any], size: Any, dtype: Any) -> Any:
    if size is None:
        return draw()
    shape = np.empty(size, bool).shape
    results = np.empty(math.prod(shape), dtype)
    results[:] = [draw() for _ in results]
    return results.reshape(shape)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error itself, then the chain of its causes."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def enumerate_runs(function: Callable[[Any], _T]) -> dict[_T, Any]:
    """The probability of each outcome of `function(rng)`, by enumeration.

    The first runs are made twice, and every run repeats the beginning of an earlier run: with
    random numbers from elsewhere than `rng` some of these repetitions differ.

    Raises:
        NotEnumerableError: the distribution cannot be enumerated; the message says why.
    """
    distribution: dict[_T, Any] = {}
    todo, runs = [list[int]()], 0
    while todo:
        branches, runs = todo.pop(), runs + 1
        first, again = SymbolicRandom(branches), SymbolicRandom(branches)
        try:
            outcome = function(first)
            is_same = runs > REPEATED_RUNS or (
                function(again) == outcome and again.branches == first.branches
            )
        except NotEnumerableError:
            raise
        except Exception as error:  # in arithmetic, or in a library's conversion
            cause = next((e for e in _causes(error) if isinstance(e, NotEnumerableError)), None)
            if cause is not None:
                raise cause from error
            first_line = str([*_causes(error)][-1]).partition("\n")[0]
            message = f"the function fails when random numbers are intervals ({first_line})"
            raise NotEnumerableError(message) from error
        if not is_same:
            raise NotEnumerableError("the function draws random numbers from elsewhere than `rng`")
        if runs > MAX_RUNS:
            raise NotEnumerableError(f"the function takes more than {MAX_RUNS} runs")
        distribution[outcome] = distribution.get(outcome, 0) + first.weight
        todo += first.unexplored
    return distribution

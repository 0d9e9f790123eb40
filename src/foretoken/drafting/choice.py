"""Which drafter of a `hybrid` request: by what past rounds of it and of others have shown.

Drafts that were looked up are taken if, for each millisecond, they promise at least as many tokens
as those of a model: (1 + accepted) over the seconds of drafting and of the pass that verifies. What
is accepted is the mean of past rounds whose drafts promised about as much, what it costs is
measured as it runs. Nothing here sees the token that the target will draw: a choice that did would
bias the output.

A request with a seed of its own that draws at random under `standard` or `block` depends on its own
tokens alone, so that its text is the same in any company and at any speed: drafts that were looked
up are taken if they promise a fixed part of what was asked.

What is to be had, replayed on 56 held-out texts (embedded pair, K = 5, T=0, fixed costs): the best
sequence of choices in hindsight decodes 1.29 times as fast as the draft model alone, with 1.07
times its tokens a step (next to the head: 1.08 times); these choices 1.17 and 1.02, and a linear
model of match length and counts, fitted to other texts, no better. To go on with what is looked up
behind a model's drafts, or the other way round, and to end drafts where q is flat, brought nothing.

Rounds of all requests are counted together, and a number for each kind of round: a record of each
request's own, by kind, chose no better on held-out code, and `control.Acceptance`, which is made
for batches, takes 43 us a step where this takes 4.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from foretoken.slots.step import Admission, Outcome

FIXED_PART = 0.85
"""Of the drafts asked for, what must be expected to be accepted where nothing is measured."""

# Of the drafts asked for, accepted of a model's before any were seen: where nothing was looked up,
# and where all were. Text that repeats is easy for a model, too: 3.7 of 5 at T=0, and there 4.1.
_MODEL_PRIORS = (0.6, 0.8)
_PRIOR_ROUNDS, _MOST_ROUNDS = 8, 64  # weight of what is assumed at first; rounds that count


class _Mean(NamedTuple):
    value: float
    rounds: int = _PRIOR_ROUNDS

    def with_one(self, value: float) -> _Mean:
        rounds = min(self.rounds + 1, _MOST_ROUNDS)
        return _Mean(self.value + (value - self.value) / rounds, rounds)


class Kind(NamedTuple):
    """Rounds that are alike.

    drafter: its number
    draws: whether the request draws at random
    promised: how many drafts that were looked up are expected to be accepted, rounded
    asked: of a model, how many drafts it was asked for; 0: these are what was looked up
    """

    drafter: int
    draws: bool
    promised: int
    asked: int = 0

    @property
    def prior(self) -> float:
        """Accepted drafts, as long as there were no such rounds."""
        if not self.asked:
            return self.promised
        low, high = _MODEL_PRIORS
        return self.asked * low + min(self.promised, self.asked) * (high - low)


class Choice:
    """Accepted drafts by kind of round; seconds that rounds take.

    Attributes:
        pass_seconds: of a pass that verifies, for each request in it; None: not measured yet.
    """

    def __init__(self) -> None:
        self._means: dict[Kind, _Mean] = {}
        self._seconds: dict[int, float] = {}
        # By slot, what this round will teach: drafts that were taken, or others, as tokens.
        self._offers: dict[int, list[tuple[Kind, Sequence[int] | None]]] = {}
        self.pass_seconds: float | None = None

    def takes(
        self,
        request: Admission,
        drafter: int,
        drafts: Sequence[int],
        expected: float,
        model: tuple[int, int],
    ) -> bool:
        """Whether a request has drafts that were looked up, and not a model's.

        Args:
            drafter: the number of the one that found them.
            expected: how many of them should be accepted by counts.
            model: the number of the drafter that runs it, and the drafts asked for.
        """
        rival, asked = model
        kind = Kind(drafter, request.params.temperature > 0, round(expected))
        costs = (self._seconds.get(kind.drafter), self._seconds.get(rival), self.pass_seconds)
        if _is_fixed(request) or None in costs:
            has = expected >= FIXED_PART * asked
        else:
            looking, drafting, verifying = (cost or 0.0 for cost in costs)
            mine = self._mean(kind).value
            theirs = self._mean(kind._replace(drafter=rival, asked=asked)).value
            has = (1 + mine) * (verifying + drafting) >= (1 + theirs) * (verifying + looking)
        self._offers.setdefault(request.slot, []).append((kind, None if has else drafts))
        return has

    def leave_to_model(self, request: Admission, number: int, asked: int) -> None:
        """Nothing that was found in this round, if anything, was taken."""
        offers = self._offers.setdefault(request.slot, [])
        promised = max((kind.promised for kind, _ in offers), default=0)
        draws = request.params.temperature > 0
        offers.append((Kind(number, draws, promised, asked), None))

    def learn(self, slot: int, outcome: Outcome) -> None:
        """Count what was accepted of this round's drafts, or would have been."""
        for kind, passed_over in self._offers.pop(slot, ()):
            mean, num_accepted = self._mean(kind), float(outcome.num_accepted)
            if passed_over is not None:
                pairs = list(zip(passed_over, outcome.token_ids, strict=False))
                differ = (i for i, (draft, token) in enumerate(pairs) if draft != token)
                # If all that are known are right, it goes on as usual.
                num_accepted = next(differ, max(mean.value, len(pairs)))
            self._means[kind] = mean.with_one(num_accepted)

    def forget(self, slot: int) -> None:
        """The request in this slot has ended."""
        self._offers.pop(slot, None)

    def held_slots(self) -> Iterable[int]:
        """Slots in whose round something was offered."""
        return self._offers.keys()

    @contextmanager
    def timing(self, number: int, num_requests: int) -> Iterator[None]:
        """Time a proposal."""
        begin = time.perf_counter()
        yield
        seconds = (time.perf_counter() - begin) / num_requests
        self._seconds[number] = follow(self._seconds.get(number), seconds)

    def _mean(self, kind: Kind) -> _Mean:
        return self._means.get(kind) or _Mean(kind.prior)


def follow(before: float | None, seconds: float) -> float:
    """What something usually takes: rounds that also compute a prompt hardly count."""
    if before is None:
        return seconds
    return before + (seconds - before) / (2 if seconds < before else 32)


def _is_fixed(request: Admission) -> bool:
    """Whether the choice shows in the request's text, which may depend on no other request."""
    return request.shows_drafts and request.params.seed is not None

"""Which drafter of a `hybrid` request: by what past rounds of it and of others have shown.

Drafts that were looked up are taken if, for each millisecond, they promise at least as many tokens
as those of a model: (1 + accepted) over the seconds of drafting and of the pass that verifies. What
is accepted is the mean of past rounds whose drafts promised about as much, what it costs is
measured as it runs. Nothing here sees the token that the target will draw: a choice that did would
bias the output.

A request with a seed of its own that draws at random under `standard` or `block` depends on its own
tokens alone, so that its text is the same in any company and at any speed: drafts that were looked
up are taken if they promise a fixed part of what was asked.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from foretoken.slots.parameters import SlotRequest
from foretoken.slots.step import Outcome

FIXED_PART = 0.85
"""Of the drafts asked for, what must be expected to be accepted where nothing is measured."""

# Of the drafts asked for, accepted of a model's before any were seen: where nothing was looked up,
# and where all were. Text that repeats is easy for a model, too: 3.7 of 5 at T=0, and there 4.1.
_MODEL_PRIORS = (0.6, 0.8)
_PRIOR_ROUNDS, _MOST_ROUNDS = 4, 64  # weight of what is assumed at first; rounds that count


class _Mean(NamedTuple):
    value: float
    rounds: int = _PRIOR_ROUNDS

    def with_one(self, value: float) -> _Mean:
        rounds = min(self.rounds + 1, _MOST_ROUNDS)
        return _Mean(self.value + (value - self.value) / rounds, rounds)


class Kind(NamedTuple):
    """Rounds that are alike.

    drafter: its number
    promised: how many drafts that were looked up are expected to be accepted, rounded
    asked: of a model, how many drafts it was asked for; 0: these are what was looked up
    """

    drafter: int
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
    """Accepted drafts by kind of round, of each slot and of all; seconds that rounds take.

    Attributes:
        pass_seconds: of a pass that verifies, for each request in it; None: not measured yet.
    """

    def __init__(self) -> None:
        self._all: dict[Kind, _Mean] = {}
        self._own: dict[int, dict[Kind, _Mean]] = {}
        self._seconds: dict[int, float] = {}
        self._offers: dict[int, list[tuple[Kind, Sequence[int] | None]]] = {}
        self.pass_seconds: float | None = None

    def takes(
        self, request: SlotRequest, slot: int, found: tuple[int, float], model: tuple[int, int]
    ) -> bool:
        """Whether a request has drafts that were looked up, and not a model's.

        Args:
            found: the drafter's number, and how many of its drafts are expected to be accepted.
            model: the number of the drafter that runs it, and the drafts asked for.
        """
        (number, expected), (rival, asked) = found, model
        costs = (self._seconds.get(number), self._seconds.get(rival), self.pass_seconds)
        if _is_fixed(request) or None in costs:
            return expected >= FIXED_PART * asked
        looking, drafting, verifying = (cost or 0.0 for cost in costs)
        promised = round(expected)
        mine = self._expect(slot, Kind(number, promised))
        theirs = self._expect(slot, Kind(rival, promised, asked))
        return (1 + mine) * (verifying + drafting) >= (1 + theirs) * (verifying + looking)

    def offer(self, slot: int, kind: Kind, passed_over: Sequence[int] | None = None) -> None:
        """Remember what this round will teach: the drafts that were taken, or others, as tokens."""
        self._offers.setdefault(slot, []).append((kind, passed_over))

    def offer_model(self, slot: int, number: int, asked: int) -> None:
        """The same of a model's drafts, in place of what was found in this round, if anything."""
        found = (kind.promised for kind, _ in self._offers.get(slot, ()))
        self.offer(slot, Kind(number, max(found, default=0), asked))

    def learn(self, slot: int, outcome: Outcome) -> None:
        """Count what was accepted of this round's drafts, or would have been."""
        for kind, passed_over in self._offers.pop(slot, ()):
            num_accepted: float = outcome.num_accepted
            if passed_over is not None:
                pairs = list(zip(passed_over, outcome.token_ids, strict=False))
                differ = (i for i, (draft, token) in enumerate(pairs) if draft != token)
                known = next(differ, None)
                if known is None:  # it goes on as usual
                    num_accepted = max(self._expect(slot, kind), len(pairs))
                else:
                    num_accepted = known
            self._count(slot, kind, num_accepted)

    def _count(self, slot: int, kind: Kind, num_accepted: float) -> None:
        everyone = self._all.get(kind, _Mean(kind.prior))
        own = self._own.setdefault(slot, {})
        own[kind] = own.get(kind, _Mean(everyone.value)).with_one(num_accepted)
        self._all[kind] = everyone.with_one(num_accepted)

    def forget(self, slot: int) -> None:
        """The request in this slot has ended."""
        self._own.pop(slot, None)
        self._offers.pop(slot, None)

    def held_slots(self) -> Iterable[int]:
        """Slots of whose rounds it knows."""
        return self._own.keys() | self._offers.keys()

    @contextmanager
    def timing(self, number: int, num_requests: int) -> Iterator[None]:
        """Time a proposal."""
        begin = time.perf_counter()
        yield
        seconds = (time.perf_counter() - begin) / num_requests
        self._seconds[number] = follow(self._seconds.get(number), seconds)

    def _expect(self, slot: int, kind: Kind) -> float:
        own = self._own.get(slot, {}).get(kind) or self._all.get(kind)
        return kind.prior if own is None else own.value


def follow(before: float | None, seconds: float) -> float:
    """What something usually takes: rounds that also compute a prompt hardly count."""
    if before is None:
        return seconds
    return before + (seconds - before) / (2 if seconds < before else 32)


def _is_fixed(request: SlotRequest) -> bool:
    """Whether the choice shows in the request's text, and the text may depend on nobody else."""
    return request.shows_drafts and request.params.seed is not None

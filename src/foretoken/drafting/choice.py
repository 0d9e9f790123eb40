"""Which drafter a `hybrid` request uses in a round, judged by past rounds of all requests.

Looked-up drafts are taken if they promise at least as many tokens per millisecond as a model's:
(1 + accepted) over the seconds of drafting and of the verifying pass. `accepted` is the mean of
past rounds whose drafts promised about as much; the seconds are measured while serving. Nothing
here sees the token that the target will draw: a choice that did would bias the output.

A request with its own seed that draws at random under `standard` or `block` must have the same text
whatever else is in the batch and however fast it runs. Its choice therefore depends only on its own
tokens: looked-up drafts are taken if they promise a fixed part of the number asked for.

What a choice can gain, replayed on 56 held-out texts (embedded pair, K = 5, T=0, fixed costs): the
best sequence of choices in hindsight decodes 1.29 times as fast as the draft model alone, with 1.07
times its tokens per step (with the head: 1.08 times). The choices made here reach 1.17 and 1.02. A
linear model of match length and counts, fitted to other texts, did no better. Nothing was gained by
appending looked-up drafts to a model's, or the reverse, or by ending drafts where q is flat.

There is one mean per kind of round, over all requests. Separate means for each request chose no
better on held-out code. `control.Acceptance` is made for batches: it takes 43 us a step, this 4.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from foretoken.slots.plan import Admission
from foretoken.slots.step import Outcome

FIXED_PART = 0.85
"""Share of the drafts asked for that must be expected to be accepted if nothing is measured."""

# Assumed share of a model's drafts that is accepted: where the look-up found none, and where it
# found all that were asked for. Repetitive text is easier for a model, too: at T=0 it had 3.7 of 5
# drafts accepted overall, and 4.1 there.
_MODEL_PRIORS = (0.6, 0.8)
_PRIOR_ROUNDS, _MOST_ROUNDS = 8, 64  # rounds that the prior counts for; that a mean looks back on


class _Mean(NamedTuple):
    value: float
    rounds: int = _PRIOR_ROUNDS

    def with_one(self, value: float) -> _Mean:
        rounds = min(self.rounds + 1, _MOST_ROUNDS)
        return _Mean(self.value + (value - self.value) / rounds, rounds)


class Kind(NamedTuple):
    """Rounds that share one mean.

    drafter:  its number
    draws:    whether the request draws at random
    promised: how many looked-up drafts were expected to be accepted, rounded
    asked:    how many drafts a model was asked for; 0: the drafts were looked up
    """

    drafter: int
    draws: bool
    promised: int
    asked: int = 0

    @property
    def prior(self) -> float:
        """Assumed number of accepted drafts before the first such round."""
        if not self.asked:
            return self.promised
        low, high = _MODEL_PRIORS
        return self.asked * low + min(self.promised, self.asked) * (high - low)


class Chooser:
    """Chooses between looked-up drafts and a model's; learns what rounds yield and cost.

    Attributes:
        pass_seconds: of a verifying pass, divided by its requests; None: not measured yet.
    """

    def __init__(self) -> None:
        self._means: dict[Kind, _Mean] = {}
        self._seconds: dict[int, float] = {}
        # By slot, what this round offered; with the tokens of drafts that were passed over.
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
        """Whether a request gets these looked-up drafts instead of a model's.

        Args:
            drafter: the number of the drafter that looked them up.
            expected: how many of them should be accepted, by counts.
            model: the number of the drafter that runs a model, and the drafts asked for.
        """
        rival, asked = model
        kind = Kind(drafter, request.params.temperature > 0, round(expected))
        costs = (self._seconds.get(drafter), self._seconds.get(rival), self.pass_seconds)
        if _is_fixed(request) or None in costs:
            is_taken = expected >= FIXED_PART * asked
        else:
            looking, drafting, verifying = (cost or 0.0 for cost in costs)
            mine = self._mean(kind).value
            theirs = self._mean(kind._replace(drafter=rival, asked=asked)).value
            is_taken = (1 + mine) * (verifying + drafting) >= (1 + theirs) * (verifying + looking)
        self._offers.setdefault(request.slot, []).append((kind, None if is_taken else drafts))
        return is_taken

    def leave_to_model(self, request: Admission, number: int, asked: int) -> None:
        """Note that the request gets the drafts of model `number` in this round."""
        offers = self._offers.setdefault(request.slot, [])
        promised = max((kind.promised for kind, _ in offers), default=0)
        draws = request.params.temperature > 0
        offers.append((Kind(number, draws, promised, asked), None))

    def learn(self, slot: int, outcome: Outcome) -> None:
        """Count how many drafts of this round were accepted, or would have been."""
        for kind, passed_over in self._offers.pop(slot, ()):
            mean, num_accepted = self._mean(kind), float(outcome.num_accepted)
            if passed_over is not None:
                pairs = list(zip(passed_over, outcome.token_ids, strict=False))
                differ = (i for i, (draft, token) in enumerate(pairs) if draft != token)
                # If they agree with every token drawn, assume the mean for the rest.
                num_accepted = next(differ, max(mean.value, len(pairs)))
            self._means[kind] = mean.with_one(num_accepted)

    def forget(self, slot: int) -> None:
        """Forget the request in this slot."""
        self._offers.pop(slot, None)

    def held_slots(self) -> Iterable[int]:
        """Slots with offers that await their outcome."""
        return self._offers.keys()

    @contextmanager
    def timing(self, number: int, num_requests: int) -> Iterator[None]:
        """Time a drafter's proposal for so many requests."""
        begin = time.perf_counter()
        yield
        seconds = (time.perf_counter() - begin) / num_requests
        self._seconds[number] = follow(self._seconds.get(number), seconds)

    def _mean(self, kind: Kind) -> _Mean:
        return self._means.get(kind) or _Mean(kind.prior)


def follow(before: float | None, seconds: float) -> float:
    """Update a usual duration; slower rounds hardly count, since they may compute a prompt, too."""
    if before is None:
        return seconds
    return before + (seconds - before) / (2 if seconds < before else 32)


def _is_fixed(request: Admission) -> bool:
    """Whether the choice changes the request's text, so it must not depend on other requests."""
    return request.shows_drafts and request.params.seed is not None

"""Which drafter a `hybrid` request uses in a round, judged by past rounds of all requests.

Looked-up drafts are taken if they should yield at least as many tokens per second as a model's
drafts: (1 + accepted) over the seconds of drafting and of the verifying pass. `accepted` is the
mean of past rounds in which about as many drafts were expected to be accepted. The seconds are
measured while serving. The choice never depends on the token that the target will draw, because the
output would then be biased.

The text of a request with its own seed that draws at random under `standard` or `block` must not
depend on the rest of the batch or on speed. So the choice depends only on the request's tokens:
looked-up drafts are taken if a fixed share of the requested drafts should be accepted.

What choices can gain was replayed on 56 held-out texts (embedded pair, K = 5, T=0, fixed costs).
The best choices in hindsight decode 1.29 times as fast as the draft model alone, with 1.07 times as
many tokens per step. The choices made here reach 1.17 and 1.02. A linear model of match length and
counts, fitted to other texts, did no better, nor did separate means for each request. Nothing was
gained by appending looked-up drafts to a model's drafts, or a model's to looked-up drafts, or by
ending drafts where q is flat. `control.Acceptance`, made for batches, would take 43 us a step; the
means here take 4 us.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from foretoken.slots.step import Admission, Outcome

FIXED_PART = 0.85
"""Without measurements looked-up drafts are taken if this share of K should be accepted."""

# Assumed shares of a model's drafts that are accepted: if no looked-up draft should be accepted,
# and if as many as requested should be. Repetitive text is easier for a model, too: at T=0 the
# draft model had 3.7 of 5 drafts accepted overall, and 4.1 in repetitive text.
_MODEL_PRIORS = (0.6, 0.8)
_PRIOR_ROUNDS = 8  # weight of a prior, in rounds
_MOST_ROUNDS = 64  # the most rounds in a mean


class _Mean(NamedTuple):
    """A running mean and the number of rounds in it."""

    value: float
    rounds: int = _PRIOR_ROUNDS

    def updated(self, value: float) -> _Mean:
        """The mean with one more round; after `_MOST_ROUNDS`, earlier rounds count less."""
        rounds = min(self.rounds + 1, _MOST_ROUNDS)
        return _Mean(self.value + (value - self.value) / rounds, rounds)


class Kind(NamedTuple):
    """A kind of rounds, which share a mean.

    drafter: number of the drafter
    samples: whether the request draws at random
    expected: looked-up drafts that were expected to be accepted, rounded
    num_drafts: drafts requested of a model; 0: the drafts were looked up
    """

    drafter: int
    samples: bool
    expected: int
    num_drafts: int = 0

    @property
    def prior(self) -> float:
        """The mean number of accepted drafts that is assumed before the first round."""
        if not self.num_drafts:
            return self.expected
        low, high = _MODEL_PRIORS
        return self.num_drafts * low + min(self.expected, self.num_drafts) * (high - low)


class Chooser:
    """Chooses between looked-up drafts and a model's; learns what rounds yield and cost.

    pass_seconds: duration of a verifying pass divided by its number of requests; None: not measured
        yet.
    """

    def __init__(self) -> None:
        self._means: dict[Kind, _Mean] = {}
        self._seconds: dict[int, float] = {}  # by drafter: seconds to draft for one request
        # By slot: the kinds of drafts considered in this round, each with its looked-up drafts
        # if these were not taken, else None.
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
        """Whether a request gets these looked-up drafts, not a model's; recorded for `learn`.

        Args:
            drafter: number of the drafter that looked up the drafts.
            expected: how many of the drafts should be accepted, estimated from counts.
            model: number of the drafter that runs a model, and how many drafts it would make.
        """
        model_number, num_drafts = model
        kind = Kind(drafter, request.params.temperature > 0, round(expected))
        costs = (self._seconds.get(drafter), self._seconds.get(model_number), self.pass_seconds)
        if _must_have_fixed_drafts(request) or None in costs:
            is_taken = expected >= FIXED_PART * num_drafts
        else:
            lookup_s, model_s, pass_s = (cost or 0.0 for cost in costs)
            mean = self._mean(kind).value
            model_kind = kind._replace(drafter=model_number, num_drafts=num_drafts)
            model_mean = self._mean(model_kind).value
            is_taken = (1 + mean) * (pass_s + model_s) >= (1 + model_mean) * (pass_s + lookup_s)
        self._offers.setdefault(request.slot, []).append((kind, None if is_taken else drafts))
        return is_taken

    def leave_to_model(self, request: Admission, number: int, num_drafts: int) -> None:
        """Record that drafter `number`, which runs a model, makes the request's drafts."""
        offers = self._offers.setdefault(request.slot, [])
        expected = max((kind.expected for kind, _ in offers), default=0)
        samples = request.params.temperature > 0
        offers.append((Kind(number, samples, expected, num_drafts), None))

    def learn(self, slot: int, outcome: Outcome) -> None:
        """Update the means with the accepted drafts of this round. Looked-up drafts that were not
        taken count as accepted up to the first that differs from the drawn token."""
        for kind, unused_drafts in self._offers.pop(slot, ()):
            mean, num_accepted = self._mean(kind), float(outcome.num_accepted)
            if unused_drafts is not None:
                pairs = list(zip(unused_drafts, outcome.token_ids, strict=False))
                differ = (i for i, (draft, token) in enumerate(pairs) if draft != token)
                # If all pairs agree, more drafts might have been accepted: at least the mean.
                num_accepted = next(differ, max(mean.value, len(pairs)))
            self._means[kind] = mean.updated(num_accepted)

    def forget(self, slot: int) -> None:
        self._offers.pop(slot, None)

    def held_slots(self) -> Iterable[int]:
        return self._offers.keys()

    @contextmanager
    def timing(self, number: int, num_requests: int) -> Iterator[None]:
        """Measure how long drafter `number` takes per request, in the body of the `with`."""
        begin = time.perf_counter()
        yield
        seconds = (time.perf_counter() - begin) / num_requests
        self._seconds[number] = update_duration(self._seconds.get(number), seconds)

    def _mean(self, kind: Kind) -> _Mean:
        return self._means.get(kind) or _Mean(kind.prior)


def update_duration(usual: float | None, seconds: float) -> float:
    """The usual duration (None before the first measurement) updated with a measurement. Durations
    above the usual one count little, since the round may have computed a prompt, too."""
    if usual is None:
        return seconds
    return usual + (seconds - usual) / (2 if seconds < usual else 32)


def _must_have_fixed_drafts(request: Admission) -> bool:
    """Whether the request has its own seed and a text that depends on the drafts."""
    return request.depends_on_drafts and request.params.seed is not None

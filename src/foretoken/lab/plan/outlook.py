"""What follows from costs and acceptance alone, with a batch that stays as it is. No torch.

Charter: rates of batches that only decode. Queues, prompts and ends are the simulation's.
"""

from __future__ import annotations

from foretoken.lab.plan.acceptance import Acceptance
from foretoken.lab.plan.profile import Profile
from foretoken.lab.plan.simulate import StepClock


class Outlook:
    """Rates by batch, K, and tokens of context of each request."""

    def __init__(self, profile: Profile, acceptance: Acceptance) -> None:
        self.most = min(profile.most_drafts, acceptance.most)
        self._lengths = [1 + sum(acceptance.joint(k)) for k in range(self.most + 1)]
        self.profile, self.acceptance, self._clock = profile, acceptance, StepClock(profile)

    def seconds(self, batch: int, drafts: int, context: int) -> float:
        """Of a step."""
        return self._clock.decoding([drafts] * batch, batch * context)

    def rate(self, batch: int, drafts: int, context: int) -> float:
        """Tokens per second of all requests together."""
        return batch * self._lengths[drafts] / self.seconds(batch, drafts, context)

    def best(self, batch: int, context: int) -> int:
        """K of the highest rate; the smaller one of equals."""
        return max(range(self.most + 1), key=lambda k: (self.rate(batch, k, context), -k))

    def need(self, batch: int, drafts: int, context: int) -> float:
        """Mean tokens of a round, bonus included, from which on so many drafts pay; above K + 1
        not even accepting every one would."""
        return self.seconds(batch, drafts, context) / self.seconds(batch, 0, context)

    def last_that_pays(self, context: int) -> int:
        """The largest batch at which some K beats plain decoding; 0: none."""
        batches = range(self.profile.limits.max_num_seqs, 0, -1)
        return next((b for b in batches if self.best(b, context)), 0)

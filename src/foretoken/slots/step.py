"""A step as data: what goes into it and what comes out.

Charter: the records between scheduler, runner, drafters and engine. A `StepInput` names slots,
never requests: it can be replayed, delayed, or sent to other ranks, and true lengths are read from
the slots when it runs. A `StepResult` may be read after the next step was launched. Nothing here
decides or computes what a step is about.

Shape suffixes: B requests of the step, D those that decide, K drafts, N rows of logits, T
packed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foretoken.ops import DraftBlock, Evidence, Logprobs, Rule, Verdict
from foretoken.ops.steps import DraftRequests, SlotSpan

NONE = -1
"""In the place of a number of log-probabilities: none are wanted."""


_NO_PACKET = torch.empty(0, dtype=torch.int64)


class StepInput(NamedTuple):
    """Requests of one step, in batch order, as numbers on the host.

    Attributes:
        slot_B: where their state is.
        num_tokens_B: known tokens to compute.
        max_drafts_B: most drafts to verify after them; K_b is smaller where fewer tokens may
            follow, or where the drafter has fewer.
        decides_B: whether new tokens are drawn: at the end of a prompt and in every decode step.
        num_logprobs_B: likeliest tokens to report beside each that is drawn; NONE: no report.
        num_prompt_logprobs_B: the same of the prompt's tokens: logits of every row are wanted.
        traces_B: whether evidence of what is decided is wanted.
    """

    slot_B: Sequence[int]
    num_tokens_B: Sequence[int]
    max_drafts_B: Sequence[int]
    decides_B: Sequence[bool]
    num_logprobs_B: Sequence[int]
    num_prompt_logprobs_B: Sequence[int]
    traces_B: Sequence[bool]

    def at(self, index: Sequence[int]) -> StepInput:
        """Some of the requests."""
        columns: list[Any] = [[column[i] for i in index] for column in self]
        return StepInput(*columns)

    @property
    def most_logprobs(self) -> int:
        """Likeliest tokens that any row wants; NONE if no row wants log-probabilities."""
        return max([*self.num_logprobs_B, *self.num_prompt_logprobs_B, NONE])

    @property
    def deciding_slots(self) -> list[int]:
        """Slots of the requests that decide."""
        return [s for s, decides in zip(self.slot_B, self.decides_B, strict=True) if decides]

    @property
    def traced_D(self) -> list[int]:
        """Which of the requests that decide want evidence."""
        if True not in self.traces_B:
            return []
        return [d for d, traces in zip(self.of_B, self.traces_B, strict=True) if traces and d >= 0]

    @property
    def of_B(self) -> list[int]:
        """Which of the requests that decide each is; -1: none of them."""
        index = count()
        return [next(index) if decides else NONE for decides in self.decides_B]

    @classmethod
    def padding(cls) -> StepInput:
        """No request at all: a captured step of padding alone."""
        return cls([], [], [], [], [], [], [])


class StepShape(NamedTuple):
    """What a captured step depends on beside tensors.

    Attributes:
        size: requests, padding included; all of them decode.
        most_drafts: columns of drafts.
        has_filters, rules: as in `SlotParams`.
        warm: whether a request draws at random, so that the q of drafts is kept.
        drafters: numbers of those that its requests may have.
    """

    size: int
    most_drafts: int
    has_filters: bool
    rules: frozenset[Rule]
    warm: bool
    drafters: frozenset[int] = frozenset()


class StepRequests(NamedTuple):
    """The requests of a step that go on, as tensors on the slots' device.

    On a host the numbers are the truth. On a device that nobody waits for they are bounds, and what
    depends on lengths is found there: `DeviceSlotTable.asked`.

    Attributes:
        step: the same requests as numbers.
        slot_B, num_tokens_B: int64; slots and known tokens to compute. Behind the requests of
            `step` may follow padding: the spare slot, with one token and no drafts.
        slot_D, max_drafts_D: int64; of those that decide.
        of_B: int64, which of these each of the B requests is, -1: none; None: all are, in order.
        most_drafts: no request has more.
        warm: whether a request draws at random; True says nothing.
        shape: of a captured step; None runs operator by operator.
        known: on a host, where numbers are the truth: who decides.
        others: drafts may be another drafter's than the one that reads this.
    """

    step: StepInput
    slot_B: Tensor
    num_tokens_B: Tensor
    slot_D: Tensor
    max_drafts_D: Tensor
    of_B: Tensor | None
    most_drafts: int
    warm: bool = True
    shape: StepShape | None = None
    known: DraftRequests | None = None
    others: bool = False


class Outcome(NamedTuple):
    """One request's part of a result, on the host.

    Attributes:
        token_ids: accepted drafts and the one token after them; empty in the midst of a prefill.
        num_drafts, num_accepted: drafts that were verified, and how many of them were accepted.
        is_finite: False if there is no token after the accepted drafts: the target's logits were
            not finite, or, if `bans_all`, the request's own parameters left no token.
        fault: what its own part of the step raised; its tokens are void.
        logprobs: one row per token, if asked for.
        prompt_logprobs: rows of the prompt tokens after those computed here, if asked for.
        drafter: the number of the one that made the drafts; None: the one that was asked for.
        evidence: its row of each part, if asked for.
    """

    token_ids: list[int]
    num_drafts: int = 0
    num_accepted: int = 0
    is_finite: bool = True
    bans_all: bool = False
    fault: Exception | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    drafter: int | None = None
    evidence: Evidence | None = None

    @property
    def origins(self) -> list[str]:
        """Of each of the tokens, as in `CompletionOutput.origins`."""
        last = "bonus" if self.num_accepted == self.num_drafts else "resampled"
        return ["accepted"] * self.num_accepted + [last if self.num_drafts else "plain"]


_UNDECIDED = Outcome([])


@dataclass
class StepResult:
    """What a step computed.

    What `read` reads is its own. Two parts are not, and are gone with the next step: `aux`, and the
    q in `drafts.cache`, which the next proposal overwrites.

    Attributes:
        spans: the tokens that were computed, drafts included, of every request that ran: not of one
            that had all its tokens already, or has failed.
        slot_D: of the requests that decided; the rows of `drafts` and `verdict`.
        drafts: what was verified.
        verdict: the new tokens.
        faults: by slot, what the part of one request alone raised.
        banned_all: slots whose logits were finite, but whose requests' parameters left no token.
        logprobs: by slot, those of the prompt and of the decision, each None if not wanted.
        evidence: by slot, one request's row of each part, where it is wanted.
        aux: hidden states [T, H] of each layer in the drafter's `target_view`, in the order of
            the batch.
        packet: of a step on a device: what the host will read, see `Steps.advance`.
    """

    spans: Sequence[SlotSpan]
    slot_D: Sequence[int]
    drafts: DraftBlock
    verdict: Verdict
    faults: dict[int, Exception] = field(default_factory=dict)
    banned_all: set[int] = field(default_factory=set)
    logprobs: dict[int, tuple[Logprobs | None, Logprobs | None]] = field(default_factory=dict)
    evidence: dict[int, Evidence] = field(default_factory=dict)
    aux: tuple[Tensor, ...] = ()
    packet: Tensor = _NO_PACKET

    def resolve(self) -> StepResult:
        """Itself: nothing is on its way any more. See `engine/pending.py`."""
        return self

    @classmethod
    def empty(cls) -> StepResult:
        """The result of a step whose requests had all ended already."""
        none, flags = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.bool)
        drafts = DraftBlock(token_BK=none.view(0, 0), num_B=none, cache=None, real_q_B=flags)
        return cls((), (), drafts, Verdict(none.view(0, 1), none, flags))

    @cached_property
    def decisions(self) -> dict[int, Outcome]:
        """What was decided, by slot; waits for the device, once."""
        columns = zip(
            self.slot_D, self.verdict.token_BK1.tolist(), self.drafts.num_B.tolist(),
            self.verdict.n_accept_B.tolist(), self.verdict.finite_B.tolist(), strict=True,
        )  # fmt: skip
        decisions = {
            slot: Outcome(tokens[: accepted + finite], drafted, accepted, finite)
            for slot, tokens, drafted, accepted, finite in columns
        }
        if self.drafts.source_B is not None:
            for slot, drafter in zip(self.slot_D, self.drafts.source_B.tolist(), strict=True):
                decisions[slot] = decisions[slot]._replace(drafter=drafter)
        return decisions

    def read(self) -> dict[int, Outcome]:
        """The outcome of every request that ran, by slot."""
        outcomes = dict.fromkeys((span.slot for span in self.spans), _UNDECIDED) | self.decisions
        for slot in self.banned_all:
            outcomes[slot] = outcomes[slot]._replace(bans_all=True)
        for slot, fault in self.faults.items():
            outcomes[slot] = outcomes[slot]._replace(fault=fault)
        for slot, (of_prompt, of_decision) in self.logprobs.items():
            outcome = outcomes[slot]
            outcomes[slot] = outcome._replace(prompt_logprobs=of_prompt, logprobs=of_decision)
        for slot, evidence in self.evidence.items():
            outcomes[slot] = outcomes[slot]._replace(evidence=evidence)
        return outcomes


def some_rows(logprobs: Logprobs, begin: int, end: int) -> Logprobs | None:
    """The rows `begin` to `end`, None if there are none."""
    return None if begin == end else Logprobs(*(column[begin:end] for column in logprobs))


def evidence_by_slot(step: StepInput, evidence: Evidence) -> dict[int, Evidence]:
    """Its rows, by the slots of those requests that want it."""
    slot_D = step.deciding_slots
    return {
        slot_D[d]: Evidence(*(column[r] for column in evidence))
        for r, d in enumerate(step.traced_D)
    }

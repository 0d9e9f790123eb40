"""A step as data: what goes into it and what comes out.

Charter: the records between scheduler, runner, drafters and engine. A `StepInput` names slots,
never requests: it can be replayed, delayed, or sent to other ranks, and true lengths are read from
the slots when it runs. A `StepResult` owns its tensors, so that it may be read after the next step
was launched. Nothing here decides or computes what a step is about.

Shape suffixes: B requests of the step, D those that decide, K drafts, M rows with
log-probabilities, N rows of logits, T packed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foretoken.ops import DraftBlock, Logprobs, Verdict

NONE = -1
"""In the place of a number of log-probabilities: none are wanted."""


class StepInput(NamedTuple):
    """Requests of one step, in batch order, as numbers on the host.

    Attributes:
        slot_B: where their state is.
        num_tokens_B: known tokens to compute.
        num_drafts_B: most drafts to verify after them; K_b is smaller where fewer tokens may
            follow, or where the drafter has fewer.
        decides_B: whether new tokens are drawn: at the end of a prompt and in every decode step.
        top_B: likeliest tokens to report beside each that is drawn; NONE: no log-probabilities.
        prompt_top_B: the same of the prompt's tokens; their logits are wanted in every row.
    """

    slot_B: Sequence[int]
    num_tokens_B: Sequence[int]
    num_drafts_B: Sequence[int]
    decides_B: Sequence[bool]
    top_B: Sequence[int]
    prompt_top_B: Sequence[int]

    def at(self, index: Sequence[int]) -> StepInput:
        """Some of the requests."""
        columns: list[Any] = [[column[i] for i in index] for column in self]
        return StepInput(*columns)

    @property
    def most_logprobs(self) -> int:
        """Likeliest tokens that any row wants; NONE if no row wants log-probabilities."""
        return max(*self.top_B, *self.prompt_top_B, NONE)


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
    """

    token_ids: list[int]
    num_drafts: int = 0
    num_accepted: int = 0
    is_finite: bool = True
    bans_all: bool = False
    fault: Exception | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None


class Decisions(NamedTuple):
    """The D rows of drafts and verdict as lists: each is moved to the host once.

    Attributes:
        tokens: accepted drafts and the token after them, if there is one.
    """

    num_drafts: list[int]
    num_accepted: list[int]
    finite: list[bool]
    tokens: list[list[int]]


class LogprobRows(NamedTuple):
    """Rows of `StepResult.logprobs` about one request: first its prompt, then its decision."""

    begin: int
    decision: int
    end: int


@dataclass(slots=True)
class StepResult:
    """What a step computed; it reads nothing that a later step may overwrite.

    Attributes:
        index_B: which requests of the step ran, ascending; one that had all its tokens already, or
            has failed, does not.
        deciding: which of `index_B` decided; the D rows of what follows.
        start_B, count_B: position of the first token of each request that ran, and how many it
            computed, drafts included.
        drafts: what was verified.
        verdict: the new tokens.
        faults: what the part of one request alone raised, by its row: its tokens are void.
        banned_all: rows whose logits were finite, but whose requests' parameters left no token.
        logprobs: of M rows; None if none are wanted.
        logprob_rows: which rows are whose, by index in the step.
        hidden: [T, H] of each layer that the drafter wants, request by request; the one part that
            is gone with the next pass.
    """

    index_B: Sequence[int]
    deciding: Sequence[int]
    start_B: Sequence[int]
    count_B: Sequence[int]
    drafts: DraftBlock
    verdict: Verdict
    faults: dict[int, Exception]
    banned_all: set[int] = field(default_factory=set)
    logprobs: Logprobs | None = None
    logprob_rows: dict[int, LogprobRows] = field(default_factory=dict)
    hidden: tuple[Tensor, ...] = ()
    _decisions: Decisions | None = None

    @classmethod
    def empty(cls) -> StepResult:
        """The result of a step whose requests had all ended already."""
        none, flags = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.bool)
        drafts = DraftBlock(token_BK=none.view(0, 0), num_B=none, cache=None, real_q_B=flags)
        verdict = Verdict(none.view(0, 1), none, flags)
        return cls((), (), (), (), drafts, verdict, {})

    @property
    def decisions(self) -> Decisions:
        """What was decided, on the host; waits for the device, once."""
        if self._decisions is None:
            verdict = self.verdict
            num_accepted, finite = verdict.n_accept_B.tolist(), verdict.finite_B.tolist()
            rows = zip(verdict.token_BK1.tolist(), num_accepted, finite, strict=True)
            tokens = [row[: accepted + is_finite] for row, accepted, is_finite in rows]
            num_drafts = self.drafts.num_B.tolist()
            self._decisions = Decisions(num_drafts, num_accepted, finite, tokens)
        return self._decisions

    def read(self) -> dict[int, Outcome]:
        """The outcome of every request that ran, by its index in the step."""
        outcomes = {index: Outcome([]) for index in self.index_B}
        num_drafts_D, num_accepted_D, finite_D, tokens_D = self.decisions
        for row, b in enumerate(self.deciding):
            outcomes[self.index_B[b]] = Outcome(
                tokens_D[row],
                num_drafts_D[row],
                num_accepted_D[row],
                finite_D[row],
                row in self.banned_all,
                self.faults.get(row),
            )
        if self.logprobs is not None:
            for index, (begin, decision, end) in self.logprob_rows.items():
                own = outcomes[index]
                outcomes[index] = own._replace(
                    prompt_logprobs=_some(self.logprobs, begin, decision),
                    logprobs=_some(self.logprobs, decision, end),
                )
        return outcomes

    def blame(self, logits_NV: Tensor) -> None:
        """Find out whose fault it is that requests have no token, while their logits are there."""
        first = 0
        num_drafts_D, num_accepted_D, finite_D, _ = self.decisions
        if all(finite_D):
            return
        for row, finite in enumerate(finite_D):
            highest_N = logits_NV[first : first + num_accepted_D[row] + 1].amax(dim=1)
            if not finite and bool(torch.isfinite(highest_N).all()):
                self.banned_all.add(row)
            first += num_drafts_D[row] + 1


def _some(logprobs: Logprobs, begin: int, end: int) -> Logprobs | None:
    """Some of the rows, None if there are none."""
    if begin == end:
        return None
    return Logprobs(
        logprobs.logprob_N[begin:end],
        logprobs.rank_N[begin:end],
        logprobs.top_logprob_NT[begin:end],
        logprobs.top_token_NT[begin:end],
    )

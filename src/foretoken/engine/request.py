"""`RequestGroup`: a prompt as the user sent it; `Request`: one of its n samples. No torch."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from foretoken.engine.detokenizer import Detokenizer
from foretoken.errors import ForetokenError
from foretoken.outputs import Logprob, RequestMetrics, TokenTrace
from foretoken.sampling.grammar import Matcher
from foretoken.sampling.history import EditHistory
from foretoken.sampling.params import SamplingParams


class Status(Enum):
    """The state of a request; FINISHED is final."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Share(NamedTuple):  # made for every request in every step: a dataclass takes 3 times as long
    """One request's share of a step.

    Attributes:
        start: number of the request's tokens that were computed before this step. Accepted drafts
            of a step that is not committed yet are not counted.
        num_tokens: known tokens to compute.
        max_drafts: in a decode step, most drafts to verify after the known tokens.
        decides: whether new tokens are drawn: at the end of a prompt and in every decode step.
        num_preemptions: `Request.num_preemptions` when the step was scheduled.
    """

    request: Request
    slot: int
    start: int
    num_tokens: int
    max_drafts: int
    decides: bool
    num_preemptions: int


class Delivered(NamedTuple):
    """How much of a sample was delivered: tokens, pieces of text, and whether also the end."""

    num_tokens: int = 0
    num_pieces: int = 0
    end: bool = False


@dataclass(slots=True, eq=False)
class Request:
    """State of one sample.

    Attributes:
        group: the user's request, of which this is sample `index`.
        key: the 64-bit noise key of the sample, which is also the seed that reproduces the sample.
        token_ids: prompt and generated ids.
        stop_ids: token ids that end the request: end-of-text unless ignored, and `stop_token_ids`.
        rule: name of the verification rule.
        num_speculative_tokens: the request's K; if it `adapts`, the K of its next step.
        drafter: the index of its drafter in `Limits.names`.
        waits_for_tokens: whether its next step is launched only after the tokens of its last step
            are known on the host.
        launched_share: its share of a step that is launched but not committed; else None.
        num_computed: leading tokens of `token_ids` with K/V in the target's cache.
        slot: index into the state by slot while the request runs; -1 while it has no slot.
        block_ids: cache blocks in order of position.
        block_serials: serials (see `BlockPool`) of the leading blocks that are in the prefix index.
        arrival: (priority, number in order of arrival); the lowest is served first.
        num_preemptions: how often the request lost its blocks and had to compute them again.
        trace: a record of each token, if requested.
        detokenizer: makes the text while the request runs; None: no text is made.
        pieces: the text that no later token can change, in the pieces in which it was read.
        history: the state that edits of logits depend on, made when the request gets a slot; None
            before, and without edits.
        matcher: the request's state in its grammar, made with the first token; else None.
        limit: most tokens that the request may have, prompt included; a field because a step reads
            it six times.
    """

    group: RequestGroup
    index: int
    key: int
    token_ids: list[int]
    stop_ids: frozenset[int] = frozenset()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    rule: str = "standard"
    num_speculative_tokens: int = 0
    drafter: int = 0
    adapts: bool = False
    status: Status = Status.WAITING
    waits_for_tokens: bool = False
    launched_share: Share | None = None
    num_computed: int = 0
    slot: int = -1
    block_ids: list[int] = field(default_factory=list)
    block_serials: list[int] = field(default_factory=list)
    arrival: tuple[int, int] = (0, 0)
    num_preemptions: int = 0
    origins: list[str] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    trace: list[TokenTrace] = field(default_factory=list)
    detokenizer: Detokenizer | None = None
    pieces: list[str] = field(default_factory=list)
    delivered: Delivered = field(default_factory=Delivered)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    history: EditHistory | None = None
    matcher: Matcher | None = None
    limit: int = field(init=False)
    params: SamplingParams = field(init=False)
    num_prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.params, self.num_prompt = self.group.params, len(self.group.prompt_ids)
        self.limit = self.num_prompt + self.params.token_limit

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_remaining(self) -> int:
        return self.limit - len(self.token_ids)

    @property
    def max_drafts(self) -> int:
        """Most drafts of the next decode step: K, or fewer if fewer tokens may be emitted."""
        return min(self.num_speculative_tokens, self.most_remaining - 1)

    @property
    def num_prefill(self) -> int:
        """Known tokens to compute before the request can decode; 0 when it decodes.

        The first token is drawn when the last token of the prompt is computed. Every later token is
        drawn by a decode step, which computes the last known token and verifies the drafts after
        it. So a preempted request first computes its K/V again except for the last token, and draws
        nothing: then the positions of drafts, and the noise that decides each token, do not depend
        on preemption.
        """
        if self.launched_share is not None and self.launched_share.decides:
            return 0
        num_known = len(self.token_ids)
        return num_known - self.num_scheduled - (num_known > self.num_prompt)

    @property
    def num_scheduled(self) -> int:
        """Leading tokens with K/V after the launched step, not counting accepted drafts."""
        share = self.launched_share
        return self.num_computed + (share.num_tokens if share else 0)

    @property
    def most_known(self) -> int:
        """Known tokens after the launched step, if all of its drafts are accepted."""
        share = self.launched_share
        return len(self.token_ids) + (share.max_drafts + 1 if share and share.decides else 0)

    @property
    def most_remaining(self) -> int:
        """Most tokens that may be emitted from the next step on; 0 if the launched step surely ends
        the request, or if the request must wait for that step's tokens."""
        share = self.launched_share
        if self.waits_for_tokens and share and share.decides:
            return 0
        return self.num_remaining - (1 if share and share.decides else 0)

    @property
    def decodes(self) -> bool:
        return self.num_prefill == 0

    def append(self, token: int) -> str | None:
        """Append a token and its text; returns the finish reason if the token ends the request."""
        self.token_ids.append(token)
        params, detokenizer = self.params, self.detokenizer
        ends_grammar = self._advance_grammar(token)
        can_stop = not params.min_tokens or self.num_output >= params.min_tokens
        is_stop_token = can_stop and token in self.stop_ids
        if detokenizer is not None and (not is_stop_token or params.include_stop_str_in_output):
            detokenizer.append(token)
        if is_stop_token:
            self.stop_reason = token if token in (params.stop_token_ids or ()) else None
            return "stop"
        if can_stop and detokenizer is not None:
            self.stop_reason = detokenizer.find_stop()
            if self.stop_reason is not None:
                return "stop"
        if can_stop and ends_grammar:
            return "stop"
        return None if self.num_remaining else "length"

    def _advance_grammar(self, token: int) -> bool:
        """Advance the grammar, if any, by a token; returns whether only the end of text may follow,
        which then need not be drawn."""
        grammar = self.params.grammar
        if grammar is None:
            return False
        self.matcher = self.matcher or grammar.matcher()
        self.matcher.append([token])
        return self.matcher.is_finished

    @property
    def needs_prompt_logits(self) -> bool:
        """Whether this request computes logits of all prompt tokens, even cached ones: the first
        sample does so for all samples, until the log-probabilities of the prompt are known."""
        rows = self.group.prompt_logprobs
        return self.index == 0 and rows is not None and len(rows) < self.num_prompt


@dataclass(slots=True, eq=False)
class RequestGroup:
    """One prompt as the user sent it, with all samples and their metrics."""

    request_id: str
    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    arrival: float = field(default_factory=time.perf_counter)
    samples: list[Request] = field(default_factory=list)
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    error: ForetokenError | None = None
    delivered_prompt: bool = False  # whether a delta has contained the prompt
    delivered_prompt_logprobs: bool = False

    @property
    def finished(self) -> bool:
        return all(request.status is Status.FINISHED for request in self.samples)

"""Outputs of requests, and metrics. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Self

from foretoken.errors import ForetokenError
from foretoken.foreign import absent_attribute


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log-probability under the model's raw distribution, and its rank (1 = likeliest).

    decoded_token: the text of this token by itself, with U+FFFD for parts of a character; None
        without a tokenizer or with detokenize=False
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class TokenTrace:
    """How a token came about, or why a draft was not emitted; see docs/verification.md.

    p and q are probabilities as verification uses them: after edits, temperature and filters. At
    temperature 0 p is 1 or 0.

    Attributes:
        decoded_token: as in `Logprob`.
        position: the token's index in prompt and output together, from 0.
        round: number of the pass of the target that decided the token, from 0 in each sample.
        origin: as in `CompletionOutput.origins`. A draft that was not emitted is `rejected`, or
            `unread` (after a rejected one), or `accepted` (after the token that ended the sample).
        p: the target's probability of the token.
        q: the drafter's probability of the token at this position; None if there was no draft, or
            if q is one-hot (1 for the draft and 0 for all other tokens), as under `coupled`.
        drafter: name of the drafter of this round; None if nothing was drafted.
        draft_index: the index of a draft in its round, from 0; None if the token was no draft.
        u: the uniform random number of a draft's acceptance test. None if no number decides (under
            `coupled`, at temperature 0), or if the draft counts as no draft.
        threshold: the bound that u must be below: under `standard` min(1, p / q), with q = 1 if q
            is None; under `block` h_i; under `synthetic` the configured rate. None if u is None.
        residual_mass: under `block`, S_i of a draft with another draft after it; else None.
        reason: why a draft was rejected, one of `REASONS`; else None.
        dropped: for the last token of a round, the drafts that were not emitted, in order. A
            `resampled` token replaced the first of these drafts.
    """

    token_id: int
    decoded_token: str | None
    position: int
    round: int
    rule: str
    origin: str
    p: float
    q: float | None = None
    drafter: str | None = None
    draft_index: int | None = None
    u: float | None = None
    threshold: float | None = None
    residual_mass: float | None = None
    reason: str | None = None
    dropped: tuple[TokenTrace, ...] = ()


REASONS = {
    "standard": "u >= p/q",
    "block": "u >= h",
    "synthetic": "u >= rate",
    "coupled": "the target drew another token",
    "greedy": "not the argmax",
    "placeholder": "no token, or one that its q excludes",
    "not finite": "q is not finite",
}
"""Why a draft is rejected: by rule, `greedy` for temperature 0; and for drafts that count as no
draft, `placeholder` and `not finite`."""


@dataclass(slots=True)
class DrafterMetrics:
    """Counts of one drafter, under the names of `SpeculationMetrics`."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(slots=True)
class SpeculationMetrics:
    """Counts of verification for one request, or summed over requests.

    A draft accepted after the token that ended the request counts as accepted, but is not emitted.

    Attributes:
        num_steps: target passes that emitted tokens.
        num_drafts: how many of `num_steps` verified at least one drafted token.
        accepted_per_position: how often the draft at each index was accepted, length K.
        drafted_per_position: how often there was a draft at each index, length K.
        steps_per_k: item k: how many of `num_steps` verified k drafts, from k = 0.
        num_synthetic_drafts: how many of `num_drafts` were decided by the rule `synthetic`, at
            configured rates that say nothing about the drafter.
        drafters: counts of each drafter that drafted, by name.
    """

    num_steps: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    drafted_per_position: list[int] = field(default_factory=list)
    steps_per_k: list[int] = field(default_factory=list)
    num_synthetic_drafts: int = 0
    drafters: dict[str, DrafterMetrics] = field(default_factory=dict)

    def observe(
        self, num_drafted: int, num_accepted: int, drafter: str = "", *, synthetic: bool = False
    ) -> None:
        """Record one step of one request; `synthetic`: whether the rule `synthetic` decided."""
        self.num_steps += 1
        self.steps_per_k.extend([0] * (num_drafted + 1 - len(self.steps_per_k)))
        self.steps_per_k[num_drafted] += 1
        if not num_drafted:
            return
        self.num_drafts += 1
        self.num_synthetic_drafts += synthetic
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        self._add_to_drafter(drafter, DrafterMetrics(1, num_drafted, num_accepted))
        drafted, accepted = self.drafted_per_position, self.accepted_per_position
        for counts, num_counted in ((drafted, num_drafted), (accepted, num_accepted)):
            counts.extend([0] * (num_drafted - len(counts)))
            for i in range(num_counted):
                counts[i] += 1

    def _add_to_drafter(self, name: str, more: DrafterMetrics) -> None:
        counts = self.drafters.setdefault(name, DrafterMetrics())
        counts.num_drafts += more.num_drafts
        counts.num_draft_tokens += more.num_draft_tokens
        counts.num_accepted_tokens += more.num_accepted_tokens

    def add(self, other: SpeculationMetrics) -> None:
        """Add another request's counts to these."""
        for name, counts in other.drafters.items():
            self._add_to_drafter(name, counts)
        for counter in fields(SpeculationMetrics):
            if counter.name == "drafters":
                continue
            old, more = getattr(self, counter.name), getattr(other, counter.name)
            if isinstance(old, list):
                total: Any = [a + b for a, b in zip_longest(old, more, fillvalue=0)]
            else:
                total = old + more
            setattr(self, counter.name, total)

    def copy(self) -> Self:
        return replace(
            self,
            accepted_per_position=[*self.accepted_per_position],
            drafted_per_position=[*self.drafted_per_position],
            steps_per_k=[*self.steps_per_k],
            drafters={name: replace(counts) for name, counts in self.drafters.items()},
        )

    @property
    def synthetic_acceptance(self) -> bool:
        return self.num_synthetic_drafts > 0

    @property
    def mean_k(self) -> float:
        """Drafts per step; 0.0 without steps."""
        return self.num_draft_tokens / self.num_steps if self.num_steps else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Accepted drafts + 1, per verification; 1.0 when nothing was drafted."""
        return 1.0 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted; 0.0 when nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0


@dataclass(slots=True)
class EngineMetrics(SpeculationMetrics):
    """Counts of all requests, and the gain from speculation if K is `auto`.

    Attributes:
        controlled_seconds: seconds of the steps for which K was chosen and in which all requests
            decoded.
        estimated_plain_seconds: seconds that plain decoding would need, by the measured costs of
            steps, for as many tokens as these steps were expected to emit.
        realised_plain_seconds: as `estimated_plain_seconds`, for the tokens that were emitted.
    """

    controlled_seconds: float = 0.0
    estimated_plain_seconds: float = 0.0
    realised_plain_seconds: float = 0.0

    @property
    def estimated_speedup(self) -> float | None:
        """Expected speed-up over plain decoding; None if `controlled_seconds` is 0."""
        seconds = self.controlled_seconds
        return self.estimated_plain_seconds / seconds if seconds else None

    @property
    def realised_speedup(self) -> float | None:
        """Measured speed-up over estimated plain decoding; None if `controlled_seconds` is 0."""
        seconds = self.controlled_seconds
        return self.realised_plain_seconds / seconds if seconds else None


@dataclass(slots=True)
class RequestMetrics(SpeculationMetrics):
    """Counts and times of one request, all samples together.

    Attributes:
        queue_time: seconds from submission until the first sample had a slot.
        time_to_first_token: seconds from submission to the first token of any sample.
        tokens_per_second: generated tokens over seconds since submission.
        num_cached_tokens: prompt tokens of the first sample whose keys and values were found in
            cache blocks of earlier requests.
        num_preemptions: how often a sample lost its cache blocks to an older request and had to
            compute them again.
    """

    queue_time: float | None = None
    time_to_first_token: float | None = None
    tokens_per_second: float = 0.0
    num_cached_tokens: int = 0
    num_preemptions: int = 0

    if not TYPE_CHECKING:
        __getattr__ = absent_attribute


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sample of a request.

    Attributes:
        index: number j of the sample, 0..n-1.
        token_ids: generated ids; a stop token that ended the output is the last of them.
        text: decoded text, without the stop string or the text of the stop token that ended it
            unless `include_stop_str_in_output`; empty without a tokenizer or with detokenize=False.
        finish_reason: None while the sample runs, then `stop` (a stop string, a stop token or
            end-of-text), `length` (`max_tokens`), `abort` (by the caller), `interrupted` (by Ctrl-C
            or SIGTERM: `on_interrupt` of `LLM.generate`), or `error` (see `RequestOutput.error`);
            after an abort, an interrupt or an error the output is incomplete.
        stop_reason: the stop string or stop token id that ended the output, or the name of the
            signal that interrupted it; else None.
        seed: in float32, SamplingParams(seed=seed, n=1) reproduces this sample.
        logprobs: per generated token, token id -> Logprob; None unless asked for.
        origins: per generated token: `accepted` (a draft), `resampled` (replaces a rejected draft),
            `bonus` (after all drafts were accepted) or `plain` (no draft before it).
        synthetic_acceptance: the rule `synthetic` decided which drafts were accepted: the text is
            meaningless by design.
        trace: a record per generated token; None unless asked for.
    """

    index: int
    token_ids: list[int]
    text: str
    finish_reason: str | None
    stop_reason: str | int | None = None
    seed: int = 0
    logprobs: list[dict[int, Logprob]] | None = None
    origins: list[str] = field(default_factory=list)
    synthetic_acceptance: bool = False
    trace: list[TokenTrace] | None = None

    if not TYPE_CHECKING:
        __getattr__ = absent_attribute

    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the log-probabilities of `token_ids`; None unless `logprobs` were asked for."""
        if self.logprobs is None:
            return None
        pairs = zip(self.logprobs, self.token_ids, strict=True)
        return sum(row[token].logprob for row, token in pairs)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The result of one prompt.

    error: why the request was refused or ended, or None; with an error, outputs are incomplete
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    error: ForetokenError | None = None

    if not TYPE_CHECKING:
        __getattr__ = absent_attribute

    @property
    def finished(self) -> bool:
        """Whether every sample has ended; True for a refused prompt, which has no samples."""
        return all(o.finish_reason for o in self.outputs)

    @property
    def num_cached_tokens(self) -> int:
        """`metrics.num_cached_tokens`, under vLLM's name."""
        return self.metrics.num_cached_tokens

    @property
    def synthetic_acceptance(self) -> bool:
        return any(o.synthetic_acceptance for o in self.outputs)

    @property
    def interrupted_by(self) -> str | None:
        """`SIGINT` or `SIGTERM` if a signal ended any sample early, else None."""
        names = (o.stop_reason for o in self.outputs if o.finish_reason == "interrupted")
        return next((name for name in names if isinstance(name, str)), None)


@dataclass(frozen=True, slots=True)
class CompletionDelta(CompletionOutput):
    """What is new in one sample since its last delta. All deltas together are a `CompletionOutput`.

    Attributes:
        index, seed, synthetic_acceptance: as in `CompletionOutput`, in every delta of the sample.
        token_ids, logprobs, origins, trace: for the new tokens; a delta has all tokens of a step.
        text: the continuation of the text so far, which never changes. While a stop string or a
            character is incomplete, tokens come without text, and later text without tokens.
        finish_reason, stop_reason: as in `CompletionOutput`, in the last delta; None before.
    """

    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class RequestDelta:
    """What is new in one request since its last delta. All deltas together are a `RequestOutput`.

    Attributes:
        outputs: the samples that have something new, by index.
        finished: whether this is the last delta: every sample has ended.
        prompt, prompt_token_ids: in the first delta; None after it.
        prompt_logprobs: in the first delta after the prompt was computed, if asked for; else None.
        metrics: in the last delta; None before.
        error: why the request failed, from the failure on; else None.
    """

    request_id: str
    outputs: list[CompletionDelta]
    finished: bool = False
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics | None = None
    error: ForetokenError | None = None

    @classmethod
    def merge(cls, deltas: Sequence[Self]) -> Self:
        """Consecutive deltas of one request, at least one, as one delta."""
        by_sample: dict[int, list[CompletionDelta]] = {}
        for delta in deltas:
            for sample in delta.outputs:
                by_sample.setdefault(sample.index, []).append(sample)
        prompt_fields: dict[str, Any] = {}
        for name in ("prompt", "prompt_token_ids", "prompt_logprobs"):  # at most one delta has each
            values = (getattr(delta, name) for delta in deltas)
            prompt_fields[name] = next((value for value in values if value is not None), None)
        outputs = [_concatenate(by_sample[index]) for index in sorted(by_sample)]
        return replace(deltas[-1], outputs=outputs, **prompt_fields)


def _concatenate(deltas: Sequence[CompletionDelta]) -> CompletionDelta:
    """Consecutive deltas of one sample as one; only the last delta can have a finish reason."""
    last = deltas[-1]
    joined: dict[str, Any] = {"text": "".join(delta.text for delta in deltas)}
    for name in ("token_ids", "logprobs", "origins", "trace"):
        if getattr(last, name) is not None:
            joined[name] = [item for delta in deltas for item in getattr(delta, name) or ()]
    return replace(last, **joined)

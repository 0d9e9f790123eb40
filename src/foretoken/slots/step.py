"""The records of a step: the message that asks for it, its state on the device, its result.

Charter: records that engine, runner, slots and drafters exchange, and the form of a message as
bytes. Nothing is decided here. A `StepPlan` names slots, not requests: it can be recorded, replayed
in another process, or sent to other ranks. True lengths are read from the slots when it runs.
`PackedEdits` (`sampling/edits.py`) may follow as a second message of the same step, once its drafts
are known.

Shape suffixes: B requests of the step, D those that decide, K drafts, N rows of logits, T packed
tokens.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from foretoken.ops import DraftBlock, Evidence, ForwardOutput, Logprobs, Rule, SlotParams
from foretoken.ops.pinned import ToHost
from foretoken.ops.steps import DraftRequests, ForwardBatch, StepTokens
from foretoken.sampling.edits import PackedEdits
from foretoken.sampling.grammar import Grammar
from foretoken.sampling.params import SamplingParams

NONE = -1
"""As a number of log-probabilities: none are wanted."""


class Admission(NamedTuple):
    """The state that a request brings into its slot; `StepPlan.new_blocks` has its blocks.

    Attributes:
        key: the 64-bit key of its noise.
        token_ids: known tokens, of which the first `num_prompt` are the prompt.
        limit: most tokens that it may have, prompt included.
        num_computed: number of leading tokens with K/V in the cache.
        drafter: the number of its drafter.
    """

    slot: int
    key: int
    params: SamplingParams
    rule: Rule
    token_ids: Sequence[int]
    num_prompt: int
    limit: int
    num_computed: int = 0
    drafter: int = 0

    @property
    def shows_drafts(self) -> bool:
        """Whether its tokens, though not their distribution, depend on what is drafted."""
        if self.rule is Rule.SYNTHETIC:
            return True
        return self.params.temperature > 0 and self.rule is not Rule.COUPLED

    @property
    def has_grammar(self) -> bool:
        """Whether its output must match a grammar."""
        return self.params.grammar is not None


class StepInput(NamedTuple):
    """Requests of one step, in batch order.

    Attributes:
        slot_B: slots of their state.
        num_tokens_B: known tokens to compute.
        max_drafts_B: most drafts to verify after them; K_b is smaller if fewer tokens may follow,
            or if the drafter has fewer.
        decides_B: whether new tokens are drawn: at the end of a prompt and in every decode step.
        num_logprobs_B: likeliest tokens to report with each that is drawn; NONE: no report.
        num_prompt_logprobs_B: the same for the prompt's tokens, which needs logits of every row.
        traces_B: whether evidence of the decisions is wanted.
    """

    slot_B: Sequence[int] = ()
    num_tokens_B: Sequence[int] = ()
    max_drafts_B: Sequence[int] = ()
    decides_B: Sequence[bool] = ()
    num_logprobs_B: Sequence[int] = ()
    num_prompt_logprobs_B: Sequence[int] = ()
    traces_B: Sequence[bool] = ()

    @property
    def most_logprobs(self) -> int:
        """Likeliest tokens that any row wants; NONE if no row wants log-probabilities."""
        return max([*self.num_logprobs_B, *self.num_prompt_logprobs_B, NONE])

    @property
    def slot_D(self) -> list[int]:
        """Slots of the requests that decide."""
        return [s for s, decides in zip(self.slot_B, self.decides_B, strict=True) if decides]

    @property
    def of_B(self) -> list[int]:
        """Index of each request among those that decide; -1 if it does not."""
        index = count()
        return [next(index) if decides else NONE for decides in self.decides_B]

    @property
    def traced_D(self) -> list[int]:
        """Indices of deciding requests that want evidence."""
        if True not in self.traces_B:
            return []
        return [d for d, traces in zip(self.of_B, self.traces_B, strict=True) if traces and d >= 0]

    @property
    def reported_D(self) -> list[int]:
        """Indices of deciding requests that want log-probabilities of drawn tokens."""
        columns = zip(self.of_B, self.num_logprobs_B, strict=True)
        return [d for d, most in columns if most != NONE and d >= 0]

    @property
    def reported_prompts_B(self) -> list[int]:
        """Indices of requests that want log-probabilities of their prompt's tokens."""
        return [b for b, most in enumerate(self.num_prompt_logprobs_B) if most != NONE]


NO_STEP = StepInput()


class StepPlan(NamedTuple):
    """A step, and the slots and blocks that changed hands before it; applied in this order.

    Attributes:
        released: slots of requests that ended or were preempted.
        admissions: requests that are new to their slots.
        new_blocks: (slot, first column, block ids): entries to append to block tables.
        fresh_blocks: blocks handed out, which still hold the data of their last owner.
        step: the requests to compute; the rest of the plan is applied even if there are none.
        timed: whether to time the phases of the step for its result.
    """

    released: Sequence[int] = ()
    admissions: Sequence[Admission] = ()
    new_blocks: Sequence[tuple[int, int, Sequence[int]]] = ()
    fresh_blocks: Sequence[int] = ()
    step: StepInput = NO_STEP
    timed: bool = False


class StepShape(NamedTuple):
    """Everything that a captured step depends on besides tensors.

    Attributes:
        size: requests, padding included; all of them decode.
        most_drafts: columns of drafts.
        has_filters, rules: as in `SlotParams`.
        samples: whether a request draws at random, so that q of drafts is kept.
        drafters: numbers of the drafters that its requests may have.
    """

    size: int
    most_drafts: int
    has_filters: bool
    rules: frozenset[Rule]
    samples: bool
    drafters: frozenset[int] = frozenset()


class StepRequests(NamedTuple):
    """The requests of a step as tensors on the slots' device. Numbers of drafts are upper bounds.

    Attributes:
        step: the same requests as numbers.
        params: the parameters of all slots, with flags that hold for this step.
        drafters: numbers of the drafters that its requests may have.
        slot_B, num_tokens_B: int64; slots and known tokens to compute. After the requests of `step`
            there may be padding: the spare slot, with one token and no drafts.
        slot_D, max_drafts_D: int64; of those that decide.
        of_B: int64; index of each of the B requests among the D, -1: it does not decide; None: all
            decide, in order.
        most_drafts: no request has more.
        samples: False: no request draws at random; True: some may.
        shape: of a captured step; None runs operator by operator.
        others: drafts may come from another drafter than the one that reads this.
    """

    step: StepInput
    params: SlotParams
    drafters: frozenset[int]
    slot_B: Tensor
    num_tokens_B: Tensor
    slot_D: Tensor
    max_drafts_D: Tensor
    of_B: Tensor | None
    most_drafts: int
    samples: bool = True
    shape: StepShape | None = None
    others: bool = False


@dataclass(slots=True)
class OpenStep:
    """A step after the launch of drafting and of the target's pass, before verification.

    Attributes:
        tokens: tokens to compute of each request.
        seconds: time of the step on the host so far.
    """

    requests: StepRequests
    draft_requests: DraftRequests
    drafts: DraftBlock
    tokens: StepTokens
    batch: ForwardBatch
    output: ForwardOutput
    seconds: float = 0.0

    @property
    def logits_NV(self) -> Tensor:
        """Raw rows of the requests that decide."""
        return self.batch.deciding(self.output.logits_NV)

    def drafted(self) -> list[list[int]]:
        """Drafts of each deciding request; waits for the device."""
        columns = zip(self.drafts.token_BK.tolist(), self.drafts.num_B.tolist(), strict=True)
        return [token_K[:num] for token_K, num in columns]


class Outcome(NamedTuple):
    """One request's part of a result, on the host.

    Attributes:
        token_ids: accepted drafts and the one token after them; empty within a prefill.
        num_drafts, num_accepted: drafts that were verified, and how many of them were accepted.
        is_finite: False if there is no token after the accepted drafts: the target's logits were
            not finite, or, if `bans_all`, the request's own parameters ban every token.
        fault: the exception of the work for this request alone; its tokens are void.
        logprobs: one row per token, if asked for.
        prompt_logprobs: rows of the prompt tokens after those computed here, if asked for.
        drafter: the number of the drafter that made the drafts; None: the request's own.
        evidence: its row of each column, if asked for.
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
        """The origin of each token, as in `CompletionOutput.origins`."""
        last = "bonus" if self.num_accepted == self.num_drafts else "resampled"
        return ["accepted"] * self.num_accepted + [last if self.num_drafts else "plain"]


_UNDECIDED = Outcome([])


@dataclass
class StepResult:
    """What a step computed. Only reading blocks; later steps do not change what it reads.

    Attributes:
        step: its requests.
        packet: of `Steps.advance`; num_padded: requests in it that are padding, all of which
            decide.
        faults: by slot, exceptions of drafting for one request alone.
        source_D: numbers of the drafters that made the drafts; None: the requests' own.
        is_finite_N: whether each deciding row was finite before edits; None: no row became
            non-finite by edits.
        logprobs: `num_drafts + 1` rows for each deciding request that wants some, padded to the
            request with most, then those of prompts; None if no request wants any.
        evidence: of requests that want it; None if none does.
        seconds: time of the step in the runner; events: those that it recorded on a GPU.
        phases: seconds of each phase, if timed.
        aux: hidden states [T, H] of each layer in the drafter's `target_view`, in the order of the
            batch; overwritten by the next step.
    """

    step: StepInput = NO_STEP
    packet: ToHost | None = None
    num_padded: int = 0
    faults: dict[int, Exception] = field(default_factory=dict)
    source_D: Tensor | None = None
    is_finite_N: ToHost | None = None
    logprobs: ToHost | None = None
    evidence: ToHost | None = None
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    events: Sequence[Any] = ()
    aux: tuple[Tensor, ...] = ()

    @cached_property
    def decisions(self) -> dict[int, Outcome]:
        """The outcomes of deciding requests, by slot."""
        if self.packet is None:
            return {}
        numbers, slot_D = self.packet.wait()[0].tolist(), self.step.slot_D
        at = len(self.step.slot_B) + self.num_padded
        width = (len(numbers) - at) // max(len(slot_D) + self.num_padded, 1)
        decisions = {}
        for slot in slot_D:
            drafted, accepted, finite = numbers[at : at + 3]
            tokens = numbers[at + 3 : at + 3 + accepted + finite]
            decisions[slot] = Outcome(tokens, drafted, accepted, finite > 0)
            at += width
        return decisions

    def read(self) -> dict[int, Outcome]:
        """The outcome of every request of the step, by slot."""
        outcomes = dict.fromkeys(self.step.slot_B, _UNDECIDED) | self.decisions
        if self.source_D is not None:
            for slot, drafter in zip(self.decisions, self.source_D.tolist(), strict=True):
                outcomes[slot] = outcomes[slot]._replace(drafter=drafter)
        if self.is_finite_N is not None:
            self._read_bans(outcomes, self.is_finite_N.wait()[0].tolist())
        if self.logprobs is not None:
            self._read_logprobs(outcomes, Logprobs(*self.logprobs.wait()))
        if self.evidence is not None:
            columns = self.evidence.wait()
            slot_D = self.step.slot_D
            for r, d in enumerate(self.step.traced_D):
                evidence = Evidence(*(column[r] for column in columns))
                outcomes[slot_D[d]] = outcomes[slot_D[d]]._replace(evidence=evidence)
        for slot, fault in self.faults.items():
            outcomes[slot] = outcomes[slot]._replace(fault=fault)
        return outcomes

    def _read_bans(self, outcomes: dict[int, Outcome], is_finite_N: list[bool]) -> None:
        """Set `bans_all` where logits were finite before the request's own edits."""
        first = 0
        for slot, outcome in self.decisions.items():
            raw = all(is_finite_N[first : first + outcome.num_accepted + 1])
            if raw and not outcome.is_finite:
                outcomes[slot] = outcomes[slot]._replace(bans_all=True)
            first += outcome.num_drafts + 1

    def _read_logprobs(self, outcomes: dict[int, Outcome], found: Logprobs) -> None:
        step, slot_D = self.step, self.step.slot_D
        reported, prompts = step.reported_D, step.reported_prompts_B
        num_decided = len(found.rank_N) - sum(step.num_tokens_B[b] for b in prompts)
        for i, d in enumerate(reported):
            outcome, first = outcomes[slot_D[d]], i * num_decided // len(reported)
            rows = _some_rows(found, first, len(outcome.token_ids))
            outcomes[slot_D[d]] = outcome._replace(logprobs=rows)
        first = num_decided
        for b in prompts:
            # The token after the prompt is no part of it.
            rows = _some_rows(found, first, step.num_tokens_B[b] - step.decides_B[b])
            slot, first = step.slot_B[b], first + step.num_tokens_B[b]
            outcomes[slot] = outcomes[slot]._replace(prompt_logprobs=rows)


def _some_rows(logprobs: Logprobs, begin: int, count: int) -> Logprobs | None:
    """`count` rows from `begin` on; None if there are none."""
    return Logprobs(*(column[begin : begin + count] for column in logprobs)) if count else None


def encode(message: StepPlan | PackedEdits) -> bytes:
    """A message as JSON, with every number to the bit."""
    if isinstance(message, StepPlan):
        admissions = [a._replace(params=_written(a.params)) for a in message.admissions]  # type: ignore[arg-type]
        written = message._replace(admissions=admissions)
        return json.dumps({"plan": written}, default=list).encode()  # `list` for ranges
    return json.dumps({"edits": [_packed(column) for column in message]}).encode()


def decode(data: bytes, compiled: Callable[[Any], Grammar | None]) -> StepPlan | PackedEdits:
    """The message that `encode` wrote.

    Args:
        compiled: compiles a grammar from its source, in the reading process.
    """
    message = json.loads(data)
    if "edits" in message:
        row_4E, mask_RW, *entries = map(_unpacked, message["edits"])
        return PackedEdits(row_4E, mask_RW, *entries)
    released, admitted, new_blocks, fresh_blocks, step, timed = message["plan"]
    admissions = []
    for slot, key, params, rule, *numbers in admitted:
        params["logit_bias"] = dict(params["logit_bias"]) if params["logit_bias"] else None
        params["structured_outputs"] = compiled(params["structured_outputs"])
        admissions.append(Admission(slot, key, SamplingParams(**params), Rule(rule), *numbers))
    return StepPlan(released, admissions, new_blocks, fresh_blocks, StepInput(*step), timed)


def _written(params: SamplingParams) -> dict[str, Any]:
    written = {f.name: getattr(params, f.name) for f in fields(params)}
    written["logit_bias"] = list((params.logit_bias or {}).items())
    written["structured_outputs"] = params.grammar and params.grammar.asked
    return written


def _packed(array: np.ndarray[Any, Any] | None) -> list[Any] | None:
    if array is None:
        return None
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return [array.dtype.str, array.shape, data]


def _unpacked(packed: list[Any] | None) -> Any:
    if packed is None:
        return None
    kind, shape, data = packed
    return np.frombuffer(base64.b64decode(data), dtype=kind).reshape(shape).copy()

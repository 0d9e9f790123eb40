"""The records of a step that engine, runner, slots and drafters exchange: the message that asks for
the step, the step's state on the device, and the result.

A `StepPlan` names slots, not requests: it can be recorded, replayed in another process, or sent to
other ranks. The step reads the true lengths of requests from the slots. `PackedEdits`
(`sampling/edits.py`) may follow as a second message of the step, once the drafts are known.

A request *decides* in a step if the step draws new tokens for it.

Shape suffixes: B requests of the step, D deciding requests, K drafts, N rows of logits, T packed
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
"""Stands for a number of log-probabilities: the request wants no log-probabilities."""


class Admission(NamedTuple):
    """The state of a request that gets a slot; `StepPlan.new_blocks` has the request's blocks.

    key: the 64-bit key of the request's noise.
    token_ids: known tokens, of which the first `num_prompt` are the prompt.
    limit: most tokens that the request may have, prompt included.
    num_computed: number of leading tokens with K/V in the cache.
    drafter: the number of the request's drafter.
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
    def depends_on_drafts(self) -> bool:
        """Whether other drafts could change the drawn tokens; under the lossless rules they never
        change the distribution of the tokens."""
        if self.rule is Rule.SYNTHETIC:
            return True
        return self.params.temperature > 0 and self.rule is not Rule.COUPLED

    @property
    def has_grammar(self) -> bool:
        return self.params.grammar is not None


class StepInput(NamedTuple):
    """Requests of one step, in batch order.

    slot_B: the requests' slots.
    num_tokens_B: known tokens to compute.
    max_drafts_B: most drafts to verify after the known tokens. The true number K_b is smaller if
        the request may have fewer tokens, or if the drafter makes fewer drafts.
    decides_B: whether new tokens are drawn: at the end of a prompt and in every decode step.
    num_logprobs_B: how many of the likeliest tokens to report with each drawn token; NONE: no
        log-probabilities.
    num_prompt_logprobs_B: the same for each token of the prompt, which needs the logits of all
        rows.
    traces_B: whether to report the evidence of the decisions.
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
        """The largest number of likeliest tokens to report, or NONE."""
        return max([*self.num_logprobs_B, *self.num_prompt_logprobs_B, NONE])

    @property
    def slot_D(self) -> list[int]:
        return [s for s, decides in zip(self.slot_B, self.decides_B, strict=True) if decides]

    @property
    def decider_B(self) -> list[int]:
        """The index d of each request among the deciding requests; -1 if it does not decide."""
        index = count()
        return [next(index) if decides else -1 for decides in self.decides_B]

    @property
    def traced_D(self) -> list[int]:
        """Indices d of the deciding requests that want evidence."""
        if True not in self.traces_B:
            return []
        return [
            d for d, traces in zip(self.decider_B, self.traces_B, strict=True) if traces and d >= 0
        ]

    @property
    def reported_D(self) -> list[int]:
        """Indices d of the deciding requests that want log-probabilities of drawn tokens."""
        columns = zip(self.decider_B, self.num_logprobs_B, strict=True)
        return [d for d, num_logprobs in columns if num_logprobs != NONE and d >= 0]

    @property
    def reported_prompts_B(self) -> list[int]:
        """Indices b of the requests that want log-probabilities of their prompt's tokens."""
        counts = enumerate(self.num_prompt_logprobs_B)
        return [b for b, num_logprobs in counts if num_logprobs != NONE]


NO_STEP = StepInput()


class StepPlan(NamedTuple):
    """A step, and the changes of slots and blocks before the step, in the order of the fields.

    released: slots of requests that ended or were preempted.
    admissions: requests that are new to their slots.
    new_blocks: (slot, first column, block ids): entries to append to block tables.
    fresh_blocks: blocks with a new owner, which still have the data of the last owner.
    step: the requests to compute. If there are none, the rest of the plan is still applied.
    timed: whether to time the phases of the step; `StepResult` has the times.
    """

    released: Sequence[int] = ()
    admissions: Sequence[Admission] = ()
    new_blocks: Sequence[tuple[int, int, Sequence[int]]] = ()
    fresh_blocks: Sequence[int] = ()
    step: StepInput = NO_STEP
    timed: bool = False


class StepShape(NamedTuple):
    """Everything that a captured step depends on besides tensors.

    size: requests, padding included; all of them decode.
    most_drafts: columns of drafts.
    has_filters, rules: as in `SlotParams`.
    samples: whether any request draws at random, so that the drafts' q is kept.
    drafters: numbers of the drafters that the step's requests may have.
    """

    size: int
    most_drafts: int
    has_filters: bool
    rules: frozenset[Rule]
    samples: bool
    drafters: frozenset[int] = frozenset()


class StepRequests(NamedTuple):
    """The requests of a step as tensors on the slots' device. Numbers of drafts are upper bounds.

    step: the same requests as Python numbers.
    params: the parameters of all slots; the flags hold for this step.
    drafters: numbers of the drafters that the step's requests may have.
    slot_B, num_tokens_B: int64; slots and known tokens to compute. After the requests of `step`
        there may be padding: the spare slot, with one token and no drafts.
    slot_D, max_drafts_D: int64; slots and most drafts of the deciding requests.
    decider_B: int64; the index d of each request among the deciding requests, or -1 if it does not
        decide. None: all requests decide, in order.
    most_drafts: the most drafts of any request.
    samples: False: no request draws at random; True: some may.
    shape: the shape of a captured step; None: the step runs operator by operator.
    has_other_drafters: for a drafter that observes the step: whether another drafter may have made
        some of the drafts.
    """

    step: StepInput
    params: SlotParams
    drafters: frozenset[int]
    slot_B: Tensor
    num_tokens_B: Tensor
    slot_D: Tensor
    max_drafts_D: Tensor
    decider_B: Tensor | None
    most_drafts: int
    samples: bool = True
    shape: StepShape | None = None
    has_other_drafters: bool = False


@dataclass(slots=True)
class OpenStep:
    """A step after the launch of drafting and of the target's pass, before verification.

    tokens: which tokens of each request the target computes.
    seconds: the host's time for the step so far.
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
        return self.batch.deciding(self.output.logits_NV)

    def read_drafts(self) -> list[list[int]]:
        """The drafts of each deciding request; waits for the device."""
        columns = zip(self.drafts.token_BK.tolist(), self.drafts.num_B.tolist(), strict=True)
        return [token_K[:num] for token_K, num in columns]


class Outcome(NamedTuple):
    """The result of a step for one request, on the host.

    token_ids: accepted drafts and the one token after them; empty within a prefill.
    num_drafts, num_accepted: drafts that were verified, and how many of them were accepted.
    is_finite: False if there is no token after the accepted drafts. Then the target's logits were
        not finite, or, if `bans_all`, the request's own parameters ban every token.
    fault: an exception raised by work for this request only; the tokens must not be used.
    logprobs: one row per token, if requested.
    prompt_logprobs: if requested, one row for each prompt token that follows a token computed in
        this step.
    drafter: number of the drafter that made the drafts; None: the request's own drafter.
    evidence: this request's row of each tensor in `Evidence`, if requested.
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
        """`CompletionOutput.origins` of these tokens."""
        last = "bonus" if self.num_accepted == self.num_drafts else "resampled"
        return ["accepted"] * self.num_accepted + [last if self.num_drafts else "plain"]


@dataclass
class StepResult:
    """What a step computed. Only its methods wait for the device. Later steps overwrite only `aux`.

    step: the requests of the step.
    packet: the numbers that `Steps.advance` returns.
    num_padded: how many requests in the packet are padding; all of these decide.
    faults: by slot, exceptions of drafting for one request only.
    source_D: numbers of the drafters that made the drafts; None: the requests' own drafters.
    is_finite_N: whether each deciding row was finite before edits; None: edits made no row
        non-finite.
    logprobs: for each deciding request that wants log-probabilities, `num_drafts + 1` rows, padded
        to the same number for all; then a row for each token of prompts whose log-probabilities
        are wanted. None: no request wants log-probabilities.
    evidence: the `Evidence` of the requests that want it; None: no request wants it.
    seconds: the host's time for the step in the runner.
    events: (phase, event) for each event recorded on a GPU.
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
        """The outcomes of deciding requests, by slot; see `Steps.advance` for the packet."""
        if self.packet is None:
            return {}
        numbers, slot_D = self.packet.wait()[0].tolist(), self.step.slot_D
        start = len(self.step.slot_B) + self.num_padded
        width = (len(numbers) - start) // max(len(slot_D) + self.num_padded, 1)
        decisions = {}
        for slot in slot_D:
            num_drafts, num_accepted, finite = numbers[start : start + 3]
            tokens = numbers[start + 3 : start + 3 + num_accepted + finite]
            decisions[slot] = Outcome(tokens, num_drafts, num_accepted, finite > 0)
            start += width
        return decisions

    def read(self) -> dict[int, Outcome]:
        """The outcome of every request of the step, by slot."""
        outcomes = dict.fromkeys(self.step.slot_B, Outcome([])) | self.decisions
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
        """Set `bans_all` of requests whose logits were finite until edits banned every token."""
        first = 0  # the request's first row
        for slot, outcome in self.decisions.items():
            was_finite = all(is_finite_N[first : first + outcome.num_accepted + 1])
            if was_finite and not outcome.is_finite:
                outcomes[slot] = outcomes[slot]._replace(bans_all=True)
            first += outcome.num_drafts + 1

    def _read_logprobs(self, outcomes: dict[int, Outcome], all_rows: Logprobs) -> None:
        """Set `logprobs` and `prompt_logprobs` of the outcomes. See the class for the order of
        `all_rows`, which are the rows of `self.logprobs`."""
        step, slot_D = self.step, self.step.slot_D
        reported, prompts = step.reported_D, step.reported_prompts_B
        # Rows of deciding requests, those of rejected drafts and of padding included.
        num_deciding_rows = len(all_rows.rank_N) - sum(step.num_tokens_B[b] for b in prompts)
        for i, d in enumerate(reported):
            outcome, first = outcomes[slot_D[d]], i * num_deciding_rows // len(reported)
            rows = _some_rows(all_rows, first, len(outcome.token_ids))
            outcomes[slot_D[d]] = outcome._replace(logprobs=rows)
        first = num_deciding_rows
        for b in prompts:
            # The last row of a prompt predicts a drawn token, not a token of the prompt.
            rows = _some_rows(all_rows, first, step.num_tokens_B[b] - step.decides_B[b])
            slot, first = step.slot_B[b], first + step.num_tokens_B[b]
            outcomes[slot] = outcomes[slot]._replace(prompt_logprobs=rows)


def _some_rows(logprobs: Logprobs, first: int, count: int) -> Logprobs | None:
    return Logprobs(*(column[first : first + count] for column in logprobs)) if count else None


def encode(message: StepPlan | PackedEdits) -> bytes:
    """A message as JSON; floats keep every bit."""
    if isinstance(message, StepPlan):
        admissions = [a._replace(params=_params_dict(a.params)) for a in message.admissions]  # type: ignore[arg-type]
        plan = message._replace(admissions=admissions)
        return json.dumps({"plan": plan}, default=list).encode()  # `list` for ranges
    return json.dumps({"edits": [_array_to_json(array) for array in message]}).encode()


def decode(data: bytes, compile_grammar: Callable[[Any], Grammar | None]) -> StepPlan | PackedEdits:
    """The message that `encode` wrote; `compile_grammar` compiles a grammar from its source."""
    message = json.loads(data)
    if "edits" in message:
        row_4E, mask_RW, *entries = map(_array_from_json, message["edits"])
        return PackedEdits(row_4E, mask_RW, *entries)
    released, admissions, new_blocks, fresh_blocks, step, timed = message["plan"]
    decoded = []
    for slot, key, params, rule, *numbers in admissions:
        params["logit_bias"] = dict(params["logit_bias"]) if params["logit_bias"] else None
        params["structured_outputs"] = compile_grammar(params["structured_outputs"])
        decoded.append(Admission(slot, key, SamplingParams(**params), Rule(rule), *numbers))
    return StepPlan(released, decoded, new_blocks, fresh_blocks, StepInput(*step), timed)


def _params_dict(params: SamplingParams) -> dict[str, Any]:
    """The fields of `params` in types of JSON; a compiled grammar becomes its source."""
    values = {f.name: getattr(params, f.name) for f in fields(params)}
    values["logit_bias"] = list((params.logit_bias or {}).items())
    values["structured_outputs"] = params.grammar and params.grammar.source
    return values


def _array_to_json(array: np.ndarray[Any, Any] | None) -> list[Any] | None:
    """An array as [dtype, shape, base64 of its bytes]."""
    if array is None:
        return None
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return [array.dtype.str, array.shape, data]


def _array_from_json(item: list[Any] | None) -> Any:
    if item is None:
        return None
    dtype, shape, data = item
    return np.frombuffer(base64.b64decode(data), dtype=dtype).reshape(shape).copy()

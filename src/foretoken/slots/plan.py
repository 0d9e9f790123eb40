"""A step as a message: everything that the device side needs for it, as numbers.

Charter: the message from an engine to a runner, and its form as bytes. It names slots, not
requests: a plan can be recorded, replayed in another process, or sent to other ranks. True lengths
are read from the slots when it runs. `PackedEdits` (`sampling/edits.py`) may follow as a second
message of the same step, once its drafts are known.

Shape suffixes: B requests of the step, D those that decide.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import fields
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from foretoken.ops import Rule
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
        """Whether its output must match one."""
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


def encode(message: StepPlan | PackedEdits) -> bytes:
    """A message as JSON, with every number to the bit."""
    if isinstance(message, StepPlan):
        admissions = [a._replace(params=_written(a.params)) for a in message.admissions]  # type: ignore[arg-type]
        written = message._replace(admissions=admissions)
        return json.dumps({"plan": written}, default=list).encode()  # a range, say
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
    written = {field.name: getattr(params, field.name) for field in fields(params)}
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

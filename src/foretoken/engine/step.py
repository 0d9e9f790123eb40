"""Requests as slots and steps read them: from here on no request is known, slots are."""

from __future__ import annotations

from collections.abc import Sequence

from foretoken.engine.request import Request, Share
from foretoken.ops import Rule
from foretoken.slots.parameters import SlotRequest
from foretoken.slots.step import NONE, StepInput


def step_input(shares: Sequence[Share]) -> StepInput:
    """The shares as numbers, in their order; there is one at least."""
    return StepInput(*zip(*map(_numbers, shares), strict=True))


def _numbers(share: Share) -> tuple[int, int, int, bool, int, int, bool]:
    request, top, prompt_top = share.request, NONE, NONE
    traces = request.params.trace
    if share.decides and request.params.logprobs is not None:
        top = request.params.logprobs
    if share.start < request.num_prompt and request.needs_prompt_logits:
        prompt_top = request.params.prompt_logprobs or 0
    known, most = share.num_tokens, share.max_drafts
    return share.slot, known, most, share.decides, top, prompt_top, traces


def slot_request(request: Request) -> SlotRequest:
    """What a request brings into its slot."""
    return SlotRequest(
        request.key, request.params, Rule[request.rule.upper()], request.group.prompt_ids,
        request.limit, request.output_ids, num_computed=request.num_computed,
        stop_ids=tuple(request.stop_ids), bad_word_ids=request.bad_word_ids,
        drafter=request.drafter,
    )  # fmt: skip

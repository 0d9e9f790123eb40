"""Shares of requests as the input of a step: from here on no request is known, slots are."""

from __future__ import annotations

from collections.abc import Sequence

from foretoken.engine.request import Share
from foretoken.slots.step import NONE, StepInput


def step_input(shares: Sequence[Share]) -> StepInput:
    """The shares as numbers, in their order; there is one at least."""
    return StepInput(*zip(*map(_numbers, shares), strict=True))


def _numbers(share: Share) -> tuple[int, int, int, bool, int, int]:
    request, top, prompt_top = share.request, NONE, NONE
    if share.decides and request.params.logprobs is not None:
        top = request.params.logprobs
    if share.start < request.num_prompt and request.needs_prompt_logits:
        prompt_top = request.params.prompt_logprobs or 0
    return share.slot, share.num_tokens, share.max_drafts, share.decides, top, prompt_top

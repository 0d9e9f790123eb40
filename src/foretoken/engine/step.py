"""Shares of requests as the input of a step: from here on no request is known, slots are."""

from __future__ import annotations

from collections.abc import Sequence

from foretoken.engine.request import Share
from foretoken.slots.step import NONE, StepInput


def step_input(shares: Sequence[Share]) -> StepInput:
    """The shares as numbers, in their order; there is one at least."""
    return StepInput(*zip(*map(_numbers, shares), strict=True))


def _numbers(share: Share) -> tuple[int, int, int, bool, int, int]:
    params = share.request.params
    top = params.logprobs if share.decides else None
    prompt_top = params.prompt_logprobs if share.wants_prompt_logits else None
    return (
        share.slot,
        share.num_tokens,
        share.max_drafts,
        share.decides,
        NONE if top is None else top,
        NONE if prompt_top is None else prompt_top,
    )

"""Tokens that a request's own parameters force. No torch.

Charter: the sources of such tokens, not their use. Each source is a function in `FORCING` that
makes a `Continuation`; the drafters `forced` and `prediction` draft its tokens. These drafts are
verified like any others, so a wrong one only costs time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import NDArray

from foretoken.config import MAX_SPECULATIVE_TOKENS
from foretoken.sampling.params import SamplingParams

Continuation = Callable[[NDArray[Any]], Sequence[int] | NDArray[Any]]
"""From the output so far, int32, to the ids that must follow it; none if there is a choice.

One is made for each sample. It may keep state, because outputs only grow from call to call. After a
preemption a new one gets the whole output at once and must return the same ids.
"""


def only_allowed(params: SamplingParams) -> Continuation | None:
    """For a request that allows only one token: that token, without end."""
    allowed = set(params.allowed_token_ids or ())
    if len(allowed) != 1:
        return None
    forever = [*allowed] * MAX_SPECULATIVE_TOKENS
    return lambda output: forever


def by_grammar(params: SamplingParams) -> Continuation | None:
    """For a request with a grammar: the tokens that it forces."""
    if params.grammar is None:
        return None
    matcher, num_read = params.grammar.matcher(), 0

    def ahead(output: NDArray[Any]) -> Sequence[int]:
        nonlocal num_read
        matcher.append(output[num_read:].tolist())
        num_read = len(output)
        return matcher.forced()

    return ahead


FORCING: list[Callable[[SamplingParams], Continuation | None]] = [only_allowed, by_grammar]
"""Each makes the continuation of one kind of parameter; None for a request without it."""

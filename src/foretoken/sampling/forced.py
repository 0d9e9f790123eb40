"""Tokens that a request's own parameters leave no choice about. No torch.

Charter: who knows of such tokens, not what they are for. Whoever does makes a `Continuation` and is
added to `FORCING`; the drafters `forced` and `prediction` draft what it says. Drafts are verified
as any others, so that one that is wrong costs only time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import NDArray

from foretoken.config import MAX_SPECULATIVE_TOKENS
from foretoken.sampling.params import SamplingParams

Continuation = Callable[[NDArray[Any]], Sequence[int] | NDArray[Any]]
"""The output so far, int32, to the ids that follow it, none where there is a choice.

One is made for each sample. It may keep state: from call to call outputs only grow; after a
preemption a new one is given the whole output at once, and must say the same.
"""


def only_allowed(params: SamplingParams) -> Continuation | None:
    """Of a request that allows one token: that one, for ever."""
    allowed = set(params.allowed_token_ids or ())
    if len(allowed) != 1:
        return None
    forever = [*allowed] * MAX_SPECULATIVE_TOKENS
    return lambda output: forever


def by_grammar(params: SamplingParams) -> Continuation | None:
    """Of a request with a grammar: what follows where that has one way on."""
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
"""Each makes what one kind of parameter forces; None for a request that does not have it."""

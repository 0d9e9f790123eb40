"""A round as users see it: how each token of one pass came about, in numbers.

Charter: the rules' arithmetic on a few numbers of one request. What took a pass over the vocabulary
is in the evidence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from foretoken.engine.request import Request
from foretoken.ops import Evidence
from foretoken.outputs import REASONS, TokenTrace
from foretoken.slots.step import Outcome


class Round(NamedTuple):
    """What a round's evidence does not say.

    Attributes:
        drafter: the name of who drafted; None if nobody did.
        rates: of the rule `synthetic`, one per draft.
        decode: a token's text.
    """

    drafter: str | None
    rates: Sequence[float]
    decode: Callable[[int], str | None]


def trace_round(
    request: Request, outcome: Outcome, evidence: Evidence, about: Round
) -> list[TokenTrace]:
    """One record for each token of an outcome that the request does not have yet."""
    token_K, p_K1, q_K1, u_K, mass_K, is_real = (column.tolist() for column in evidence)
    num, accepted, last = outcome.num_drafts, outcome.num_accepted, len(outcome.token_ids) - 1
    first, number = len(request.token_ids), 1 + request.trace[-1].round if request.trace else 0
    greedy = request.params.temperature == 0 and request.rule != "synthetic"
    rule = "greedy" if greedy else request.rule
    q_K, mass_K = q_K1[:num], mass_K[:num]
    threshold_K = _thresholds(rule, p_K1[:num], q_K, mass_K, about.rates)
    # The block rule looks at every draft up to the first that is none.
    looked_at = next((i for i, q in enumerate(q_K) if not q > 0), num) if rule == "block" else 0

    def record(i: int, token: int, origin: str, p: float, q: float | None) -> TokenTrace:
        return TokenTrace(
            token, about.decode(token) if token >= 0 else None, first + i, number, request.rule,
            origin, p, q if is_real else None, about.drafter if num else None,
        )  # fmt: skip

    drafts = []
    for i in range(num):
        origin, reason = "accepted" if i < accepted else "unread", None
        if accepted <= i < max(accepted + 1, looked_at) and outcome.is_finite:
            kind = rule if q_K[i] > 0 else "placeholder" if q_K[i] == 0 else "not finite"
            origin, reason = "rejected", REASONS[kind]
        draft = record(i, token_K[i], origin, p_K1[i], q_K[i] if q_K[i] > 0 else None)
        threshold, mass = threshold_K[i], mass_K[i]
        drafts.append(
            replace(
                draft,
                draft_index=i,
                u=None if threshold is None else u_K[i],
                threshold=threshold,
                residual_mass=None if math.isnan(mass) else mass,
                reason=reason,
            )
        )
    records = drafts[:accepted]
    if last == accepted:
        replaced = accepted < num and q_K[accepted] > 0
        token, q = outcome.token_ids[last], q_K1[-1] if replaced else None
        records.append(record(last, token, outcome.origins[last], p_K1[-1], q))
    if records:
        records[-1] = replace(records[-1], dropped=tuple(drafts[accepted:]))
    return records


def ended_at(records: Sequence[TokenTrace], i: int) -> TokenTrace:
    """Record i of a round, of which what is behind it is not emitted: it has all those drafts."""
    behind = [record for record in records[i + 1 :] if record.draft_index is not None]
    drafts = (replace(record, dropped=()) for record in behind)
    return replace(records[i], dropped=(*drafts, *records[-1].dropped))


def _thresholds(
    rule: str, p_K: list[float], q_K: list[float], mass_K: list[float], rates: Sequence[float]
) -> list[float | None]:
    """What each u has to be below; None where there is no draft, or draws are compared."""
    found: list[float | None] = []
    weight = 1.0  # p_i of the block rule
    for i, (p, q, mass) in enumerate(zip(p_K, q_K, mass_K, strict=True)):
        if rule in ("greedy", "coupled") or not q > 0:
            found.append(None)
        elif rule == "synthetic":
            found.append(rates[i])
        elif rule == "standard":
            found.append(min(1.0, p / q))
        elif rule != "block":
            raise NotImplementedError(f"`engine/rounds.py` lacks the verification rule {rule}")
        else:
            weight = min(1.0, weight * p / q)
            rest = mass + 1 - weight  # NaN: no draft follows
            found.append(weight if math.isnan(rest) else mass / rest if rest > 0 else 1.0)
    return found

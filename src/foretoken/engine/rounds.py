"""The records of a step that users read: log-probabilities, and how each token came about.

Charter: from the numbers of a result to records; for traces, the arithmetic of the verification
rules on a few numbers. Passes over the vocabulary are made on the device, before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from foretoken.engine.request import Request
from foretoken.ops import Logprobs
from foretoken.outputs import REASONS, Logprob, TokenTrace
from foretoken.slots.step import Outcome

TokenText = Callable[[int], str | None]
"""From a token to its text, or None if texts are not wanted or there is no tokenizer."""


def no_text(token: int) -> None:
    """The `TokenText` that has no texts."""


def describe(
    found: Logprobs, token_ids: Sequence[int], num_top: int, text_of: TokenText
) -> list[dict[int, Logprob]]:
    """Rows for users: token id -> Logprob, the given token first, then the likeliest by rank.

    Args:
        found: a row for each of the tokens.
        num_top: how many of the likeliest to report; `found` may have more.
    """
    rows = zip(
        token_ids, found.logprob_N.tolist(), found.rank_N.tolist(),
        found.top_token_NT[:, :num_top].tolist(), found.top_logprob_NT[:, :num_top].tolist(),
        strict=True,
    )  # fmt: skip
    described = []
    for token, logprob, rank, top_ids, top_logprobs in rows:
        row = {token: Logprob(logprob, rank, text_of(token))}
        for k, (top_id, value) in enumerate(zip(top_ids, top_logprobs, strict=True)):
            row.setdefault(top_id, Logprob(value, k + 1, text_of(top_id)))
        described.append(row)
    return described


def trace_round(
    request: Request,
    outcome: Outcome,
    drafter: str | None,
    rates: Sequence[float],
    text_of: TokenText,
) -> list[TokenTrace]:
    """One record for each token of an outcome that was not yet appended to the request.

    Args:
        outcome: with evidence; [] without.
        drafter: the name of the drafter; None: nothing was drafted.
        rates: of the rule `synthetic`, one per draft.
    """
    if outcome.evidence is None:
        return []
    token_K, p_K1, q_K1, u_K, mass_K, is_real = (column.tolist() for column in outcome.evidence)
    num, accepted, last = outcome.num_drafts, outcome.num_accepted, len(outcome.token_ids) - 1
    first, number = len(request.token_ids), 1 + request.trace[-1].round if request.trace else 0
    greedy = request.params.temperature == 0 and request.rule != "synthetic"
    rule = "greedy" if greedy else request.rule
    q_K, mass_K = q_K1[:num], mass_K[:num]
    threshold_K = _thresholds(rule, p_K1[:num], q_K, mass_K, rates)
    # The block rule tests every draft up to the first that counts as none.
    looked_at = next((i for i, q in enumerate(q_K) if not q > 0), num) if rule == "block" else 0

    def record(
        i: int, token: int, origin: str, p: float, q: float | None, **of_draft: Any
    ) -> TokenTrace:
        return TokenTrace(
            token, text_of(token) if token >= 0 else None, first + i, number, request.rule,
            origin, p, q if is_real else None, drafter if num else None, **of_draft,
        )  # fmt: skip

    drafts = []
    for i in range(num):
        origin, reason = "accepted" if i < accepted else "unread", None
        if accepted <= i < max(accepted + 1, looked_at) and outcome.is_finite:
            kind = rule if q_K[i] > 0 else "placeholder" if q_K[i] == 0 else "not finite"
            origin, reason = "rejected", REASONS[kind]
        threshold, mass = threshold_K[i], mass_K[i]
        draft = record(
            i, token_K[i], origin, p_K1[i], q_K[i] if q_K[i] > 0 else None, draft_index=i,
            u=None if threshold is None else u_K[i], threshold=threshold,
            residual_mass=None if math.isnan(mass) else mass, reason=reason,
        )  # fmt: skip
        drafts.append(draft)
    records = drafts[:accepted]
    if last == accepted:
        replaced = accepted < num and q_K[accepted] > 0
        token, q = outcome.token_ids[last], q_K1[-1] if replaced else None
        records.append(record(last, token, outcome.origins[last], p_K1[-1], q))
    if records:
        records[-1] = replace(records[-1], dropped=tuple(drafts[accepted:]))
    return records


def ended_at(records: Sequence[TokenTrace], i: int) -> TokenTrace:
    """Record i of a round in which it is the last: the drafts after it count as dropped."""
    later = [record for record in records[i + 1 :] if record.draft_index is not None]
    drafts = (replace(record, dropped=()) for record in later)
    return replace(records[i], dropped=(*drafts, *records[-1].dropped))


def _thresholds(
    rule: str, p_K: list[float], q_K: list[float], mass_K: list[float], rates: Sequence[float]
) -> list[float | None]:
    """The bound below which each u accepts; None for no draft, or a rule that compares draws."""
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
            rest = mass + 1 - weight  # NaN if no draft follows
            found.append(weight if math.isnan(rest) else mass / rest if rest > 0 else 1.0)
    return found

"""The records of a step that users read: log-probabilities, and how each token came about.

Traces repeat the arithmetic of the verification rules on a few numbers from the device.
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

TokenText = Callable[[int], str | None]  # the text of a token; None if texts are not wanted


def no_text(token: int) -> None:
    """The `TokenText` if texts are not wanted or there is no tokenizer."""


def logprob_rows(
    logprobs: Logprobs, token_ids: Sequence[int], num_top: int, text_of: TokenText
) -> list[dict[int, Logprob]]:
    """One dict per token, {token id: Logprob}: the token, then the `num_top` likeliest by rank.

    Args:
        logprobs: one row per token, with at least `num_top` likeliest tokens.
    """
    rows = zip(
        token_ids, logprobs.logprob_N.tolist(), logprobs.rank_N.tolist(),
        logprobs.top_token_NT[:, :num_top].tolist(), logprobs.top_logprob_NT[:, :num_top].tolist(),
        strict=True,
    )  # fmt: skip
    dicts = []
    for token, logprob, rank, top_ids, top_logprobs in rows:
        entries = {token: Logprob(logprob, rank, text_of(token))}
        for k, (top_id, value) in enumerate(zip(top_ids, top_logprobs, strict=True)):
            entries.setdefault(top_id, Logprob(value, k + 1, text_of(top_id)))
        dicts.append(entries)
    return dicts


def trace_round(
    request: Request, outcome: Outcome, drafter: str | None, rates: Sequence[float],
    text_of: TokenText,
) -> list[TokenTrace]:  # fmt: skip
    """One record per token of an outcome; [] if the outcome has no evidence.

    The records of drafts that were not emitted are in `dropped` of the last record.

    Args:
        request: the request, before the outcome's tokens are appended.
        drafter: the name of the drafter; None: nothing was drafted.
        rates: the conditional rates of the rule `synthetic`, one per draft.
    """
    if outcome.evidence is None:
        return []
    token_K, p_K1, q_K1, u_K, mass_K, has_real_q = (column.tolist() for column in outcome.evidence)
    num_drafts, num_accepted = outcome.num_drafts, outcome.num_accepted
    position = len(request.token_ids)  # of the outcome's first token
    round_number = 1 + request.trace[-1].round if request.trace else 0
    greedy = request.params.temperature == 0 and request.rule != "synthetic"
    rule = "greedy" if greedy else request.rule
    q_K, mass_K = q_K1[:num_drafts], mass_K[:num_drafts]
    threshold_K = _thresholds(rule, p_K1[:num_drafts], q_K, mass_K, rates)
    num_tested = 0
    if rule == "block":  # this rule tests all drafts before the first that counts as no draft
        num_tested = next((i for i, q in enumerate(q_K) if not q > 0), num_drafts)

    def record(
        i: int, token: int, origin: str, p: float, q: float | None, **draft_fields: Any
    ) -> TokenTrace:
        """The record of a token or draft, i tokens after the outcome's first token."""
        return TokenTrace(
            token, text_of(token) if token >= 0 else None, position + i, round_number, request.rule,
            origin, p, q if has_real_q else None, drafter if num_drafts else None, **draft_fields,
        )  # fmt: skip

    drafts = []
    for i in range(num_drafts):
        origin, reason = "accepted" if i < num_accepted else "unread", None
        if num_accepted <= i < max(num_accepted + 1, num_tested) and outcome.is_finite:
            cause = rule if q_K[i] > 0 else "placeholder" if q_K[i] == 0 else "not finite"
            origin, reason = "rejected", REASONS[cause]
        threshold, mass = threshold_K[i], mass_K[i]
        drafts.append(record(
            i, token_K[i], origin, p_K1[i], q_K[i] if q_K[i] > 0 else None, draft_index=i,
            u=None if threshold is None else u_K[i], threshold=threshold,
            residual_mass=None if math.isnan(mass) else mass, reason=reason,
        ))  # fmt: skip
    records = drafts[:num_accepted]
    if len(outcome.token_ids) > num_accepted:  # the token after the accepted drafts
        replaces_draft = num_accepted < num_drafts and q_K[num_accepted] > 0
        token, origin = outcome.token_ids[num_accepted], outcome.origins[num_accepted]
        q = q_K1[-1] if replaces_draft else None
        records.append(record(num_accepted, token, origin, p_K1[-1], q))
    if records:
        records[-1] = replace(records[-1], dropped=tuple(drafts[num_accepted:]))
    return records


def last_record(records: Sequence[TokenTrace], i: int) -> TokenTrace:
    """Record i of a round, if token i ended the request, with all later drafts as `dropped`."""
    later = [replace(r, dropped=()) for r in records[i + 1 :] if r.draft_index is not None]
    return replace(records[i], dropped=(*later, *records[-1].dropped))


def _thresholds(
    rule: str, p_K: list[float], q_K: list[float], mass_K: list[float], rates: Sequence[float]
) -> list[float | None]:
    """For each draft, the number that u must be below to accept the draft; None if the draft
    counts as no draft, or if the rule compares tokens."""
    thresholds: list[float | None] = []
    weight = 1.0  # of the block rule: p_i in docs/verification.md
    for i, (p, q, mass) in enumerate(zip(p_K, q_K, mass_K, strict=True)):
        if rule in ("greedy", "coupled") or not q > 0:
            thresholds.append(None)
        elif rule == "synthetic":
            thresholds.append(rates[i])
        elif rule == "standard":
            thresholds.append(min(1.0, p / q))
        elif rule != "block":
            raise NotImplementedError(f"`engine/rounds.py` lacks the verification rule {rule}")
        else:
            weight = min(1.0, weight * p / q)
            rest = mass + 1 - weight  # NaN if no draft follows
            thresholds.append(weight if math.isnan(rest) else mass / rest if rest > 0 else 1.0)
    return thresholds

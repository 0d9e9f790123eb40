"""Requests under a rule that the kernels do not state get no token; other requests get theirs.

On the host such rules are refused before any work. What slots on a device hold is never looked at,
so the checks are left out here.
"""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import torch

from foretoken.ops import Backend, DraftBlock, DraftCache, Rule, Verdict, VerifyBatch
from tests.support.oracle import CPU, Case, Tally, moved, random_case
from tests.support.pieces import part_of

OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
EVERY, OTHERS = frozenset(Rule), frozenset(Rule) - {Rule.BLOCK}
UNSTATED: tuple[tuple[int, frozenset[Rule], bool], ...] = (
    (len(Rule), EVERY, True),
    (-1, OTHERS, True),
    (2**32, OTHERS, True),
    (Rule.BLOCK, OTHERS, True),
    (Rule.SYNTHETIC, OTHERS, False),
)
"""The rule, what the parameters promise, and whether there are rates."""


def compare_unstated(backend: Backend, vocabulary: int, device: torch.device = CPU) -> Tally:
    """Raise AssertionError if one of these gets a token, or changes what another request gets."""
    tally = Tally()
    for most, number in ((0, 2), (2, 3), (2, 6)):  # of 3 requests one kernel decides and draws
        fixed = {**OFF, "rule": Rule.STANDARD, "temperature": float(number > 2)}
        case = random_case(
            vocabulary, 3, num_requests=6, num_slots=7, most=most, fixed=fixed, edited=False
        )
        case = part_of(case, torch.arange(number))
        plain = verdict_under(backend, case, Rule.STANDARD, OTHERS, True, device)
        assert plain.finite_B.all()
        for rule, promised, rates in UNSTATED:
            found = verdict_under(backend, case, rule, promised, rates, device)
            about = f"rule {rule}, {number} requests, K = {most}"
            assert not found.finite_B[::2].any(), about
            assert not found.n_accept_B[::2].any(), about
            assert bool((found.token_BK1[::2] == -1).all()), about
            assert torch.equal(found.n_accept_B[1::2], plain.n_accept_B[1::2]), about
            assert torch.equal(found.token_BK1[1::2], plain.token_BK1[1::2]), about
            tally = tally.plus(Tally(number))
    return tally


def verdict_under(
    backend: Backend,
    case: Case,
    rule: int,
    promised: frozenset[Rule],
    rates: bool,
    device: torch.device,
) -> Verdict:
    """Of one-hot drafts, every other request of the case under the rule."""
    rule_S = case.params.rule_S.clone()
    rule_S[case.slot_B[::2]] = rule
    params = replace(case.params, rule_S=rule_S, rules=promised, has_filters=False)
    on = moved(replace(case, params=params), device)
    token_BK, size = torch.zeros_like(on.hidden_BK, dtype=case.token_dtype), on.raw_SKV.shape
    cache = DraftCache.empty(*size, torch.float32, device) if size[1] else None
    drafts = DraftBlock(token_BK, on.num_B, cache, on.real_q_B & False)
    rate_K = on.rate_K if rates else None
    batch = VerifyBatch(
        on.raw_NV, on.params, on.slot_B, on.position_B, drafts, synthetic_rate_K=rate_K
    )
    with patch("foretoken.ops.checks.check_verify"):
        return moved(backend.verify(batch), CPU)

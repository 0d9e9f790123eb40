"""Each rule through `verify`, on every backend: what it accepts and what is emitted after.

The rules as functions, and their law by enumeration, are in `test_rules.py`.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from foretoken.ops import TARGET, Backend, Rule, VerifyBatch, get_backend
from tests.support.cases import drafts_of, host_backends, make_edits, make_params, no_drafts
from tests.support.verdicts import check, draw, only

INF = math.inf


@pytest.fixture(params=host_backends())
def ops(request: pytest.FixtureRequest) -> Backend:
    return get_backend(request.param)


def test_the_residual_weight_of_block_scales_p(ops: Backend) -> None:
    """norm(max(w p - q, 0)) at w = 1/2, p = (.6, .3, .1), q = (.1, .1, .8): (.8, .2, 0).

    p_1 = w: q is certain of x_1, p gives it 1/2. S_1 = 1/4, so h_1 = 1/3; h_2 = p_2 = 1/16. With
    1/w in its place the residual would be (.688, .313, 0). Logits are shifted: they need no norm.
    """
    count = 1500
    p = torch.tensor([[0.5, 0.25, 0.25], [0.6, 0.3, 0.1], [0.1, 0.2, 0.7]]).log() + 3
    q = torch.tensor([[1.0, 0.0, 0.0], [0.1, 0.1, 0.8]]).log() - 2
    slot = torch.arange(count)
    params = make_params(count, seed=8, rule=Rule.BLOCK)
    drafts = drafts_of([[0, 2]] * count, q.repeat(count, 1, 1))
    verdict = ops.verify(VerifyBatch(p.repeat(count, 1), params, slot, slot * 0, drafts))
    share = torch.bincount(verdict.n_accept_B, minlength=3) / count
    assert share.tolist() == pytest.approx([0.625, 0.3125, 0.0625], abs=0.05)
    one = verdict.token_BK1[verdict.n_accept_B == 1, 1]
    emitted = torch.bincount(one, minlength=3) / len(one)
    assert abs(float(emitted[0]) - 0.8) < 4 * math.sqrt(0.8 * 0.2 / len(one))
    assert float(emitted[2]) == 0


def test_coupled_emits_the_targets_own_draws_whatever_was_drafted(ops: Backend) -> None:
    """Equal tokens with any drafts, any K and none, with q or without, in agreement or not."""
    rows = torch.randn(4, 1100, generator=torch.Generator().manual_seed(4)) * 2
    params, slot = make_params(1, 0.8, seed=6, rule=Rule.COUPLED), torch.tensor([0])
    for position in range(10):
        own = [draw(ops, row, params, position + i, TARGET) for i, row in enumerate(rows)]
        at = torch.tensor([position])
        q = torch.randn(1, 3, 1100)
        q[0, 0] = math.nan  # nothing of q is read
        for drafts in (drafts_of([own[:3]]), drafts_of([own[:3]], q)):
            check(ops.verify(VerifyBatch(rows, params, slot, at, drafts)), [own])
        wrong = [own[0], (own[1] + 1) % 1100, own[2]]
        check(ops.verify(VerifyBatch(rows, params, slot, at, drafts_of([wrong]))), [own[:2]])
        check(ops.verify(VerifyBatch(rows[:1], params, slot, at, no_drafts(1))), [own[:1]])
        check(
            ops.verify(VerifyBatch(rows, params, slot, at, drafts_of([[-1, own[1], own[2]]]))),
            [own[:1]],
        )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("real_q", [False, True])
def test_synthetic_accepts_by_rate_alone(ops: Backend, temperature: float, real_q: bool) -> None:
    """Rates (1, 0): x_1 though p gives it nothing, x_2 never, even if it is the argmax."""
    rows = torch.stack([only(1), only(2), only(3)])
    params = make_params(1, temperature, rule=Rule.SYNTHETIC)
    q = torch.stack([only(7), only(2)])[None] if real_q else None
    for position in range(20):
        verdict = ops.verify(
            VerifyBatch(
                rows,
                params,
                torch.tensor([0]),
                torch.tensor([position]),
                drafts_of([[7, 2]], q),
                synthetic_rate_K=torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64),
            )
        )
        check(verdict, [[7, 2]])


def test_synthetic_rejections_are_drawn_as_standard_ones(ops: Backend) -> None:
    """From the residual, with the same noise; a placeholder ends the prefix here too."""
    count = 50
    rows = torch.randn(2, 40, generator=torch.Generator().manual_seed(2))
    p, q = rows.repeat(count, 1), (-8 * rows[:1]).expand(count, 1, 40)
    token = int(rows[0].argmin())
    slot, drafts = torch.arange(count), drafts_of([[token]] * count, q)
    rates = torch.zeros(1, dtype=torch.float64)
    synthetic = make_params(count, seed=3, rule=Rule.SYNTHETIC)
    ours = ops.verify(VerifyBatch(p, synthetic, slot, slot * 0, drafts, synthetic_rate_K=rates))
    standard = ops.verify(VerifyBatch(p, make_params(count, seed=3), slot, slot * 0, drafts))
    assert not bool((ours.n_accept_B + standard.n_accept_B).any())
    assert torch.equal(ours.token_BK1, standard.token_BK1)
    hidden = replace(drafts, token_BK=torch.full_like(drafts.token_BK, -1))
    ours = ops.verify(VerifyBatch(p, synthetic, slot, slot * 0, hidden, synthetic_rate_K=rates + 1))
    assert not bool(ours.n_accept_B.any())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("real_q", [False, True])
def test_synthetic_never_emits_an_id_that_the_target_lacks(
    ops: Backend, temperature: float, real_q: bool
) -> None:
    """Such a draft counts as a placeholder: whatever its rate, its slot is drawn from p."""
    rows = torch.randn(2, 8, generator=torch.Generator().manual_seed(2))
    params, slot = make_params(1, temperature, rule=Rule.SYNTHETIC), torch.tensor([0])
    rates = torch.ones(1, dtype=torch.float64)
    drafts = drafts_of([[9]], torch.zeros(1, 1, 12) if real_q else None)
    for position in range(10):
        at = torch.tensor([position])
        verdict = ops.verify(VerifyBatch(rows, params, slot, at, drafts, synthetic_rate_K=rates))
        check(verdict, [[draw(ops, rows[0], params, position, TARGET)]])


def test_synthetic_rates_are_probabilities(ops: Backend) -> None:
    count, rates = 1000, torch.tensor([0.7, 0.4], dtype=torch.float64)
    slot, rows = torch.arange(count), torch.zeros(3 * count, 4)
    params = make_params(count, [0.0, 1.0] * (count // 2), seed=1, rule=Rule.SYNTHETIC)
    drafts = drafts_of([[1, 2]] * count)
    verdict = ops.verify(VerifyBatch(rows, params, slot, slot * 0, drafts, synthetic_rate_K=rates))
    share = [float((verdict.n_accept_B >= i).double().mean()) for i in (1, 2)]
    assert share == pytest.approx([0.7, 0.28], abs=4 * 0.5 / math.sqrt(count))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("junk", [math.nan, INF, -INF])
def test_a_row_that_is_not_finite_ends_in_minus_one_by_every_rule(
    ops: Backend, rule: Rule, temperature: float, junk: float
) -> None:
    """n_accept is the row's index; SYNTHETIC may accept past it, and is reported all the same."""
    rows = torch.stack([only(t) for t in (1, 2, 3)])
    rows[1, 2] = junk
    params, slot = make_params(1, temperature, rule=rule), torch.tensor([0])
    rates = torch.ones(2, dtype=torch.float64)
    drafts = drafts_of([[1, 2]])
    verdict = ops.verify(VerifyBatch(rows, params, slot, slot, drafts, synthetic_rate_K=rates))
    check(verdict, [[1, 2, -1] if rule == Rule.SYNTHETIC else [1, -1]], [False])
    verdict = ops.verify(
        VerifyBatch(rows[1:2], params, slot, slot, no_drafts(1), synthetic_rate_K=rates)
    )
    check(verdict, [[-1]], [False])
    drafts = drafts_of([[-1, 2]])  # a placeholder before it: the row decides nothing
    verdict = ops.verify(VerifyBatch(rows, params, slot, slot, drafts, synthetic_rate_K=rates))
    check(verdict, [[1]])


@pytest.mark.parametrize("rule", [Rule.STANDARD, Rule.BLOCK, Rule.COUPLED])
def test_filters_and_edits_are_applied_on_load(ops: Backend, rule: Rule) -> None:
    """A draft that the target's mask, a ban or its nucleus drops has p = 0."""
    rows = torch.zeros(4, 6)
    rows[:, 2] = 5.0
    masked = make_edits(4, masks=[[0, 1]], mask_of=[0, -1, -1, -1], vocabulary=6)
    banned = make_edits(4, {(0, 2): (-INF, 1.5, -3.0), (1, 0): (1.0, 1.0, 1.0)})
    slot, position = torch.tensor([0, 1]), torch.tensor([5, 6])
    drafts = drafts_of([[2], [2]], torch.zeros(2, 1, 6))
    for edits in (masked, banned):
        for seed in range(10):
            params = make_params(2, seed=seed, rule=rule)
            verdict = ops.verify(VerifyBatch(rows, params, slot, position, drafts, edits=edits))
            assert verdict.n_accept_B[0] == 0
            assert int(verdict.token_BK1[0, 0]) in ({0, 1} if edits is masked else {0, 1, 3, 4, 5})
    for seed in range(10):
        params = make_params(2, seed=seed, rule=rule, top_p=0.5)
        drafts = drafts_of([[3], [2]], torch.zeros(2, 1, 6))
        verdict = ops.verify(VerifyBatch(rows, params, slot, position, drafts))
        check(verdict, [[2], [2, 2]])

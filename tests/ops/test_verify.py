"""Verification on every backend, in cases worked out by hand: what is emitted and why.

The rules as functions, and their distribution by enumeration, are in `test_rules.py`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from foretoken.ops import RESIDUAL, TARGET, Backend, DraftBlock, Noise, Rows, Rule, VerifyBatch
from tests.ops.verdicts import check, draw, only, verify
from tests.support.cases import drafts_of, make_edits, make_params, no_drafts

INF = math.inf


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ragged_batch_and_slots(ops: Backend, dtype: torch.dtype, temperature: float) -> None:
    """Certain rows: accepted, rejected at once, no draft, rejected in the middle."""
    rows = torch.stack([only(t) for t in (1, 2, 3, 4, 5, 6, 1, 2, 3, 4)])
    drafts = drafts_of([[1, 2], [7], [], [1, 7, 3]], dtype=dtype)
    params, slots = make_params(6, temperature), [5, 0, 3, 1]
    verdict = verify(ops, rows, params, drafts, [10, 0, 99, 7], slots)
    check(verdict, [[1, 2, 3], [4], [6], [1, 2]])
    assert verdict.token_BK1.dtype == dtype


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("width", [0, 2])
def test_no_drafts_is_plain_sampling(ops: Backend, temperature: float, width: int) -> None:
    rows = torch.randn(5, 2100, generator=torch.Generator().manual_seed(1))
    params = make_params(5, temperature)
    slot, position = torch.tensor([4, 2, 0, 1, 3]), torch.arange(5) + 2**33
    block = no_drafts(5)
    if width:
        block = DraftBlock(torch.full((5, width), -1), block.num_B, None, block.real_q_B)
    verdict = ops.verify(VerifyBatch(rows, params, slot, position, block))
    plain = ops.sample(
        Rows(rows, params, slot), Noise(position, torch.zeros(5, dtype=torch.long), TARGET)
    )
    check(verdict, [[t] for t in plain.tolist()])


def test_empty_batch(ops: Backend) -> None:
    empty = torch.zeros(0, dtype=torch.long)
    verdict = ops.verify(VerifyBatch(torch.zeros(0, 8), make_params(1), empty, empty, no_drafts(0)))
    assert verdict.token_BK1.shape == (0, 1)
    assert ops.sample(
        Rows(torch.zeros(0, 8), make_params(1), empty), Noise(empty, empty, TARGET)
    ).shape == (0,)


def test_placeholder_ends_the_prefix_and_draws_from_p_with_target_noise(ops: Backend) -> None:
    rows = torch.stack([only(1), torch.zeros(8), only(3), only(4)])
    params = make_params(1, seed=3)
    for position in range(20):
        verdict = verify(ops, rows, params, drafts_of([[1, -1, 3]]), position)
        check(verdict, [[1, draw(ops, rows[1], params, position + 1, TARGET)]])


@pytest.mark.parametrize("junk", [math.nan, INF, -INF])
def test_draft_row_that_is_not_finite_counts_as_no_draft(ops: Backend, junk: float) -> None:
    rows = torch.zeros(3, 8)
    q = torch.zeros(2, 2, 8)
    q[1, 0, 5] = junk
    if junk == -INF:
        q[1, 0] = junk
    params = make_params(2, seed=3)
    flipped = replace(params, key_S=params.key_S.flip(0))
    for position in range(20):
        verdict = verify(ops, rows, params, drafts_of([[5, 2]], q), position, [1])
        check(verdict, [[draw(ops, rows[0], flipped, position, TARGET)]])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("junk", [math.nan, INF, -INF])
def test_target_row_that_is_not_finite_is_reported(
    ops: Backend, junk: float, temperature: float
) -> None:
    rows = torch.stack([only(t) for t in (1, 2, 3, 1, 2, 3, 4, 1)])
    rows[1, 2] = junk  # first request: its second row
    rows[4, 2] = junk  # second: rejected before that row, so it does not matter
    rows[6, 4] = junk  # third: the bonus row of no drafts
    drafts = drafts_of([[1, 2], [7, 2], [], []])
    verdict = verify(ops, rows, make_params(4, temperature), drafts, [0, 1, 2, 3])
    check(verdict, [[1, -1], [1], [-1], [1]], [False, True, False, True])


def test_rejected_one_hot_draft_is_never_emitted(ops: Backend) -> None:
    """The residual of a one-hot q is p without x; K = 1, p(x) = 1/2."""
    count = 300
    rows = torch.tensor([math.log(0.5), math.log(0.25), math.log(0.25)]).repeat(2 * count, 1)
    verdict = verify(ops, rows, make_params(count, seed=5), drafts_of([[0]] * count))
    rejected = verdict.n_accept_B == 0
    assert 100 < int(rejected.sum()) < 200
    assert not bool((verdict.token_BK1[rejected, 0] == 0).any())
    assert bool((verdict.token_BK1[rejected, 1] == -1).all())


def test_residual_without_mass_falls_back_to_p_with_residual_noise(ops: Backend) -> None:
    """p(x) = 0 and p <= q elsewhere, through rows that do not agree about rounding."""
    p = torch.full((8,), -INF)
    p[:4] = 0.0
    q = p.clone()
    p[7], p[2] = -1e-30, -INF  # p = {0, 1, 3, 7}
    rows = torch.stack([only(1), only(2)])
    params = make_params(1, seed=9)
    check(verify(ops, rows, params, drafts_of([[1]])), [[1, 2]])
    # x = 2 was "drafted" from q = {0, 1, 2, 3}; only {7} is left in the residual.
    rows = torch.stack([p, only(2)])
    check(verify(ops, rows, params, drafts_of([[2]], q[None, None])), [[7]])
    # q covers p entirely (q = p but for an impossible draft): nothing is left of max(p - q, 0).
    wide = torch.cat([p, torch.tensor([-80.0])])
    for position in range(20):
        verdict = verify(ops, rows, params, drafts_of([[8]], wide[None, None]), position)
        check(verdict, [[draw(ops, p, params, position, RESIDUAL)]])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ids_beyond_the_vocabulary_are_never_accepted(ops: Backend, temperature: float) -> None:
    rows = torch.zeros(2, 8)
    q = torch.zeros(1, 1, 12)
    params = make_params(1, temperature)
    for token in (8, 11, 2**31 - 1):
        for logits in (None, q):
            verdict = verify(ops, rows, params, drafts_of([[token]], logits), 3)
            assert verdict.n_accept_B.tolist() == [0]
            assert 0 <= int(verdict.token_BK1[0, 0]) < 8


def test_wider_draft_vocabulary_leaves_its_share_to_the_residual(ops: Backend) -> None:
    """q has 2/3 of its mass beyond V: a draft x < V has q(x) = 1/12, p(x) = 1/4: accepted."""
    rows = torch.zeros(2, 4)
    q = torch.zeros(1, 1, 12)
    for position in range(50):
        verdict = verify(ops, rows, make_params(1), drafts_of([[1]], q), position)
        assert verdict.n_accept_B.tolist() == [1]


def test_narrower_draft_vocabulary_has_no_mass_beyond_it(ops: Backend) -> None:
    """q lives on {0, 1}, p on {1, 2, 3}: 0 is rejected, and the residual is within {2, 3}."""
    rows = torch.tensor([[-INF, 0.0, 0.0, 0.0]] * 2)
    drafts, seen = drafts_of([[0]], torch.zeros(1, 1, 2)), set()
    for position in range(50):
        verdict = verify(ops, rows, make_params(1), drafts, position)
        assert verdict.n_accept_B.tolist() == [0]
        seen.add(int(verdict.token_BK1[0, 0]))
    assert seen == {2, 3}


def test_draft_with_no_q_mass_counts_as_no_draft(ops: Backend) -> None:
    """q(x) = 0 cannot have been sampled: the slot is drawn from p, which stays exact."""
    q = torch.zeros(1, 1, 8)
    q[0, 0, 5] = -INF
    params = make_params(1, seed=2)
    rows = torch.zeros(2, 8)
    for position in range(20):
        verdict = verify(ops, rows, params, drafts_of([[5]], q), position)
        check(verdict, [[draw(ops, rows[0], params, position, TARGET)]])


def test_q_is_found_by_slot_and_missing_q_is_one_hot_for_that_request_alone(ops: Backend) -> None:
    """Cached rows by slot [c, a, b]; batch [a, b, c] drafts [2, 0, 1]; c lost its q."""
    q = torch.full((3, 2, 8), math.nan)
    q[1] = torch.stack([only(2), only(3)])
    rows = torch.stack([only(2), only(3), only(4), only(5), torch.zeros(8), only(6)])
    drafts = drafts_of([[2, 3], [], [1]], q, real_q=[True, True, False])
    accepted = 0
    for position in range(50):
        verdict = verify(ops, rows, make_params(3, seed=4), drafts, position, [1, 2, 0])
        assert verdict.token_BK1[:2].tolist() == [[2, 3, 4], [5, -1, -1]]
        accepted += int(verdict.n_accept_B[2])
    assert 0 < accepted < 30  # p(x) = 1/8


def test_greedy_ties_take_the_lowest_index(ops: Backend) -> None:
    rows = torch.zeros(2, 2050)
    rows[:, 7] = rows[:, 2049] = 1.0
    params = make_params(1, 0.0)
    assert draw(ops, rows[0], params, 0, TARGET) == 7
    check(verify(ops, rows, params, drafts_of([[2049]])), [[7]])
    check(verify(ops, rows, params, drafts_of([[7]])), [[7, 7]])


@pytest.mark.parametrize("vocabulary", [1025, 1030, 2047])
@pytest.mark.parametrize("fp64", [False, True])
def test_ids_stay_below_v_in_the_last_block(ops: Backend, vocabulary: int, fp64: bool) -> None:
    """Nearly all mass in an incomplete last block, in plain sampling and in the residual."""
    row = torch.full((vocabulary,), -20.0)
    row[1024:] = 0.0
    count = 20
    params, slot = make_params(count, seed=vocabulary), torch.arange(count)
    zero = torch.zeros(count, dtype=torch.long)
    rows = row.expand(count, -1)
    drawn = ops.sample(Rows(rows, params, slot), Noise(zero, zero, TARGET, fp64=fp64))
    both, drafts = row.expand(2 * count, -1), drafts_of([[3]] * count)
    verdict = verify(ops, both, params, drafts, fp64_noise=fp64)
    for tokens in (drawn, verdict.token_BK1[:, 0]):
        assert bool(((tokens >= 1024) & (tokens < vocabulary)).all())


@pytest.mark.parametrize("rejecting", [False, True])
def test_bf16_logits_and_untouched_inputs(ops: Backend, rejecting: bool) -> None:
    """Cached bf16 q is used as it is; no argument is written to, also where a residual is drawn."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(6, 1100, generator=generator).bfloat16()
    q = torch.randn(2, 2, 1100, generator=generator).bfloat16()
    if rejecting:
        q = -10 * rows[[0, 1, 3, 4]].view(2, 2, -1)
    best = q.float().argmax(dim=2)
    params, at = make_params(2, seed=1), [5, 6]
    before = rows.clone(), q.clone(), best.clone()
    drafts = drafts_of(best.tolist(), q)
    half = verify(ops, rows, params, drafts, at)
    full = verify(ops, rows.float(), params, drafts_of(best.tolist(), q.float()), at)
    assert torch.equal(half.token_BK1, full.token_BK1)
    assert not rejecting or half.n_accept_B.tolist() == [0, 0]
    wide = rows.float()
    verify(ops, wide, params, drafts, at)
    assert torch.equal(wide, before[0].float())
    assert torch.equal(rows, before[0])
    assert torch.equal(q, before[1])
    assert torch.equal(drafts.token_BK, before[2])


def test_the_residual_weight_of_block_scales_p(ops: Backend) -> None:
    """norm(max(w p - q, 0)) at w = 1/2, p = (.6, .3, .1), q = (.1, .1, .8): (.8, .2, 0).
    p_1 = w: q is certain of x_1, p gives it 1/2. S_1 = 1/4, so h_1 = 1/3; h_2 = p_2 = 1/16. With
    1/w in its place the residual would be (.688, .313, 0). Logits are shifted: they need no norm.
    """
    count = 1500
    p = torch.tensor([[0.5, 0.25, 0.25], [0.6, 0.3, 0.1], [0.1, 0.2, 0.7]]).log() + 3
    q = torch.tensor([[1.0, 0.0, 0.0], [0.1, 0.1, 0.8]]).log() - 2
    params = make_params(count, seed=8, rule=Rule.BLOCK)
    drafts = drafts_of([[0, 2]] * count, q.repeat(count, 1, 1))
    verdict = verify(ops, p.repeat(count, 1), params, drafts)
    share = torch.bincount(verdict.n_accept_B, minlength=3) / count
    assert share.tolist() == pytest.approx([0.625, 0.3125, 0.0625], abs=0.05)
    one = verdict.token_BK1[verdict.n_accept_B == 1, 1]
    emitted = torch.bincount(one, minlength=3) / len(one)
    assert abs(float(emitted[0]) - 0.8) < 4 * math.sqrt(0.8 * 0.2 / len(one))
    assert float(emitted[2]) == 0


def test_coupled_emits_the_targets_own_draws_whatever_was_drafted(ops: Backend) -> None:
    """Equal tokens with any drafts, any K and none, with q or without, in agreement or not."""
    rows = torch.randn(4, 1100, generator=torch.Generator().manual_seed(4)) * 2
    params = make_params(1, 0.8, seed=6, rule=Rule.COUPLED)
    for position in range(10):
        own = [draw(ops, row, params, position + i, TARGET) for i, row in enumerate(rows)]
        q = torch.randn(1, 3, 1100)
        q[0, 0] = math.nan  # nothing of q is read
        for drafts in (drafts_of([own[:3]]), drafts_of([own[:3]], q)):
            check(verify(ops, rows, params, drafts, position), [own])
        wrong = [own[0], (own[1] + 1) % 1100, own[2]]
        check(verify(ops, rows, params, drafts_of([wrong]), position), [own[:2]])
        check(verify(ops, rows[:1], params, no_drafts(1), position), [own[:1]])
        hidden = drafts_of([[-1, own[1], own[2]]])
        check(verify(ops, rows, params, hidden, position), [own[:1]])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("real_q", [False, True])
def test_synthetic_accepts_by_rate_alone(ops: Backend, temperature: float, real_q: bool) -> None:
    """Rates (1, 0): x_1 though p gives it nothing, x_2 never, even if it is the argmax."""
    rows = torch.stack([only(1), only(2), only(3)])
    params = make_params(1, temperature, rule=Rule.SYNTHETIC)
    q = torch.stack([only(7), only(2)])[None] if real_q else None
    rate_K = torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64)
    for position in range(20):
        drafts = drafts_of([[7, 2]], q)
        check(verify(ops, rows, params, drafts, position, synthetic_rate_K=rate_K), [[7, 2]])


def test_synthetic_rejections_are_drawn_as_standard_ones(ops: Backend) -> None:
    """From the residual, with the same noise; a placeholder ends the prefix here too."""
    count = 50
    rows = torch.randn(2, 40, generator=torch.Generator().manual_seed(2))
    p, q = rows.repeat(count, 1), (-8 * rows[:1]).expand(count, 1, 40)
    token = int(rows[0].argmin())
    drafts, rates = drafts_of([[token]] * count, q), torch.zeros(1, dtype=torch.float64)
    synthetic = make_params(count, seed=3, rule=Rule.SYNTHETIC)
    ours = verify(ops, p, synthetic, drafts, synthetic_rate_K=rates)
    standard = verify(ops, p, make_params(count, seed=3), drafts)
    assert not bool((ours.n_accept_B + standard.n_accept_B).any())
    assert torch.equal(ours.token_BK1, standard.token_BK1)
    hidden = replace(drafts, token_BK=torch.full_like(drafts.token_BK, -1))
    ours = verify(ops, p, synthetic, hidden, synthetic_rate_K=rates + 1)
    assert not bool(ours.n_accept_B.any())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("real_q", [False, True])
def test_synthetic_never_emits_an_id_that_the_target_lacks(
    ops: Backend, temperature: float, real_q: bool
) -> None:
    """Such a draft counts as a placeholder: whatever its rate, its slot is drawn from p."""
    rows = torch.randn(2, 8, generator=torch.Generator().manual_seed(2))
    params = make_params(1, temperature, rule=Rule.SYNTHETIC)
    rates = torch.ones(1, dtype=torch.float64)
    drafts = drafts_of([[9]], torch.zeros(1, 1, 12) if real_q else None)
    for position in range(10):
        verdict = verify(ops, rows, params, drafts, position, synthetic_rate_K=rates)
        check(verdict, [[draw(ops, rows[0], params, position, TARGET)]])


def test_synthetic_rates_are_probabilities(ops: Backend) -> None:
    count, rates = 1000, torch.tensor([0.7, 0.4], dtype=torch.float64)
    params = make_params(count, [0.0, 1.0] * (count // 2), seed=1, rule=Rule.SYNTHETIC)
    rows, drafts = torch.zeros(3 * count, 4), drafts_of([[1, 2]] * count)
    verdict = verify(ops, rows, params, drafts, synthetic_rate_K=rates)
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
    params = make_params(1, temperature, rule=rule)
    rates: dict[str, Any] = {"synthetic_rate_K": torch.ones(2, dtype=torch.float64)}
    verdict = verify(ops, rows, params, drafts_of([[1, 2]]), **rates)
    check(verdict, [[1, 2, -1] if rule == Rule.SYNTHETIC else [1, -1]], [False])
    check(verify(ops, rows[1:2], params, no_drafts(1), **rates), [[-1]], [False])
    drafts = drafts_of([[-1, 2]])  # a placeholder before it: the row decides nothing
    check(verify(ops, rows, params, drafts, **rates), [[1]])


@pytest.mark.parametrize("rule", [Rule.STANDARD, Rule.BLOCK, Rule.COUPLED])
def test_filters_and_edits_are_applied_on_load(ops: Backend, rule: Rule) -> None:
    """A draft that the target's mask, a ban or its nucleus drops has p = 0."""
    rows = torch.zeros(4, 6)
    rows[:, 2] = 5.0
    masked = make_edits(4, masks=[[0, 1]], mask_of=[0, -1, -1, -1], vocabulary=6)
    banned = make_edits(4, {(0, 2): (-INF, 1.5, -3.0), (1, 0): (1.0, 1.0, 1.0)})
    drafts = drafts_of([[2], [2]], torch.zeros(2, 1, 6))
    for edits in (masked, banned):
        for seed in range(10):
            params = make_params(2, seed=seed, rule=rule)
            verdict = verify(ops, rows, params, drafts, [5, 6], edits=edits)
            assert verdict.n_accept_B[0] == 0
            assert int(verdict.token_BK1[0, 0]) in ({0, 1} if edits is masked else {0, 1, 3, 4, 5})
    for seed in range(10):
        params = make_params(2, seed=seed, rule=rule, top_p=0.5)
        drafts = drafts_of([[3], [2]], torch.zeros(2, 1, 6))
        check(verify(ops, rows, params, drafts, [5, 6]), [[2], [2, 2]])

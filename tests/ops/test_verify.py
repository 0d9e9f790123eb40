"""Verification, case by case, on every backend: what is emitted and why."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from foretoken.ops import (
    RESIDUAL,
    TARGET,
    Backend,
    DraftBlock,
    Noise,
    Rows,
    VerifyBatch,
    get_backend,
)
from tests.support.cases import drafts_of, host_backends, make_params, no_drafts
from tests.support.verdicts import check, draw, only

INF = math.inf


@pytest.fixture(params=host_backends())
def ops(request: pytest.FixtureRequest) -> Backend:
    return get_backend(request.param)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ragged_batch_and_slots(ops: Backend, dtype: torch.dtype, temperature: float) -> None:
    """Certain rows: accepted, rejected at once, no draft, rejected in the middle."""
    rows = torch.stack([only(t) for t in (1, 2, 3, 4, 5, 6, 1, 2, 3, 4)])
    drafts = drafts_of([[1, 2], [7], [], [1, 7, 3]], dtype=dtype)
    slot = torch.tensor([5, 0, 3, 1])
    position = torch.tensor([10, 0, 99, 7])
    verdict = ops.verify(VerifyBatch(rows, make_params(6, temperature), slot, position, drafts))
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
        verdict = ops.verify(
            VerifyBatch(
                rows, params, torch.tensor([0]), torch.tensor([position]), drafts_of([[1, -1, 3]])
            )
        )
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
        verdict = ops.verify(
            VerifyBatch(
                rows, params, torch.tensor([1]), torch.tensor([position]), drafts_of([[5, 2]], q)
            )
        )
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
    slot = torch.arange(4)
    verdict = ops.verify(VerifyBatch(rows, make_params(4, temperature), slot, slot, drafts))
    check(verdict, [[1, -1], [1], [-1], [1]], [False, True, False, True])


def test_rejected_one_hot_draft_is_never_emitted(ops: Backend) -> None:
    """The residual of a one-hot q is p without x; K = 1, p(x) = 1/2."""
    count = 300
    rows = torch.tensor([math.log(0.5), math.log(0.25), math.log(0.25)]).repeat(2 * count, 1)
    slot = torch.arange(count)
    verdict = ops.verify(
        VerifyBatch(rows, make_params(count, seed=5), slot, slot * 0, drafts_of([[0]] * count))
    )
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
    one_hot_on_p = drafts_of([[1]])
    params = make_params(1, seed=9)
    verdict = ops.verify(
        VerifyBatch(rows, params, torch.tensor([0]), torch.tensor([0]), one_hot_on_p)
    )
    check(verdict, [[1, 2]])
    # x = 2 was "drafted" from q = {0, 1, 2, 3}; the residual is {7} alone.
    rows = torch.stack([p, only(2)])
    verdict = ops.verify(
        VerifyBatch(
            rows, params, torch.tensor([0]), torch.tensor([0]), drafts_of([[2]], q[None, None])
        )
    )
    check(verdict, [[7]])
    # q covers p entirely (q = p but for an impossible draft): nothing is left of max(p - q, 0).
    wide = torch.cat([p, torch.tensor([-80.0])])
    for position in range(20):
        verdict = ops.verify(
            VerifyBatch(
                rows,
                params,
                torch.tensor([0]),
                torch.tensor([position]),
                drafts_of([[8]], wide[None, None]),
            )
        )
        check(verdict, [[draw(ops, p, params, position, RESIDUAL)]])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ids_beyond_the_vocabulary_are_never_accepted(ops: Backend, temperature: float) -> None:
    rows = torch.zeros(2, 8)
    q = torch.zeros(1, 1, 12)
    params = make_params(1, temperature)
    for token in (8, 11, 2**31 - 1):
        for logits in (None, q):
            verdict = ops.verify(
                VerifyBatch(
                    rows, params, torch.tensor([0]), torch.tensor([3]), drafts_of([[token]], logits)
                )
            )
            assert verdict.n_accept_B.tolist() == [0]
            assert 0 <= int(verdict.token_BK1[0, 0]) < 8


def test_wider_draft_vocabulary_leaves_its_share_to_the_residual(ops: Backend) -> None:
    """q has 2/3 of its mass beyond V: a draft x < V has q(x) = 1/12, p(x) = 1/4: accepted."""
    rows = torch.zeros(2, 4)
    q = torch.zeros(1, 1, 12)
    for position in range(50):
        verdict = ops.verify(
            VerifyBatch(
                rows,
                make_params(1),
                torch.tensor([0]),
                torch.tensor([position]),
                drafts_of([[1]], q),
            )
        )
        assert verdict.n_accept_B.tolist() == [1]


def test_narrower_draft_vocabulary_has_no_mass_beyond_it(ops: Backend) -> None:
    """q lives on {0, 1}, p on {1, 2, 3}: 0 is rejected, and the residual is within {2, 3}."""
    p = torch.tensor([-INF, 0.0, 0.0, 0.0])
    q = torch.zeros(1, 1, 2)
    seen = set()
    for position in range(50):
        verdict = ops.verify(
            VerifyBatch(
                torch.stack([p, p]),
                make_params(1),
                torch.tensor([0]),
                torch.tensor([position]),
                drafts_of([[0]], q),
            )
        )
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
        verdict = ops.verify(
            VerifyBatch(
                rows, params, torch.tensor([0]), torch.tensor([position]), drafts_of([[5]], q)
            )
        )
        check(verdict, [[draw(ops, rows[0], params, position, TARGET)]])


def test_q_is_found_by_slot_and_missing_q_is_one_hot_for_that_request_alone(ops: Backend) -> None:
    """Cached rows by slot [c, a, b]; batch [a, b, c] drafts [2, 0, 1]; c lost its q."""
    q = torch.full((3, 2, 8), math.nan)
    q[1] = torch.stack([only(2), only(3)])
    rows = torch.stack([only(2), only(3), only(4), only(5), torch.zeros(8), only(6)])
    drafts = drafts_of([[2, 3], [], [1]], q, real_q=[True, True, False])
    accepted = 0
    for position in range(50):
        verdict = ops.verify(
            VerifyBatch(
                rows,
                make_params(3, seed=4),
                torch.tensor([1, 2, 0]),
                torch.full((3,), position),
                drafts,
            )
        )
        assert verdict.token_BK1[:2].tolist() == [[2, 3, 4], [5, -1, -1]]
        accepted += int(verdict.n_accept_B[2])
    assert 0 < accepted < 30  # p(x) = 1/8


def test_greedy_ties_take_the_lowest_index(ops: Backend) -> None:
    rows = torch.zeros(2, 2050)
    rows[:, 7] = rows[:, 2049] = 1.0
    params = make_params(1, 0.0)
    slot = torch.tensor([0])
    assert draw(ops, rows[0], params, 0, TARGET) == 7
    check(ops.verify(VerifyBatch(rows, params, slot, slot, drafts_of([[2049]]))), [[7]])
    check(ops.verify(VerifyBatch(rows, params, slot, slot, drafts_of([[7]]))), [[7, 7]])


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
    verdict = ops.verify(
        VerifyBatch(
            row.expand(2 * count, -1), params, slot, zero, drafts_of([[3]] * count), fp64_noise=fp64
        )
    )
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
    params, slot = make_params(2, seed=1), torch.tensor([0, 1])
    before = rows.clone(), q.clone(), best.clone()
    drafts = drafts_of(best.tolist(), q)
    half = ops.verify(VerifyBatch(rows, params, slot, slot + 5, drafts))
    full = ops.verify(
        VerifyBatch(rows.float(), params, slot, slot + 5, drafts_of(best.tolist(), q.float()))
    )
    assert torch.equal(half.token_BK1, full.token_BK1)
    assert not rejecting or half.n_accept_B.tolist() == [0, 0]
    wide = rows.float()
    ops.verify(VerifyBatch(wide, params, slot, slot + 5, drafts))
    assert torch.equal(wide, before[0].float())
    assert torch.equal(rows, before[0])
    assert torch.equal(q, before[1])
    assert torch.equal(drafts.token_BK, before[2])

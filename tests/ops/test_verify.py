"""Verification and sampling, case by case, on both backends: what is emitted and why."""

from __future__ import annotations

import math

import pytest
import torch

from foretoken.ops import BACKENDS, Backend, DraftBlock, SlotParams, Stream, Verdict, get_backend
from foretoken.ops.rules import RULES, RuleInputs
from tests.support.cases import drafts_of, make_params, no_drafts

INF = math.inf
TARGET = (Stream.TARGET_TOKEN, Stream.TARGET_BLOCK)
RESIDUAL = (Stream.RESIDUAL_TOKEN, Stream.RESIDUAL_BLOCK)


@pytest.fixture(params=sorted(BACKENDS))
def ops(request: pytest.FixtureRequest) -> Backend:
    return get_backend(request.param)


def only(token: int, vocabulary: int = 8) -> torch.Tensor:
    """All mass on one token."""
    row = torch.full((vocabulary,), -INF)
    row[token] = 0.0
    return row


def draw(
    ops: Backend,
    row: torch.Tensor,
    params: SlotParams,
    position: int,
    streams: tuple[Stream, Stream],
) -> int:
    one = torch.tensor([position])
    return int(ops.sample(row[None], params, one * 0, one, one * 0, streams))


def check(verdict: Verdict, tokens: list[list[int]], finite: list[bool] | None = None) -> None:
    widest = verdict.token_BK1.shape[1]
    assert verdict.token_BK1.tolist() == [row + [-1] * (widest - len(row)) for row in tokens]
    assert verdict.n_accept_B.tolist() == [len(row) - 1 for row in tokens]
    assert verdict.n_accept_B.dtype == torch.int64
    assert verdict.finite_B.tolist() == (finite or [True] * len(tokens))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ragged_batch_and_slots(ops: Backend, dtype: torch.dtype, temperature: float) -> None:
    """Certain rows: accepted, rejected at once, no draft, rejected in the middle."""
    rows = torch.stack([only(t) for t in (1, 2, 3, 4, 5, 6, 1, 2, 3, 4)])
    drafts = drafts_of([[1, 2], [7], [], [1, 7, 3]], dtype=dtype)
    slot = torch.tensor([5, 0, 3, 1])
    position = torch.tensor([10, 0, 99, 7])
    verdict = ops.verify(rows, make_params(6, temperature), slot, position, drafts)
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
    verdict = ops.verify(rows, params, slot, position, block)
    plain = ops.sample(rows, params, slot, position, torch.zeros(5, dtype=torch.long), TARGET)
    check(verdict, [[t] for t in plain.tolist()])


def test_empty_batch(ops: Backend) -> None:
    empty = torch.zeros(0, dtype=torch.long)
    verdict = ops.verify(torch.zeros(0, 8), make_params(1), empty, empty, no_drafts(0))
    assert verdict.token_BK1.shape == (0, 1)
    assert ops.sample(torch.zeros(0, 8), make_params(1), empty, empty, empty, TARGET).shape == (0,)


def test_placeholder_ends_the_prefix_and_draws_from_p_with_target_noise(ops: Backend) -> None:
    rows = torch.stack([only(1), torch.zeros(8), only(3), only(4)])
    params = make_params(1, seed=3)
    for position in range(20):
        verdict = ops.verify(
            rows, params, torch.tensor([0]), torch.tensor([position]), drafts_of([[1, -1, 3]])
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
    for position in range(20):
        verdict = ops.verify(
            rows, params, torch.tensor([1]), torch.tensor([position]), drafts_of([[5, 2]], q)
        )
        flipped = SlotParams(*(getattr(params, f).flip(0) for f in SlotParams.__dataclass_fields__))
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
    verdict = ops.verify(rows, make_params(4, temperature), slot, slot, drafts)
    check(verdict, [[1, -1], [1], [-1], [1]], [False, True, False, True])


def test_rejected_one_hot_draft_is_never_emitted(ops: Backend) -> None:
    """The residual of a one-hot q is p without x; K = 1, p(x) = 1/2."""
    count = 300
    rows = torch.tensor([math.log(0.5), math.log(0.25), math.log(0.25)]).repeat(2 * count, 1)
    slot = torch.arange(count)
    verdict = ops.verify(rows, make_params(count, seed=5), slot, slot * 0, drafts_of([[0]] * count))
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
    verdict = ops.verify(rows, params, torch.tensor([0]), torch.tensor([0]), one_hot_on_p)
    check(verdict, [[1, 2]])
    # x = 2 was "drafted" from q = {0, 1, 2, 3}; the residual is {7} alone.
    rows = torch.stack([p, only(2)])
    verdict = ops.verify(
        rows, params, torch.tensor([0]), torch.tensor([0]), drafts_of([[2]], q[None, None])
    )
    check(verdict, [[7]])
    # q covers p entirely (q = p but for an impossible draft): nothing is left of max(p - q, 0).
    wide = torch.cat([p, torch.tensor([-80.0])])
    for position in range(20):
        verdict = ops.verify(
            rows,
            params,
            torch.tensor([0]),
            torch.tensor([position]),
            drafts_of([[8]], wide[None, None]),
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
                rows, params, torch.tensor([0]), torch.tensor([3]), drafts_of([[token]], logits)
            )
            assert verdict.n_accept_B.tolist() == [0]
            assert 0 <= int(verdict.token_BK1[0, 0]) < 8


def test_wider_draft_vocabulary_leaves_its_share_to_the_residual(ops: Backend) -> None:
    """q has 2/3 of its mass beyond V: a draft x < V has q(x) = 1/12, p(x) = 1/4: accepted."""
    rows = torch.zeros(2, 4)
    q = torch.zeros(1, 1, 12)
    for position in range(50):
        verdict = ops.verify(
            rows, make_params(1), torch.tensor([0]), torch.tensor([position]), drafts_of([[1]], q)
        )
        assert verdict.n_accept_B.tolist() == [1]


def test_narrower_draft_vocabulary_has_no_mass_beyond_it(ops: Backend) -> None:
    """q lives on {0, 1}, p on {1, 2, 3}: 0 is rejected, and the residual is within {2, 3}."""
    p = torch.tensor([-INF, 0.0, 0.0, 0.0])
    q = torch.zeros(1, 1, 2)
    seen = set()
    for position in range(50):
        verdict = ops.verify(
            torch.stack([p, p]), make_params(1), torch.tensor([0]), torch.tensor([position]),
            drafts_of([[0]], q),
        )  # fmt: skip
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
            rows, params, torch.tensor([0]), torch.tensor([position]), drafts_of([[5]], q)
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
            rows,
            make_params(3, seed=4),
            torch.tensor([1, 2, 0]),
            torch.full((3,), position),
            drafts,
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
    check(ops.verify(rows, params, slot, slot, drafts_of([[2049]])), [[7]])
    check(ops.verify(rows, params, slot, slot, drafts_of([[7]])), [[7, 7]])


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
    drawn = ops.sample(rows, params, slot, zero, zero, TARGET, fp64_noise=fp64)
    verdict = ops.verify(
        row.expand(2 * count, -1), params, slot, zero, drafts_of([[3]] * count), fp64_noise=fp64
    )
    for tokens in (drawn, verdict.token_BK1[:, 0]):
        assert bool(((tokens >= 1024) & (tokens < vocabulary)).all())


def test_which_noise_a_row_uses_follows_from_its_parameters(ops: Backend) -> None:
    """top_k >= V is off (hierarchical); an active top-k that drops nothing is flat."""
    row = torch.zeros(1, 1500)  # all tied: top_k = 3 keeps everything
    params = make_params(3, 1.0, [0, 1500, 3])
    key = params.key_S[:1].expand(3).contiguous()
    params = SlotParams(key, params.temperature_S, params.top_k_S, params.top_p_S, params.min_p_S)
    hierarchical, off, flat = (
        [
            int(ops.sample(row, params, torch.tensor([s]), at, at * 0, TARGET))
            for at in torch.arange(8)[:, None]
        ]
        for s in range(3)
    )
    assert hierarchical == off != flat


def test_batch_order_and_company_never_change_a_draw(ops: Backend) -> None:
    generator = torch.Generator().manual_seed(11)
    params = make_params(6, [1.0, 0.0, 0.7, 1.0, 1.3, 0.5], [0, 0, 5, 0, 9, 0], seed=2)
    rows = ops.process_logits(
        torch.randn(6, 1300, generator=generator), params, torch.arange(6), None
    )
    position, index = torch.arange(6) * 7, torch.arange(6) % 3
    streams = (Stream.DRAFT_TOKEN, Stream.DRAFT_BLOCK)
    together = ops.sample(rows, params, torch.arange(6), position, index, streams)
    order = torch.tensor([3, 5, 0, 2, 4, 1])
    shuffled = ops.sample(rows[order], params, order, position[order], index[order], streams)
    assert torch.equal(shuffled, together[order])
    for s in range(6):
        one = slice(s, s + 1)
        alone = ops.sample(
            rows[one], params, torch.arange(6)[one], position[one], index[one], streams
        )
        assert alone.tolist() == together[one].tolist()


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
    half = ops.verify(rows, params, slot, slot + 5, drafts)
    full = ops.verify(rows.float(), params, slot, slot + 5, drafts_of(best.tolist(), q.float()))
    assert torch.equal(half.token_BK1, full.token_BK1)
    assert not rejecting or half.n_accept_B.tolist() == [0, 0]
    wide = rows.float()
    ops.verify(wide, params, slot, slot + 5, drafts)
    assert torch.equal(wide, before[0].float())
    assert torch.equal(rows, before[0])
    assert torch.equal(q, before[1])
    assert torch.equal(drafts.token_BK, before[2])


def test_a_residual_weight_scales_p(monkeypatch: pytest.MonkeyPatch) -> None:
    """norm(max(w p - q, 0)) at w = 1/2, p = (.6, .3, .1), q = (.1, .1, .8): (.8, .2, 0).

    With 1/w in its place it would be (.688, .313, 0). Logits are shifted: they need no norm.
    """
    count = 40_000

    def halve(x: RuleInputs) -> tuple[torch.Tensor, torch.Tensor]:
        rejected = torch.zeros(len(x.log_p_BK), dtype=torch.int64)
        return rejected, torch.full((len(rejected),), math.log(0.5), dtype=torch.float64)

    monkeypatch.setitem(RULES, "halve", halve)
    p = torch.tensor([0.6, 0.3, 0.1]).log() + 3
    q = torch.tensor([0.1, 0.1, 0.8]).log() - 2
    slot = torch.arange(count)
    verdict = get_backend("torch_cpu").verify(
        p.repeat(2 * count, 1), make_params(count, seed=8), slot, slot * 0,
        drafts_of([[2]] * count, q.expand(count, 1, 3)), rule="halve",
    )  # fmt: skip
    share = torch.bincount(verdict.token_BK1[:, 0], minlength=3) / count
    assert abs(float(share[0]) - 0.8) < 4 * math.sqrt(0.8 * 0.2 / count)
    assert float(share[2]) == 0

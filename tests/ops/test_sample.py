"""Sampling, drafting and log-probabilities, case by case, on every backend."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from foretoken.ops import (
    DRAFT,
    TARGET,
    Backend,
    DraftCache,
    Noise,
    Rows,
    Rule,
    SlotParams,
    get_backend,
)
from tests.support.cases import host_backends, make_edits, make_params

INF = math.inf
CPU = torch.device("cpu")


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def one_key(params: SlotParams) -> SlotParams:
    return replace(params, key_S=params.key_S[:1].expand(len(params.key_S)).contiguous())


def test_which_noise_a_row_uses_follows_from_its_parameters(ops: Backend) -> None:
    """top_k >= V is off (hierarchical); an active top-k that drops nothing is flat; COUPLED is."""
    row = torch.zeros(1, 1500)  # all tied: top_k = 3 keeps everything
    params = one_key(make_params(4, 1.0, [0, 1500, 3, 0], rule=[0, 1, 0, Rule.COUPLED]))
    hierarchical, off, flat, coupled = (
        [
            int(ops.sample(Rows(row, params, torch.tensor([s])), Noise(at, at * 0, TARGET)))
            for at in torch.arange(8)[:, None]
        ]
        for s in range(4)
    )
    assert hierarchical == off
    assert flat == coupled
    assert off != flat


@pytest.mark.parametrize("rule", [Rule.STANDARD, Rule.COUPLED])
def test_logits_of_any_size_leave_room_for_noise(ops: Backend, rule: Rule) -> None:
    """Only differences of logits count: ties at 1e30 are drawn like ties at 0."""
    zeros = torch.full((64, 1500), -INF)
    zeros[:, [3, 4, 1400]] = 0.0
    params, row_N = make_params(64, rule=rule), torch.arange(64)
    drawn = ops.sample(Rows(zeros, params, row_N), Noise(row_N, row_N * 0, TARGET))
    assert len(set(drawn.tolist())) == 3
    for largest in (1e30, -1e30):
        huge = torch.where(zeros == 0, largest, -INF)
        assert ops.sample(Rows(huge, params, row_N), Noise(row_N, row_N * 0, TARGET)).equal(drawn)


@pytest.mark.parametrize(
    "filters", [{"top_p": 0.9}, {"top_k": 400}, {"top_k": 400, "top_p": 0.9}, {"min_p": 0.01}, {}]
)
@pytest.mark.parametrize("first_masked", [1024, 300])
def test_blocks_without_a_finite_logit_have_no_mass(
    ops: Backend, filters: dict[str, Any], first_masked: int
) -> None:
    """Blocks that are masked whole; and fewer tokens left than k, where top-k drops nothing."""
    rows, slot = randn(16, 5000, seed=1) * 2, torch.arange(16)
    rows[:, first_masked : first_masked + 2048] = -INF
    if first_masked == 300:
        rows[:, first_masked:] = -INF
    params, oracle = make_params(16, 1.0, seed=3, **filters), get_backend("reference")
    given, noise = Rows(rows, params, slot), Noise(slot, slot * 0, TARGET)
    assert torch.equal(ops.sample(given, noise), oracle.sample(given, noise))
    noise = noise._replace(streams=DRAFT)
    assert torch.equal(ops.draft(given, noise, None), oracle.draft(given, noise, None))
    kept = ops.process_logits(given) > -INF
    assert torch.equal(kept, oracle.process_logits(given) > -INF)


@pytest.mark.skipif("native" not in host_backends(), reason="no native kernels")
def test_a_sample_and_a_draft_agree_in_near_ties() -> None:
    """A draft sums all blocks, a sample only a few: the sums must be equal to the bit."""
    native, params, slot = get_backend("native"), make_params(1, 0.7, seed=3), torch.tensor([0])

    def tokens(row: torch.Tensor, position: int) -> tuple[int, int]:
        rows, noise = Rows(row, params, slot), Noise(torch.tensor([position]), slot, DRAFT)
        return int(native.sample(rows, noise)), int(native.draft(rows, noise, None))

    for position in range(100):
        row = randn(1, 2048, seed=position)
        row[0, 0] = 5.0
        row[:, 1024:] = -9.0
        low, high = np.float32(-8), np.float32(40)  # the first block wins, the second
        while True:
            middle = np.float32((float(low) + float(high)) / 2)
            if middle in (low, high):
                break
            row[0, 1500] = float(middle)
            low, high = (low, middle) if tokens(row, position)[0] >= 1024 else (middle, high)
        winners = set()
        for step in range(-6, 7):
            row[0, 1500] = float(low + step * np.spacing(low))
            sampled, drafted = tokens(row, position)
            assert sampled == drafted
            winners.add(sampled // 1024)
        assert winners == {0, 1}


def test_batch_order_and_company_never_change_a_draw(ops: Backend) -> None:
    params = make_params(
        6, [1.0, 0.0, 0.7, 1.0, 1.3, 0.5], [0, 0, 5, 0, 9, 0], seed=2, rule=[0, 1, 2, 2, 3, 0]
    )
    rows = randn(6, 1300, seed=11)
    position, index = torch.arange(6) * 7, torch.arange(6) % 3
    together = ops.sample(Rows(rows, params, torch.arange(6)), Noise(position, index, DRAFT))
    order = torch.tensor([3, 5, 0, 2, 4, 1])
    shuffled = ops.sample(
        Rows(rows[order], params, order), Noise(position[order], index[order], DRAFT)
    )
    assert torch.equal(shuffled, together[order])
    for s in range(6):
        one = slice(s, s + 1)
        alone = ops.sample(
            Rows(rows[one], params, torch.arange(6)[one]), Noise(position[one], index[one], DRAFT)
        )
        assert alone.tolist() == together[one].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_raw_logits_are_processed_on_load(ops: Backend, dtype: torch.dtype) -> None:
    """The same tokens as from logits that were processed before; inputs stay as they are."""
    count = 12
    rows = (randn(count, 1100, seed=5) * 3).to(dtype)
    edits = make_edits(
        count, {(n, 5): (4.0, 1.5, 0.5) for n in range(count)} | {(0, 6): (-INF, 1.0, 0.0)},
        masks=[list(range(0, 1100, 2))], mask_of=[n % 2 - 1 for n in range(count)], vocabulary=1100,
    )  # fmt: skip
    slot = torch.arange(count)
    params = make_params(
        count, [0.7, 1.0, 0.0] * 4, [0, 0, 0, 4] * 3, [1.0, 0.8] * 6, [0.0, 0.0, 0.0, 0.1] * 3
    )
    before = rows.clone()
    ours = ops.sample(Rows(rows, params, slot, edits), Noise(slot, slot * 0, TARGET))
    processed = ops.process_logits(Rows(rows, params, slot, edits))
    # As they are: processed logits are divided and filtered already. Top-k stays, for its noise.
    plain = make_params(count, [1.0, 1.0, 0.0] * 4, [0, 0, 0, 4] * 3)
    again = ops.sample(Rows(processed.float(), plain, slot), Noise(slot, slot * 0, TARGET))
    assert ours.tolist() == again.tolist()
    assert torch.equal(rows, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_draft_leaves_its_q_in_its_slot(ops: Backend, dtype: torch.dtype) -> None:
    """The cache has the raw logits to the bit; threshold and lse give the draft's distribution."""
    params = make_params(
        5, [0.7, 1.0, 1.3, 1.0, 0.0], [0, 3, 0, 50, 0], [1, 1, 0.9, 1, 1], [0, 0, 0, 0.1, 0]
    )
    rows = (randn(4, 300, seed=9) * 3).to(dtype)
    rows[0, 7] = -INF
    slot, position, index = torch.tensor([3, 0, 2, 1]), torch.arange(4), torch.tensor([1, 0, 1, 0])
    cache = DraftCache.empty(5, 2, 300, dtype, CPU)
    for tensor in (cache.logits_SKV, cache.threshold_SK, cache.lse_SK):
        tensor.fill_(99.0)
    token = ops.draft(Rows(rows, params, slot), Noise(position, index, DRAFT), cache)
    assert torch.equal(token, ops.sample(Rows(rows, params, slot), Noise(position, index, DRAFT)))
    assert torch.equal(cache.logits_SKV[slot, index], rows)
    law = ops.process_logits(Rows(rows, params, slot)).double().softmax(dim=1)
    temperature = params.temperature_S[slot].double()[:, None]
    q = (rows.double() / temperature - cache.lse_SK[slot, index][:, None]).exp()
    q = q.masked_fill(rows.float() < cache.threshold_SK[slot, index][:, None], 0)
    torch.testing.assert_close(q, law, rtol=1e-5, atol=1e-9)
    assert cache.threshold_SK[0, 0] == -INF  # nothing was dropped from slot 0
    written = torch.zeros(5, 2).bool()
    written[slot, index] = True
    assert bool((cache.logits_SKV[~written] == 99).all())
    assert bool((cache.lse_SK[~written] == 99).all())


def test_drafts_without_a_cache_are_the_same(ops: Backend) -> None:
    params, slot = make_params(4, [0.0, 1.0, 0.5, 1.0], rule=[0, 1, 2, 3]), torch.arange(4)
    rows = randn(4, 50, seed=1)
    cache = DraftCache.empty(4, 1, 50, rows.dtype, CPU)
    given = Rows(rows, params, slot), Noise(slot, slot * 0, DRAFT)
    assert torch.equal(ops.draft(*given, None), ops.draft(*given, cache))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_coupled_drafter_that_is_the_target_drafts_its_draws(
    ops: Backend, temperature: float
) -> None:
    params = make_params(3, temperature, seed=4, rule=Rule.COUPLED)
    slot, position = torch.arange(3), torch.tensor([7, 8, 9])
    rows = randn(3, 2000, seed=3)
    drafts = ops.draft(Rows(rows, params, slot), Noise(position, slot + 1, DRAFT), None)
    target = ops.sample(Rows(rows, params, slot), Noise(position, slot * 0, TARGET))
    assert drafts.tolist() == target.tolist()


@pytest.mark.parametrize("junk", [math.nan, INF, -INF])
def test_a_draft_row_that_is_not_finite_has_no_finite_lse(ops: Backend, junk: float) -> None:
    rows = torch.zeros(2, 30)
    rows[0, 4] = junk
    if junk == -INF:
        rows[0] = junk
    for params in (make_params(2), make_params(2, top_k=3), make_params(2, 0.5, top_p=0.5)):
        cache, slot = DraftCache.empty(2, 1, 30, rows.dtype, CPU), torch.arange(2)
        token = ops.draft(Rows(rows, params, slot), Noise(slot, slot * 0, DRAFT), cache)
        assert bool(((token >= 0) & (token < 30)).all())
        assert cache.lse_SK.isfinite().flatten().tolist() == [False, True]


def test_logprobs_of_raw_and_processed_logits(ops: Backend) -> None:
    p = [0.5, 0.25, 0.125, 0.125]
    rows = torch.tensor([p, p[::-1]]).log() + 3
    token = torch.tensor([1, 0])
    raw = ops.logprobs(rows, token, 3)
    assert raw.logprob_N.tolist() == pytest.approx([math.log(0.25), math.log(0.125)], abs=1e-6)
    assert raw.rank_N.tolist() == [2, 3]
    assert raw.top_token_NT.tolist() == [[0, 1, 2], [3, 2, 0]]
    assert raw.top_logprob_NT[0].exp().tolist() == pytest.approx(p[:3], abs=1e-6)
    assert [t.dtype for t in (raw.logprob_N, raw.rank_N, raw.top_logprob_NT, raw.top_token_NT)] == [
        torch.float32, torch.int64, torch.float32, torch.int64,
    ]  # fmt: skip
    params, slot = make_params(2, [1.0, 0.0], top_k=2), torch.arange(2)
    edits = make_edits(2, {(0, 0): (-INF, 1.0, 0.0), (1, 3): (-INF, 1.0, 0.0)})
    ours = ops.logprobs(Rows(rows, params, slot, edits), torch.tensor([0, 2]), 2)
    assert ours.logprob_N.exp().tolist() == pytest.approx([0.0, 0.5], abs=1e-6)
    assert ours.rank_N.tolist() == [4, 1]  # row 0 keeps 1, and 2 and 3, which tie at the k-th
    assert ours.top_token_NT.tolist() == [[1, 2], [2, 0]]  # row 1 at T=0 is not filtered
    assert ours.top_logprob_NT.exp().flatten().tolist() == pytest.approx(
        [0.5, 0.25, 0.5, 0.25], abs=1e-6
    )
    lowest = torch.tensor([[0.0, torch.finfo(torch.float32).min]])  # what some masks write for -inf
    far = ops.logprobs(Rows(lowest, make_params(1, 0.7), slot[:1]), token[:1], 0)
    assert far.logprob_N.tolist() == [-INF]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_of_many(ops: Backend, dtype: torch.dtype) -> None:
    """Against torch's own; in bf16 ties are common, and the lowest id comes first."""
    rows = (randn(6, 3000, seed=8) * 3).to(dtype)
    token = torch.arange(6) * 499
    ours = ops.logprobs(rows, token, 64)
    log_p = rows.double().log_softmax(dim=1)
    order = torch.sort(log_p, dim=1, descending=True, stable=True)
    given = log_p.gather(1, token[:, None])
    torch.testing.assert_close(ours.logprob_N.double(), given[:, 0], rtol=1e-5, atol=1e-5)
    assert ours.rank_N.tolist() == (1 + (log_p > given).sum(dim=1)).tolist()
    assert torch.equal(ours.top_token_NT, order.indices[:, :64])
    torch.testing.assert_close(
        ours.top_logprob_NT.double(), order.values[:, :64], rtol=1e-5, atol=1e-5
    )


def test_no_top_and_no_rows(ops: Backend) -> None:
    ours = ops.logprobs(randn(2, 7), torch.tensor([1, 2]), 0)
    assert ours.top_token_NT.shape == ours.top_logprob_NT.shape == (2, 0)
    empty = torch.zeros(0, dtype=torch.long)
    assert ops.logprobs(torch.zeros(0, 7), empty, 2).top_token_NT.shape == (0, 2)
    cache = DraftCache.empty(1, 1, 7, torch.float32, CPU)
    drawn = ops.draft(
        Rows(torch.zeros(0, 7), make_params(1), empty), Noise(empty, empty, DRAFT), cache
    )
    assert drawn.shape == (0,)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("law", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}, {"rule": 2}])
@pytest.mark.parametrize("vocabulary", [8, 1030])
def test_a_row_that_is_not_finite_gives_an_unmarked_id(
    ops: Backend, temperature: float, law: dict[str, float], vocabulary: int
) -> None:
    """Any id in range. For a draft, the lse in the cache is not finite."""
    rows = torch.randn(5, vocabulary, generator=torch.Generator().manual_seed(1))
    rows[0, 5] = torch.nan
    rows[1, 5] = torch.inf
    rows[2] = -torch.inf
    rows[3] = torch.nan
    rows[4] = torch.inf
    params, slot = make_params(5, temperature, **law), torch.arange(5)  # type: ignore[arg-type]
    drawn_N = ops.sample(Rows(rows, params, slot), Noise(slot, slot * 0, TARGET))
    cache = DraftCache.empty(5, 1, vocabulary, torch.float32, torch.device("cpu"))
    draft_N = ops.draft(Rows(rows, params, slot), Noise(slot, slot * 0, DRAFT), cache)
    for token_N in (drawn_N, draft_N):
        assert bool(((token_N >= 0) & (token_N < vocabulary)).all())
    if temperature:
        assert not bool(cache.lse_SK.isfinite().any())
    else:
        assert cache.lse_SK.tolist() == [[0.0]] * 5

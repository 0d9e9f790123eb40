"""Drafts that were made elsewhere: the q of given logits, on every backend."""

from __future__ import annotations

import doctest
import math

import pytest
import torch
from torch import Tensor

from foretoken.errors import ConfigError
from foretoken.ops import (
    DRAFT,
    Backend,
    DraftBlock,
    DraftCache,
    Noise,
    Rows,
    Rule,
    SlotParams,
    VerifyBatch,
    dispatch,
    draft_cache,
    get_backend,
)
from foretoken.sampling import synthetic
from tests.support.cases import fast_backends, make_params

SLOTS, REQUESTS, K = 70, 60, 3


def given_params() -> SlotParams:
    """Every rule, temperature and filter, in more slots than there are requests."""
    return make_params(
        SLOTS, [0.0, 0.7, 1.0, 1.0, 1.3] * 14, [0, 0, 20, 0, 0, 0, 5] * 10, [1.0, 0.9] * 35,
        [0.0, 0.0, 0.0, 0.1, 0.0, 0.0, 0.0] * 10, rule=[0, 0, 1, 3, 2] * 14,
    )  # fmt: skip


def given_drafts(dtype: torch.dtype, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draft logits [B, K, V'], rows apart in memory, one not finite; slots; and target logits."""
    generator = torch.Generator().manual_seed(3)
    wide_BKV = torch.randn(REQUESTS, K, 2 * width, generator=generator) * 2
    logits_NV = torch.randn(REQUESTS, K + 1, 40, generator=generator) / 2
    shared = min(width, 40)
    logits_NV[:, :K, :shared] += wide_BKV[..., :shared]
    wide_BKV[5, 1, 7] = math.nan
    slot_B = torch.randperm(SLOTS, generator=generator)[:REQUESTS]
    return wide_BKV.to(dtype)[..., :width], slot_B, logits_NV.flatten(0, 1)


def drawn(cache: DraftCache, params: SlotParams, slot_B: Tensor) -> Tensor:
    raw_BKV = cache.logits_SKV[slot_B].double()
    scale_B = params.temperature_S[slot_B].double().clamp(min=1e-3)
    x_BKV = raw_BKV.nan_to_num(0) / scale_B[:, None, None]
    x_BKV[raw_BKV < cache.threshold_SK[slot_B][..., None]] = -torch.inf
    generator = torch.Generator().manual_seed(4)
    q = x_BKV.softmax(2).flatten(0, 1)
    return q.multinomial(1, generator=generator).view(x_BKV.shape[:2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("width", [40, 33, 50])
def test_the_cache_is_that_of_drafting(ops: Backend, dtype: torch.dtype, width: int) -> None:
    params, (raw_BKV, slot_B, _) = given_params(), given_drafts(dtype, width)
    cache = draft_cache(ops, raw_BKV, params, slot_B)
    other = DraftCache.empty(SLOTS, K, width, dtype, torch.device("cpu"))
    for i in range(K):  # other positions: the noise of the draws leaves nothing
        ops.draft(
            Rows(raw_BKV[:, i], params, slot_B), Noise(slot_B + 9, slot_B * 0 + i, DRAFT), other
        )
    for name in ("logits_SKV", "threshold_SK", "lse_SK"):
        mine, theirs = getattr(cache, name), getattr(other, name)
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        assert torch.equal(mine[slot_B].nan_to_num(7), theirs[slot_B].nan_to_num(7)), name


@pytest.mark.parametrize("name", fast_backends())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [40, 33, 50])
def test_given_drafts_are_verified_as_the_oracle_does(
    name: str, dtype: torch.dtype, width: int
) -> None:
    """End to end: logits and tokens from elsewhere, rates from a length, every rule."""
    params, (raw_BKV, slot_B, logits_NV) = given_params(), given_drafts(dtype, width)
    oracle = get_backend("reference")
    token_BK = drawn(draft_cache(oracle, raw_BKV, params, slot_B), params, slot_B)
    rates = synthetic.conditional_rates(K, synthetic_acceptance_length=2.5)
    verdicts = []
    for ops in (oracle, get_backend(name)):
        cache = draft_cache(ops, raw_BKV, params, slot_B)
        drafts = DraftBlock(
            token_BK, torch.full_like(slot_B, K), cache, torch.ones(REQUESTS).bool()
        )
        rate_K = torch.tensor(rates, dtype=torch.float64)
        verdicts.append(
            ops.verify(
                VerifyBatch(logits_NV, params, slot_B, slot_B + 5, drafts, synthetic_rate_K=rate_K)
            )
        )
    for field in ("token_BK1", "n_accept_B", "finite_B"):
        assert torch.equal(getattr(verdicts[0], field), getattr(verdicts[1], field)), field
    standard_B = (params.rule_S == Rule.STANDARD)[slot_B] & (params.temperature_S > 0)[slot_B]
    assert 0.5 < verdicts[0].n_accept_B[standard_B].double().mean() < 2.9


def test_slots_without_a_request_have_no_q(ops: Backend) -> None:
    """Their drafts count as placeholders even if `real_q_B` is True."""
    params, zero = make_params(2), torch.tensor([0])
    cache = draft_cache(ops, torch.zeros(1, 1, 8), params, zero)
    drafts = DraftBlock(torch.tensor([[3]]), zero + 1, cache, torch.tensor([True]))
    rows = torch.zeros(2, 8)
    for position in range(10):
        verdict = ops.verify(VerifyBatch(rows, params, zero + 1, zero + position, drafts))
        assert verdict.n_accept_B.tolist() == [0]
    verdict = ops.verify(VerifyBatch(rows, params, zero, zero, drafts))
    assert verdict.n_accept_B.tolist() == [1]  # p = q


def test_no_drafts_are_an_empty_cache(ops: Backend) -> None:
    cache = draft_cache(ops, torch.zeros(2, 0, 8), make_params(2), torch.arange(2))
    assert cache.logits_SKV.shape == (2, 0, 8)


@pytest.mark.parametrize(
    ("field", "logits_BKV", "slot_B"),
    [
        ("logits_BKV", torch.zeros(2, 8), [0, 1]),
        ("logits_BKV.dtype", torch.zeros(2, 1, 8, dtype=torch.int64), [0, 1]),
        ("logits_BKV.shape", torch.zeros(2, 1, 0), [0, 1]),
        ("logits_BKV.stride", torch.zeros(2, 8, 3).transpose(1, 2), [0, 1]),
        ("slot_B.shape", torch.zeros(2, 1, 8), [0]),
        ("slot_B", torch.zeros(2, 1, 8), [0, 2]),
        ("slot_B", torch.zeros(2, 1, 8), [1, 1]),
        ("slot_B.dtype", torch.zeros(2, 1, 8), [0.0, 1.0]),
    ],
)
def test_what_does_not_fit_is_named(
    ops: Backend, field: str, logits_BKV: Tensor, slot_B: list[int]
) -> None:
    with pytest.raises(ConfigError) as caught:
        draft_cache(ops, logits_BKV, make_params(2), torch.tensor(slot_B))
    assert caught.value.field.startswith(field)


def test_a_backend_given_by_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="a backend from `get_backend`"):
        draft_cache("native", torch.zeros(2, 1, 8), make_params(2), torch.tensor([0, 1]))


@pytest.mark.parametrize("module", [dispatch, synthetic])
def test_examples_run_as_written(module: object) -> None:
    found = doctest.testmod(module, optionflags=doctest.FAIL_FAST)  # type: ignore[arg-type]
    assert found.attempted >= 4
    assert found.failed == 0

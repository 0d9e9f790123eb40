"""The joint law of three emitted tokens is the target's, and each way to break it is noticed."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from foretoken.ops import DraftBlock, SlotParams, Stream, get_backend, unavailable
from foretoken.ops.backends.torch_cpu import noise
from tests.support.cases import make_params
from tests.support.law import (
    CORRECT_P,
    MUTANT_P,
    MakePropose,
    Outcome,
    Propose,
    TableDrafter,
    count_sequences,
    cut_before_token,
    cut_by_prefix,
    hide_token,
    p_value,
    random_chain,
)

CPU = get_backend("torch_cpu")  # another one where a test runs on `each_backend`
FAST = [name for name in ("torch_cpu", "native_cpu") if not unavailable(name)]
SAMPLE, VERIFY = (  # the modules: the package has the functions under these names
    importlib.import_module(f"foretoken.ops.backends.torch_cpu.{name}")
    for name in ("sample", "verify")
)
V = 6
TARGET, DRAFT = random_chain(V, seed=1)
FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.93},
    "top_k+top_p": {"top_k": 5, "top_p": 0.97},
}
DRAFTERS: dict[str, dict[str, Any]] = {
    "real_q": {},
    "one_hot": {"lookup": True, "real_q": False},
    "sampled_as_one_hot": {"real_q": False},
}


@pytest.fixture(params=FAST)
def _each_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "CPU", get_backend(request.param))


each_backend = pytest.mark.usefixtures("_each_backend")


def drafter(**changes: Any) -> MakePropose:
    return lambda params: TableDrafter(CPU, DRAFT, params, **changes)


def run(make_propose: MakePropose, **settings: Any) -> tuple[Outcome, float]:
    """Emit sequences, and the p-value of their counts under the target's law."""
    outcome = count_sequences(CPU, TARGET, make_propose, **settings)
    params = make_params(
        1, settings.get("temperature", 1.0), settings.get("top_k", 0), settings.get("top_p", 1.0)
    )
    return outcome, p_value(outcome.counts, TARGET.joint(params, 3))


def check(filters: str, temperature: float, kind: str, fp64_noise: bool = False) -> None:
    make_propose = drafter(**DRAFTERS[kind], fp64_noise=fp64_noise)
    outcome, p = run(
        make_propose, temperature=temperature, **FILTERS[filters], fp64_noise=fp64_noise
    )
    assert p > CORRECT_P
    assert 0.01 < outcome.acceptance < 0.9  # the drafts are neither all wrong nor all right


@each_backend
@pytest.mark.parametrize(
    ("filters", "temperature", "kind"),
    [
        ("none", 0.7, "real_q"),
        ("none", 1.0, "one_hot"),
        ("top_k", 1.0, "real_q"),
        ("top_k", 0.7, "sampled_as_one_hot"),
        ("top_p", 0.7, "one_hot"),
        ("top_p", 1.0, "real_q"),
        ("top_k+top_p", 1.0, "sampled_as_one_hot"),
        ("top_k+top_p", 0.7, "real_q"),
    ],
)
def test_joint_law(filters: str, temperature: float, kind: str) -> None:
    check(filters, temperature, kind)


@each_backend
@pytest.mark.law
@pytest.mark.parametrize("fp64_noise", [False, True])
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("filters", FILTERS)
def test_joint_law_full(filters: str, temperature: float, kind: str, fp64_noise: bool) -> None:
    check(filters, temperature, kind, fp64_noise)


@each_backend
def test_ragged_lengths_that_depend_on_the_prefix() -> None:
    outcome, p = run(lambda params: cut_by_prefix(drafter()(params)))
    assert p > CORRECT_P
    assert outcome.drafted > 0


@pytest.mark.parametrize(
    "make_propose",
    [
        pytest.param(
            drafter(streams=(Stream.RESIDUAL_TOKEN, Stream.RESIDUAL_BLOCK), draft_indices=False),
            id="draft and residual share a stream",
        ),
        pytest.param(
            lambda params: hide_token(drafter()(params), token=2),
            id="a sampled draft becomes -1 for what it is",
        ),
        pytest.param(
            lambda params: cut_before_token(drafter()(params), token=2),
            id="the length depends on the token sampled there",
        ),
        pytest.param(lambda params: next_row_of_q(drafter()(params)), id="q of the next row"),
    ],
)
def test_mutant_drafter_is_rejected(make_propose: MakePropose) -> None:
    _, p = run(make_propose)
    assert p < MUTANT_P


def next_row_of_q(propose: Propose) -> Propose:
    """Mutant: every draft is verified against the q of another row."""

    def mutant(*args: torch.Tensor) -> DraftBlock:
        drafts = propose(*args)
        assert drafts.logits_SKV is not None
        return replace(drafts, logits_SKV=drafts.logits_SKV.roll(1, dims=1))

    return mutant


Residual = Callable[..., noise.Array]


def no_subtraction(residual: Residual, batch: Any, logits_RV: Any, *rest: Any) -> noise.Array:
    return logits_RV.copy()


def double_weight(residual: Residual, batch: Any, logits_RV: Any, *rest: Any) -> noise.Array:
    b_R, i_R, shift_R = rest
    return residual(batch, logits_RV, b_R, i_R, shift_R - math.log(2.0))


def row_before(residual: Residual, batch: Any, logits_RV: Any, *rest: Any) -> noise.Array:
    """Off by one: the residual is taken against the q of the draft before."""
    b_R, i_R, shift_R = rest
    return residual(batch, logits_RV, b_R, (i_R - 1).clip(0), shift_R)


def one_hot_residual(residual: Residual, batch: Any, logits_RV: Any, *rest: Any) -> noise.Array:
    """Accepted by the real q, resampled as if it were one-hot."""
    return residual(batch._replace(real_q_B=batch.real_q_B & False), logits_RV, *rest)


@pytest.mark.parametrize(
    "mutant",
    [no_subtraction, double_weight, row_before, one_hot_residual],
    ids=lambda f: f.__name__,
)
def test_mutant_residual_is_rejected(
    mutant: Callable[..., noise.Array], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = VERIFY._residual
    monkeypatch.setattr(VERIFY, "_residual", lambda *args: mutant(real, *args))
    _, p = run(drafter())
    assert p < MUTANT_P


def draw_four_equal(streams: tuple[Stream, Stream], trials: int) -> float:
    """p-value of four equal tokens, two in each of two blocks, drawn as a quarter each."""
    logits = torch.full((2048,), -torch.inf)
    tokens = torch.tensor([0, 1, 1024, 1025])
    logits[tokens] = 0.0
    slot = torch.arange(trials)
    zero = torch.zeros(trials, dtype=torch.int64)
    drawn = CPU.sample(logits.expand(trials, -1), make_params(trials), slot, zero, zero, streams)
    counts = (drawn[:, None] == tokens).sum(dim=0)
    assert int(counts.sum()) == trials
    return p_value(counts, torch.full((4,), 0.25))


@each_backend
def test_block_and_token_noise_are_independent() -> None:
    assert draw_four_equal((Stream.TARGET_TOKEN, Stream.TARGET_BLOCK), 10_000) > CORRECT_P
    assert draw_four_equal((Stream.TARGET_TOKEN, Stream.TARGET_TOKEN), 1_000) < MUTANT_P


def accept_once(
    target: torch.Tensor, draft: torch.Tensor, trials: int, fp64_noise: bool = False
) -> tuple[float, torch.Tensor]:
    """Acceptance of one draft per request, and the first tokens emitted."""
    params, slot = make_params(trials, seed=7), torch.arange(trials)
    zero = torch.zeros(trials, dtype=torch.int64)
    q = draft.expand(trials, -1).contiguous()
    x = CPU.sample(
        q, params, slot, zero, zero, (Stream.DRAFT_TOKEN, Stream.DRAFT_BLOCK), fp64_noise=fp64_noise
    )
    drafts = DraftBlock(x[:, None], zero + 1, q[:, None], torch.ones(trials, dtype=torch.bool))
    rows = target.expand(2 * trials, -1).contiguous()
    verdict = CPU.verify(rows, params, slot, zero, drafts, fp64_noise=fp64_noise)
    return float(verdict.n_accept_B.double().mean()), verdict.token_BK1[:, 0]


@each_backend
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_acceptance_is_the_overlap(seed: int) -> None:
    """Sum of min(p, q), to four standard errors; FP32 and FP64 noise accept equally."""
    trials = 100_000
    generator = torch.Generator().manual_seed(seed)
    target, draft = torch.randn(2, 12, generator=generator)
    overlap = float(torch.minimum(target.softmax(0), draft.softmax(0)).sum())
    error = math.sqrt(overlap * (1 - overlap) / trials)
    fp32, first32 = accept_once(target, draft, trials)
    fp64, first64 = accept_once(target, draft, trials, fp64_noise=True)
    assert abs(fp32 - overlap) < 4 * error
    assert abs(fp64 - overlap) < 4 * error
    assert abs(fp32 - fp64) < 4 * math.sqrt(2) * error
    for first in (first32, first64):
        assert p_value(torch.bincount(first, minlength=12), target.softmax(0)) > CORRECT_P


@each_backend
def test_a_draft_equal_to_the_target_is_always_accepted() -> None:
    logits = torch.randn(12, generator=torch.Generator().manual_seed(0)) * 5
    assert accept_once(logits, logits, 100_000)[0] == 1.0


@each_backend
def test_disjoint_supports_accept_nothing_and_emit_p() -> None:
    target, draft = torch.full((2, 12), -torch.inf)
    target[:6], draft[6:] = torch.arange(6) / 3, 0.0
    accepted, first = accept_once(target, draft, 100_000)
    assert accepted == 0.0
    assert p_value(torch.bincount(first, minlength=12), target.softmax(0)) > CORRECT_P


@each_backend
def test_drafts_outside_the_nucleus_are_never_accepted() -> None:
    """The draft model samples unfiltered: what the target's filters dropped has p(x) = 0."""
    params = make_params(1, top_p=0.6)
    raw = torch.randn(1, 12, generator=torch.Generator().manual_seed(3))
    kept = CPU.process_logits(raw, params, torch.tensor([0]), None)[0]
    assert 1 < int((kept > -torch.inf).sum()) < 11
    accepted, first = accept_once(kept, raw[0], 100_000)
    assert 0 < accepted < 1
    assert p_value(torch.bincount(first, minlength=12), kept.softmax(0)) > CORRECT_P


def tail_rate(params: SlotParams, trials: int, gap: float) -> int:
    """How often one of 1023 tokens `gap` below the head is drawn."""
    logits = torch.full((1024,), -gap)
    logits[0] = 0.0
    slot = torch.arange(trials)
    zero = torch.zeros(trials, dtype=torch.int64)
    rows = logits.expand(trials, -1)
    streams = (Stream.TARGET_TOKEN, Stream.TARGET_BLOCK)
    return int((CPU.sample(rows, params, slot, zero, zero, streams) != 0).sum())


def capped_gumbel(u: noise.Array) -> noise.Array:
    """Mutant: -log(-log u) in FP32, which cannot exceed 16.6."""
    return -noise.np.log(-noise.np.log(u))


def tail_draws() -> tuple[int, float]:
    """Draws 18 logits below the head, FP32 noise, and how many are expected: 31 of 2 million."""
    trials, waves, gap = 200_000, 10, 18.0
    drawn = sum(tail_rate(make_params(trials, seed=w), trials, gap) for w in range(waves))
    return drawn, trials * waves * 1023 * math.exp(-gap)


@each_backend
@pytest.mark.law
def test_tail_is_drawn_at_its_rate() -> None:
    drawn, expected = tail_draws()
    assert abs(drawn - expected) < 4 * math.sqrt(expected)


@pytest.mark.law
def test_a_tail_cut_off_by_coarse_noise_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SAMPLE, "to_gumbel", capped_gumbel)
    drawn, expected = tail_draws()
    assert drawn < expected / 4

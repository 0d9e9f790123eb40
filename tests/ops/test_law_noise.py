"""Drawing one token: large vocabularies, ties, nearly uniform rows and far tails."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from foretoken.lab.laws.chain import CPU, Setting
from foretoken.lab.laws.drawing import (
    VOCABULARIES,
    far_rows,
    masked_blocks,
    near_uniform,
    sampler,
    tail,
    tied_chains,
    ties,
    vocabulary_law,
)
from foretoken.lab.laws.findings import MUTANT_P, fit
from foretoken.lab.laws.joint import RULES
from foretoken.lab.laws.mutants import batch_mutant, replaced
from foretoken.ops import TARGET, Backend, Noise, Rows, Rule, Stream
from tests.support.laws import QUICK_NUCLEUS, On, each_backend, fastest, require

FLAT = Setting(rule=Rule.COUPLED)
FP64 = Setting(fp64_noise=True)
LOGITS = 2**24  # of one rule in one vocabulary; they determine the time


@each_backend
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_every_vocabulary(on: On, vocabulary: int) -> None:
    trials = max(100, min(4000, LOGITS // vocabulary))
    rules = RULES if vocabulary == 1025 else (Rule.STANDARD,)
    require(vocabulary_law(on.backend, on.device, vocabulary, trials, rules))


@pytest.mark.law
@each_backend
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_every_vocabulary_full(on: On, vocabulary: int) -> None:
    require(vocabulary_law(on.backend, on.device, vocabulary, 5000))


@each_backend
def test_masked_blocks_have_no_mass(on: On) -> None:
    require(masked_blocks(on.backend, on.device, 2000))


def drawing_from(backend: Backend, change: Callable[[torch.Tensor], torch.Tensor]) -> Backend:
    """Mutant: `sample` and `verify` read other logits than they were given."""

    def sample(rows: Rows, noise: Noise) -> torch.Tensor:
        return backend.sample(rows._replace(logits_NV=change(rows.logits_NV)), noise)

    mutant = batch_mutant(lambda x: x._replace(logits_NV=change(x.logits_NV)))
    return replaced(mutant(backend), sample=sample)


@fastest
def test_mass_in_masked_blocks_is_noticed(on: On) -> None:
    """A floor in place of -inf, as if noise were added to empty blocks."""
    backend = drawing_from(on.backend, lambda logits_NV: logits_NV.clamp(min=-6.0))
    found = masked_blocks(backend, on.device, 2000)
    assert not all(f.passed for f in found if f.case == "masked_blocks-unfiltered")


@fastest
@pytest.mark.parametrize("vocabulary", [1025, 8193])
def test_another_distribution_over_a_vocabulary_is_noticed(on: On, vocabulary: int) -> None:
    """A tilt, by which the last ids are e times likelier than they should be."""

    def change(logits_NV: torch.Tensor) -> torch.Tensor:
        return logits_NV + torch.linspace(0.0, 1.0, vocabulary, device=logits_NV.device)

    found = vocabulary_law(drawing_from(on.backend, change), on.device, vocabulary, 2000, RULES[:1])
    assert not all(f.passed for f in found if f.case.endswith("-blocks"))


@fastest
def test_tokens_that_are_never_drawn_are_noticed(on: On) -> None:
    """One token in twenty is never drawn: coverage of a nearly uniform row, and chi-square."""

    def change(logits_NV: torch.Tensor) -> torch.Tensor:
        cut_NV = logits_NV.clone()
        cut_NV[:, ::20] = -torch.inf
        return cut_NV

    found = near_uniform(sampler(drawing_from(on.backend, change)), on.device, 1500, 15_000)
    assert not any(f.passed for f in found)


@fastest
def test_a_row_read_at_anothers_place_is_noticed(on: On) -> None:
    """The last request reads the first one's rows, as if its offset were modulo something."""

    def change(logits_NV: torch.Tensor) -> torch.Tensor:
        return torch.cat([logits_NV[:-5], logits_NV[:5]]) if len(logits_NV) > 100 else logits_NV

    found = far_rows(drawing_from(on.backend, change), on.device, 3000, 60)
    assert not all(f.passed for f in found)


@each_backend
def test_ties_at_the_edge_of_a_filter_are_kept(on: On) -> None:
    trials = QUICK_NUCLEUS if on.name == "torch" else on.quick // 2
    require(ties(on.backend, on.device, trials))


def test_broken_ties_have_another_distribution() -> None:
    """Keeping exactly k tokens, the lowest ids of those that tie, is noticed at 50 000 draws."""
    target, _, setting = tied_chains(top_k=5)
    logits_CV = target.logits_CV.float()
    order_CV = torch.sort(logits_CV, dim=1, descending=True, stable=True).indices
    kept_CV = torch.zeros_like(logits_CV).scatter_(1, order_CV[:, :5], 1.0)
    broken_CV = logits_CV.masked_fill(kept_CV == 0, -torch.inf).double().softmax(1)
    counts = (broken_CV[-1] * 50_000).round().long()  # at the start of a text
    assert fit(counts, setting.next_token(target)[-1]) < MUTANT_P


@each_backend
@pytest.mark.parametrize("setting", [Setting(), FP64, FLAT], ids=["fp32", "fp64", "flat"])
def test_nearly_uniform(on: On, setting: Setting) -> None:
    require(near_uniform(sampler(on.backend, setting), on.device, 1500, 15_000))


@fastest
def test_nearly_uniform_rows_of_20k_tokens(on: On) -> None:
    require(near_uniform(sampler(on.backend), on.device, 20_000, 25_000))


@pytest.mark.law
@each_backend
def test_nearly_uniform_full(on: On) -> None:
    """200 000 tokens; on a GPU 4 million draws (0.8 T logits), on a CPU a hundredth of them."""
    draws = 4_000_000 if on.device.type == "cuda" else 40_000
    require(near_uniform(sampler(on.backend), on.device, 200_000, draws))


def four_equal(on: On, streams: tuple, trials: int) -> float:
    """p-value of four equal tokens, two in each of two blocks, drawn as a quarter each."""
    logits_V = torch.full((2048,), -torch.inf, device=on.device)
    token_4 = torch.tensor([0, 1, 1024, 1025], device=on.device)
    logits_V[token_4] = 0.0
    drawn = sampler(on.backend, streams=streams)(logits_V, trials, 0)
    counts = (drawn[:, None] == token_4).sum(dim=0)
    assert int(counts.sum()) == trials
    return fit(counts, torch.full((4,), 0.25))


@each_backend
def test_block_and_token_noise_are_independent(on: On) -> None:
    assert four_equal(on, TARGET, 10_000) > 1e-4
    shared = (Stream.TARGET_TOKEN, Stream.TARGET_TOKEN)
    unchecked = on._replace(backend=replaced(on.backend, sample=on.backend._kernels.sample))
    assert four_equal(unchecked, shared, 1_000) < MUTANT_P


@fastest
def test_the_tail_is_drawn_at_its_rate(on: On) -> None:
    require(tail(sampler(on.backend), on.device, 20_000, 130_000))


@pytest.mark.law
@each_backend
@pytest.mark.parametrize("setting", [Setting(), FLAT], ids=["hierarchical", "flat"])
@pytest.mark.parametrize("vocabulary", [1024, 20_000])
def test_the_tail_full(on: On, vocabulary: int, setting: Setting) -> None:
    gpu = on.device.type == "cuda"
    if setting is FLAT and vocabulary > 1024 and not gpu:
        vocabulary = 512  # flat noise takes a CPU 20 ns per token
    draws = (64 if gpu else 1) * 2**31 // vocabulary
    require(tail(sampler(on.backend, setting), on.device, vocabulary, draws))


def test_a_tail_cut_off_by_coarse_noise_is_noticed() -> None:
    """`-log(-log u)` in FP32 draws none of 14 that are expected."""
    expected = 14.0
    logits_V = torch.linspace(-18.0, -20.5, 1000)
    logits_V[500] = 0.0
    u_NV = torch.rand(20_000, len(logits_V), generator=torch.Generator().manual_seed(0))
    capped_NV = logits_V - (-u_NV.clamp(min=2.0**-32).log()).log()
    assert bool((capped_NV.argmax(dim=1) == 500).all())
    largest = -math.log(-math.log(1 - 2.0**-24))
    assert largest < 17  # so no number of draws would bridge 18 logits
    assert math.exp(-expected) < MUTANT_P
    # A sampler that always draws the head, in the test above:
    found = tail(lambda logits_V, num, wave: torch.full((num,), 10_000), CPU, 20_000, 130_000)
    assert found[0].value > expected


@each_backend
def test_the_last_requests_get_the_tokens_they_get_alone(on: On) -> None:
    require(far_rows(on.backend, on.device, 3000, 60))


@pytest.mark.law
@each_backend
def test_rows_after_two_billion_numbers(on: On) -> None:
    if on.device.type == "cpu":
        pytest.skip("takes 10 GB and minutes")
    require(far_rows(on.backend, on.device))

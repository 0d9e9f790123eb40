"""Edits and filters on every backend: ties, their order, rows that are not finite."""

from __future__ import annotations

import math

import pytest
import torch

from foretoken.ops import Backend, Rows
from tests.support.cases import make_edits, make_params

INF = math.inf


def kept(ops: Backend, row: list[float] | torch.Tensor, **params: float) -> list[int]:
    logits = torch.as_tensor(row)[None]
    out = ops.process_logits(Rows(logits, make_params(1, **params), torch.tensor([0])))
    return torch.nonzero(out[0] > -INF).flatten().tolist()


def log_of(*p: float) -> list[float]:
    return [math.log(x) if x else -INF for x in p]


def test_temperature_divides_and_input_is_untouched(ops: Backend) -> None:
    logits = torch.tensor([[1.0, 2.0, -INF]])
    before = logits.clone()
    out = ops.process_logits(Rows(logits, make_params(1, 0.5), torch.tensor([0])))
    assert out.tolist() == [[2.0, 4.0, -INF]]
    assert out.dtype == (torch.float64 if ops.name == "reference" else torch.float32)
    out.zero_()
    same = ops.process_logits(Rows(logits, make_params(1, 1.0), torch.tensor([0])))
    same.zero_()
    assert torch.equal(logits, before)


def test_greedy_rows_are_edited_but_not_filtered(ops: Backend) -> None:
    edits = make_edits(1, {(0, 1): (3.0, 1.0, 0.0)})
    params = make_params(1, 0.0, top_k=1, top_p=0.1, min_p=0.9)
    out = ops.process_logits(
        Rows(torch.tensor([[1.0, 2.0, 0.5]]), params, torch.tensor([0]), edits)
    )
    assert out.tolist() == [[1.0, 5.0, 0.5]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_top_k_keeps_every_tie_at_the_kth_value(ops: Backend, dtype: torch.dtype) -> None:
    row = torch.tensor([3.0, 1.0, 2.0, 2.0, 2.0, 0.0], dtype=dtype)
    assert kept(ops, row, top_k=2) == [0, 2, 3, 4]
    assert kept(ops, row, top_k=4) == [0, 2, 3, 4]
    assert kept(ops, row, top_k=1) == [0]
    assert kept(ops, row, top_k=5) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("vocabulary", [300, 4097])
def test_ties_in_bf16_rows_are_kept_beyond_k(ops: Backend, vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (torch.randn(20, vocabulary, generator=generator) * 3).bfloat16()
    params = make_params(20, 0.8, top_k=40)
    out = ops.process_logits(Rows(logits, params, torch.arange(20)))
    kth = logits.float().sort(dim=1, descending=True).values[:, 39:40]
    assert torch.equal(out > -INF, logits.float() >= kth)
    assert bool(((out > -INF).sum(dim=1) > 40).any())


@pytest.mark.parametrize("k", [0, -1, 6, 7])
def test_top_k_is_off_outside_its_range(ops: Backend, k: int) -> None:
    assert kept(ops, [3.0, 1.0, 2.0, 2.0, 2.0, 0.0], top_k=k) == list(range(6))


def test_top_p_keeps_the_least_set_and_its_ties(ops: Backend) -> None:
    assert kept(ops, log_of(0.5, 0.3, 0.2), top_p=0.4) == [0]
    assert kept(ops, log_of(0.5, 0.3, 0.2), top_p=0.6) == [0, 1]
    assert kept(ops, log_of(0.4, 0.2, 0.2, 0.2), top_p=0.5) == [0, 1, 2, 3]
    assert kept(ops, log_of(0.2, 0.2, 0.6), top_p=0.5) == [2]
    assert kept(ops, log_of(0.5, 0.3, 0.2), top_p=1e-6) == [0]
    assert kept(ops, log_of(0.5, 0.3, 0.2), top_p=1 - 2.0**-24) == [0, 1, 2]


def test_top_p_counts_mass_inside_the_top_k_set(ops: Backend) -> None:
    row = log_of(0.3, 0.2, 0.2, 0.15, 0.15)
    assert kept(ops, row, top_p=0.69) == [0, 1, 2]
    assert kept(ops, row, top_p=0.42, top_k=1) == [0]
    assert kept(ops, row, top_p=0.42, top_k=2) == [0]  # 0.3 of the 0.7 that the ties bring in
    assert kept(ops, row, top_p=0.44, top_k=2) == [0, 1, 2]


def test_ties_at_the_kth_value_count_into_the_mass(ops: Backend) -> None:
    """One head of half the mass, 2000 equal others: top-k 2 keeps all, and top-p sees them."""
    row = torch.zeros(2001)
    row[7] = math.log(2000.0)
    assert kept(ops, row, top_k=2, top_p=0.49) == [7]
    assert len(kept(ops, row, top_k=2, top_p=0.51)) == 2001


def test_min_p_is_relative_to_the_best_and_comes_first(ops: Backend) -> None:
    row = log_of(0.5, 0.26, 0.14, 0.1)
    assert kept(ops, row, min_p=0.5) == [0, 1]
    assert kept(ops, row, min_p=1.0) == [0]
    assert kept(ops, [2.0, 2.0, 1.0], min_p=1.0) == [0, 1]
    assert kept(ops, row, min_p=0.5, top_k=3, top_p=0.66) == [0, 1]
    assert kept(ops, row, min_p=0.5, top_k=3, top_p=0.65) == [0]  # 0.5 of the 0.76 left


def test_min_p_is_seen_after_temperature(ops: Backend) -> None:
    assert kept(ops, log_of(0.5, 0.3, 0.2), min_p=0.5) == [0, 1]
    assert kept(ops, log_of(0.5, 0.3, 0.2), min_p=0.5, temperature=0.5) == [0]


@pytest.mark.parametrize("vocabulary", [70, 900, 5000])
@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
def test_wide_nuclei(ops: Backend, vocabulary: int, top_p: float) -> None:
    """Nuclei of few tokens and of nearly all, by the plain definition."""
    generator = torch.Generator().manual_seed(vocabulary)
    spread = torch.tensor([[0.1], [1], [4]]).repeat(2, 1)
    logits = torch.randn(6, vocabulary, generator=generator) * spread
    out = ops.process_logits(Rows(logits, make_params(6, top_p=top_p), torch.arange(6)))
    for row, filtered in zip(logits.double(), out, strict=True):
        p = row.softmax(0).sort(descending=True).values
        count = int((p.cumsum(0) < top_p).sum()) + 1
        assert int((filtered > -INF).sum()) == count


@pytest.mark.parametrize(
    ("params", "rest"),
    [({}, {}), ({"top_k": 2}, {}), ({"top_p": 0.5}, {}), ({"min_p": 0.5}, {"top_p": 0.9})],
)
def test_rows_that_are_not_finite_stay_so(
    ops: Backend, params: dict[str, float], rest: dict[str, float]
) -> None:
    rows = torch.zeros(5, 70)
    rows[:, 3] = 2.0
    rows[0, 5], rows[1, 5], rows[2] = math.nan, INF, -INF
    rows[3, 5] = -INF
    out = ops.process_logits(Rows(rows, make_params(5, **params, **rest), torch.arange(5)))
    assert [math.isfinite(v) for v in out.max(dim=1).values.tolist()] == [
        False, False, False, True, True,
    ]  # fmt: skip


def test_edits_apply_in_order(ops: Backend) -> None:
    """The mask; then per entry: bias, repetition by the sign that the bias left, subtract."""
    logits = torch.tensor([[1.0, -1.0, 4.0, 2.0, 0.5]] * 4)
    edits = make_edits(
        4,
        {
            (0, 1): (0.0, 2.0, 0.0),
            (0, 2): (100.0, 1.0, 0.0),  # masked: stays so
            (0, 4): (5.5, 2.0, 0.625),
            (1, 0): (-3.0, 1.5, 0.5),
            (2, 2): (-INF, 1.5, -7.0),
            (2, 3): (-2.0, 9.0, 0.25),  # 0 is not > 0
        },
        masks=[[3], [0, 1, 4]],
        mask_of=[1, -1, -1, 0],
        vocabulary=5,
    )
    out = ops.process_logits(Rows(logits, make_params(1), torch.zeros(4, dtype=torch.long), edits))
    assert out.tolist() == [
        [1.0, -2.0, -INF, -INF, 6.0 / 2 - 0.625],
        [-2.0 * 1.5 - 0.5, -1.0, 4.0, 2.0, 0.5],
        [1.0, -1.0, -INF, -0.25, 0.5],
        [-INF, -INF, -INF, 2.0, -INF],
    ]
    assert logits[0].tolist() == [1.0, -1.0, 4.0, 2.0, 0.5]


@pytest.mark.parametrize("vocabulary", [31, 32, 33, 64, 1025])
def test_masks_reach_every_token(ops: Backend, vocabulary: int) -> None:
    """Bits 0 and 31 of a word, the last word incomplete; bits at or past V are not looked at."""
    generator = torch.Generator().manual_seed(vocabulary)
    keep = torch.rand(3, vocabulary, generator=generator) < 0.5
    keep[:, -1] = torch.tensor([True, False, True])
    masks = [torch.nonzero(one).flatten().tolist() for one in keep]
    edits = make_edits(4, masks=masks, mask_of=[2, 0, -1, 1], vocabulary=vocabulary)
    if vocabulary % 32:
        assert edits.mask_RW is not None
        edits.mask_RW[:, -1] |= -(1 << vocabulary % 32)
    slots = torch.zeros(4, dtype=torch.long)
    out = ops.process_logits(Rows(torch.zeros(4, vocabulary), make_params(1), slots, edits))
    everything = torch.ones(vocabulary).bool()
    assert torch.equal(out > -INF, torch.stack([keep[2], keep[0], everything, keep[1]]))


def test_filters_see_edited_logits(ops: Backend) -> None:
    """The best token is banned before the k-th largest and the nucleus are found."""
    rows = torch.tensor([log_of(0.6, 0.2, 0.1, 0.1)] * 2)
    edits = make_edits(2, {(0, 0): (-INF, 1.0, 0.0)})
    slots = torch.zeros(2, dtype=torch.long)
    for params in (make_params(1, top_k=1), make_params(1, top_p=0.4), make_params(1, min_p=0.9)):
        out = ops.process_logits(Rows(rows, params, slots, edits))
        assert [torch.nonzero(row > -INF).flatten().tolist() for row in out] == [[1], [0]]


def test_rows_take_the_parameters_of_their_slot(ops: Backend) -> None:
    params = make_params(3, [1.0, 0.5, 0.0], [0, 1, 0], [0.6, 1.0, 1.0])
    logits = torch.tensor([log_of(0.5, 0.3, 0.2)] * 4)
    out = ops.process_logits(Rows(logits, params, torch.tensor([2, 1, 0, 1])))
    assert (out > -INF).sum(dim=1).tolist() == [3, 1, 2, 1]


def test_no_rows(ops: Backend) -> None:
    empty = torch.zeros(0, dtype=torch.long)
    params = make_params(1, top_k=1)
    assert ops.process_logits(Rows(torch.zeros(0, 7), params, empty)).shape == (0, 7)

"""Paths of the native kernels that are chosen by size, dtype or rule: all must agree."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foretoken.ops import (
    DRAFT,
    TARGET,
    DraftBlock,
    DraftCache,
    Edits,
    Noise,
    Rows,
    Rule,
    SlotParams,
    VerifyBatch,
    get_backend,
)
from foretoken.ops.backends.native import library
from tests.support.cases import make_params
from tests.support.kernels import needs_kernels
from tests.support.oracle import random_case
from tests.support.pieces import compare_pieces

pytestmark = needs_kernels

CPU = torch.device("cpu")
INF = float("inf")


def rows_of(count: int, vocabulary: int, spread: float, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, vocabulary, generator=generator) * spread


def brute_threshold(row: Tensor, temperature: float, top_k: int, top_p: float) -> float:
    """The least logit kept, by sorting the whole row in float64."""
    falling = row.double().sort(descending=True).values
    if 0 < top_k < len(row):
        falling = falling[falling >= falling[top_k - 1]]
    mass = ((falling - falling[0]) / temperature).exp().cumsum(0)
    return float(falling[int((mass < top_p * mass[-1]).sum())])


# Peaked rows end in a short list, flat ones in buckets of the whole row; 2500 kept are no list.
@pytest.mark.parametrize("spread", [0.3, 1.0, 6.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.3), (0, 0.99), (20, 1.0), (2500, 0.9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_thresholds_are_exact_however_many_tokens_are_kept(
    spread: float, top_k: int, top_p: float, dtype: torch.dtype
) -> None:
    raw = rows_of(4, 30_011, spread).to(dtype)
    params = make_params(4, 0.7, top_k, top_p)
    kept = get_backend("native").process_logits(Rows(raw, params, torch.arange(4))) > -INF
    for row, keeps in zip(raw, kept, strict=True):
        least = brute_threshold(row, 0.7, top_k, float(params.top_p_S[0]))
        near = int(((row.double() - least).abs() < 1e-4 * spread).sum())  # sums differ in rounding
        assert abs(int(keeps.sum()) - int((row >= least).sum())) <= (near if top_p < 1 else 0)
        assert torch.equal(keeps, row >= row[keeps].min())


@pytest.mark.parametrize("fp64", [False, True])
@pytest.mark.parametrize("top_k", [0, 300, 10])
def test_a_list_and_the_whole_row_give_one_token(fp64: bool, top_k: int) -> None:
    """Tokens that cannot be drawn make the row longer, and change its lists and blocks."""
    params, slot, zero = make_params(60, 0.9, top_k), torch.arange(60), torch.zeros(60).long()
    raw = rows_of(60, 700, 2.0)
    wide = torch.full((60, 3000), -80.0)
    wide[:, :700] = raw
    ops = get_backend("native")
    flat = replace(params, rule_S=torch.full((60,), int(Rule.COUPLED)))
    narrow_N = ops.sample(Rows(raw, flat, slot), Noise(slot, zero, TARGET, fp64=fp64))
    wide_N = ops.sample(Rows(wide, flat, slot), Noise(slot, zero, TARGET, fp64=fp64))
    assert torch.equal(narrow_N, wide_N)
    oracle_N = get_backend("reference").sample(
        Rows(wide, params, slot), Noise(slot, zero, TARGET, fp64=fp64)
    )
    drawn_N = ops.sample(Rows(wide, params, slot), Noise(slot, zero, TARGET, fp64=fp64))
    assert torch.equal(drawn_N, oracle_N)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_floats_are_read_exactly(dtype: torch.dtype) -> None:
    """All values, also subnormal ones, infinities and NaN."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).short().view(dtype)
    params, slot = make_params(1, 0.0), torch.zeros(1).long()
    out = get_backend("native").process_logits(Rows(values[None], params, slot))
    torch.testing.assert_close(out[0], values.float(), rtol=0, atol=0, equal_nan=True)


def test_rows_may_be_apart_and_each_has_its_edits() -> None:
    """Rows of a wider tensor, masks that end within a word, entries at the ends of blocks."""
    raw = rows_of(3, 4000, 1.0)[:, :2050]
    masks = torch.full((1, 65), -1, dtype=torch.int32)
    masks[0, 64] = 2  # of the last two tokens only the last
    token = torch.tensor([0, 1023, 1024, 2049, 7])
    edits = Edits(
        masks, torch.tensor([-1, 0, 0]), torch.tensor([0, 4, 4, 5]), token,
        torch.tensor([1.0, -INF, 0.0, 2.0, 0.5]), torch.tensor([1.0, 1.0, 2.0, 1.0, 0.5]),
        torch.tensor([0.0, 0.0, 0.25, 0.0, 1.0]),
    )  # fmt: skip
    expected = raw.clone()
    expected[1:, 2048] = -INF
    for n, entries in ((0, range(4)), (2, range(4, 5))):
        for m in entries:
            x = expected[n, token[m]] + edits.bias_M[m]
            x = x / edits.repetition_M[m] if x > 0 else x * edits.repetition_M[m]
            expected[n, token[m]] = x - edits.subtract_M[m]
    params, slot = make_params(3, 0.0), torch.arange(3)
    out = get_backend("native").process_logits(Rows(raw, params, slot, edits))
    torch.testing.assert_close(out, expected)


def cached(
    raw_BKV: Tensor, params: SlotParams, position_B: Tensor, *, fp64: bool = False
) -> tuple[Tensor, DraftCache]:
    num, most, vocabulary = raw_BKV.shape
    cache = DraftCache.empty(num, most, vocabulary, raw_BKV.dtype, CPU)
    slot_B = torch.arange(num)
    drafts = [
        get_backend("native").draft(
            Rows(raw_BKV[:, i], params, slot_B),
            Noise(position_B + i, slot_B * 0 + i, DRAFT, fp64=fp64),
            cache,
        )
        for i in range(most)
    ]
    return torch.stack(drafts, dim=1), cache


@pytest.mark.parametrize("rule", [None, Rule.STANDARD, Rule.SYNTHETIC])
@pytest.mark.parametrize("fp64", [False, True])
def test_a_batch_and_its_pieces_get_one_verdict(rule: Rule | None, fp64: bool) -> None:
    """Rules mixed or one for all; ragged drafts, hidden ones, rows that are not finite."""
    fixed = None if rule is None else {"rule": rule}
    case = random_case(
        1500, 7, num_requests=96, num_slots=96, most=3, junk=True, fp64_noise=fp64, fixed=fixed
    )
    compare_pieces(case, get_backend("native"))


UNREADABLE = """
import ctypes, itertools, mmap
import torch
from foretoken.ops import Rule, VerifyBatch, get_backend
from tests.support.cases import drafts_of, make_params

ROW = 2 * mmap.PAGESIZE  # bytes
memory = mmap.mmap(-1, 10 * ROW)
logits_NV = torch.frombuffer(memory, dtype=torch.float32).view(10, ROW // 4)
libc = ctypes.CDLL(None, use_errno=True)
assert libc.mprotect(ctypes.c_void_p(logits_NV[6:].data_ptr()), ctypes.c_size_t(4 * ROW), 0) == 0
slot_B, rate_K = torch.arange(2), torch.zeros(4, dtype=torch.float64)
for temperature, *rules in itertools.product((0.0, 1.0), Rule, Rule):
    if rules[1] == Rule.BLOCK and temperature:
        continue  # looks at all of its rows
    params, drafts = make_params(2, temperature, rule=rules), drafts_of([[5] * 4] * 2)
    batch = VerifyBatch(logits_NV, params, slot_B, slot_B, drafts, synthetic_rate_K=rate_K)
    verdict = get_backend("native").verify(batch)
    assert verdict.n_accept_B[1] == 0, (temperature, rules)
print("done")
"""


def test_rows_after_a_rejection_are_not_read() -> None:
    """Whatever the rule of the other request; `synthetic` reads the same rows as `standard`.
    Two requests of five rows. The last four of the second are memory that may not be read.
    """
    command, root = [sys.executable, "-c", UNREADABLE], Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.stdout == "done\n", (done.returncode, done.stderr)


@pytest.mark.parametrize("rule", [Rule.STANDARD, Rule.BLOCK])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_draft_equal_to_the_target_is_always_accepted(rule: Rule, dtype: torch.dtype) -> None:
    """log p - log q is exactly 0, however large the logits are."""
    num, most = 120, 4
    params = make_params(
        num, [0.3, 1.0, 2.0] * 40, [0, 20, 0, 400] * 30, [1.0, 0.9] * 60, rule=int(rule)
    )
    rows = (rows_of(num, 2049, 3.0) * 7).to(dtype)
    token_BK, cache = cached(rows[:, None].expand(-1, most, -1), params, torch.arange(num))
    drafts = DraftBlock(token_BK, torch.full((num,), most), cache, torch.ones(num).bool())
    wide, slot_B = rows.repeat_interleave(most + 1, dim=0), torch.arange(num)
    verdict = get_backend("native").verify(VerifyBatch(wide, params, slot_B, slot_B, drafts))
    assert verdict.n_accept_B.tolist() == [most] * num


def test_threads_change_nothing() -> None:
    """Enough rows to be shared among threads, on different paths."""
    num, vocabulary = 12, 20_000
    params = make_params(
        num, [0.0, 1.0, 0.6] * 4, [0, 20, 0, 0] * 3, [1.0, 0.95] * 6, rule=[0, 1, 2] * 4
    )
    raw, slot = rows_of(num, vocabulary, 3.0), torch.arange(num)
    ops = get_backend("native")

    def results() -> list[Tensor]:
        token_BK, cache = cached(raw[:, None], params, slot)
        drafts = DraftBlock(token_BK, torch.ones(num).long(), cache, torch.ones(num).bool())
        both = raw.flip(1).repeat_interleave(2, dim=0)
        verdict = ops.verify(VerifyBatch(both, params, slot, slot, drafts))
        top = ops.logprobs(Rows(raw, params, slot), token_BK[:, 0], 5)
        return [token_BK, cache.lse_SK, verdict.token_BK1, top.logprob_N, top.top_token_NT]

    alone = results()
    try:
        library.set_num_threads(3)
        shared = results()
    finally:
        library.set_num_threads(1)
    for one, other in zip(alone, shared, strict=True):
        assert torch.equal(one, other)

"""Bookkeeping over slots: C++ and Triton's kernels leave the same numbers as stock operators do.

Random slots and steps: chunks of prompts, requests that have all their tokens, padding, with drafts
and without. Triton's kernels run in its interpreter, in a process of its own, and on a GPU. Numbers
that are not read may differ: the end of the spare's tokens, block tables after the last block.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from foretoken.errors import IntegrityError
from foretoken.ops import Verdict, get_backend, unavailable
from foretoken.ops.steps import DraftRequests, ForwardBatch, PackSizes, SlotState, Steps, StepTokens
from tests.support.cases import make_params
from tests.support.interpreter import INTERPRETED, interpret_tests

BLOCK_SIZE, VOCABULARY = 4, 7
Bind = Callable[[SlotState], Steps]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)
needs_native = pytest.mark.skipif(
    unavailable("native") is not None, reason="there are no native kernels"
)
HOST = ["torch", pytest.param("native", marks=needs_native)]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Case(NamedTuple):
    state: SlotState
    slot_B: Tensor
    num_tokens_B: Tensor
    decider_B: Tensor | None
    slot_D: Tensor
    most_D: Tensor
    most: int

    def copy(self) -> SlotState:
        return SlotState(*(column.clone() for column in self.state))


def make_case(
    seed: int,
    requests: int,
    most: int,
    *,
    max_tokens: int = 60,
    prompts: bool = False,
    device: torch.device = DEVICE,
) -> Case:
    """Slots of any length up to `max_tokens`, and a step over some of them; a third is padding."""
    draw = random.Random(seed)
    slots, columns = requests + 3, -(-max_tokens // BLOCK_SIZE)
    generator = torch.Generator().manual_seed(seed)
    shape = (slots + 1, max_tokens + most + 1)
    token_SL = torch.randint(VOCABULARY, shape, dtype=torch.int32, generator=generator)
    block_SL = torch.randperm(slots * columns, generator=generator).view(slots, columns)
    block_SL = torch.cat([block_SL, torch.full((1, columns), slots * columns)])
    length, computed, limit = [1] * (slots + 1), [0] * (slots + 1), [1] * (slots + 1)
    order = draw.sample(range(slots), requests)
    rows = []
    for i, slot in enumerate(order):
        if i > requests * 2 // 3:
            rows.append((slots, 1, True, 0))
            continue
        length[slot] = draw.randint(1, max_tokens)
        limit[slot] = min(max_tokens, length[slot] + draw.choice([0, 1, 2, most + 1, 99]))
        num, decides = 1, True
        if prompts and draw.random() < 0.6:
            num = draw.randint(1, length[slot])
        computed[slot] = length[slot] - num
        if num > 1 and draw.random() < 0.5:
            computed[slot], decides = draw.randint(0, computed[slot]), False
        rows.append((slot, num, decides, draw.choice([most, draw.randint(0, most)])))
    slot_B, num_tokens_B, decides_B, most_B = torch.tensor(rows, device=device).T.contiguous()
    decider_B, at_D = None, decides_B.nonzero()[:, 0]
    if prompts:
        decider_B = torch.where(decides_B > 0, decides_B.cumsum(0) - 1, -1)
    numbers = torch.tensor([length, computed, limit], device=device)
    state = SlotState(token_SL.to(device), block_SL.to(device), *numbers)
    return Case(state, slot_B, num_tokens_B, decider_B, slot_B[at_D], most_B[at_D], most)


def make_verdict(seed: int, num_D: Tensor, most: int) -> Verdict:
    draw, device = random.Random(seed), num_D.device
    accepted = [draw.randint(0, num) for num in num_D.tolist()]
    finite = [draw.random() < 0.8 for _ in accepted]
    tokens = [
        [draw.randrange(VOCABULARY) if i < n + f else -1 for i in range(most + 1)]
        for n, f in zip(accepted, finite, strict=True)
    ]
    token_DK1 = torch.tensor(tokens, dtype=torch.int64, device=device).view(-1, most + 1)
    numbers = torch.tensor(accepted, dtype=torch.int64, device=device)
    return Verdict(token_DK1, numbers, torch.tensor(finite, dtype=torch.bool, device=device))


def make_asked(case: Case, num_D: Tensor, position_D: Tensor) -> DraftRequests:
    params = make_params(len(case.state.length_S))
    return DraftRequests(case.slot_D, num_D, position_D, case.most, params)


def check_batch(mine: ForwardBatch, theirs: ForwardBatch, reach_B: Tensor, exact: bool) -> None:
    """Blocks are compared as far as `reach_B` tokens. exact: neither batch is padded."""
    for name in ("token_T", "position_T", "logit_row_N"):
        one, other = getattr(mine, name), getattr(theirs, name)
        size = max(len(one), len(other)) if exact else min(len(one), len(other))
        assert torch.equal(one[:size], other[:size]), name
    a, b = mine.attention, theirs.attention
    assert torch.equal(a.query_start_B1, b.query_start_B1)
    assert torch.equal(a.length_B, b.length_B)
    assert (a.block_size, a.most_queries, a.values_fit) == (b.block_size, b.most_queries, True)
    assert a.block_BL.is_contiguous()
    assert b.block_BL.is_contiguous()
    columns = min(a.block_BL.shape[1], b.block_BL.shape[1])
    if exact:
        assert a.block_BL.shape == b.block_BL.shape
    read_BL = torch.arange(columns, device=reach_B.device) * BLOCK_SIZE < reach_B[:, None]
    assert torch.equal(a.block_BL[:, :columns][read_BL], b.block_BL[:, :columns][read_BL])


def check_state(mine: SlotState, theirs: SlotState) -> None:
    for name, one, other in zip(SlotState._fields, mine, theirs, strict=True):
        assert torch.equal(one[:-1], other[:-1]), name
        assert torch.equal(one[-1].flatten()[:-1], other[-1].flatten()[:-1]), name


def compare_step(mine: Bind, theirs: Bind, case: Case, seed: int, *, exact: bool = False) -> None:
    """A whole step: drafts counted and written, tokens packed, slots advanced."""
    states = case.copy(), case.copy()
    both = mine(states[0]), theirs(states[1])
    counted = [steps.count_drafts(case.slot_D, case.most_D) for steps in both]
    assert all(map(torch.equal, *counted))
    num_D, position_D = counted[1]
    if case.most:
        shape = (len(num_D), case.most)
        token_DK = torch.randint(-2, VOCABULARY + 3, shape, device=num_D.device)
        asked = make_asked(case, num_D, position_D)
        for steps in both:
            steps.write_drafts(asked, num_D, token_DK, VOCABULARY - 1)
        check_state(*states)
    tokens = StepTokens(case.slot_B, case.num_tokens_B, case.decider_B, num_D)
    most_tokens = int(case.num_tokens_B.sum()) + len(num_D) * case.most
    for more, ahead in ((0, seed % 7), (3, 0)) if exact else ((3, 0),):
        sizes = PackSizes(most_tokens + more, len(num_D) * (case.most + 1) + more, 9, ahead)
        packs = [steps.pack(tokens, sizes, BLOCK_SIZE) for steps in both]
        reach_B = packs[1].attention.length_B + (ahead if exact else 0)
        check_batch(*packs, reach_B, exact)
    batch = packs[1].attention
    verdict = make_verdict(seed, num_D, case.most)
    assert torch.equal(*(steps.advance(tokens, verdict) for steps in both))
    check_state(*states)
    real = int(batch.query_start_B1[-1])  # ids after these may differ
    (token_T, row_B), (other_T, other_B) = (
        steps.shift(case.slot_B, batch, sizes.tokens) for steps in both
    )
    assert torch.equal(token_T[:real], other_T[:real])
    assert torch.equal(row_B, other_B)
    assert token_T.min() >= 0
    assert len(token_T) == sizes.tokens


def compare_drafting(
    mine: Bind, theirs: Bind, case: Case, seed: int, *, exact: bool = False
) -> None:
    """A round of drafting and a look-up; some requests are longer than the model's context."""
    both = mine(case.state), theirs(case.state)
    max_len = case.state.token_SL.shape[1] - random.Random(seed).randint(1, 20)
    asked = make_asked(case, *both[1].count_drafts(case.slot_D, case.most_D))
    known = 1 + seed % 2
    one, other = (steps.begin_round(asked, known, max_len, BLOCK_SIZE) for steps in both)
    check_batch(one.first, other.first, other.length_KB[-1], exact)
    for name in ("num_B", "index_B1", "position_KB", "length_KB", "index_KB"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    shape, device = (case.most, len(asked.slot_B)), asked.slot_B.device
    drafts = list(torch.randint(VOCABULARY, shape, device=device))
    assert torch.equal(*(steps.join_drafts(drafts, one.num_B) for steps in both))
    for shortest, longest in ((1, 3), (2, 2)):
        assert all(map(torch.equal, *(s.look_up(asked, shortest, longest) for s in both)))


@needs_triton
@pytest.mark.skipif(DEVICE.type == "cuda" or INTERPRETED, reason="the tests below run here")
def test_interpreted_kernels_leave_the_same_numbers() -> None:
    interpret_tests(__file__, "test_kernels")


@needs_triton
@pytest.mark.skipif(DEVICE.type == "cpu" and not INTERPRETED, reason="needs a GPU, or a process")
@pytest.mark.parametrize("seed", range(18))
def test_kernels_leave_the_same_numbers(seed: int) -> None:
    requests, most = ((1, 0), (2, 3), (7, 1), (9, 4), (3, 0), (1, 2))[seed % 6]
    mine, theirs = get_backend("triton").steps, get_backend("torch").steps
    for prompts in (False, True):
        case = make_case(seed, requests, most, prompts=prompts)
        compare_step(mine, theirs, case, seed)
        if case.most and len(case.slot_D):
            compare_drafting(mine, theirs, case, seed)


@needs_triton
@pytest.mark.skipif(DEVICE.type == "cpu" and not INTERPRETED, reason="needs a GPU, or a process")
@pytest.mark.parametrize(("requests", "most", "max_tokens"), [(2, 3, 9000), (300, 1, 20)])
def test_kernels_that_take_several_turns(requests: int, most: int, max_tokens: int) -> None:
    """More tokens, columns or requests than a program moves at once."""
    mine, theirs = get_backend("triton").steps, get_backend("torch").steps
    case = make_case(1, requests, most, max_tokens=max_tokens, prompts=max_tokens > 100)
    compare_step(mine, theirs, case, 1)
    compare_drafting(mine, theirs, case, 1)


@needs_native
@pytest.mark.parametrize("seed", range(60))
def test_native_steps_are_those_of_stock_operators(seed: int) -> None:
    """To the last number, sizes included: neither pads a batch."""
    mine, theirs = get_backend("native").steps, get_backend("torch").steps
    requests, most = random.Random(seed).choice([1, 2, 7, 16]), seed % 5
    for prompts in (False, True):
        case = make_case(seed, requests, most, prompts=prompts, device=torch.device("cpu"))
        compare_step(mine, theirs, case, seed, exact=True)
        if case.most and len(case.slot_D):
            compare_drafting(mine, theirs, case, seed, exact=True)


@needs_native
def test_native_steps_read_tensors_of_any_layout() -> None:
    """Columns of a table, drafts as int32."""
    case = make_case(3, 5, 4, device=torch.device("cpu"))
    results = []
    for lay in (Tensor.contiguous, lambda x: torch.stack([x, x], dim=-1)[..., 0]):
        state = case.copy()
        steps = get_backend("native").steps(state)
        slot_D, most_D = lay(case.slot_D), lay(case.most_D)
        asked = make_asked(case, *steps.count_drafts(slot_D, most_D))
        asked = asked._replace(slot_B=slot_D, num_B=lay(asked.num_B))
        dtype = torch.int64 if slot_D.is_contiguous() else torch.int32
        token_DK = torch.arange(20, dtype=dtype).view(5, 4) % 7
        steps.write_drafts(asked, asked.num_B, lay(token_DK), 5)
        given = lay(case.slot_B), lay(case.num_tokens_B), lay(torch.arange(5))
        tokens = StepTokens(*given, asked.num_B)
        batch = steps.pack(tokens, PackSizes(0, 0, 5), BLOCK_SIZE)
        token_DK1, *rest = make_verdict(1, asked.num_B, 4)
        packet = steps.advance(tokens, Verdict(lay(token_DK1.to(dtype)), *map(lay, rest)))
        first = steps.begin_round(asked, 2, 50, BLOCK_SIZE).first
        results.append((*state, batch.token_T, packet, first.token_T, *steps.look_up(asked, 1, 3)))
    assert all(map(torch.equal, *results))


@needs_native
def test_memory_is_reused_except_for_results_of_advance() -> None:
    """Results of `advance` stay as they are, and one object's are not another's."""
    case = make_case(2, 4, 3, device=torch.device("cpu"))
    steps, other = (get_backend("native").steps(case.copy()) for _ in range(2))
    num_D, _ = steps.count_drafts(case.slot_D, case.most_D)
    tokens = StepTokens(case.slot_B, case.num_tokens_B, None, num_D.clone())
    batch = steps.pack(tokens, PackSizes(0, 0, 4), BLOCK_SIZE)
    before = num_D.clone(), batch.token_T.clone(), batch.attention.block_BL.clone()
    elsewhere = tokens._replace(slot_B=case.slot_B.flip(0), num_D=tokens.num_D.flip(0))
    other.count_drafts(elsewhere.slot_B, case.most_D * 0)
    other.pack(elsewhere, PackSizes(0, 0, 4), BLOCK_SIZE)
    after = num_D, batch.token_T, batch.attention.block_BL
    assert all(map(torch.equal, before, after))
    again = steps.pack(tokens, PackSizes(0, 0, 4), BLOCK_SIZE)
    assert again.token_T.data_ptr() == batch.token_T.data_ptr()
    assert again.attention is not batch.attention
    packet = steps.advance(tokens, make_verdict(1, tokens.num_D, 3))
    copy = packet.clone()
    later = steps.advance(tokens, make_verdict(2, tokens.num_D, 3))
    assert torch.equal(packet, copy)
    assert not torch.equal(packet, later)


@needs_native
def test_more_sizes_than_are_kept() -> None:
    """A batch that has as many blocks as tokens has another size at each length."""
    case = make_case(5, 1, 2, max_tokens=1200, device=torch.device("cpu"))
    case.state.limit_S.fill_(999)
    both = [get_backend(name).steps(case.state) for name in ("native", "torch")]
    one = torch.ones(1, dtype=torch.int64)
    tokens = StepTokens(0 * one, one, None, one)
    for start in (*range(290), *range(9)):
        case.state.computed_S[0] = start
        packs = [steps.pack(tokens, PackSizes(0, 0, 9), 1) for steps in both]
        assert packs[0].attention.block_BL.shape == (1, start + 2)
        check_batch(*packs, packs[1].attention.length_B, exact=True)


def make_slots(length: int) -> SlotState:
    numbers = torch.tensor([[length, 1], [length - 1, 0], [99, 1]])
    blocks = torch.tensor([[1, 2, 3], [0, 0, 0]])
    return SlotState(torch.ones(2, 8, dtype=torch.int32), blocks, *numbers)


@pytest.mark.parametrize("backend", HOST)
def test_more_drafts_than_requested_are_an_error(backend: str) -> None:
    state = make_slots(3)
    steps, one = get_backend(backend).steps(state), torch.ones(1, dtype=torch.int64)
    asked = DraftRequests(0 * one, one, 3 * one, 2, make_params(2))
    before = state.token_SL.clone()
    with pytest.raises(IntegrityError, match=r"2\]? drafts.*\b1\]? requested"):
        steps.write_drafts(asked, 2 * one, torch.tensor([[5, 6]]), 9)
    with pytest.raises(IntegrityError, match=r"\[1, 1\] drafts, but at most \[1\] requested"):
        steps.write_drafts(asked, torch.tensor([1, 1]), torch.tensor([[5], [6]]), 9)
    assert torch.equal(state.token_SL, before)
    steps.write_drafts(asked, one, torch.tensor([[5, 6]]), 9)
    assert state.token_SL[0].tolist() == [1, 1, 1, 5, 1, 1, 1, 1]


@pytest.mark.parametrize("backend", HOST)
def test_tokens_without_a_place_or_a_value_are_an_error(backend: str) -> None:
    one = torch.ones(1, dtype=torch.int64)
    tokens, sizes = StepTokens(0 * one, one, None, 3 * one), PackSizes(9, 9, 9)
    for length, block_size, room in ((6, 4, 8), (4, 2, 6)):
        with pytest.raises(IntegrityError, match=rf"{length + 3} tokens .* has room for {room}"):
            get_backend(backend).steps(make_slots(length)).pack(tokens, sizes, block_size)
    state = make_slots(4)
    state.token_SL[0, 5] = -1
    with pytest.raises(IntegrityError, match="never written"):
        get_backend(backend).steps(state).pack(tokens, sizes, 4)
    last = get_backend(backend).steps(make_slots(5)).pack(tokens, sizes, 4)
    assert last.position_T.tolist() == [4, 5, 6, 7]
    assert last.attention.block_BL.tolist() == [[1, 2]]


@pytest.mark.parametrize("backend", HOST)
def test_a_request_that_has_all_its_tokens_writes_nowhere(backend: str) -> None:
    """Its last token may be in a block that it does not have: the table has another request's."""
    numbers = torch.tensor([[16, 0], [17, 1], [17, 1]])  # computed, length, limit
    state = SlotState(
        torch.ones(2, 40, dtype=torch.int32), torch.tensor([[3, 99], [7, 7]]), numbers[1].clone(),
        numbers[0].clone(), numbers[2].clone(),
    )  # fmt: skip
    one, none = torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    steps = get_backend(backend).steps(state)
    packed = steps.pack(StepTokens(none, one, None, none), PackSizes(1, 1, 1), 16)
    assert packed.position_T.tolist() == [0]
    assert packed.attention.block_BL[0, 0] == 7
    asked = DraftRequests(none, none, 17 * one, 1, make_params(2))
    plan = steps.begin_round(asked, 2, 64, 16)
    assert plan.first.attention.block_BL[0, 0] == 7
    assert plan.position_KB.max() < 16

"""A round of drafting in one native call is bitwise the round of one pass per draft."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken.config import EngineConfig, SpeculativeConfig
from foretoken.drafting.base import DraftContext, DrafterSetup, DraftRequest
from foretoken.drafting.draft_model import DraftModel
from foretoken.ops import TARGET, DraftBlock, Noise, Rows, Rule, SlotParams, get_backend
from tests.support.cases import make_params
from tests.support.checkpoints import save_checkpoint
from tests.support.kernels import needs_kernels

pytestmark = needs_kernels

CPU = torch.device("cpu")
MOST = 5
SLOTS = 7
MAX_LEN = 64
VOCABULARY = 1100  # more than one block of the hierarchical draw
TEMPERATURES = [0.0, 0.7, 1.0, 0.0, 1.3, 0.5, 1.0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(
        tmp_path_factory.mktemp("draft"), vocabulary=VOCABULARY, tokenizer=False, max_len=MAX_LEN
    )


def build(folder: Path, block_size: int = 16, **options: Any) -> DraftModel:
    method = options.pop("draft_sample_method", "probabilistic")
    spec = SpeculativeConfig(
        method="draft_model",
        model=str(folder),
        num_speculative_tokens=MOST,
        draft_sample_method=method,
    )
    config = EngineConfig(
        model=str(folder), speculative_config=spec, block_size=block_size, max_num_seqs=SLOTS,
        max_num_batched_tokens=48, **options,
    )  # fmt: skip
    backend = get_backend("native")
    built = DraftModel(DrafterSetup(config, spec, backend, CPU, VOCABULARY, MAX_LEN))
    built.allocate(1 + SLOTS * (-(-(MAX_LEN + MOST) // block_size)))
    return built


@dataclass
class Pair:
    """Two drafters given the same requests; the second drafts by passes."""

    at_once: DraftModel
    by_passes: DraftModel
    params: SlotParams

    def request(self, slot: int, tokens: list[int], blocks: list[int], num: int) -> DraftRequest:
        temperature = float(self.params.temperature_S[slot])
        rule = Rule(int(self.params.rule_S[slot]))
        return DraftRequest(slot, tokens, blocks, num, temperature, rule)

    def propose(self, requests: list[DraftRequest]) -> DraftBlock:
        context = DraftContext(requests, self.params)
        one, other = self.at_once.propose(context), self.by_passes.propose(context)
        assert one.token_BK.tolist() == other.token_BK.tolist()
        assert one.num_B.tolist() == other.num_B.tolist()
        assert one.real_q_B.tolist() == other.real_q_B.tolist()
        if one.cache is None or other.cache is None:
            assert one.cache is other.cache
            assert not one.real_q_B.any()
            return one
        for request, num, real in zip(requests, one.num_B, one.real_q_B, strict=True):
            assert bool(real) == (request.keeps_q and num > 0)
            if real:
                for name in ("logits_SKV", "threshold_SK", "lse_SK"):
                    mine, theirs = getattr(one.cache, name), getattr(other.cache, name)
                    at = (request.slot, slice(int(num)))
                    assert torch.equal(mine[at], theirs[at]), name
        return one


MakePair = Callable[..., Pair]


@pytest.fixture
def make_pair(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakePair]:
    def make(params: SlotParams, **options: Any) -> Pair:
        pair = Pair(build(folder, **options), build(folder, **options), params)
        monkeypatch.setattr(pair.by_passes, "_draft_at_once", pair.by_passes._draft_by_passes)
        return pair

    yield make
    get_backend("native").set_num_threads(1)


def drive(pair: Pair, *, rounds: int = 12, seed: int = 0) -> int:
    """Rounds over requests of ragged lengths, some accepted, some left out; drafts made in all."""
    rng = random.Random(seed)
    size = pair.at_once.config.block_size
    columns = -(-(MAX_LEN + MOST) // size)
    ids = list(range(SLOTS * columns))
    rng.shuffle(ids)
    texts = [[rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 40))] for _ in range(SLOTS)]
    num_drafted = 0
    for _ in range(rounds):
        requests = []
        for slot in rng.sample(range(SLOTS), rng.randint(1, SLOTS)):
            known, wanted = len(texts[slot]), rng.randint(1, MOST)
            own = ids[slot * columns : (slot + 1) * columns][: -(-(known + wanted) // size)]
            requests.append(pair.request(slot, list(texts[slot]), own, wanted))
        block = pair.propose(requests)
        for request, tokens, num in zip(
            requests, block.token_BK.tolist(), block.num_B.tolist(), strict=True
        ):
            accepted = rng.randint(0, num)
            num_drafted += num
            if num:
                for built in (pair.at_once, pair.by_passes):
                    built.observe(request.slot, num, accepted)
            text = texts[request.slot]
            text += [*tokens[:accepted], rng.randrange(VOCABULARY)]
            del text[MAX_LEN:]
    return num_drafted


RULES = [Rule.STANDARD, Rule.BLOCK, Rule.COUPLED, Rule.COUPLED, Rule.SYNTHETIC, Rule.COUPLED]


def with_rules(params: SlotParams) -> SlotParams:
    """Other rules in other slots, coupled ones with and without a temperature."""
    return replace(params, rule_S=torch.tensor([*RULES, Rule.STANDARD], dtype=torch.int64))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_mixed_requests(make_pair: MakePair, block_size: int, threads: int) -> None:
    get_backend("native").set_num_threads(threads)
    pair = make_pair(make_params(SLOTS, TEMPERATURES), block_size=block_size)
    assert drive(pair, seed=block_size) > 60


def test_greedy_requests_keep_no_q(make_pair: MakePair) -> None:
    pair = make_pair(make_params(SLOTS, 0.0))
    assert drive(pair) > 60


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}])
def test_drafts_that_are_the_argmax_at_any_temperature(
    make_pair: MakePair, filters: dict[str, Any]
) -> None:
    params = make_params(SLOTS, TEMPERATURES, **filters)
    assert drive(make_pair(with_rules(params), draft_sample_method="greedy")) > 60
    fresh = make_pair(with_rules(params), draft_sample_method="greedy")
    cold = make_pair(make_params(SLOTS, 0.0))
    for slot in range(SLOTS):
        wanted = (slot, [slot, 5, 1], [slot], MOST)
        hot = fresh.propose([fresh.request(*wanted)])
        assert hot.token_BK.tolist() == cold.propose([cold.request(*wanted)]).token_BK.tolist()


@pytest.mark.parametrize("fp64", [False, True])
@pytest.mark.parametrize(
    "filters",
    [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": [4, 4, 0, 0, 0, 0, 9]}],
)
def test_filters_rules_and_noise(make_pair: MakePair, filters: dict[str, Any], fp64: bool) -> None:
    params = with_rules(make_params(SLOTS, TEMPERATURES, **filters))
    pair = make_pair(params, use_fp64_gumbel=fp64)
    assert drive(pair) > 60


def test_coupled_requests_draw_the_targets_own_tokens(make_pair: MakePair) -> None:
    """What a target with the same logits and edits would draw next, with nothing kept of q."""
    coupled = replace(make_params(SLOTS, 0.9), rule_S=torch.full((SLOTS,), Rule.COUPLED))
    pair = make_pair(coupled)
    backend, drafter = get_backend("native"), pair.at_once
    block = pair.propose([pair.request(2, [3, 1, 4], [0], 3)])
    assert block.cache is None
    cache = drafter._cache
    assert cache is not None
    slot_N, position_N = torch.full((3,), 2), torch.arange(3, 6)
    drawn = backend.sample(
        Rows(cache.logits_SKV[2, :3], coupled, slot_N),
        Noise(position_N, torch.zeros_like(slot_N), TARGET),
    )
    assert block.token_BK[0].tolist() == drawn.tolist()


def test_the_memory_plan_is_what_is_allocated(folder: Path) -> None:
    drafter = build(folder)
    cache = drafter._cache
    assert cache is not None
    held = (cache.logits_SKV, cache.threshold_SK, cache.lse_SK)
    assert SLOTS * drafter.needs.bytes_per_slot == sum(t.nbytes for t in held)
    assert cache.logits_SKV.dtype is drafter.model.dtype
    greedy = build(folder, draft_sample_method="greedy")
    assert greedy.needs.bytes_per_slot == 0
    assert greedy._cache is None


def test_requests_without_room_leave_the_others_rows_alone(make_pair: MakePair) -> None:
    """Beside a request at the end of the draft model's context."""
    pair = make_pair(make_params(SLOTS, 1.0))
    full = [1] * (MAX_LEN + 1)
    block = pair.propose(
        [
            pair.request(0, [5, 6], [0], 2),
            pair.request(1, full, [1, 2, 3, 4, 5], 3),
            pair.request(2, [7, 8], [6], 1),
        ]
    )
    assert block.num_B.tolist() == [2, 0, 1]
    assert block.real_q_B.tolist() == [True, False, True]
    assert block.token_BK[1].tolist() == [-1, -1]
    assert block.token_BK[2, 1] == -1


def test_noise_follows_the_request_not_its_place(make_pair: MakePair) -> None:
    """Drafts of a request are the same alone, and in another order beside others."""
    texts = [[3, 1, 4], [1, 5], [9, 2, 6, 5, 3]]

    params = make_params(SLOTS, [1.0, 0.7, 1.3, *TEMPERATURES[3:]])
    requests = [
        DraftRequest(s, t, [s], MOST - s, float(params.temperature_S[s]), Rule.STANDARD)
        for s, t in enumerate(texts)
    ]

    def drafts(of: list[DraftRequest]) -> list[list[int]]:
        pair = make_pair(params)
        rows = pair.propose(of).token_BK.tolist()
        return [row[: r.num_drafts] for row, r in zip(rows, of, strict=True)]

    together = drafts(requests)
    assert drafts(requests[::-1])[::-1] == together
    assert [drafts([request])[0] for request in requests] == together

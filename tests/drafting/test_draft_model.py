"""A round of drafting in one native call is bitwise the round of one pass per draft."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from foretoken.config import EngineConfig, SpeculativeConfig
from foretoken.drafting.base import DrafterSetup
from foretoken.drafting.stacks import DraftModel
from foretoken.drafting.vocabulary import DraftNetwork
from foretoken.models import CausalLM
from foretoken.ops import TARGET, DraftBlock, Noise, Rows, Rule, SlotParams, get_backend
from tests.models.batches import Span, build_batch
from tests.support.cases import make_params
from tests.support.checkpoints import save_checkpoint
from tests.support.kernels import needs_kernels
from tests.support.slots import GivenSlots, observe

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


def build(
    folder: Path, params: SlotParams, block_size: int = 16, *, by_passes: bool = False,
    **options: Any,
) -> DraftModel:  # fmt: skip
    method = options.pop("draft_sample_method", "probabilistic")
    spec = SpeculativeConfig(
        method="draft_model", model=str(folder), num_speculative_tokens=MOST,
        draft_sample_method=method,
    )  # fmt: skip
    config = EngineConfig(
        model=str(folder), speculative_config=spec, block_size=block_size, max_num_seqs=SLOTS,
        max_num_batched_tokens=48, **options,
    )  # fmt: skip
    setup = DrafterSetup(config, spec, get_backend("native"), CPU, VOCABULARY, MAX_LEN)
    built = DraftModel(setup)
    if by_passes:
        network = DraftNetwork(Unfused(built.model), None)  # type: ignore[arg-type]
        built = DraftModel(setup, network)
    columns = -(-(MAX_LEN + MOST) // block_size)
    # One request may be longer than the draft model's context.
    sizes = {"max_tokens": MAX_LEN + MOST, "max_drafts": MOST, "blocks": columns}
    spare = SLOTS * columns
    slots = GivenSlots(params, **sizes, spare_block=spare, backend=setup.backend)
    built.allocate(slots, spare + 1)
    return built


class Unfused:
    """A model with the passes of the native stack, but without its round of drafting."""

    def __init__(self, model: CausalLM) -> None:
        self.model = self.network = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


class Asked(NamedTuple):
    slot: int
    tokens: list[int]
    blocks: list[int]
    num_drafts: int


def asked(built: DraftModel, requests: Sequence[Asked]) -> DraftBlock:
    for slot, tokens, blocks, _ in requests:
        built.slots.put(slot, tokens, blocks)  # type: ignore[attr-defined]
    slots: Any = built.slots
    return built.propose(slots.asking([r.slot for r in requests], [r.num_drafts for r in requests]))


@dataclass
class Pair:
    at_once: DraftModel
    by_passes: DraftModel
    params: SlotParams

    def propose(self, requests: Sequence[Asked]) -> DraftBlock:
        one, other = asked(self.at_once, requests), asked(self.by_passes, requests)
        assert one.token_BK.tolist() == other.token_BK.tolist()
        assert one.num_B.tolist() == other.num_B.tolist()
        assert one.real_q_B.tolist() == other.real_q_B.tolist()
        if one.cache is None or other.cache is None:
            assert one.cache is other.cache
            assert not one.real_q_B.any()
            return one
        for request, num, real in zip(requests, one.num_B, one.real_q_B, strict=True):
            assert bool(real) == (self.keeps_q(request.slot) and num > 0)
            if real:
                for name in ("logits_SKV", "threshold_SK", "lse_SK"):
                    mine, theirs = getattr(one.cache, name), getattr(other.cache, name)
                    at = (request.slot, slice(int(num)))
                    assert torch.equal(mine[at], theirs[at]), name
        return one

    def keeps_q(self, slot: int) -> bool:
        is_warm = bool(self.params.temperature_S[slot] > 0)
        return is_warm and self.params.rule_S[slot] != Rule.COUPLED


MakePair = Callable[..., Pair]


@pytest.fixture
def make_pair(folder: Path) -> Iterator[MakePair]:
    def make(params: SlotParams, **options: Any) -> Pair:
        at_once = build(folder, params, **options)
        return Pair(at_once, build(folder, params, by_passes=True, **options), params)

    yield make
    get_backend("native").set_num_threads(1)


def drive(pair: Pair, *, rounds: int = 12, seed: int = 0) -> int:
    """The number of drafts in rounds over ragged requests, some drafts of which are accepted."""
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
            requests.append(Asked(slot, list(texts[slot]), own, wanted))
        block = pair.propose(requests)
        accepted = [rng.randint(0, num) for num in block.num_B.tolist()]
        num_drafted += int(block.num_B.sum())
        for built in (pair.at_once, pair.by_passes):
            observe(built, [request.slot for request in requests], block, accepted)
        for request, tokens, kept in zip(requests, block.token_BK.tolist(), accepted, strict=True):
            text = texts[request.slot]
            text += [*tokens[:kept], rng.randrange(VOCABULARY)]
            del text[MAX_LEN:]
    return num_drafted


RULES = [Rule.STANDARD, Rule.BLOCK, Rule.COUPLED, Rule.COUPLED, Rule.SYNTHETIC, Rule.COUPLED]


def with_rules(params: SlotParams) -> SlotParams:
    """A rule for each slot; coupled slots with and without a temperature."""
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
        wanted = Asked(slot, [slot, 5, 1], [slot], MOST)
        hot = fresh.propose([wanted])
        assert hot.token_BK.tolist() == cold.propose([wanted]).token_BK.tolist()


@pytest.mark.parametrize("fp64", [False, True])
@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": [4, 4, 0, 0, 0, 0, 9]}]
)
def test_filters_rules_and_noise(make_pair: MakePair, filters: dict[str, Any], fp64: bool) -> None:
    params = with_rules(make_params(SLOTS, TEMPERATURES, **filters))
    pair = make_pair(params, use_fp64_gumbel=fp64)
    assert drive(pair) > 60


def test_coupled_requests_draw_the_targets_own_tokens(make_pair: MakePair) -> None:
    """They are what a target with the same logits would draw next; no q is kept."""
    coupled = replace(make_params(SLOTS, 0.9), rule_S=torch.full((SLOTS,), Rule.COUPLED))
    pair = make_pair(coupled)
    backend, drafter = get_backend("native"), pair.at_once
    block = pair.propose([Asked(2, [3, 1, 4], [0], 3)])
    assert block.cache is None
    drafts = block.token_BK[0].tolist()
    batch = build_batch([Span([0], 0, [3, 1, 4, *drafts[:2]], 3)], 16, CPU)
    logits_NV = drafter.model.forward(batch, drafter.kv).logits_NV
    slot_N, position_N = torch.full((3,), 2), torch.arange(3, 6)
    drawn = backend.sample(
        Rows(logits_NV, coupled, slot_N), Noise(position_N, torch.zeros_like(slot_N), TARGET)
    )
    assert drafts == drawn.tolist()


def test_the_memory_plan_is_what_is_allocated(folder: Path) -> None:
    params, request = make_params(SLOTS, 1.0), Asked(0, [5, 6], [0], 2)
    drafter = build(folder, params)
    cache = asked(drafter, [request]).cache
    assert cache is not None
    held = (cache.logits_SKV, cache.threshold_SK, cache.lse_SK)
    assert (SLOTS + 1) * drafter.bytes_per_slot == sum(t.nbytes for t in held)
    assert cache.logits_SKV.dtype is drafter.model.dtype
    held_kv = sum(t.nbytes for t in (*drafter.kv.keys, *drafter.kv.values))
    assert len(drafter.kv.keys[0]) * drafter.kv_bytes_per_block == held_kv
    greedy = build(folder, params, draft_sample_method="greedy")
    assert greedy.bytes_per_slot == 0
    assert asked(greedy, [request]).cache is None


def test_requests_without_room_do_not_change_other_rows(make_pair: MakePair) -> None:
    pair = make_pair(make_params(SLOTS, 1.0))
    full = [1] * (MAX_LEN + 1)
    block = pair.propose(
        [Asked(0, [5, 6], [0], 2), Asked(1, full, [1, 2, 3, 4, 5], 3), Asked(2, [7, 8], [6], 1)]
    )
    assert block.num_B.tolist() == [2, 0, 1]
    assert block.real_q_B.tolist() == [True, False, True]
    assert block.token_BK[1].tolist() == [-1, -1]
    assert block.token_BK[2, 1] == -1


def test_noise_follows_the_request_not_its_place(make_pair: MakePair) -> None:
    texts = [[3, 1, 4], [1, 5], [9, 2, 6, 5, 3]]

    params = make_params(SLOTS, [1.0, 0.7, 1.3, *TEMPERATURES[3:]])
    requests = [Asked(slot, text, [slot], MOST - slot) for slot, text in enumerate(texts)]

    def drafts(of: list[Asked]) -> list[list[int]]:
        pair = make_pair(params)
        rows = pair.propose(of).token_BK.tolist()
        return [row[: r.num_drafts] for row, r in zip(rows, of, strict=True)]

    together = drafts(requests)
    assert drafts(requests[::-1])[::-1] == together
    assert [drafts([request])[0] for request in requests] == together

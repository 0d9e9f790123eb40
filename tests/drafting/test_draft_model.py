"""A round of drafting in one native call is bitwise the round of one pass per draft."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken.config import EngineConfig, SpeculativeConfig
from foretoken.drafting.base import DraftContext, DrafterSetup, DraftRequest
from foretoken.drafting.draft_model import DraftModel
from foretoken.native import library
from foretoken.ops import DraftBlock, SlotParams, get_backend
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
    backend = get_backend("native_cpu")
    built = DraftModel(DrafterSetup(config, spec, backend, CPU, VOCABULARY, MAX_LEN))
    built.allocate(1 + SLOTS * (-(-(MAX_LEN + MOST) // block_size)))
    return built


@dataclass
class Pair:
    """Two drafters given the same requests; the second drafts by passes."""

    at_once: DraftModel
    by_passes: DraftModel
    params: SlotParams
    covered: list[bool] = field(default_factory=list)  # what each native round said

    def propose(self, requests: list[DraftRequest]) -> DraftBlock:
        context = DraftContext(requests, self.params)
        one, other = self.at_once.propose(context), self.by_passes.propose(context)
        assert one.token_BK.tolist() == other.token_BK.tolist()
        assert one.num_B.tolist() == other.num_B.tolist()
        assert one.real_q_B.tolist() == other.real_q_B.tolist()
        if one.logits_SKV is None or other.logits_SKV is None:
            assert one.logits_SKV is other.logits_SKV
            return one
        for request, num, real in zip(requests, one.num_B, one.real_q_B, strict=True):
            if real:
                rows = (block.logits_SKV[request.slot, : int(num)] for block in (one, other))
                assert torch.equal(*rows)
        return one


MakePair = Callable[..., Pair]


@pytest.fixture
def make_pair(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakePair]:
    def make(params: SlotParams, **options: Any) -> Pair:
        pair = Pair(build(folder, **options), build(folder, **options), params)
        monkeypatch.setattr(pair.by_passes, "_draft_at_once", lambda *_: None)
        fused = pair.at_once.model.fused
        assert fused is not None
        native = fused.draft

        def draft(*args: Any) -> Tensor | None:
            found = native(*args)
            pair.covered.append(found is not None)
            return found

        monkeypatch.setattr(fused, "draft", draft)
        return pair

    yield make
    library.set_num_threads(1)


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
            requests.append(DraftRequest(slot, list(texts[slot]), own, wanted))
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


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_mixed_requests(make_pair: MakePair, block_size: int, threads: int) -> None:
    library.set_num_threads(threads)
    pair = make_pair(make_params(SLOTS, TEMPERATURES), block_size=block_size)
    assert drive(pair, seed=block_size) > 60
    assert pair.covered == [True] * 12


def test_greedy_requests_keep_no_q(make_pair: MakePair) -> None:
    pair = make_pair(make_params(SLOTS, 0.0))
    assert drive(pair) > 60
    assert pair.covered == [True] * 12


def test_drafts_that_are_the_argmax_at_any_temperature(make_pair: MakePair) -> None:
    pair = make_pair(make_params(SLOTS, TEMPERATURES), draft_sample_method="greedy")
    assert drive(pair) > 60
    assert pair.covered == [True] * 12


def test_filters_do_not_matter_to_the_argmax(make_pair: MakePair) -> None:
    pair = make_pair(make_params(SLOTS, 1.0, top_k=3), draft_sample_method="greedy")
    assert drive(pair) > 60
    assert pair.covered == [True] * 12


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_filters_take_one_pass_per_draft(make_pair: MakePair, filters: dict[str, Any]) -> None:
    pair = make_pair(make_params(SLOTS, 1.0, **filters))
    assert drive(pair) > 60
    assert pair.covered == [False] * 12


def test_one_filter_is_enough_and_at_zero_temperature_none(make_pair: MakePair) -> None:
    pair = make_pair(make_params(SLOTS, [0.0, *TEMPERATURES[1:]], top_k=[4, 4, 0, 0, 0, 0, 0]))
    pair.propose([DraftRequest(0, [5, 6, 7], [0], 3)])
    assert pair.covered == [True]
    pair.propose([DraftRequest(1, [8, 9], [1], 2), DraftRequest(0, [5, 6, 7, 8], [0], 3)])
    assert pair.covered == [True, False]


def test_noise_of_64_bits_takes_one_pass_per_draft(make_pair: MakePair) -> None:
    pair = make_pair(make_params(SLOTS, TEMPERATURES), use_fp64_gumbel=True)
    requests = [DraftRequest(s, [s, 1], [s], 3) for s in (2, 1)]
    pair.propose(requests)
    assert pair.covered == []
    pair.propose([DraftRequest(0, [4, 5], [3], 3)])  # at T=0 there is no noise
    assert pair.covered == [True]


def test_noise_follows_the_request_not_its_place(make_pair: MakePair) -> None:
    """Drafts of a request are the same alone, and in another order beside others."""
    texts = [[3, 1, 4], [1, 5], [9, 2, 6, 5, 3]]
    requests = [DraftRequest(s, t, [s], MOST - s) for s, t in enumerate(texts)]

    def drafts(of: list[DraftRequest]) -> list[list[int]]:
        pair = make_pair(make_params(SLOTS, [1.0, 0.7, 1.3, *TEMPERATURES[3:]]))
        rows = pair.propose(of).token_BK.tolist()
        return [row[: r.num_drafts] for row, r in zip(rows, of, strict=True)]

    together = drafts(requests)
    assert drafts(requests[::-1])[::-1] == together
    assert [drafts([request])[0] for request in requests] == together

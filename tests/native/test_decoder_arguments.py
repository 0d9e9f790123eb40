"""What a decoder is given is checked before its kernels read it: they check nothing."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foretoken.errors import ConfigError
from foretoken.models import CausalLM, load_model
from foretoken.ops import DraftCache, DraftRound, RoundStack
from tests.models import families
from tests.models.batches import Span, build_batch
from tests.models.walk import CPU, new_pool
from tests.support.cases import make_params
from tests.support.kernels import needs_kernels

pytestmark = needs_kernels

BLOCK = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    folder = families.save_model(tmp_path_factory.mktemp("llama"), "llama", {"head_dim": 16})
    return load_model(folder, device="cpu", backend="native")


def forward(model: CausalLM, **changes: Any) -> Any:
    """Two requests, of 3 and 1 new tokens, in a pool of 6 blocks."""
    kv = new_pool(model, 6, BLOCK)
    spans = [Span([1, 2], 2, [5, 6, 7], 1), Span([3], 0, [8], 1)]
    batch = build_batch(spans, BLOCK, CPU)
    attention = replace(batch.attention, **changes)
    return model.forward(batch._replace(attention=attention), kv)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_start_B1": torch.tensor([0, 3, 5])}, "`batch.query_start_B1` .* from 0 to 4"),
        ({"length_B": torch.tensor([5, 9])}, r"`batch.length_B` is 9: .* 1\.\.8"),
        ({"block_BL": torch.tensor([[1, 2], [6, 0]])}, r"`batch.block_BL` is 6: .* 0\.\.5"),
        ({"block_BL": torch.tensor([[1, 3], [2, 0]]).T}, "`batch.block_BL.stride`"),
        ({"block_size": 5}, "`batch.block_size` is 5: must be 4"),
    ],
)
def test_a_wrong_batch_is_named(model: CausalLM, changes: dict[str, Any], message: str) -> None:
    assert forward(model).logits_NV.shape == (2, model.vocab_size)
    with pytest.raises(ConfigError, match=message):
        forward(model, **changes)


def draft(model: CausalLM, columns: int = 2, **changes: Any) -> torch.Tensor:
    """Three drafts for a request of 6 known tokens in slot 1, two for one of 1 in slot 0."""
    assert isinstance(model.network, RoundStack)
    kv = new_pool(model, 6, BLOCK)
    spans = [Span([1, 2], 0, [5, 6, 7, 8, 9, 10], 1), Span([3], 0, [8], 1)]
    first = build_batch(spans, BLOCK, CPU)
    table = torch.tensor([[1, 2, 0, 0], [3, 0, 0, 0]])[:, :columns].contiguous()
    attention = replace(first.attention, block_BL=table)
    drafting = DraftRound(
        make_params(2, [0.8, 0.8]),
        torch.tensor([1, 0]),
        torch.tensor([3, 2]),
        DraftCache.empty(2, 3, model.vocab_size, torch.float32, CPU),
    )._replace(**changes)
    return model.network.draft(first._replace(attention=attention), kv, drafting)


def empty_cache(*sizes: int, dtype: torch.dtype = torch.float32) -> DraftCache:
    return DraftCache.empty(*sizes, families.VOCABULARY, dtype, CPU)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slot_B": torch.tensor([1, 2])}, r"`drafting.slot_B` is 2: .* 0\.\.1"),
        ({"slot_B": torch.tensor([-1, 0])}, "`drafting.slot_B` is -1"),
        ({"slot_B": torch.tensor([1])}, r"`drafting.slot_B.shape` .* \[2]"),
        ({"num_B": torch.tensor([3, 0])}, r"`drafting.num_B` is 0: must be in 1\.\.8"),
        ({"num_B": torch.tensor([4, 2])}, r"`drafting.num_B` is 4: must be in 1\.\.3"),
        ({"num_B": torch.tensor([[3, 1], [2, 1]])[:, 0]}, "`drafting.num_B.stride`"),
        ({"cache": empty_cache(2, 2)}, "`drafting.cache.logits_SKV` .* K >= 3"),
        ({"cache": empty_cache(1, 3)}, "`drafting.cache.logits_SKV.shape` is .*S >= 2"),
        ({"cache": empty_cache(2, 3, dtype=torch.bfloat16)}, "`drafting.cache.* float32"),
    ],
)
def test_a_wrong_round_is_named(model: CausalLM, changes: dict[str, Any], message: str) -> None:
    assert (draft(model) >= 0).tolist() == [[True, True, True], [True, True, False]]
    with pytest.raises(ConfigError, match=message):
        draft(model, **changes)


def test_a_wider_block_table_changes_nothing(model: CausalLM) -> None:
    assert torch.equal(draft(model, columns=4), draft(model, columns=2))


def test_a_pool_of_another_model_is_refused(model: CausalLM) -> None:
    kv, batch = new_pool(model, 2, BLOCK), build_batch([Span([0], 0, [1], 1)], BLOCK, CPU)
    one = SimpleNamespace(keys=kv.keys[:1], values=kv.values[:1])
    with pytest.raises(ConfigError, match="`keys` is 1: must be tensors of 2 layers"):
        model.forward(batch, one)

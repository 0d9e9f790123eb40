"""The native EAGLE-3 head: what it takes, what it is given, and what it leaves in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.heads import save_head
from foretoken.cache.kv_pool import KVPool
from foretoken.errors import ConfigError
from foretoken.models.eagle3 import load_head
from foretoken.models.eagle3_config import read_eagle3_config
from foretoken.ops import (
    AttentionBatch,
    DraftCache,
    DraftRound,
    LoadedStack,
    RoundStack,
    get_backend,
)
from foretoken.ops.steps import ForwardBatch
from tests.support.cases import make_params
from tests.support.kernels import needs_kernels

pytestmark = needs_kernels

HIDDEN, VOCABULARY, BLOCK, SLOTS = 32, 60, 4, 2
CPU = torch.device("cpu")


def load(folder: Path, dtype: torch.dtype = torch.float32, **switches: Any) -> LoadedStack:
    save_head(folder, hidden=HIDDEN, vocabulary=VOCABULARY, **switches)
    embedding = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(9))
    kernels = get_backend("native")
    config = read_eagle3_config(folder)
    embedding = embedding.to(dtype)
    return load_head(
        folder, config, embedding=embedding, backend=kernels, positions=40, most_rows=SLOTS
    )


def round_of(head: LoadedStack, **changes: Any) -> torch.Tensor:
    """Three drafts for slot 1, of 6 known tokens; none for slot 0, of 1."""
    assert isinstance(head, RoundStack)
    given = {"hidden_SC": torch.zeros(SLOTS, HIDDEN), "dtype": torch.float32, "blocks_1": [1, 2]}
    given = {**given, "step": 1, "num_B": torch.tensor([3, 0]), "cache": cache(), **changes}
    kv = KVPool(head.stack.layer_shapes, 6, BLOCK, dtype=given["dtype"], device=CPU)
    blocks_1 = given["blocks_1"]
    block_SL, length_B = torch.tensor([[3] * len(blocks_1), blocks_1]), torch.tensor([6, 1])
    params, slot_B = make_params(SLOTS, [0.8, 0.8]), torch.tensor([1, 0])
    drafting = DraftRound(
        params, slot_B, given["num_B"], given["cache"], hidden_SC=given["hidden_SC"]
    )
    where = AttentionBatch(slot_B, length_B, block_SL[:, :: given["step"]], BLOCK)
    return head.draft(ForwardBatch(slot_B, slot_B, slot_B, where), kv, drafting)


def cache(drafts: int = 3, dtype: torch.dtype = torch.float32) -> DraftCache:
    return DraftCache.empty(SLOTS, drafts, VOCABULARY, dtype, CPU)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_B": torch.tensor([4, 0])}, r"`drafting.num_B` is 4: must be in 0\.\.3"),
        ({"num_B": torch.tensor([3, -1])}, r"`drafting.num_B` is -1: must be in 0\.\.8"),
        ({"cache": cache(2)}, "`drafting.cache.logits_SKV` .* K >= 3"),
        ({"cache": cache(dtype=torch.bfloat16)}, "`drafting.cache.* float32"),
        ({"hidden_SC": torch.zeros(1, HIDDEN)}, r"`hidden_SC.shape` .*\[2, 32\]"),
        ({"hidden_SC": torch.zeros(HIDDEN, SLOTS).T}, "`hidden_SC.stride"),
        ({"dtype": torch.bfloat16}, "`keys.dtype` is torch.bfloat16"),
        ({"blocks_1": [1, 5, 2, 5], "step": 2}, "`block_SL.stride"),
    ],
)
def test_a_wrong_round_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """The kernels check nothing."""
    head = load(tmp_path)
    assert (round_of(head) >= 0).tolist() == [[True] * 3, [False] * 3]
    assert torch.equal(round_of(head, blocks_1=[1, 2, 5, 5]), round_of(head))
    with pytest.raises(ConfigError, match=message):
        round_of(head, **changes)


@pytest.mark.parametrize(
    ("state_TH", "message"),
    [
        (torch.zeros(2, HIDDEN), r"`aux\[2\].shape` .*\[3, 32\]"),
        (torch.zeros(3, HIDDEN, dtype=torch.bfloat16), r"`aux\[2\].dtype` .*float32"),
        (torch.zeros(HIDDEN, 3).T, r"`aux\[2\].stride"),
    ],
)
def test_wrong_hidden_states_are_named(
    tmp_path: Path, state_TH: torch.Tensor, message: str
) -> None:
    head = load(tmp_path)
    kv = KVPool(head.stack.layer_shapes, 6, BLOCK, dtype=torch.float32, device=CPU)
    where = AttentionBatch(torch.tensor([0, 3]), torch.tensor([3]), torch.tensor([[1]]), BLOCK)
    row_T = torch.arange(3)
    batch = ForwardBatch(torch.zeros(3, dtype=torch.int64), row_T, row_T, where)
    right = [torch.zeros(3, HIDDEN)] * 2
    for last in (right[0], state_TH):
        states = [*right, last]
        if last is state_TH:
            with pytest.raises(ConfigError, match=message):
                head.run(batch, kv, features=states)
        else:
            hidden_NC = head.run(batch, kv, features=states).hidden_NC
            assert hidden_NC is not None
            assert hidden_NC.shape == (3, HIDDEN)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"head_dim": 8}, "heads of size 8: no multiple of 16"),
        ({"dtype": torch.bfloat16}, "weights are torch.bfloat16, not float32 on the CPU"),
    ],
)
def test_what_it_lacks_is_said_and_computed_by_operators(
    tmp_path: Path, given: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    head = load(tmp_path, **given)
    with caplog.at_level("INFO"):
        fuse(head, positions=40, most_rows=4)
    assert head.fused is None
    assert f"The EAGLE-3 head runs operator by operator: {reason}" in caplog.text
    assert head.logits(torch.zeros(1, HIDDEN, dtype=head.dtype)).shape == (1, VOCABULARY)


def test_one_that_differs_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what it computes, or by which ids it drafts."""
    head = load(tmp_path, drafted=23)
    right = head.backend.draft_head

    def with_norm(model: Any, rows: int) -> Any:
        weights = model.weights._replace(post_norm=model.weights.post_norm * 1.01)
        return right(model._replace(weights=weights), rows)

    def with_ids(model: Any, rows: int) -> Any:
        return right(model._replace(target_ids=model.target_ids.flip(0) // 2), rows)

    for wrong in (with_norm, with_ids):
        monkeypatch.setattr(head.backend, "draft_head", wrong)
        fuse(head, positions=40, most_rows=SLOTS)
        assert head.fused is None
        assert "slower: that of backend `native` differs by" in caplog.text
        caplog.clear()
    assert not any(weight.is_meta for weight in head.weights)


def test_matrices_are_kept_once(tmp_path: Path) -> None:
    head = load(tmp_path)
    kept = {name for name, weight in head.weights._asdict().items() if not weight.is_meta}
    assert kept == {"input_norm", "hidden_norm", "post_norm", "norm"}

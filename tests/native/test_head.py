"""A native stack with a `FeatureRule`: what it takes, is given, and leaves in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foretoken.cache.kv_pool import KVPool
from foretoken.errors import ConfigError
from foretoken.ops import AttentionBatch, DraftCache, get_backend
from foretoken.ops.stack import DraftRound, RoundStack, Stack, UnfitError
from foretoken.ops.steps import ForwardBatch
from tests.support.cases import make_params
from tests.support.kernels import needs_kernels
from tests.support.stacks import random_stack

pytestmark = needs_kernels

HIDDEN, VOCABULARY, BLOCK, SLOTS = 32, 60, 4, 2
CPU = torch.device("cpu")


def load(stack: Stack | None = None) -> RoundStack:
    loaded = get_backend("native").load_stack(stack or random_stack(target=HIDDEN), 40, SLOTS)
    assert isinstance(loaded, RoundStack)
    return loaded


def round_of(head: RoundStack, **changes: Any) -> torch.Tensor:
    """Three drafts for slot 1, of 6 known tokens; none for slot 0, of 1."""
    given = {"hidden_SC": torch.zeros(SLOTS, HIDDEN), "dtype": torch.float32, "blocks_1": [1, 2]}
    given = {**given, "step": 1, "num_B": torch.tensor([3, 0]), "cache": cache(), **changes}
    kv = KVPool(head.stack.layer_shapes, 6, BLOCK, dtype=given["dtype"], device=CPU)
    blocks_1 = given["blocks_1"]
    block_SL, length_B = torch.tensor([[3] * len(blocks_1), blocks_1]), torch.tensor([6, 1])
    params, slot_B = make_params(SLOTS, [0.8, 0.8]), torch.tensor([1, 0])
    hidden_SC, num_B = given["hidden_SC"], given["num_B"]
    drafting = DraftRound(params, slot_B, num_B, given["cache"], hidden_SC=hidden_SC)
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
def test_a_wrong_round_is_named(changes: dict[str, Any], message: str) -> None:
    """The kernels check nothing."""
    head = load()
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
def test_wrong_hidden_states_are_named(state_TH: torch.Tensor, message: str) -> None:
    head = load()
    kv = KVPool(head.stack.layer_shapes, 6, BLOCK, dtype=torch.float32, device=CPU)
    where = AttentionBatch(torch.tensor([0, 3]), torch.tensor([3]), torch.tensor([[1]]), BLOCK)
    token_T = torch.zeros(3, dtype=torch.int64)
    batch = ForwardBatch(token_T, torch.arange(3), torch.tensor([2]), where)
    right = [torch.zeros(3, HIDDEN)] * 2
    with pytest.raises(ConfigError, match=message):
        head.run(batch, kv, features=[*right, state_TH])
    output = head.run(batch, kv, features=[*right, right[0]])
    assert output.hidden_NC is not None
    assert torch.equal(head.logits(output.hidden_NC), output.logits_NV)
    assert head.run(batch, kv, features=right[0], logits=False).logits_NV.shape == (0, VOCABULARY)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"head_size": 8}, r"heads of sizes \[8\]: not one multiple of 16"),
        ({"dtype": torch.bfloat16}, "weights are torch.bfloat16, not float32 on the CPU"),
        ({"layers": 2}, "a feature goes into several layers"),
    ],
)
def test_what_it_lacks_is_said(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnfitError, match=reason):
        load(random_stack(target=HIDDEN, **given))


def test_matrices_are_kept_once() -> None:
    stack = load().stack
    layer, rule = stack.layers[0], stack.features
    assert rule is not None
    linears = (layer.mixer.qkv, layer.mixer.o, layer.feed.gate_up, layer.feed.down)
    for linear in (*linears, stack.head, rule.fc):
        assert linear.weight.values.is_meta
    for kept in (stack.embedding_VC, stack.norm_C, layer.mixer_norm_C, rule.feature_norm_C):
        assert not kept.is_meta

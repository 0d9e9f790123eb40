"""The native EAGLE-3 head: its arguments, when it is used, and the memory that it keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.heads import save_head
from foretoken import LLM, SamplingParams
from foretoken.cache.kv_pool import KVPool
from foretoken.errors import ConfigError
from foretoken.models.eagle3 import load_head, read_head
from foretoken.models.eagle3_config import Eagle3Config, read_eagle3_config
from foretoken.ops import (
    AttentionBatch,
    Backend,
    DraftCache,
    DraftRound,
    LoadedStack,
    RoundStack,
    Stack,
    get_backend,
)
from foretoken.ops.backends.native.stack import NativeStack
from foretoken.ops.stack import Dense, Linear, map_linears
from foretoken.ops.steps import ForwardBatch
from tests.models import families
from tests.native.libraries import native_backend
from tests.support.cases import make_params
from tests.support.kernels import needs_kernels

pytestmark = needs_kernels

HIDDEN, VOCABULARY, BLOCK, SLOTS = 32, 60, 4, 2
CPU = torch.device("cpu")


def load(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    backend: Backend | None = None,
    **switches: Any,
) -> LoadedStack:
    save_head(folder, hidden=HIDDEN, vocabulary=VOCABULARY, **switches)
    kernels = backend or get_backend("native")
    _, config, embedding = read_from(folder, dtype)
    return load_head(
        folder, config, embedding=embedding, backend=kernels, positions=40, most_rows=SLOTS
    )


def read_from(folder: Path, dtype: torch.dtype) -> tuple[Path, Eagle3Config, Dense]:
    """Arguments of `read_head`: the folder, its configuration, the target's embedding."""
    embedding = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(9))
    return folder, read_eagle3_config(folder), Dense(embedding.to(dtype))


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_head_that_kernels_lack_runs_in_operators(
    tmp_path: Path, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    reason = "head sizes are [8]: must be one multiple of 16"
    with caplog.at_level("INFO"):
        head = load(tmp_path, dtype, head_dim=8)
    assert not isinstance(head, RoundStack)
    assert f"The EAGLE-3 head runs in stock operators: {reason}" in caplog.text
    assert head.logits(torch.zeros(1, HIDDEN, dtype=head.stack.dtype)).shape == (1, VOCABULARY)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_half_precision_are_computed_with_in_float32(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    """The bits are those of the same weights as floats."""
    head = load(tmp_path, dtype, attention_bias=True)
    assert isinstance(head, RoundStack)
    assert head.dtype is torch.float32
    assert head.stack.head.weight.values.dtype is dtype
    wide = NativeStack(as_floats(read_head(*read_from(tmp_path, dtype))), 40, SLOTS)
    given = {"hidden_SC": torch.randn(SLOTS, HIDDEN)}
    first, second = (cache(8) for _ in range(2))
    drafts = round_of(head, **given, cache=first)
    assert torch.equal(drafts, round_of(wide, **given, cache=second))
    assert bool(first.logits_SKV[1, :3].any())
    assert torch.equal(first.logits_SKV[1, :3], second.logits_SKV[1, :3])


def as_floats(stack: Stack) -> Stack:
    """The stack with matrices in float32. Norms and biases are widened anyway."""

    def wide(one: Linear) -> Linear:
        return one._replace(weight=Dense(one.weight.values.float()))

    return replace(map_linears(stack, wide), embedding=Dense(stack.embedding.values.float()))


def wrong_norm(stack: Stack) -> Stack:
    (layer,) = stack.layers
    return replace(stack, layers=(layer._replace(feed_norm_C=layer.feed_norm_C * 1.01),))


def wrong_ids(stack: Stack) -> Stack:
    assert stack.target_ids is not None
    return replace(stack, target_ids=stack.target_ids.flip(0) // 2)


@pytest.mark.parametrize("wrong", [wrong_norm, wrong_ids])
def test_a_head_that_differs_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, wrong: Callable[[Stack], Stack]
) -> None:
    """In its numbers, or in the ids that it drafts."""

    def load_stack(stack: Stack, *sizes: int, deterministic: bool) -> NativeStack:
        return NativeStack(wrong(stack), *sizes, deterministic=deterministic)

    head = load(tmp_path, backend=native_backend(load_stack), drafted=23)
    assert not isinstance(head, RoundStack)
    assert "slower: the kernels of backend `native` differ" in caplog.text


def test_matrices_are_kept_once(tmp_path: Path) -> None:
    stack = load(tmp_path).stack
    (layer,), rule = stack.layers, stack.features
    assert rule is not None
    mixer, feed = layer.mixer, layer.feed
    for linear in (rule.fc, mixer.qkv, mixer.o, feed.gate_up, feed.down, stack.head):
        assert linear.weight.values.is_meta
    for kept in (layer.mixer_norm_C, layer.feed_norm_C, rule.feature_norm_C, stack.norm_C):
        assert not kept.is_meta


MIXED = [
    (size, head_size, dtype)
    for size in (16, 24)
    for head_size in (16, 8)
    for dtype in ("float32", "bfloat16", "float16")
]


@pytest.mark.parametrize(("size", "head_size", "dtype"), MIXED)
def test_a_head_reads_its_target_s_states_whichever_of_both_runs_in_kernels(
    tmp_path: Path, size: int, head_size: int, dtype: str
) -> None:
    """Kernels lack attention heads of 24 numbers (in the target) and of 8 (in the head). A stack in
    kernels gives float32, one in stock operators the dtype of its weights."""
    target = tmp_path / "target"
    families.save_model(target, "llama", {"head_dim": size, "vocab_size": VOCABULARY})
    sizes = {"hidden": HIDDEN, "vocabulary": VOCABULARY, "aux_layers": (0, 1)}
    head = save_head(tmp_path / "head", **sizes, head_dim=head_size)
    speculation = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    llm = LLM(str(target), speculation, dtype=dtype, max_num_seqs=2, block_size=BLOCK)
    runner: Any = llm.engine.runner
    assert runner.model.runs_in_kernels == (size == 16)
    prompts: Any = [{"prompt_token_ids": [5, 6, 7] * 3}, {"prompt_token_ids": [9]}]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    assert [output.error for output in outputs] == [None, None]
    assert llm.metrics.num_draft_tokens > 0
    if size == 16:
        plain = LLM(str(target), dtype=dtype, max_num_seqs=2, block_size=BLOCK)
        wanted = [output.outputs[0].token_ids for output in plain.generate(prompts, params)]
        assert [output.outputs[0].token_ids for output in outputs] == wanted

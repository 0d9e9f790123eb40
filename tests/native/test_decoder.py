"""The native decoder against plain Transformers and in other batches; arguments that do not fit."""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from foretoken.cache.kv_pool import KVPool
from foretoken.errors import ConfigError
from foretoken.models import CausalLM, load_model
from foretoken.models.attention import ATTENTION_NAME, register_attention
from foretoken.models.families import FAMILIES, read_stack
from foretoken.ops import DraftCache, DraftRound, RoundStack, Stack, UnfitError, get_backend
from foretoken.ops.backends.native import library
from foretoken.ops.stack import Dense, linears, map_linears
from tests.models import families
from tests.models.batches import Span, build_batch
from tests.models.walk import CPU, new_pool, walk
from tests.support.cases import make_params
from tests.support.kernels import needs_kernels

pytestmark = needs_kernels

WINDOW = 5
HEADS = {"head_dim": 16}
ROPE = {"rope_theta": 10000.0}
MIXED = {
    "sliding_window": WINDOW,
    "use_sliding_window": True,
    "layer_types": ["sliding_attention", "full_attention"],
}
# No size is a multiple of a vector or of a panel.
ODD = {**HEADS, "hidden_size": 36, "intermediate_size": 53, "vocab_size": 101}
ROPES: dict[str, dict[str, Any]] = {
    "llama3": {
        **ROPE, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "linear": {**ROPE, "factor": 3.0},
    "yarn": {**ROPE, "factor": 4.0, "original_max_position_embeddings": 16},
}  # fmt: skip
MANY_HEADS = {**HEADS, "num_attention_heads": 32, "num_key_value_heads": 1}
# Family, settings, tokens of a block.
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "llama": ("llama", HEADS, 16),
    "llama with biases": ("llama", {**ODD, "attention_bias": True, "mlp_bias": True}, 4),
    "llama, tied": ("llama", {**ODD, "tie_word_embeddings": True}, 16),
    "llama, a key head to each query head": ("llama", {**HEADS, "num_key_value_heads": 4}, 16),
    "llama, one key head": ("llama", {**HEADS, "num_key_value_heads": 1}, 16),
    "llama, 32 heads on one key head": ("llama", MANY_HEADS, 16),
    "llama, heads of 48": ("llama", {"head_dim": 48, "num_hidden_layers": 1}, 16),
    "llama, heads of 128": ("llama", {"head_dim": 128}, 32),
    **{f"llama, blocks of {size}": ("llama", ODD, size) for size in (1, 7, 32)},
    **{
        f"{kind} RoPE": ("llama", {**HEADS, "rope_parameters": {**rope, "rope_type": kind}}, 16)
        for kind, rope in ROPES.items()
    },
    "mistral": ("mistral", {**ODD, "sliding_window": WINDOW}, 4),
    "mistral, window of 1": ("mistral", {**HEADS, "sliding_window": 1}, 16),
    "mistral, window of a block": ("mistral", {**HEADS, "sliding_window": 16}, 16),
    "ministral": ("ministral", {**HEADS, "sliding_window": WINDOW}, 16),
    "qwen2": ("qwen2", {**MIXED, "hidden_size": 64, "vocab_size": 97}, 4),
    "qwen3": ("qwen3", {**ODD, **MIXED}, 16),
    "seed_oss": ("seed_oss", {**ODD, "attention_out_bias": True}, 16),
}


def test_every_family_has_a_case() -> None:
    assert {family for family, _, _ in CASES.values()} == set(FAMILIES)


def save(folder: Path, family: str, overrides: dict[str, Any]) -> Path:
    """A random checkpoint, with random biases and weights of norms, too."""
    families.save_model(folder, family, {"max_position_embeddings": 512, **overrides})
    path, generator = folder / "model.safetensors", torch.Generator().manual_seed(1)
    weights = {
        name: w + 0.3 * torch.randn(w.shape, generator=generator) if w.ndim == 1 else w
        for name, w in load_file(path).items()
    }
    save_file(weights, path, metadata={"format": "pt"})
    return folder


def load(folder: Path) -> CausalLM:
    model = load_model(folder, device="cpu", backend="native")
    assert isinstance(model.network, RoundStack)
    return model


def random_text(length: int, seed: int, vocabulary: int = families.VOCABULARY) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocabulary) for _ in range(length)]


@pytest.mark.parametrize("case", CASES)
def test_forward_equals_transformers(tmp_path: Path, case: str) -> None:
    family, overrides, block_size = CASES[case]
    folder = save(tmp_path, family, overrides)
    model, plain = load(folder), families.plain_model(folder)
    texts = [random_text(22, seed, model.vocab_size) for seed in range(4)]
    expected = [families.plain_logits(plain, text) for text in texts]
    for seed in range(3):
        rows_seen = walk(model, texts, seed, block_size, fill=torch.nan)
        for text, rows in zip(expected, rows_seen, strict=True):
            assert rows
            for position, row in rows.items():
                torch.testing.assert_close(row, text[position], atol=2e-5, rtol=1e-4)


def test_a_context_of_hundreds_of_keys(tmp_path: Path) -> None:
    folder = save(tmp_path, "qwen3", {**ODD, **MIXED, "sliding_window": 100})
    model, text = load(folder), random_text(400, 1)
    expected = families.plain_logits(families.plain_model(folder), text)
    torch.testing.assert_close(run(model, text, [300, 1, 17, 82]), expected, atol=1e-4, rtol=1e-3)


def run(
    model: CausalLM,
    text: list[int],
    chunks: list[int],
    *,
    block_size: int = 16,
    others: bool = False,
) -> Tensor:
    assert sum(chunks) == len(text)
    columns = -(-len(text) // block_size)
    tables = [list(range(i, 3 * columns, 3)) for i in range(3)]
    kv, rows, done = new_pool(model, 3 * columns, block_size, torch.nan), [], 0
    for number, size in enumerate(chunks):
        new = text[done : done + size]
        spans = [Span(tables[0], done, new, size)]
        if others:  # one of as many tokens, before or after it, and a ragged one at the end
            spans.insert(number % 2, Span(tables[1], done, new[::-1], 1))
            spans.append(Span(tables[2], 0, text[: 1 + number % 5], 1))
        logits = model.forward(build_batch(spans, block_size, CPU), kv).logits_NV
        first = 1 if spans[0].block_ids is tables[1] else 0
        rows.append(logits[first : first + size])
        done += size
    return torch.cat(rows)


BITWISE: dict[str, tuple[str, dict[str, Any], int]] = {
    "four queries to a key": ("llama", {**ODD, "num_key_value_heads": 1}, 16),
    "biases": ("llama", {**HEADS, "attention_bias": True, "mlp_bias": True}, 16),
    "many heads on one key head": ("llama", MANY_HEADS, 16),
    "blocks of 1": ("llama", HEADS, 1),
    "window": ("mistral", {**HEADS, "sliding_window": WINDOW}, 16),
    "window, blocks of 1": ("mistral", {**HEADS, "sliding_window": 21}, 1),
    "window, blocks of 4": ("mistral", {**HEADS, "sliding_window": 21}, 4),
    "blocks of 24": ("llama", HEADS, 24),
    "window, blocks of 7": ("mistral", {**HEADS, "sliding_window": 21}, 7),
}


@pytest.fixture
def _one_thread_afterwards() -> Iterator[None]:
    yield
    library.set_num_threads(1)


@pytest.mark.usefixtures("_one_thread_afterwards")
@pytest.mark.parametrize("case", BITWISE)
def test_a_row_is_the_same_bits_in_any_batch(tmp_path: Path, case: str) -> None:
    family, overrides, block_size = BITWISE[case]
    model, text = load(save(tmp_path, family, overrides)), random_text(131, 2)
    one_by_one = run(model, text, [1] * 131, block_size=block_size)
    for threads in (1, 2):
        library.set_num_threads(threads)
        for chunks in ([131], [100, 31], [7, 2, 109, 13], [30, *[5] * 20, 1], [1] * 131):
            for others in (False, True):
                again = run(model, text, chunks, block_size=block_size, others=others)
                assert torch.equal(again, one_by_one), (threads, chunks, others)


@pytest.mark.parametrize("block_size", [1, 4, 7, 12, 20, 24, 32, 40, 64])
def test_blocks_of_another_size_change_rounding_only(tmp_path: Path, block_size: int) -> None:
    """Also sizes that end within a vector of 8 or 16 numbers."""
    model, text = load(save(tmp_path, "llama", ODD)), random_text(90, 3)
    expected = run(model, text, [90], block_size=16)
    for chunks in ([90], [1] * 90):
        other = run(model, text, chunks, block_size=block_size)
        torch.testing.assert_close(other, expected, atol=2e-5, rtol=1e-4)


def test_nan_of_another_request_does_not_spread(tmp_path: Path) -> None:
    model, block = load(save(tmp_path, "llama", HEADS)), 4
    kv, text = new_pool(model, 12, block), random_text(14, 4)
    ours, theirs, alone = [1, 5, 3, 7], [2, 6, 4, 8], run(model, text, [14], block_size=block)
    spans = [Span(ours, 0, text[:9], 0), Span(theirs, 0, text[:9], 0)]
    assert model.forward(build_batch(spans, block, CPU), kv).logits_NV.shape == (
        0,
        model.vocab_size,
    )
    for cache in (*kv.keys, *kv.values):
        cache[theirs] = torch.nan
        assert bool(cache[ours[-1]].eq(0).all())  # not yet used
        cache[ours[-1]] = torch.nan
    spans = [Span(theirs, 9, text[9:], 5), Span(ours, 9, text[9:], 5)]
    logits = model.forward(build_batch(spans, block, CPU), kv).logits_NV
    assert bool(logits[:5].isnan().all())
    assert torch.equal(logits[5:], alone[9:])


def test_pools_may_change_between_passes(tmp_path: Path) -> None:
    model, text = load(save(tmp_path, "llama", HEADS)), random_text(8, 6)
    pools, expected = [new_pool(model, 2, 4), new_pool(model, 2, 4)], run(model, text, [8])
    for start in (0, 5):
        for kv in pools:
            batch = build_batch([Span([0, 1], start, text[start : start + 5], 1)], 4, CPU)
            logits = model.forward(batch, kv).logits_NV
    torch.testing.assert_close(logits[0], expected[7], atol=2e-5, rtol=1e-4)


def test_a_pool_of_another_dtype_is_refused(tmp_path: Path) -> None:
    model = load(save(tmp_path, "llama", HEADS))
    kv = KVPool(model.layer_shapes, 2, 4, dtype=torch.bfloat16, device=CPU)
    with pytest.raises(ConfigError, match=r"`keys.dtype` is torch.bfloat16: must be torch.float32"):
        model.forward(build_batch([Span([0], 0, [1], 1)], 4, CPU), kv)


LONGROPE = {
    **ROPE, "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 64, "factor": 8.0,
}  # fmt: skip
UNFIT: dict[str, tuple[str, dict[str, Any], str]] = {
    "family": ("gemma", HEADS, "models of type `gemma` run through their own modules"),
    "heads": ("llama", {"head_dim": 24}, r"head sizes are \[24\]: must be one multiple of"),
    "activation": ("llama", {**HEADS, "hidden_act": "gelu"}, "activation is `gelu`, not SiLU"),
    "longrope": ("llama", {**HEADS, "rope_parameters": LONGROPE}, "RoPE of type `longrope`"),
    "dynamic": (
        "llama",
        {**HEADS, "rope_parameters": {**ROPE, "rope_type": "dynamic", "factor": 2.0}},
        "RoPE of type `dynamic` changes its frequencies",
    ),
}


@pytest.mark.parametrize("case", UNFIT)
def test_models_that_are_not_implemented_run_through_their_modules(
    tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    family, overrides, message = UNFIT[case]
    folder = save(tmp_path, family, overrides)
    with caplog.at_level(logging.INFO, "foretoken"):
        model = load_model(folder, device="cpu", backend="native", max_model_len=64)
    assert not isinstance(model.network, RoundStack)
    assert model.multiplies_masked_keys
    (record,) = caplog.records
    stands_in = "`{family}` runs through its Transformers module: "
    if "heads" in case:
        stands_in = "The model runs in stock operators: "
    assert stands_in.format(family=family) in record.getMessage()
    assert re.search(message, record.getMessage())
    text = random_text(20, 7)
    expected = families.plain_logits(families.plain_model(folder), text)
    kv = KVPool(model.layer_shapes, 3, 8, dtype=model.dtype, device=CPU)
    logits = model.forward(build_batch([Span([0, 1, 2], 0, text, 20)], 8, CPU), kv).logits_NV
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_of_half_precision_are_computed_with_in_float32(tmp_path: Path, dtype: str) -> None:
    """The bits are those of the same weights in float32."""
    half = getattr(torch, dtype)
    folder = save(tmp_path, "llama", {**ODD, "attention_bias": True, "mlp_bias": True})
    model = load_model(folder, device="cpu", backend="native", dtype=dtype)
    assert isinstance(model.network, RoundStack)
    assert model.dtype is torch.float32
    assert model.embedding.values.dtype is half
    for _, linear in linears(model.network.stack):
        assert linear.weight.values.dtype is half
    path, text = folder / "model.safetensors", random_text(40, 8, model.vocab_size)
    rounded = {name: w.to(half).float() for name, w in load_file(path).items()}
    save_file(rounded, path, metadata={"format": "pt"})
    assert torch.equal(run(model, text, [30, 1, 9]), run(load(folder), text, [30, 1, 9]))


def test_other_backends_do_not_fuse(tmp_path: Path) -> None:
    folder = families.save_model(tmp_path, "llama", HEADS)
    assert not load_model(folder, device="cpu", backend="torch").runs_in_kernels


def loose_module() -> Any:
    from transformers import AutoModelForCausalLM

    register_attention()
    config = families.make_config("llama", HEADS)
    module = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME)
    return module.eval().requires_grad_(False)


def load_stack(stack: Stack) -> None:
    get_backend("native").load_stack(stack, 64, 0)


def biased_head(stack: Stack) -> Stack:
    return replace(stack, head=stack.head._replace(bias=torch.zeros(families.VOCABULARY)))


def transposed_weight(stack: Stack) -> Stack:
    layer, last = stack.layers
    weight = Dense(last.feed.down.weight.values.t().contiguous().t())
    down = last.feed.down._replace(weight=weight)
    return replace(stack, layers=(layer, last._replace(feed=last.feed._replace(down=down))))


def wide_weights(stack: Stack) -> Stack:
    return map_linears(stack, lambda one: one._replace(weight=Dense(one.weight.values.double())))


def wide_norm(stack: Stack) -> Stack:
    return replace(stack, norm_C=stack.norm_C.double())


def half_a_norm(stack: Stack) -> Stack:
    """A norm of one layer in half precision; the last norm is float32."""
    layer, last = stack.layers
    return replace(stack, layers=(layer, last._replace(feed_norm_C=last.feed_norm_C.half())))


def capped(stack: Stack) -> Stack:
    layer, last = stack.layers
    options = last.mixer.options._replace(softcap=3.0)
    mixer = last.mixer._replace(options=options)
    return replace(stack, layers=(layer, last._replace(mixer=mixer)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (biased_head, "the output layer has a bias"),
        (transposed_weight, "`down` is not contiguous"),
        (wide_weights, "`qkv` is stored as float64"),
        (wide_norm, "a norm, a bias or RoPE is not contiguous float32"),
        (half_a_norm, "a norm, a bias or RoPE is not contiguous float32"),
        (capped, "attention has a soft cap or sinks"),
    ],
)
def test_odd_stacks_do_not_fit(change: Callable[[Stack], Stack], message: str) -> None:
    stack = read_stack(loose_module())
    load_stack(stack)
    with pytest.raises(UnfitError, match=message):
        load_stack(change(stack))


def test_a_module_whose_output_layer_has_a_bias_is_no_stack() -> None:
    module = loose_module()
    module.lm_head.bias = nn.Parameter(torch.zeros(families.VOCABULARY), requires_grad=False)
    with pytest.raises(UnfitError, match="the output layer has a bias"):
        read_stack(module)


@pytest.mark.parametrize("tied", [False, True])
def test_matrices_are_kept_once(tmp_path: Path, tied: bool) -> None:
    model = load(save(tmp_path, "llama", {**HEADS, "tie_word_embeddings": tied}))
    assert isinstance(model.network, RoundStack)
    stack = model.network.stack
    for layer in stack.layers:
        for linear in (layer.mixer.qkv, layer.mixer.o, layer.feed.gate_up, layer.feed.down):
            assert linear.weight.values.is_meta
    assert stack.head.weight.values.is_meta
    assert not stack.embedding.values.is_meta
    assert model.module is None
    assert not model.multiplies_masked_keys


# Arguments are checked before the kernels read them, which check nothing.
BLOCK = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    folder = families.save_model(tmp_path_factory.mktemp("llama"), "llama", {"head_dim": 16})
    return load_model(folder, device="cpu", backend="native")


def forward(model: CausalLM, **changes: Any) -> Any:
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
    assert isinstance(model.network, RoundStack)
    kv = new_pool(model, 6, BLOCK)
    spans = [Span([1, 2], 0, [5, 6, 7, 8, 9, 10], 1), Span([3], 0, [8], 1)]
    first = build_batch(spans, BLOCK, CPU)
    table = torch.tensor([[1, 2, 0, 0], [3, 0, 0, 0]])[:, :columns].contiguous()
    attention = replace(first.attention, block_BL=table)
    drafting = DraftRound(
        make_params(2, [0.8, 0.8]), torch.tensor([1, 0]), torch.tensor([3, 2]),
        DraftCache.empty(2, 3, model.vocab_size, torch.float32, CPU),
    )._replace(**changes)  # fmt: skip
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

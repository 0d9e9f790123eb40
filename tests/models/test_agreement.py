"""Our paged, packed, multi-request forward against plain Transformers, family by family."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken.cache.kv_pool import KVPool
from foretoken.models import CausalLM, TargetView, load_model
from tests.models import families
from tests.models.batches import Span, build_batch
from tests.models.walk import new_pool, walk
from tests.support.cases import host_backends

pytestmark = pytest.mark.usefixtures("packs_small_models")
BLOCK = 4
CPU = torch.device("cpu")
LENGTH = 22


def check_family(folder: Path, family: str, overrides: dict[str, Any]) -> None:
    families.save_model(folder, family, overrides)
    model = load_model(folder, device="cpu", backend="torch", view=TargetView((0, 1)))
    plain = families.plain_model(folder)
    rng = random.Random(1)
    texts = [[rng.randrange(families.VOCABULARY) for _ in range(LENGTH)] for _ in range(4)]
    expected = [families.plain_logits(plain, text) for text in texts]
    for seed in range(3):
        for text, rows in zip(expected, walk(model, texts, seed, BLOCK), strict=True):
            assert rows
            for position, row in rows.items():
                torch.testing.assert_close(row, text[position], atol=2e-5, rtol=1e-4)
    check_hidden_states(model, plain, texts[0])


def check_hidden_states(model: CausalLM, plain: Any, text: list[int]) -> None:
    """What drafters read: [T, hidden] of each layer."""
    batch = build_batch([Span([*range(1, LENGTH // BLOCK + 2)], 0, text, 0)], BLOCK, CPU)
    found = model.forward(batch, new_pool(model, LENGTH // BLOCK + 2, BLOCK)).aux
    with torch.inference_mode():
        states = plain(torch.tensor([text]), output_hidden_states=True).hidden_states
    for layer, state in zip((0, 1), found, strict=True):
        torch.testing.assert_close(state, states[layer][0], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("family", families.SUPPORTED)
def test_forward_equals_transformers(tmp_path: Path, family: str) -> None:
    check_family(tmp_path, family, families.SUPPORTED[family])


@pytest.mark.parametrize("family", families.MULTIMODAL)
def test_the_text_part_of_a_multimodal_model(tmp_path: Path, family: str) -> None:
    check_family(tmp_path, family, families.MULTIMODAL[family])
    model = load_model(tmp_path, device="cpu", backend="torch")
    text = model.module.get_decoder()
    rest = [part for part in model.module.base_model.children() if part is not text]
    assert not any(type(m) is torch.nn.Linear for part in rest for m in part.modules())


WIDE = {"v_head_dim": 20}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "heads of 6": ("llama", {"head_dim": 6}),
    "heads of 10": ("qwen3", {"head_dim": 10}),
    "heads of 7": ("gpt2", {"n_embd": 28, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "heads of 80": ("llama", {"head_dim": 80}),
    "one key head": ("llama", {"num_key_value_heads": 1}),
    "three queries to a key": ("llama", {"hidden_size": 48, "num_attention_heads": 6}),
    "one layer": ("mistral", {"num_hidden_layers": 1, "sliding_window": 1, "head_dim": 8}),
    "window of a block": ("mistral", {"sliding_window": BLOCK, "head_dim": 8}),
    "values wider than keys": ("deepseek_v3", families.SUPPORTED["deepseek_v3"] | WIDE),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_odd_shapes(tmp_path: Path, shape: str) -> None:
    check_family(tmp_path, *SHAPES[shape])


@pytest.mark.parametrize("backend", host_backends())
def test_no_rows_wanted_still_fills_the_cache(tmp_path: Path, backend: str) -> None:
    folder = families.save_model(tmp_path, "llama", {"head_dim": 16})
    model = load_model(folder, device="cpu", backend=backend)
    kv = KVPool(model.layer_shapes, 4, BLOCK, dtype=model.dtype, device=CPU)
    empty = model.forward(
        build_batch([Span([1, 2], 0, [5, 6, 7, 8, 9], 0)], BLOCK, CPU), kv
    ).logits_NV
    assert empty.shape == (0, families.VOCABULARY)
    logits = model.forward(build_batch([Span([1, 2], 5, [10], 1)], BLOCK, CPU), kv).logits_NV
    expected = families.plain_logits(families.plain_model(folder), [5, 6, 7, 8, 9, 10])[-1:]
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)


def test_description(tmp_path: Path) -> None:
    overrides = families.SUPPORTED["deepseek_v3"]
    folder = families.save_model(tmp_path, "deepseek_v3", overrides)
    model = load_model(folder, device="cpu", backend="torch", max_model_len=20)
    assert model.layer_shapes == [(4, 16, 12), (4, 16, 12)]
    assert model.config.model_type == "deepseek_v3"
    assert (model.vocab_size, model.max_model_len) == (families.VOCABULARY, 20)
    assert (model.dtype, model.device) == (torch.float32, CPU)

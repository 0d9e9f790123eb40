"""Dtypes and dummy weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from foretoken.cache.batch import Span, build_batch
from foretoken.cache.kv_pool import KVPool
from foretoken.models import CausalLM, load_model
from foretoken.models.packing import PackedLinear, can_pack
from tests.models import families

CPU = torch.device("cpu")


def logits_of(model: CausalLM) -> torch.Tensor:
    kv = KVPool(model.layer_shapes, 4, 8, dtype=model.dtype, device=CPU)
    return model.forward(build_batch([Span([1, 2], 0, list(range(3, 15)), 12)], 8, CPU), kv)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
def test_auto_dtype_on_a_cpu_is_float32(tmp_path: Path, stored: torch.dtype) -> None:
    folder = families.save_model(tmp_path, "llama", {}, dtype=stored)
    model = load_model(folder, device="cpu", backend="torch_cpu")
    assert model.dtype == torch.float32
    expected = families.plain_logits(families.plain_model(folder), list(range(3, 15)))
    torch.testing.assert_close(logits_of(model), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", torch.float16])
def test_explicit_dtype(tmp_path: Path, dtype: str | torch.dtype) -> None:
    folder = families.save_model(tmp_path, "llama", {})
    model = load_model(folder, device="cpu", dtype=dtype, backend="torch_cpu")
    assert str(model.dtype).removeprefix("torch.") == str(dtype).removeprefix("torch.")
    assert logits_of(model).dtype == model.dtype


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_dummy_weights(tmp_path: Path, family: str) -> None:
    families.make_config(family, families.SUPPORTED[family]).save_pretrained(tmp_path)
    state = torch.random.get_rng_state()

    def load(seed: int) -> torch.Tensor:
        return logits_of(
            load_model(tmp_path, device="cpu", backend="torch_cpu", load_format="dummy", seed=seed)
        )

    first, same, other = load(0), load(0), load(1)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert bool(first.isfinite().all())
    assert 0.5 < first.std().item() < 4
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.skipif(not can_pack(torch.float32, CPU), reason="no packed linear layers here")
@pytest.mark.parametrize("bias", [False, True])
def test_packed_linear_equals_linear(bias: bool) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(40, 24, bias=bias).requires_grad_(False)
    packed = PackedLinear(linear)
    for shape in ((1, 1, 40), (1, 5, 40), (7, 40), (1, 0, 40), (2, 3, 40)):
        x = torch.randn(shape)
        torch.testing.assert_close(packed(x), linear(x))
    x = torch.randn(1, 40, 9).transpose(1, 2)
    torch.testing.assert_close(packed(x), linear(x))

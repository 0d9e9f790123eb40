"""Dtypes and dummy weights; kernels that are wrong in some passes are not used."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from foretoken.errors import UnsupportedModelError
from foretoken.lab.laws.mutants import replaced
from foretoken.models import load_model
from foretoken.models.packing import PackedLinear, observe_linears, pack_linears
from foretoken.ops import get_backend
from foretoken.ops.pinned import fill
from tests.models import families
from tests.models.compressed_models import Scheme
from tests.models.compressed_models import Written as WrittenCompressed
from tests.models.gguf_models import Written
from tests.models.walk import logits_of
from tests.native.libraries import native_backend_with_logits
from tests.support.kernels import needs_kernels

TEXT = list(range(3, 15))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
def test_auto_dtype_on_a_cpu_is_float32(tmp_path: Path, stored: torch.dtype) -> None:
    folder = families.save_model(tmp_path, "llama", {}, dtype=stored)
    model = load_model(folder, device="cpu", backend="torch")
    assert model.dtype == torch.float32
    expected = families.plain_logits(families.plain_model(folder), TEXT)
    torch.testing.assert_close(logits_of(model, TEXT), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_explicit_dtype(tmp_path: Path, dtype: str) -> None:
    folder = families.save_model(tmp_path, "llama", {})
    model = load_model(folder, device="cpu", dtype=dtype, backend="torch")
    assert str(model.dtype) == f"torch.{dtype}"
    assert logits_of(model, TEXT).dtype == model.dtype


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fill_copies_to_any_dtype(stored: torch.dtype, dtype: torch.dtype) -> None:
    """A GPU gets pieces of 4 MiB: four and a rest of bfloat16."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = torch.randn(3, 2_900_001).to(stored)
    to = torch.zeros(3, 2_900_001, dtype=dtype, device=device)
    fill(to, source)
    assert torch.equal(to.cpu(), source.to(dtype))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_dummy_weights(tmp_path: Path, family: str) -> None:
    families.make_config(family, families.SUPPORTED[family]).save_pretrained(tmp_path)
    state = torch.random.get_rng_state()

    def load(seed: int) -> torch.Tensor:
        return logits_of(load_model(tmp_path, device="cpu", backend="torch", dummy_seed=seed), TEXT)

    first, same, other = load(0), load(0), load(1)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert bool(first.isfinite().all())
    assert 0.5 < first.std().item() < 4
    assert torch.equal(torch.random.get_rng_state(), state)


@needs_kernels
def test_a_native_decoder_that_differs_is_named_with_the_remedy(tmp_path: Path) -> None:
    folder = families.save_model(tmp_path, "llama", {"head_dim": 16})
    wrong = native_backend_with_logits(lambda logits_NV: 1.01 * logits_NV)
    with pytest.raises(UnsupportedModelError, match="`llama` differs from its own") as caught:
        load_model(folder, device="cpu", backend=wrong)
    assert 'kernels of backend `native`; `backend="torch"` runs it' in str(caught.value)
    assert load_model(folder, device="cpu", backend="torch").runs_in_kernels is False


class Siblings(torch.nn.Module):
    """Three linear layers on one input, one on another input, one called twice."""

    def __init__(self, bias: list[bool]) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (
            torch.nn.Linear(40, 24 + 8 * i, bias=on) for i, on in enumerate(bias)
        )
        self.twice = torch.nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        a, b = self.a(x), self.b(x)
        c, d = self.c(x + 1), self.d(x)
        return [a, b, c, d, self.twice(self.twice(a))]


@pytest.mark.skipif(
    not get_backend("torch").pack_pays([torch.empty(4096, 1024)]), reason="no packed layers here"
)
@pytest.mark.parametrize("bias", [[False] * 4, [True] * 4, [True, False, True, False]], ids=str)
def test_packed_linears_equal_linears(bias: list[bool]) -> None:
    torch.manual_seed(0)
    plain = Siblings(bias).requires_grad_(False)
    packed = copy.deepcopy(plain)
    with observe_linears(packed) as calls:
        packed(torch.randn(1, 3, 40))
    pack_linears(packed, calls, get_backend("torch"))
    assert not any(type(child) is PackedLinear for child in packed.children())  # too small
    pack_linears(packed, calls, replaced(get_backend("torch"), pack_pays=lambda weights: True))
    assert [type(child) is PackedLinear for child in packed.children()] == [True] * 4 + [False]
    inputs = [torch.randn(shape) for shape in ((1, 1, 40), (1, 5, 40), (7, 40), (1, 0, 40))]
    inputs.append(torch.randn(1, 40, 9).transpose(1, 2))
    for x in inputs + inputs[::-1]:
        for actual, expected in zip(packed(x), plain(x), strict=True):
            torch.testing.assert_close(actual, expected)
    # Any order of calls, and inputs that come again.
    x, y = inputs[0], inputs[1]
    for name, z in [("d", x), ("a", y), ("b", x), ("d", x), ("d", x), ("a", x), ("b", y)]:
        torch.testing.assert_close(getattr(packed, name)(z), getattr(plain, name)(z))


FLOATS, QUANTISED = ("F32", "F16"), ("Q8_0", "K mix", "int4")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    found = {mix: Written(folder, "llama", mix).file for mix in (*FLOATS, *QUANTISED[:-1])}
    scheme = Scheme(4, "group", 32)
    return {**found, "int4": WrittenCompressed(folder / "int4", "llama", scheme).folder}


def several_rows(logits_NV: torch.Tensor) -> torch.Tensor:
    """Right only in passes of one row."""
    return logits_NV.roll(1, dims=1) if len(logits_NV) > 1 else logits_NV


def later_rows(logits_NV: torch.Tensor) -> torch.Tensor:
    """Right in the first four rows of a pass: those of a tile."""
    return torch.cat([logits_NV[:4], logits_NV[4:].roll(1, dims=1)])


def same_rows(logits_NV: torch.Tensor) -> torch.Tensor:
    """Every row of a pass is its first one."""
    return logits_NV[:1].expand_as(logits_NV).clone()


def two_rows(logits_NV: torch.Tensor) -> torch.Tensor:
    """Wrong only in passes of two rows."""
    return logits_NV.roll(1, dims=1) if len(logits_NV) == 2 else logits_NV


WRONG = [
    *itertools.product([several_rows, later_rows, same_rows], [*FLOATS, *QUANTISED]),
    *itertools.product([two_rows], FLOATS),  # of quantised weights some rows may differ
]


@needs_kernels
@pytest.mark.parametrize(("wrong", "name"), WRONG)
def test_kernels_that_are_wrong_in_some_passes_are_not_used(
    models: dict[str, Path], name: str, wrong: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    with pytest.raises(UnsupportedModelError, match="the kernels of backend `native` give logits"):
        load_model(models[name], device="cpu", backend=native_backend_with_logits(wrong))


@needs_kernels
@pytest.mark.parametrize("name", [*FLOATS, *QUANTISED])
def test_right_kernels_are_used(models: dict[str, Path], name: str) -> None:
    for backend in ("native", "torch"):
        model = load_model(models[name], device="cpu", backend=backend)
        assert model.runs_in_kernels == (backend == "native")

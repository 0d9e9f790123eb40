"""Kernels that multiply stored weights wrong in some passes are not used."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from foretoken.errors import UnsupportedModelError
from foretoken.models import load_model
from tests.models.compressed_models import Scheme
from tests.models.compressed_models import Written as WrittenCompressed
from tests.models.gguf_models import Written
from tests.native.libraries import native_backend_with_logits
from tests.support.kernels import needs_kernels

pytestmark = needs_kernels

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


@pytest.mark.parametrize(("wrong", "name"), WRONG)
def test_kernels_that_are_wrong_in_some_passes_are_not_used(
    models: dict[str, Path], name: str, wrong: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    with pytest.raises(UnsupportedModelError, match="the kernels of backend `native` give logits"):
        load_model(models[name], device="cpu", backend=native_backend_with_logits(wrong))


@pytest.mark.parametrize("name", [*FLOATS, *QUANTISED])
def test_right_kernels_are_used(models: dict[str, Path], name: str) -> None:
    for backend in ("native", "torch"):
        model = load_model(models[name], device="cpu", backend=backend)
        assert model.runs_in_kernels == (backend == "native")

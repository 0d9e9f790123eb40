"""Kernels that multiply stored weights wrong in some passes are not used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken.errors import UnsupportedModelError
from foretoken.models import load_model
from foretoken.ops.backends.native.stack import NativeStack
from tests.models.compressed_models import Scheme
from tests.models.compressed_models import Written as WrittenCompressed
from tests.models.gguf_models import Written
from tests.support.kernels import needs_kernels

pytestmark = needs_kernels

FLOATS, QUANTISED = ("F32", "F16"), ("Q8_0", "K mix", "int4")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    found = {mix: Written(folder, "llama", mix).file for mix in (*FLOATS, *QUANTISED[:-1])}
    scheme = Scheme(4, "group", 32)
    return {**found, "int4": WrittenCompressed(folder / "int4", "llama", scheme).folder}


Wrong = Callable[[torch.Tensor], torch.Tensor]


def several_rows(logits_NV: torch.Tensor) -> torch.Tensor:
    """Right in passes of one row alone."""
    return logits_NV.roll(1, dims=1) if len(logits_NV) > 1 else logits_NV


def later_rows(logits_NV: torch.Tensor) -> torch.Tensor:
    """Right in the first four rows of a pass: those of a tile."""
    return torch.cat([logits_NV[:4], logits_NV[4:].roll(1, dims=1)])


def same_rows(logits_NV: torch.Tensor) -> torch.Tensor:
    """Every row of a pass is its first one."""
    return logits_NV[:1].expand_as(logits_NV).clone()


def two_rows(logits_NV: torch.Tensor) -> torch.Tensor:
    """Wrong in passes of two rows alone."""
    return logits_NV.roll(1, dims=1) if len(logits_NV) == 2 else logits_NV


def break_kernels(monkeypatch: pytest.MonkeyPatch, wrong: Wrong) -> None:
    run = NativeStack.run

    def broken(self: NativeStack, *args: Any, **options: Any) -> Any:
        found = run(self, *args, **options)
        return found._replace(logits_NV=wrong(found.logits_NV))

    monkeypatch.setattr(NativeStack, "run", broken)


@pytest.mark.parametrize("wrong", [several_rows, later_rows, same_rows])
@pytest.mark.parametrize("name", [*FLOATS, *QUANTISED])
def test_passes_of_several_rows_are_checked(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, name: str, wrong: Wrong
) -> None:
    assert load_model(models[name], device="cpu", backend="native").runs_in_kernels
    break_kernels(monkeypatch, wrong)
    with pytest.raises(UnsupportedModelError, match="the kernels of backend `native` give logits"):
        load_model(models[name], device="cpu", backend="native")
    assert not load_model(models[name], device="cpu", backend="torch").runs_in_kernels


@pytest.mark.parametrize("name", FLOATS)
def test_of_plain_numbers_every_row_counts(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    break_kernels(monkeypatch, two_rows)
    with pytest.raises(UnsupportedModelError, match="the kernels of backend `native` give logits"):
        load_model(models[name], device="cpu", backend="native")

"""Models that would be silently wrong are refused, and so is attention that is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foretoken.errors import UnsupportedModelError
from foretoken.models import load_model
from foretoken.ops.backends.torch_cpu.attention import attention
from tests.models import families


@pytest.mark.parametrize("family", families.REFUSED)
def test_unsupported_families(tmp_path: Path, family: str) -> None:
    overrides, reason = families.REFUSED[family]
    families.save_model(tmp_path, family, overrides)
    with pytest.raises(UnsupportedModelError, match=reason):
        load_model(tmp_path, device="cpu", backend="torch_cpu")


@pytest.mark.parametrize("family", ["llama", "gemma4_text"])
@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_rope_that_looks_at_the_batch(tmp_path: Path, family: str, kind: str) -> None:
    config = families.make_config(family, families.SUPPORTED[family])
    config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    text = path.read_text().replace('"rope_type": "default"', f'"rope_type": "{kind}"')
    assert kind in text
    path.write_text(text)
    with pytest.raises(UnsupportedModelError, match=kind):
        load_model(tmp_path, device="cpu", backend="torch_cpu", load_format="dummy")


def _no_window(*args: Any, sliding_window: int | None = None, **kwargs: Any) -> torch.Tensor:
    return attention(*args, **kwargs)


def _window_off_by_one(*args: Any, sliding_window: int | None = None, **kwargs: Any) -> Any:
    window = None if sliding_window is None else sliding_window + 1
    return attention(*args, sliding_window=window, **kwargs)


def _no_softcap(*args: Any, softcap: float | None = None, **kwargs: Any) -> torch.Tensor:
    return attention(*args, **kwargs)


def _no_sinks(*args: Any, sinks_H: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
    return attention(*args, **kwargs)


def _late_by_one(query: Any, key: Any, value: Any, batch: Any, **kwargs: Any) -> torch.Tensor:
    """Every query sees one key too few, where it has more than one."""
    groups = tuple(replace(g, position_bQ=(g.position_bQ - 1).clamp(min=0)) for g in batch.groups)
    masked = {**kwargs, "sliding_window": None}
    return attention(query, key, value, replace(batch, groups=groups), **masked)


def _wrong_request(query: Any, key: Any, value: Any, batch: Any, **kwargs: Any) -> torch.Tensor:
    """Requests of a group read each other's blocks."""
    groups = tuple(replace(g, block_bL=g.block_bL.flip(0)) for g in batch.groups)
    return attention(query, key, value, replace(batch, groups=groups), **kwargs)


MUTANTS = {
    "no window": ("mistral", _no_window),
    "window off by one": ("mistral", _window_off_by_one),
    "no soft cap": ("gemma2", _no_softcap),
    "no sinks": ("gpt_oss", _no_sinks),
    "late by one": ("llama", _late_by_one),
    "wrong request": ("llama", _wrong_request),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_self_check_rejects_wrong_attention(tmp_path: Path, mutant: str) -> None:
    family, function = MUTANTS[mutant]
    families.save_model(tmp_path, family, families.SUPPORTED[family])
    load_model(tmp_path, device="cpu", backend="torch_cpu")
    with pytest.raises(UnsupportedModelError, match="eager attention"):
        load_model(tmp_path, device="cpu", backend=SimpleNamespace(attention=function))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_half_precision_passes_and_still_catches_gross_errors(
    tmp_path: Path, family: str, dtype: str
) -> None:
    families.save_model(tmp_path, family, families.SUPPORTED[family])
    load_model(tmp_path, device="cpu", dtype=dtype, backend="torch_cpu")
    wrong: Any = SimpleNamespace(attention=_wrong_request)
    with pytest.raises(UnsupportedModelError, match="eager attention"):
        load_model(tmp_path, device="cpu", dtype=dtype, backend=wrong)

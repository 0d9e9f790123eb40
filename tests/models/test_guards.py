"""Models that would be silently wrong are refused, as is wrong attention."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, StableLmForCausalLM

from foretoken.errors import UnsupportedModelError
from foretoken.models import CausalLM, TargetView, guards, load_model
from foretoken.models.attention import ATTENTION_NAME, register_attention
from foretoken.models.causal_lm import ModuleNetwork
from foretoken.ops import Backend, get_backend
from foretoken.ops.backends.torch.attention import attention
from tests.models import families
from tests.project.source import ROOT


def load(folder: Path, **options: Any) -> CausalLM:
    return load_model(folder, device="cpu", **{"backend": "torch", **options})


@pytest.mark.parametrize("family", families.REFUSED)
def test_unsupported_families(tmp_path: Path, family: str) -> None:
    overrides, reason = families.REFUSED[family]
    families.save_model(tmp_path, family, overrides)
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        load(tmp_path)
    assert refused_on_the_page()[family] in str(caught.value)


def models_page(section: str) -> str:
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    return text.split(f"<!-- {section} -->")[1].split(f"<!-- end {section} -->")[0]


def refused_on_the_page() -> dict[str, str]:
    """Family to reason, as in the table."""
    rows = [line.strip("| ").split(" | ") for line in models_page("refused").strip().splitlines()]
    return {name: why for names, why in rows[2:] for name in re.findall(r"`(\w+)`", names)}


def test_the_page_of_models_names_the_families_of_the_tests() -> None:
    assert re.findall(r"`(\w+)`", models_page("supported")) == sorted(families.SUPPORTED)
    assert re.findall(r"`(\w+)`", models_page("multimodal")) == sorted(families.MULTIMODAL)
    assert refused_on_the_page().keys() == families.REFUSED.keys()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"{len(families.SUPPORTED)} families" in readme


# These run with our attention, but compute something else than with their own.
RUN = {
    "bloom": "makes 0 attention calls in 2 layers",
    "codegen": "makes 0 attention calls in 2 layers",
    "jamba": "makes 0 attention calls in 2 layers",
    "lfm2": "makes 1 attention calls in 2 layers",
    "llama4_text": "differs from its own eager attention",
    "mamba": "makes 0 attention calls in 2 layers",
    "qwen3_5_text": "makes 1 attention calls in 2 layers",
    "qwen3_next": "makes 1 attention calls in 2 layers",
}


@pytest.mark.parametrize("family", RUN)
def test_running_a_family_shows_it_too(tmp_path: Path, family: str) -> None:
    """Transformers' flag and the types of layers could be wrong."""
    families.save_model(tmp_path, family, families.REFUSED[family][0])
    register_attention()
    module = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=ATTENTION_NAME)
    backend, device = get_backend("torch"), torch.device("cpu")
    with pytest.raises(UnsupportedModelError, match=RUN[family]):  # noqa: PT012
        calls, _ = guards.probe(module, device)
        expected = guards.eager_logits(module, device)
        model = CausalLM(
            module, ModuleNetwork(module, backend), backend=backend, view=TargetView(),
            layer_shapes=[call.shape for call in calls], max_model_len=guards.MOST_POSITIONS,
        )  # fmt: skip
        guards.self_check(model, expected)


def test_positions_counted_in_the_packed_batch(tmp_path: Path) -> None:
    """Llama 4 without chunks passes the self-check; 8192 tokens later it would be wrong."""
    full = {"layer_types": ["full_attention"] * 2}
    families.save_model(tmp_path, "llama4_text", families.REFUSED["llama4_text"][0] | full)
    with pytest.raises(UnsupportedModelError, match="attn_temperature_tuning"):
        load(tmp_path)


class Undeclared(LlamaForCausalLM):
    _supports_attention_backend = False


def test_families_that_no_test_compares_need_the_flag() -> None:
    assert not StableLmForCausalLM._supports_attention_backend, "no need for an exception any more"
    config = families.make_config("llama", {})
    guards.check_class(LlamaForCausalLM, config)
    with pytest.raises(UnsupportedModelError, match=r"`llama`.*does not declare that it can"):
        guards.check_class(Undeclared, config)


def test_windows_that_are_not_the_configurations() -> None:
    def check(windows: list[int | None], **config: Any) -> None:
        guards._check_windows(SimpleNamespace(model_type="x", **config), windows)

    mixed = ["sliding_attention", "full_attention"]
    check([5, None], sliding_window=5, layer_types=mixed)
    check([5, 5], sliding_window=5)
    check([None, None], sliding_window=0)
    check([None, 64], sliding_window=64, max_position_embeddings=64)  # hides nothing
    for windows in ([None, None], [6, None], [5, 5]):
        with pytest.raises(UnsupportedModelError, match="sliding window of"):
            check(windows, sliding_window=5, layer_types=mixed)
    for windows in ([None, None], [5, 6]):
        with pytest.raises(UnsupportedModelError, match="sliding window of"):
            check(windows, sliding_window=5, max_position_embeddings=64)


def _no_window(*args: Any) -> torch.Tensor:
    *tensors, options = args
    return attention(*tensors, options._replace(sliding_window=None))


def _window_off_by_one(*args: Any) -> torch.Tensor:
    *tensors, options = args
    window = None if options.sliding_window is None else options.sliding_window + 1
    return attention(*tensors, options._replace(sliding_window=window))


def _no_softcap(*args: Any) -> torch.Tensor:
    *tensors, options = args
    return attention(*tensors, options._replace(softcap=None))


def _no_sinks(*args: Any) -> torch.Tensor:
    *tensors, options = args
    return attention(*tensors, options._replace(sinks_H=None))


def _late_by_one(query: Any, key: Any, value: Any, batch: Any, options: Any) -> torch.Tensor:
    """Every query sees one key too few, where each has more than one."""
    queries_B = batch.query_start_B1.diff()
    length_B = torch.where(batch.length_B > queries_B, batch.length_B - 1, batch.length_B)
    return attention(query, key, value, replace(batch, length_B=length_B), options)


def _wrong_request(query: Any, key: Any, value: Any, batch: Any, options: Any) -> torch.Tensor:
    """Requests read each other's blocks."""
    swapped = replace(batch, block_BL=batch.block_BL.flip(0).contiguous())
    return attention(query, key, value, swapped, options)


MUTANTS = {
    "no window": ("mistral", _no_window),
    "window off by one": ("mistral", _window_off_by_one),
    "no soft cap": ("gemma2", _no_softcap),
    "no sinks": ("gpt_oss", _no_sinks),
    "late by one": ("llama", _late_by_one),
    "wrong request": ("llama", _wrong_request),
}


def _backend_of(attention: Any) -> Any:
    """The stock operators around another attention."""
    return Backend("mutant", replace(get_backend("torch")._kernels, attention=attention))


@pytest.mark.parametrize("mutant", MUTANTS)
def test_self_check_rejects_wrong_attention(tmp_path: Path, mutant: str) -> None:
    family, function = MUTANTS[mutant]
    families.save_model(tmp_path, family, families.SUPPORTED[family])
    load_model(tmp_path, device="cpu", backend="torch")
    mutant: Any = _backend_of(function)
    with pytest.raises(UnsupportedModelError, match="eager attention"):
        load_model(tmp_path, device="cpu", backend=mutant)


def test_a_multimodal_model_whose_text_part_attends_to_an_encoder(tmp_path: Path) -> None:
    config = {"model_type": "florence2", "text_config": {"model_type": "bart"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        UnsupportedModelError, match=r"`florence2` is multimodal, and its text part"
    ):
        load(tmp_path, dummy_seed=0)


def test_a_rope_type_that_transformers_does_not_have(tmp_path: Path) -> None:
    unknown = {"rope_type": "spiral", "rope_theta": 1e4, "factor": 2.0}
    families.make_config("llama", {"rope_parameters": unknown}).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"RoPE of type `spiral`; .*`llama3`.*`yarn`"):
        load(tmp_path, dummy_seed=0)


@pytest.mark.parametrize("family", families.SUPPORTED)
def test_every_family_passes_in_half_precision(tmp_path: Path, family: str) -> None:
    families.save_model(tmp_path, family, families.SUPPORTED[family])
    for dtype in ("bfloat16", "float16"):
        assert load(tmp_path, dtype=dtype).dtype == getattr(torch, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_half_precision_still_catches_gross_errors(tmp_path: Path, family: str, dtype: str) -> None:
    families.save_model(tmp_path, family, families.SUPPORTED[family])
    wrong: Any = _backend_of(_wrong_request)
    with pytest.raises(UnsupportedModelError, match="eager attention"):
        load(tmp_path, dtype=dtype, backend=wrong)

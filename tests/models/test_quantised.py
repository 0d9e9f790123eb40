"""Quantised checkpoints: through Transformers' own quantisers, or refused with what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from foretoken import LLM, SamplingParams
from foretoken.errors import ConfigError, UnsupportedModelError
from foretoken.models import load_model
from foretoken.models.causal_lm import ModuleNetwork
from tests.models.families import change_config
from tests.models.test_weights import our_logits
from tests.support.checkpoints import save_checkpoint
from tests.support.kernels import needs_kernels

BLOCK = 16  # numbers of a row that share a scale, and as many rows


def save_fp8(source: Path, folder: Path) -> tuple[Path, Path]:
    stored, plain = dict[str, Tensor](), dict[str, Tensor]()
    for name, weight in load_file(source / "model.safetensors").items():
        stored[name] = plain[name] = weight
        if "proj" in name:
            rows, columns = weight.shape
            block = weight.view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
            scale = block.abs().amax((1, 3)) / 448
            eights = (block / scale[:, None, :, None]).to(torch.float8_e4m3fn)
            stored[name], stored[f"{name}_scale_inv"] = eights.view(weight.shape), scale
            plain[name] = (eights.float() * scale[:, None, :, None]).view(weight.shape)
    for kind, tensors in (("fp8", stored), ("plain", plain)):
        (folder / kind).mkdir()
        (folder / kind / "config.json").write_text((source / "config.json").read_text())
        save_file(tensors, folder / kind / "model.safetensors", {"format": "pt"})
    scheme = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    change_config(folder / "fp8", quantization_config=scheme)
    return folder / "fp8", folder / "plain"


@pytest.fixture
def accelerate(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether Transformers finds the package, which it does not use on a CPU."""
    is_there = getattr(request, "param", True)
    module = "transformers.quantizers.quantizer_finegrained_fp8"
    monkeypatch.setattr(f"{module}.is_accelerate_available", lambda: is_there)


@pytest.mark.usefixtures("accelerate")
@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_fp8_is_the_numbers_it_stands_for(draft: Path, tmp_path: Path, backend: str) -> None:
    """As a target and as a draft, also in a backend's own decoder."""
    fp8, plain = save_fp8(draft, tmp_path)
    assert torch.equal(our_logits(fp8), our_logits(plain))
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=24, ignore_eos=True)
    (one, other) = (
        LLM(str(target), {"model": str(model)}, backend=backend, num_blocks=32).generate(
            [[5, 6, 7]], params
        )[0]
        for target, model in ((fp8, plain), (plain, fp8))
    )
    assert one.outputs[0].token_ids == other.outputs[0].token_ids
    assert one.metrics.num_accepted_tokens == one.metrics.num_draft_tokens > 0


@pytest.mark.usefixtures("accelerate")
@pytest.mark.parametrize("accelerate", [False], indirect=True)
def test_a_missing_package_is_named(draft: Path, tmp_path: Path) -> None:
    fp8, plain = save_fp8(draft, tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"`quant_method`: fp8.*requires accelerate"):
        load_model(fp8, device="cpu", backend="torch")
    with pytest.raises(UnsupportedModelError, match=r"requires accelerate"):
        LLM(str(plain), {"model": str(fp8)})


@pytest.mark.usefixtures("accelerate")
def test_random_weights_are_not_quantised(draft: Path, tmp_path: Path) -> None:
    fp8, _ = save_fp8(draft, tmp_path)
    with pytest.raises(ConfigError, match=r"`load_format` is 'dummy'.*quantised"):
        LLM(str(fp8), load_format="dummy")


class Eights(nn.Module):
    """A layer of bytes, without a `weight`."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = torch.zeros(linear.weight.shape, dtype=torch.int8)
        self.qweight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.qweight.to(x.dtype) * self.scale)


class EightsQuantizer(HfQuantizer):
    """Layers of their own, as AWQ and GPTQ have them."""

    requires_calibration = False

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        for parent in [*model.model.modules()]:
            for name, child in [*parent.named_children()]:
                if type(child) is nn.Linear:
                    setattr(parent, name, Eights(child))

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


@pytest.fixture
def eights(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setitem(auto.AUTO_QUANTIZER_MAPPING, "eights", EightsQuantizer)
    monkeypatch.setitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "eights", QuantizationConfigMixin)
    return {"quant_method": "eights"}


@needs_kernels
def test_layers_of_their_own_stay_in_their_module(tmp_path: Path, eights: dict[str, Any]) -> None:
    """They have no `weight` that a backend's decoder could read."""
    plain = save_checkpoint(tmp_path / "plain", tokenizer=False)
    folder = save_checkpoint(tmp_path / "eights", tokenizer=False)
    stored = load_file(folder / "model.safetensors")
    numbers = dict(stored)
    for name, weight in numbers.items():
        if "proj" in name:
            scale = weight.abs().max() / 127
            layer = name.removesuffix("weight")
            stored[f"{layer}qweight"] = (stored.pop(name) / scale).round().to(torch.int8)
            stored[f"{layer}scale"] = scale
            numbers[name] = stored[f"{layer}qweight"] * scale
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    save_file(numbers, plain / "model.safetensors", {"format": "pt"})
    change_config(folder, quantization_config=eights)
    model = load_model(folder, device="cpu", backend="native")
    assert isinstance(model.network, ModuleNetwork)
    assert isinstance(model.module.model.layers[0].self_attn.q_proj, Eights)
    assert torch.equal(our_logits(folder), our_logits(plain))

"""Tensors that a model has no place for: a warning where they play no part, else a refusal."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from foretoken.errors import CheckpointError
from foretoken.models import CausalLM, TargetView, load_model
from tests.models import families

LAYER = "model.layers.0"


def load_with(folder: Path, family: str, *names: str) -> CausalLM:
    """A model from a checkpoint that holds these tensors, too."""
    families.save_model(folder, family, families.SUPPORTED[family])
    path = folder / "model.safetensors"
    more = {name: torch.zeros(32) for name in names}
    save_file(load_file(path) | more, path, metadata={"format": "pt"})
    return load(folder)


def load(folder: Path) -> CausalLM:
    return load_model(folder, device="cpu", backend="torch", view=TargetView(module=True))


HARMLESS = {
    "frequencies": ("llama", f"{LAYER}.self_attn.rope.inv_freq"),
    "a mask": ("opt", "model.decoder.layers.1.self_attn.bias"),
    "a mask's value": ("gpt2", "transformer.h.0.attn.masked_bias"),
    "a value head": ("llama", "v_head.summary.weight", "v_head.summary.bias"),
    "another head": ("qwen2", "score.weight"),
    "a further layer": (
        "llama",
        "model.layers.2.eh_proj.weight",
        "model.layers.2.mlp.gate_proj.weight",
    ),
    "a further module": ("qwen3", "mtp.layers.0.mlp.up_proj.weight", "model.mtp.norm.weight"),
}


@pytest.mark.parametrize("case", HARMLESS)
def test_harmless_ones_are_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    family, *names = HARMLESS[case]
    model = load_with(tmp_path, family, *names)
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    text = record.getMessage()
    assert f"{len(names)} tensors that the model does not use" in text
    assert all(f"`{name}`" in text for name in names)
    families.save_model(tmp_path / "plain", family, families.SUPPORTED[family])
    plain = load(tmp_path / "plain")
    assert families.same_weights(model.module, plain.module)


def test_what_transformers_itself_ignores_is_not_worth_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load_with(tmp_path, "llama", f"{LAYER}.self_attn.rotary_emb.inv_freq")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


REFUSED = {
    "biases": (f"{LAYER}.self_attn.o_proj.bias", f"{LAYER}.self_attn.q_proj.bias"),
    "a bias without a prefix": ("layers.0.self_attn.q_proj.bias",),
    "a bias of the head": ("lm_head.bias",),
    "norms": (f"{LAYER}.self_attn.q_norm.weight",),
    "a norm of embeddings": ("model.embed_norm.weight",),
    "a layer that the configuration does not count": ("model.layers.2.mlp.gate_proj.weight",),
    "a loose tensor": ("final_logits_scale",),
    "what a further layer has, in another": (f"{LAYER}.enorm.weight",),
}


@pytest.mark.parametrize("case", REFUSED)
def test_those_of_another_model_are_refused(tmp_path: Path, case: str) -> None:
    names = REFUSED[case]
    message = f"{len(names)} unexpected tensors, for example `{names[0]}`"
    with pytest.raises(CheckpointError, match=message):
        load_with(tmp_path, "llama", *names, "v_head.summary.weight")

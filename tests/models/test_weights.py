"""Weights as they are stored: tied, in shards, in other dtypes, not finite, or without a place."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.models import CausalLM, TargetView, load_model
from tests.models import families
from tests.models.families import change_tensors
from tests.models.walk import logits_of

TOKENS = list(range(3, 25))
HEAD, EMBEDDING, NORM = "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"


def our_logits(folder: Path, dtype: str = "auto") -> Tensor:
    return logits_of(load_model(folder, device="cpu", backend="torch", dtype=dtype), TOKENS)


def assert_equals_transformers(folder: Path) -> None:
    expected = families.plain_logits(families.plain_model(folder), TOKENS)
    torch.testing.assert_close(our_logits(folder), expected, atol=2e-5, rtol=1e-4)


def replaced(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    return lambda weights: weights.update({name: change(weights[name])})


def without_head(weights: dict[str, Tensor]) -> None:
    weights.pop(HEAD, None)


@pytest.mark.parametrize(
    "edit",
    [
        without_head,
        lambda weights: weights.update({HEAD: weights[EMBEDDING].clone()}),
        lambda weights: weights.update({HEAD: weights[EMBEDDING].flip(0).contiguous()}),
    ],
    ids=["no head", "an equal head", "another head"],
)
def test_tied_weights(tmp_path: Path, edit: Callable[[Any], Any]) -> None:
    families.save_model(tmp_path, "llama", {"tie_word_embeddings": True})
    change_tensors(tmp_path, edit)
    assert_equals_transformers(tmp_path)


def test_untied_weights_without_a_head(tmp_path: Path) -> None:
    families.save_model(tmp_path, "llama", {"tie_word_embeddings": False})
    change_tensors(tmp_path, without_head)
    with pytest.raises(CheckpointError, match=r"1 missing tensors, for example `lm_head\.weight`"):
        load_model(tmp_path, device="cpu", backend="torch")


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_shards(tmp_path: Path, family: str) -> None:
    overrides = families.SUPPORTED[family]
    whole = families.save_model(tmp_path / "whole", family, overrides)
    shards = families.save_model(tmp_path / "shards", family, overrides, max_shard_size="20KB")
    assert len(list(shards.glob("*.safetensors"))) > 2
    assert torch.equal(our_logits(shards), our_logits(whole))


@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_stored_and_requested_dtypes(tmp_path: Path, stored: torch.dtype, wanted: str) -> None:
    """Rounded once, to the requested dtype: equal to Transformers' weights in that dtype."""
    families.save_model(tmp_path, "llama", {}, dtype=stored)
    ours = our_logits(tmp_path, wanted)
    assert ours.dtype == getattr(torch, wanted)
    plain = copy.deepcopy(families.plain_model(tmp_path)).to(ours.dtype).float()
    expected = families.plain_logits(plain, TOKENS)
    bound = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 8e-2}[wanted]
    assert (ours.float() - expected).abs().max() <= bound * expected.abs().max()


def test_some_weights_in_another_dtype(tmp_path: Path) -> None:
    families.save_model(tmp_path, "llama", {})
    change_tensors(
        tmp_path, lambda w: w.update({k: v.bfloat16() for k, v in w.items() if "proj" in k})
    )
    assert_equals_transformers(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_quantised_weights_that_do_not_say_so(tmp_path: Path, dtype: torch.dtype) -> None:
    families.save_model(tmp_path, "llama", {})
    change_tensors(tmp_path, replaced(QUERY, lambda query: query.to(dtype)))
    with pytest.raises(UnsupportedModelError, match=rf"stores `{QUERY}` as [IUF]8"):
        load_model(tmp_path, device="cpu", backend="torch")


def test_a_weight_of_another_shape(tmp_path: Path) -> None:
    families.save_model(tmp_path, "llama", {})
    change_tensors(tmp_path, replaced(NORM, lambda norm: torch.ones(31)))
    with pytest.raises(CheckpointError, match=r"1 mismatched tensors.*`model\.norm\.weight`"):
        load_model(tmp_path, device="cpu", backend="torch")


def test_logits_that_are_not_finite(tmp_path: Path) -> None:
    """Each weight fits float16, their products do not."""
    families.save_model(tmp_path, "llama", {})
    change_tensors(tmp_path, replaced(NORM, lambda norm: torch.full((32,), 6e4)))
    with pytest.raises(UnsupportedModelError, match=r"not finite in torch\.float16"):
        load_model(tmp_path, device="cpu", backend="torch", dtype="float16")
    load_model(tmp_path, device="cpu", backend="torch", dtype="float32")


@pytest.mark.parametrize("name", [EMBEDDING, HEAD, QUERY])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(tmp_path: Path, name: str, value: float) -> None:
    """Also a weight of a token that the self-check does not use."""

    def damage(weights: dict[str, Tensor]) -> None:
        weights[name][2, 5] = value

    families.save_model(tmp_path, "llama", {})
    change_tensors(tmp_path, damage)
    with pytest.raises(CheckpointError, match=rf"`{name}` in .* is not finite in .*damaged"):
        load_model(tmp_path, device="cpu", backend="torch")


def test_a_weight_beyond_float16(tmp_path: Path) -> None:
    families.save_model(tmp_path, "llama", {})
    change_tensors(tmp_path, replaced(QUERY, lambda query: query * 1e6))
    with pytest.raises(CheckpointError, match=rf"`{QUERY}`.*0 are NaN.*try another `dtype`"):
        load_model(tmp_path, device="cpu", backend="torch", dtype="float16")
    load_model(tmp_path, device="cpu", backend="torch", dtype="bfloat16")


# Tensors that a model has no place for: a warning where they play no part, else a refusal.
LAYER = "model.layers.0"


def load_with(folder: Path, family: str, *names: str) -> CausalLM:
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


def test_tensors_that_transformers_ignores_are_not_reported(
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

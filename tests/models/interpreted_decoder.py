"""Cases of the GPU's decoder, in a process of its own with interpreted kernels.

    TRITON_INTERPRET=1 python -m tests.models.interpreted_decoder [name ...]

runs the cases of these names, or all, and prints one JSON object: case -> None, or what went wrong.
Products of one row run in `rowwise.py`, of more through the kernels that use cuBLAS: the
interpreter has no Gluon.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken.models import CausalLM, TargetView, load_model
from foretoken.models.families import read_stack
from foretoken.ops import UnfitError, get_backend
from foretoken.ops.backends.triton.decoder import FusedStack
from tests.models import families
from tests.models.batches import Span, build_batch
from tests.models.walk import CPU, new_pool, walk
from tests.support import interpreter as interpreter

BLOCK = 4
SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 5},
    "qwen2": {},
    "qwen3": {"num_hidden_layers": 3},
}
UNFIT: dict[str, tuple[str, dict[str, Any], str]] = {
    "family": ("olmo2", {}, "type `olmo2`"),
    "activation": ("llama", {"hidden_act": "gelu"}, "activation is `gelu`"),
    "rope": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "type `dynamic`",
    ),
    "heads": ("llama", {"head_dim": 512}, "heads of sizes"),
}
LAYERS = (0, 1, 2)


def loaded(
    folder: Path, family: str, overrides: dict[str, Any], layers: tuple[int, ...] = ()
) -> CausalLM:
    families.save_model(folder, family, SIZES | overrides)
    view = TargetView(layers, module=True)
    model = load_model(folder, device="cpu", backend="triton", view=view)
    assert isinstance(model.network, FusedStack)
    return model


def agrees(folder: Path, family: str) -> None:
    """Logits of chunks, decodes and verifications are those of Transformers."""
    model, plain = loaded(folder, family, FAMILIES[family]), families.plain_model(folder)
    rng = random.Random(1)
    texts = [[rng.randrange(families.VOCABULARY) for _ in range(12)] for _ in range(2)]
    for text, rows in zip(texts, walk(model, texts, 0, BLOCK), strict=True):
        expected = families.plain_logits(plain, text)
        assert rows
        for position, row in rows.items():
            torch.testing.assert_close(row, expected[position], atol=2e-5, rtol=1e-4)


def hidden_states(folder: Path) -> None:
    """Hidden states of a pass without logits, and of a pass over one token."""
    model, text = loaded(folder, "llama", {}, LAYERS), list(range(5, 13))
    plain = families.plain_model(folder)
    with torch.inference_mode():
        states = plain(torch.tensor([text]), output_hidden_states=True).hidden_states
    kv, found = new_pool(model, 4, BLOCK), []
    for part, start in ((text[:7], 0), (text[7:], 7)):
        output = model.forward(build_batch([Span([1, 2], start, part, 0)], BLOCK, CPU), kv)
        assert output.logits_NV.shape == (0, families.VOCABULARY)
        found.append(output.aux)
    for layer, both in zip(LAYERS, zip(*found, strict=True), strict=True):
        torch.testing.assert_close(torch.cat(both), states[layer][0], atol=1e-5, rtol=1e-5)


def no_logits(folder: Path) -> None:
    """A chunk without logits leaves its keys and values, also those of the last layer."""
    model, text = loaded(folder, "llama", {}), list(range(5, 13))
    plain = families.plain_logits(families.plain_model(folder), text)
    kv = new_pool(model, 4, BLOCK)
    for part, start, rows in ((text[:7], 0, 0), (text[7:], 7, 1)):
        output = model.forward(build_batch([Span([1, 2], start, part, rows)], BLOCK, CPU), kv)
        assert output.logits_NV.shape == (rows, families.VOCABULARY)
    torch.testing.assert_close(output.logits_NV[0], plain[7], atol=2e-5, rtol=1e-4)


def padding(folder: Path) -> None:
    """Tokens after those of all requests, whatever their ids, change no bit and no block."""
    model = loaded(folder, "llama", {})
    outcomes = []
    for behind in ([], [-1, 10**9, 3]):
        kv = new_pool(model, 6, BLOCK)
        spans = [Span([1, 2], 0, [5, 6, 7, 8, 9], 2), Span([4, 3], 0, [11, 12], 2)]
        batch = build_batch(spans, BLOCK, CPU)
        token_T = torch.cat([batch.token_T, torch.tensor(behind, dtype=torch.int64)])
        attention = replace(batch.attention, values_fit=True)
        output = model.forward(batch._replace(token_T=token_T, attention=attention), kv)
        outcomes.append([output.logits_NV, *kv.keys, *kv.values])
    for without, with_padding in zip(*outcomes, strict=True):
        assert torch.equal(without, with_padding), (without - with_padding).abs().max()


def shared_weights(folder: Path) -> None:
    """q, k and v are views of one matrix, as are gate and up, also in the twin."""
    model, plain = loaded(folder, "llama", {}), families.plain_model(folder)
    block, expected = model.module.model.layers[1], plain.model.layers[1]
    for part, names in (("self_attn", "qkv"), ("mlp", ("gate_", "up_"))):
        ours = [getattr(getattr(block, part), f"{name.rstrip('_')}_proj") for name in names]
        theirs = [getattr(getattr(expected, part), f"{name.rstrip('_')}_proj") for name in names]
        assert len({layer.weight.untyped_storage().data_ptr() for layer in ours}) == 1
        for our, their in zip(ours, theirs, strict=True):
            assert torch.equal(our.weight, their.weight)


def refuses(folder: Path, what: str) -> None:
    """The message names the part that the decoder does not implement."""
    family, overrides, message = UNFIT[what]
    families.save_model(folder, family, SIZES | overrides)
    view = TargetView(module=True)
    model = load_model(folder, device="cpu", backend="torch", view=view)
    with pytest.raises(UnfitError, match=message):
        get_backend("triton").load_stack(read_stack(model.module), 40, 0)


def beyond_its_positions(folder: Path) -> None:
    """A draft of a target with longer contexts has angles for all of the target's positions."""
    families.save_model(folder, "llama", SIZES | {"max_position_embeddings": 16})
    model = load_model(folder, device="cpu", backend="triton", max_model_len=40, shorten=True)
    assert model.max_model_len == 16
    assert isinstance(model.network, FusedStack)
    assert all(len(heads.cos_PR) >= 40 for heads in model.network._heads)


CASES: dict[str, Callable[[Path], None]] = {
    **{family: lambda folder, f=family: agrees(folder, f) for family in FAMILIES},
    "hidden states": hidden_states,
    "no logits": no_logits,
    "padding": padding,
    "beyond its positions": beyond_its_positions,
    "shared weights": shared_weights,
    **{f"unfit {what}": lambda folder, w=what: refuses(folder, w) for what in UNFIT},
}


def report(cases: dict[str, Callable[[Path], None]], names: list[str]) -> None:
    """Run the cases of these names, or all, each in a folder; print what went wrong as JSON."""
    warnings.simplefilter("ignore")
    failures: dict[str, str | None] = {}
    for name in names or cases:
        failures[name] = None
        with tempfile.TemporaryDirectory() as folder:
            try:
                cases[name](Path(folder) / "checkpoint")
            except Exception:  # the other cases follow
                failures[name] = traceback.format_exc(limit=-4)
    print(json.dumps(failures))


if __name__ == "__main__":
    report(CASES, sys.argv[1:])

"""The parts of a target that drafters read (hidden states, embedding, head) are Transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken.errors import ConfigError, IntegrityError, UnsupportedModelError
from foretoken.models import CausalLM, TargetView, load_model
from foretoken.models.attention import ATTENTION_NAME
from foretoken.models.causal_lm import ModuleNetwork
from foretoken.ops import get_backend
from tests.models import families
from tests.models.batches import Span, build_batch
from tests.models.walk import CPU, new_pool
from tests.support.cases import host_backends

pytestmark = pytest.mark.usefixtures("packs_small_models")
BLOCK = 4
TEXTS = [list(range(5, 27)), list(range(40, 7, -3))]
HEADS = {"head_dim": 16, "num_hidden_layers": 3}
LAYERS = (3, 0, 2)


def run(model: CausalLM) -> list[list[torch.Tensor]]:
    """The hidden states of each text, computed in two ragged passes without any logits."""
    kv = new_pool(model, 16, BLOCK)
    tables = ([1, 2, 3, 4, 5, 6], [11, 10, 9, 8, 7, 12])
    parts: list[list[list[torch.Tensor]]] = [[], []]  # by text, by pass, by layer
    for start, end in ((0, 7), (7, None)):
        spans = [Span(t, start, x[start:end], 0) for t, x in zip(tables, TEXTS, strict=True)]
        output = model.forward(build_batch(spans, BLOCK, CPU), kv)
        assert output.logits_NV.shape == (0, model.vocab_size)
        at = len(spans[0].tokens)
        states = [state.clone() for state in output.aux]  # the next pass may overwrite them
        parts[0].append([state[:at] for state in states])
        parts[1].append([state[at:] for state in states])
    return [[torch.cat(both) for both in zip(*passes, strict=True)] for passes in parts]


@pytest.mark.parametrize("backend", host_backends())
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_hidden_states_are_those_of_transformers(tmp_path: Path, backend: str, family: str) -> None:
    folder = families.save_model(tmp_path, family, HEADS)
    model = load_model(folder, device="cpu", backend=backend, view=TargetView(LAYERS))
    assert model.runs_in_kernels == (backend == "native")
    plain = families.plain_model(folder)
    for text, found in zip(TEXTS, run(model), strict=True):
        with torch.inference_mode():
            states = plain(torch.tensor([text]), output_hidden_states=True).hidden_states
        assert len(states) == 4
        assert len(found) == len(LAYERS)
        for layer, state in zip(LAYERS, found, strict=True):
            torch.testing.assert_close(state, states[layer][0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", host_backends())
def test_hidden_states_change_no_logit(tmp_path: Path, backend: str) -> None:
    folder = families.save_model(tmp_path, "llama", HEADS)
    batch = build_batch([Span([1, 2], 0, [5, 6, 7, 8, 9], 2)], BLOCK, CPU)
    outputs = []
    for view in (None, TargetView(LAYERS)):
        model = load_model(folder, device="cpu", backend=backend, view=view)
        outputs.append(model.forward(batch, new_pool(model, 3, BLOCK)))
    plain, watched = outputs
    assert plain.aux == ()
    assert torch.equal(plain.logits_NV, watched.logits_NV)


@pytest.mark.parametrize("backend", host_backends())
@pytest.mark.parametrize("tied", [False, True])
def test_embedding_and_head(tmp_path: Path, backend: str, tied: bool) -> None:
    folder = families.save_model(tmp_path, "llama", {**HEADS, "tie_word_embeddings": tied})
    plain = families.plain_model(folder)
    model = load_model(folder, device="cpu", backend=backend, view=TargetView(head=True))
    assert torch.equal(model.embedding.values, plain.get_input_embeddings().weight)
    assert torch.equal(model.head.values, plain.get_output_embeddings().weight)
    if tied:
        assert model.head.values.data_ptr() == model.embedding.values.data_ptr()
    without = load_model(folder, device="cpu", backend=backend)
    assert torch.equal(without.embedding.values, model.embedding.values)
    with pytest.raises(IntegrityError, match=r"`TargetView\.head`"):
        _ = without.head


@pytest.mark.parametrize("layers", [(4,), (-1,), (0, 17)])
def test_layers_that_do_not_exist(tmp_path: Path, layers: tuple[int, ...]) -> None:
    folder = families.save_model(tmp_path, "llama", HEADS)
    with pytest.raises(ConfigError, match=r"`aux_layers` is .* in 0\.\.3"):
        load_model(folder, device="cpu", backend="torch", view=TargetView(layers))


def test_a_family_that_returns_no_hidden_states_is_refused(tmp_path: Path) -> None:
    from transformers import GemmaForCausalLM

    class Silent(GemmaForCausalLM):
        def forward(self, *args: Any, **options: Any) -> Any:
            output = super().forward(*args, **options)
            output.hidden_states = None
            return output

    folder = families.save_model(tmp_path, "gemma", HEADS)
    model = load_model(folder, device="cpu", backend="torch")
    module = Silent.from_pretrained(folder, attn_implementation=ATTENTION_NAME)
    network = ModuleNetwork(module, get_backend("torch"))
    batch = build_batch([Span([1, 2], 0, [5, 6, 7], 1)], BLOCK, CPU)
    with pytest.raises(UnsupportedModelError, match="`gemma` gives 0 hidden states for 3 layers"):
        network.run(batch, new_pool(model, 3, BLOCK), aux_layers=(1,))


def test_hidden_states_that_are_not_one_vector_of_each_token(tmp_path: Path) -> None:
    """Gemma 3n stacks several versions of a hidden state; OPT may project its embedding."""
    small = {"head_dim": 8, "laurel_rank": 4, "hidden_size_per_layer_input": 8}
    gemma3n = {
        **small, "vocab_size_per_layer_input": families.VOCABULARY, "num_kv_shared_layers": 0,
        "activation_sparsity_pattern": [0.0, 0.0], "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    opt = {"ffn_dim": 48, "word_embed_proj_dim": 16}
    for family, overrides, shape in (("gemma3n_text", gemma3n, "4, 1"), ("opt", opt, "1")):
        folder = families.save_model(tmp_path / family, family, overrides)
        load_model(folder, device="cpu", backend="torch")
        message = rf"`{family}` gives hidden states of shape \[{shape}, \d+, 32\] for \d+ tokens"
        with pytest.raises(UnsupportedModelError, match=message):
            load_model(folder, device="cpu", backend="torch", view=TargetView((1,)))

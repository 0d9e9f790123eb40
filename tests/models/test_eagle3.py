"""EAGLE-3 heads against the published equations in float64; folders that are not a head's."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.heads import save_head
from foretoken.cache.kv_pool import KVPool
from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.models.eagle3 import Eagle3Head
from foretoken.models.eagle3_checkpoint import default_aux_layers, load_eagle3, read_eagle3_config
from foretoken.ops import get_backend
from tests.models.batches import Span, build_batch
from tests.models.heads import NaiveHead, NaiveRows
from tests.support.cases import host_backends

CPU = torch.device("cpu")
HIDDEN, VOCABULARY, BLOCK, LENGTH = 32, 60, 4, 19
SWITCHES: list[dict[str, Any]] = [
    {},
    {"drafted": 23},
    {"drafted": 23, "norm_before_residual": True, "aux_layers": (0, 3)},
    {"num_key_value_heads": 4, "head_dim": 8, "rope_theta": 500.0, "rms_norm_eps": 1e-3},
]


def embedding(vocabulary: int = VOCABULARY, hidden: int = HIDDEN) -> Tensor:
    return torch.randn(vocabulary, hidden, generator=torch.Generator().manual_seed(9))


def load(folder: Path, backend: str = "torch", dummy_seed: int | None = None) -> Eagle3Head:
    config = read_eagle3_config(folder)
    weight = embedding(config.vocab_size, config.hidden_size)
    kernels = get_backend(backend)
    return load_eagle3(folder, config, embedding=weight, backend=kernels, dummy_seed=dummy_seed)


@pytest.mark.parametrize("switches", SWITCHES)
@pytest.mark.parametrize("backend", host_backends())
def test_packed_rows_are_those_of_the_equations(
    tmp_path: Path, backend: str, switches: dict[str, Any]
) -> None:
    """Three texts in ragged chunks, through a cache whose blocks lie apart."""
    folder = save_head(tmp_path, hidden=HIDDEN, vocabulary=VOCABULARY, **switches)
    head, naive = load(folder, backend), NaiveHead(folder, embedding())
    rng, generator = random.Random(3), torch.Generator().manual_seed(3)
    texts = [[rng.randrange(VOCABULARY) for _ in range(LENGTH)] for _ in range(3)]
    shape = (3, head.config.num_aux, LENGTH, HIDDEN)
    aux = torch.randn(shape, generator=generator)
    blocks = rng.sample(range(1, 18), 15)
    kv = KVPool(head.layer_shapes, 18, BLOCK, dtype=head.dtype, device=CPU)
    done, found = [0] * 3, torch.empty(3, LENGTH, HIDDEN)
    while min(done) < LENGTH:
        spans, taken, parts = [], [], []
        for i in rng.sample(range(3), rng.randint(1, 3)):
            end = min(done[i] + rng.choice([1, 1, 3, 8]), LENGTH)
            if end > done[i]:
                spans.append(Span(blocks[5 * i : 5 * i + 5], done[i], texts[i][done[i] : end], 0))
                taken.append(aux[i, :, done[i] : end])
                parts.append((i, done[i], end))
                done[i] = end
        if not spans:
            continue
        features = head.features(torch.cat(taken, dim=1).unbind())
        hidden_TC = head.forward(build_batch(spans, BLOCK, CPU), features, kv)
        for i, start, end in parts:
            found[i, start:end], hidden_TC = hidden_TC[: end - start], hidden_TC[end - start :]
    for i, text in enumerate(texts):
        rows = NaiveRows(naive)
        expected = [
            rows.append(naive.feature(aux[i, :, t].unbind()), token) for t, token in enumerate(text)
        ]
        want_TC = torch.stack(expected).float()
        torch.testing.assert_close(found[i], want_TC, atol=1e-5, rtol=1e-5)
        want_TV = torch.stack([naive.logits(hidden_C) for hidden_C in expected]).float()
        torch.testing.assert_close(head.logits(found[i]), want_TV, atol=1e-5, rtol=1e-5)
        assert (want_TV == -torch.inf).any() == ("drafted" in switches)


def test_scaled_rotary_angles_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    for told in (scaling, {"rope_type": "yarn", "factor": 4.0}, {"type": "linear", "factor": 2.0}):
        sizes = {"hidden": HIDDEN, "vocabulary": VOCABULARY, "max_position_embeddings": 256}
        head = load(save_head(tmp_path, rope_scaling=told, **sizes))
        plain = LlamaConfig(head_dim=16, max_position_embeddings=256, rope_scaling=told)
        position_T = torch.tensor([0, 1, 77, 250])
        cos, sin = LlamaRotaryEmbedding(plain)(torch.zeros(1), position_T[None])
        x_THD = torch.randn(4, 2, 16)
        want, _ = apply_rotary_pos_emb(x_THD, x_THD, cos[0], sin[0])
        torch.testing.assert_close(head._rotate(x_THD, position_T), want)


def test_the_hidden_states_that_heads_read(tmp_path: Path) -> None:
    sizes = {"hidden": HIDDEN, "vocabulary": VOCABULARY}
    assert read_eagle3_config(save_head(tmp_path, **sizes)).aux_layers is None
    assert default_aux_layers(32) == (2, 16, 29)
    # As lmsys's head for Qwen3-235B names them: layers whose output is read.
    named = {"eagle_aux_hidden_state_layer_ids": [1, 46, 90]}
    folder = save_head(tmp_path, **sizes, eagle_config=named)
    assert read_eagle3_config(folder).aux_layers == (2, 47, 91) == default_aux_layers(94)


def test_random_weights_need_the_configuration_alone(tmp_path: Path) -> None:
    folder = save_head(tmp_path, hidden=64, vocabulary=400, drafted=100)
    (folder / "model.safetensors").unlink()
    first, again, other = (load(folder, dummy_seed=seed) for seed in (5, 5, 6))
    for name, weight in first.weights._asdict().items():
        assert torch.equal(weight, getattr(again.weights, name))
        assert weight.dim() == 1 or not torch.equal(weight, getattr(other.weights, name))
    assert first.target_ids is not None
    assert first.target_ids.tolist() == list(range(0, 400, 4))
    logits_NV = first.logits(torch.randn(50, 64))
    assert logits_NV.shape == (50, 400)
    assert logits_NV[:, ::4].std().item() == pytest.approx(2.0, rel=0.1)
    assert load(save_head(tmp_path, hidden=64, vocabulary=40), dummy_seed=1).target_ids is None


def test_a_map_that_changes_nothing_is_left_out(tmp_path: Path) -> None:
    folder = save_head(tmp_path, hidden=HIDDEN, vocabulary=40, drafted=40)
    assert load(folder).target_ids is None
    change_weights(folder, d2t=lambda d2t: torch.arange(39, -40, -2))
    head = load(folder)
    assert head.target_ids is not None
    assert head.target_ids.tolist() == list(range(39, -1, -1))


def test_weights_in_several_files(tmp_path: Path) -> None:
    folder = save_head(tmp_path, hidden=HIDDEN, vocabulary=VOCABULARY, drafted=23)
    whole, tensors = load(folder), load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    parts = [dict(list(tensors.items())[i::2]) for i in range(2)]
    names = [f"model-{i}.safetensors" for i in range(2)]
    for name, part in zip(names, parts, strict=True):
        save_file(part, folder / name)
    places = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    for name, weight in load(folder).weights._asdict().items():
        assert torch.equal(weight, getattr(whole.weights, name))


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    told = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in told.items() if value != "gone"}))


def change_weights(folder: Path, **changes: Callable[[Tensor], Tensor | None]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, change in changes.items():
        found = next((key for key in tensors if name in key), name)
        changed = change(tensors.pop(found, torch.zeros(0)))
        if changed is not None:
            tensors[found] = changed.contiguous()
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, r"takes heads of .* `LlamaForCausalLMEagle3`"),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "Eagle3DeepseekV2ForCausalLM"),
        ({"model_type": "qwen3"}, "type `qwen3`"),
        ({"fc_norm": True}, "sets `fc_norm` to True"),
        ({"norm_output": True}, "sets `norm_output` to True"),
        ({"attention_bias": True}, "sets `attention_bias` to True"),
        ({"hidden_act": "gelu"}, "sets `hidden_act` to 'gelu'"),
        ({"num_hidden_layers": 2}, "sets `num_hidden_layers` to 2"),
        ({"sliding_window": 512}, "sets `sliding_window` to 512"),
        ({"partial_rotary_factor": 0.5}, "sets `partial_rotary_factor` to 0.5"),
        ({"quantization_config": {"quant_method": "fp8"}}, "sets `quantization_config`"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "RoPE of type `dynamic`"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "is not EAGLE-3"),
    ],
)
def test_heads_that_would_draft_wrongly_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = save_head(tmp_path, hidden=HIDDEN, vocabulary=VOCABULARY)
    change_config(folder, **changes)
    with pytest.raises(UnsupportedModelError, match=message):
        read_eagle3_config(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": "gone"}, "has no `vocab_size`"),
        ({"hidden_size": "wide"}, "not a valid `llama` configuration"),
        ({"draft_vocab_size": 0}, "`draft_vocab_size` as 0: must be an integer >= 1"),
        ({"draft_vocab_size": 61}, "`draft_vocab_size` of 61, more than its `vocab_size` of 60"),
        ({"target_hidden_size": "x"}, "`target_hidden_size` as 'x'"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": 2}}, "as 2: must be a list"),
    ],
)
def test_configurations_that_cannot_be(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = save_head(tmp_path, hidden=HIDDEN, vocabulary=VOCABULARY)
    change_config(folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        read_eagle3_config(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fc": lambda _: None}, "1 missing tensors, for example `fc.weight`"),
        ({"midlayer.q_norm.weight": lambda _: torch.ones(16)}, "1 unexpected .*`midlayer.q_norm"),
        ({"o_proj": lambda w: w[:, 1:]}, r"1 mismatched .*o_proj.weight \[32, 63\] in place of"),
        ({"d2t": lambda _: None}, "lack `d2t`, which says what the 23 ids"),
        ({"d2t": lambda d: d[1:]}, r"`d2t` in .* is torch.int64 \[22\]: must be one integer for"),
        ({"d2t": lambda d: d.float()}, "`d2t` in .* is torch.float32"),
        ({"d2t": lambda d: d + 60}, r"maps 23 ids to 23 in \d+\.\.\d+: .* in 0\.\.59"),
        ({"d2t": lambda d: -torch.arange(23)}, "maps 23 ids to 1 in 0..0: must be as many"),
    ],
)
def test_weights_that_do_not_fit(
    tmp_path: Path, changes: dict[str, Callable[[Tensor], Tensor | None]], message: str
) -> None:
    folder = save_head(tmp_path, hidden=HIDDEN, vocabulary=VOCABULARY, drafted=23)
    change_weights(folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        load(folder)

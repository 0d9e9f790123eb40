"""EAGLE-3 heads against the published equations in float64; folders that are not a head's."""

from __future__ import annotations

import importlib
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
from foretoken.models.eagle3 import lacks_output_layer, load_head, read_head
from foretoken.models.eagle3_config import default_aux_layers, read_eagle3_config
from foretoken.ops import LoadedStack, RoundStack, Stack, get_backend
from foretoken.ops.backends.torch.stack import cos_sin, output, rotate
from foretoken.ops.stack import Dense
from tests.models import families
from tests.models.batches import Span, build_batch
from tests.models.heads import SWITCHES, NaiveHead, NaiveRows
from tests.support.cases import host_backends

CPU = torch.device("cpu")
HIDDEN, VOCABULARY, BLOCK, LENGTH = 32, 60, 4, 19
SIZES = {"hidden": HIDDEN, "vocabulary": VOCABULARY}


def embedding(vocabulary: int = VOCABULARY, hidden: int = HIDDEN) -> Tensor:
    return torch.randn(vocabulary, hidden, generator=torch.Generator().manual_seed(9))


def read(folder: Path, dummy_seed: int | None = None) -> Stack:
    config = read_eagle3_config(folder)
    weight = embedding(config.vocab_size, config.target_hidden_size)
    return read_head(folder, config, Dense(weight), dummy_seed=dummy_seed)


def load(folder: Path, backend: str) -> LoadedStack:
    config, kernels = read_eagle3_config(folder), get_backend(backend)
    weight = embedding(config.vocab_size, config.target_hidden_size)
    return load_head(
        folder, config, embedding=Dense(weight), backend=kernels, positions=LENGTH, most_rows=3
    )


def same_weights(one: Stack, other: Stack) -> list[bool]:
    pairs = list(zip(tensors_of(one), tensors_of(other), strict=True))
    pairs.sort(key=lambda pair: pair[0].dim())
    return [torch.equal(*pair) for pair in pairs]


def tensors_of(stack: Stack) -> list[Tensor]:
    layer, rule = stack.layers[0], stack.features
    assert rule is not None
    mixer, feed = layer.mixer, layer.feed
    linears = (rule.fc, mixer.qkv, mixer.o, feed.gate_up, feed.down, stack.head)
    norms = [rule.feature_norm_C, layer.mixer_norm_C, layer.feed_norm_C, stack.norm_C]
    return [*norms, *(linear.weight.values for linear in linears)]


@pytest.mark.parametrize("switches", SWITCHES)
@pytest.mark.parametrize("backend", host_backends())
def test_packed_rows_are_those_of_the_equations(
    tmp_path: Path, backend: str, switches: str
) -> None:
    """Three texts in ragged chunks, through scattered cache blocks; also in native code."""
    folder = save_head(tmp_path, **{**SIZES, **SWITCHES[switches]})
    head, naive = load(folder, backend), NaiveHead(folder, embedding())
    config, stack = read_eagle3_config(folder), head.stack
    size = config.layer.head_dim
    assert isinstance(head, RoundStack) == (backend == "native" and size % 16 == 0)
    rng, generator = random.Random(3), torch.Generator().manual_seed(3)
    texts = [[rng.randrange(VOCABULARY) for _ in range(LENGTH)] for _ in range(3)]
    shape = (3, config.num_aux, LENGTH, HIDDEN)
    aux = torch.randn(shape, generator=generator)
    blocks = rng.sample(range(1, 18), 15)
    kv = KVPool(stack.layer_shapes, 18, BLOCK, dtype=stack.dtype, device=CPU)
    done, found = [0] * 3, torch.empty(3, LENGTH, stack.hidden_size)
    while min(done) < LENGTH:
        spans, taken, parts = [], [], []
        for i in rng.sample(range(3), rng.randint(1, 3)):
            end = min(done[i] + rng.choice([1, 1, 3, 8]), LENGTH)
            if end > done[i]:
                span = Span(
                    blocks[5 * i : 5 * i + 5], done[i], texts[i][done[i] : end], end - done[i]
                )
                spans.append(span)
                taken.append(aux[i, :, done[i] : end])
                parts.append((i, done[i], end))
                done[i] = end
        if not spans:
            continue
        states = torch.cat(taken, dim=1).unbind()
        batch = build_batch(spans, BLOCK, CPU)
        hidden_TC = head.run(batch, kv, features=states, logits=False).hidden_NC
        assert hidden_TC is not None
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
        assert (want_TV == -torch.inf).any() == ("drafted" in SWITCHES[switches])


ROPE: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0},
}  # fmt: skip
POSITIONS = torch.tensor([0, 1, 77, 250])


def turned_by(head: Stack, x_THD: Tensor) -> Tensor:
    return rotate(x_THD, cos_sin(head.layers[0].mixer.rope, POSITIONS, x_THD.dtype))


@pytest.mark.parametrize("name", ["rope_type", "type"])
@pytest.mark.parametrize("kind", ROPE)
def test_rotary_angles_are_those_of_transformers(tmp_path: Path, kind: str, name: str) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    told = {"rope_scaling": {name: kind, **ROPE[kind]}, "max_position_embeddings": 256}
    head = read(save_head(tmp_path, **SIZES, **told))
    rotary: Any = LlamaRotaryEmbedding(LlamaConfig(head_dim=16, **told))
    cos, sin = rotary(torch.zeros(1), POSITIONS[None])
    x_THD = torch.randn(4, 2, 16)
    want, _ = apply_rotary_pos_emb(x_THD, x_THD, cos[0], sin[0])
    torch.testing.assert_close(turned_by(head, x_THD), want)


@pytest.mark.parametrize("kind", ["default", "mrope"])
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_rotary_angles_in_sections_are_those_of_transformers(
    tmp_path: Path, family: str, kind: str
) -> None:
    """For a text. A token in a picture has different positions, and other angles."""
    scaling = {"rope_type": kind, "mrope_section": [2, 3, 3]}
    head = read(save_head(tmp_path, **SIZES, rope_scaling=dict(scaling)))
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    [name] = [n for n in dir(modeling) if n.endswith("RotaryEmbedding") and "Vision" not in n]
    overrides = {
        "hidden_size": 64, "head_dim": 16,
        "rope_parameters": {**scaling, "rope_type": "default", "rope_theta": 1e4},
    }  # fmt: skip
    rotary = getattr(modeling, name)(families.make_config(family, overrides).get_text_config())
    x_THD = torch.randn(4, 2, 16)

    def turned(places: Tensor) -> Tensor:
        cos, sin = rotary(torch.zeros(1), places[:, None])
        turned: Tensor = modeling.apply_rotary_pos_emb(x_THD, x_THD, cos[0], sin[0])[0]
        return turned

    found = turned_by(head, x_THD)
    torch.testing.assert_close(found, turned(POSITIONS.expand(3, -1)))
    assert not torch.allclose(found, turned(torch.stack([POSITIONS, POSITIONS, POSITIONS + 1])))


def test_other_kinds_of_rotary_angles_are_refused(tmp_path: Path) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    others = {"axial", "su", "xdrope", None, *ROPE_INIT_FUNCTIONS} - {*ROPE}
    assert others >= {"dynamic", "longrope", "proportional"}
    factors = {"factor": 2.0, "short_factor": [1.0] * 8, "long_factor": [1.0] * 8}
    for kind in others:
        told = {"rope_type": kind, **factors, "original_max_position_embeddings": 64}
        folder = save_head(tmp_path, **SIZES, rope_scaling=told)
        with pytest.raises(UnsupportedModelError, match=f"RoPE of type `{kind}`: must be one of"):
            read_eagle3_config(folder)


def test_hidden_states_unless_named() -> None:
    assert default_aux_layers(32) == (2, 16, 29)


@pytest.mark.parametrize(
    ("layout", "ids", "states"),
    [
        # lmsys/Qwen3-235B-A22B-EAGLE3, 94 layers: SGLang takes what enters layers 2, 47, 91.
        ("original", [1, 46, 90], default_aux_layers(94)),
        # nvidia/gpt-oss-120b-Eagle3-v3, 36 layers: state 36 is that after the last layer.
        ("original", [24, 30, 36], (24, 30, 36)),
        # RedHatAI/gemma-4-26B-A4B-it-speculator.eagle3, 30 layers: vLLM takes what enters these.
        ("speculators", [2, 15, 27], default_aux_layers(30)),
        ("speculators", [1, 23, 44], (1, 23, 44)),
        ("original", [], None),
        ("speculators", None, None),
    ],
)
def test_hidden_states_that_heads_name(
    tmp_path: Path, layout: str, ids: list[int] | None, states: tuple[int, ...] | None
) -> None:
    folder = save_head(tmp_path, **SIZES, layout=layout)
    named = {"eagle_aux_hidden_state_layer_ids": ids}
    change_config(folder, **(named if layout == "speculators" else {"eagle_config": named}))
    assert read_eagle3_config(folder).aux_layers == states


@pytest.mark.parametrize(
    ("told", "window"),
    [
        ({"sliding_window": 64}, 64),
        ({"sliding_window": 64, "use_sliding_window": False}, None),
        ({"sliding_window": 64, "layer_types": ["full_attention"]}, None),
        ({"sliding_window": 64, "layer_types": ["sliding_attention"]}, 64),
        ({"sliding_window": 64, "model_type": "qwen3"}, None),  # as Transformers reads Qwen3
        ({"sliding_window": 64, "model_type": "qwen3", "layer_types": ["sliding_attention"]}, 64),
        ({"sliding_window": None, "layer_types": ["full_attention"]}, None),
    ],
)
def test_windows(tmp_path: Path, told: dict[str, Any], window: int | None) -> None:
    assert read_eagle3_config(save_head(tmp_path, **SIZES, **told)).sliding_window == window


def test_switches_may_stand_in_eagle_config(tmp_path: Path) -> None:
    """As in nvidia's heads; a switch outside of it has precedence."""
    folder = save_head(tmp_path, **SIZES, norm_output=False)
    change_config(folder, eagle_config={"norm_before_fc": True, "norm_output": True})
    config = read_eagle3_config(folder)
    assert config.norm_before_fc
    assert not config.norm_output


def test_a_head_uses_the_target_s_weights_where_it_has_none_or_the_same(tmp_path: Path) -> None:
    folder = save_head(tmp_path, **SIZES, layout="model", target_hidden_size=HIDDEN)
    config, target = read_eagle3_config(folder), embedding()
    assert not lacks_output_layer(folder, config)
    assert not torch.equal(read(folder).embedding.values, target)
    change_weights(folder, embed_tokens=lambda _: target, lm_head=lambda _: None)
    assert lacks_output_layer(folder, config)
    weight = torch.randn(VOCABULARY, HIDDEN)
    head = read_head(folder, config, Dense(target), output_layer=Dense(weight))
    assert head.embedding.values is target
    assert head.head.weight.values is weight
    with pytest.raises(CheckpointError, match=r"mismatched .*lm_head.weight \[60, 31\] in place"):
        read_head(folder, config, Dense(target), output_layer=Dense(weight[:, 1:]))
    with pytest.raises(CheckpointError, match=r"missing tensors, for example `lm_head.weight`"):
        read(folder)
    few = save_head(tmp_path / "few", **SIZES, drafted=9)
    change_weights(few, lm_head=lambda _: None)
    assert not lacks_output_layer(few, read_eagle3_config(few))  # the target's has other ids


def test_random_weights_need_only_the_configuration(tmp_path: Path) -> None:
    folder = save_head(tmp_path, hidden=64, vocabulary=400, drafted=100)
    (folder / "model.safetensors").unlink()
    first, again, other = (read(folder, dummy_seed=seed) for seed in (5, 5, 6))
    assert all(same_weights(first, again))
    assert same_weights(first, other) == [True] * 4 + [False] * 6
    assert first.target_ids is not None
    assert first.target_ids.tolist() == list(range(0, 400, 4))
    logits_NV = output(first, torch.randn(50, 64))
    assert logits_NV.shape == (50, 400)
    assert logits_NV[:, ::4].std().item() == pytest.approx(2.0, rel=0.1)
    assert read(save_head(tmp_path, hidden=64, vocabulary=40), dummy_seed=1).target_ids is None
    folder = save_head(tmp_path, **{**SIZES, **SWITCHES["all at once"]})
    (folder / "model.safetensors").unlink()
    head = read(folder, dummy_seed=1)
    mixer, rule = head.layers[0].mixer, head.features
    assert rule is not None
    assert None not in (rule.fc_norm_PA, mixer.q_norm_D, mixer.k_norm_D, mixer.qkv.bias)
    assert head.embedding.values.shape == (VOCABULARY, head.hidden_size)


def test_a_map_that_changes_nothing_is_left_out(tmp_path: Path) -> None:
    folder = save_head(tmp_path, hidden=HIDDEN, vocabulary=40, drafted=40)
    assert read(folder).target_ids is None
    change_weights(folder, d2t=lambda d2t: torch.arange(39, -40, -2))
    head = read(folder)
    assert head.target_ids is not None
    assert head.target_ids.tolist() == list(range(39, -1, -1))


def test_weights_in_several_files(tmp_path: Path) -> None:
    folder = save_head(tmp_path, hidden=HIDDEN, vocabulary=VOCABULARY, drafted=23)
    whole, tensors = read(folder), load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    parts = [dict(list(tensors.items())[i::2]) for i in range(2)]
    names = [f"model-{i}.safetensors" for i in range(2)]
    for name, part in zip(names, parts, strict=True):
        save_file(part, folder / name)
    places = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert all(same_weights(read(folder), whole))


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


def lossy(**settings: Any) -> dict[str, Any]:
    kept = {"proposal_type": "greedy", "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {"speculators_config": {"proposal_methods": [kept, {**kept, **settings}]}}


# Heads that would draft wrongly, and configurations that are none.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["LlamaForCausalLM"]}, r"LlamaForCausalLM, .* `LlamaForCausalLMEagle3`"),
    ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "V2ForCausalLM, .* Heads with MLA"),
    ({"model_type": "mistral"}, "type `mistral`, .* of type `llama` or `qwen3`"),
    ({"speculators_model_type": "peagle"}, "kind `peagle`"),
    ({"kv_lora_rank": 512}, "sets `kv_lora_rank` to 512"),
    ({"hidden_act": "gelu"}, "sets `hidden_act` to 'gelu'"),
    ({"num_hidden_layers": 2}, "sets `num_hidden_layers` to 2"),
    ({"bias": True}, "sets `bias` to True"),
    ({"layer_types": ["chunked_attention"]}, "of type `chunked_attention`"),
    ({"fc_norm": True, "norm_before_fc": True}, "both `fc_norm` and `norm_before_fc`"),
    ({"quantization_config": {"quant_method": "fp8"}}, "sets `quantization_config`"),
    (
        {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}},
        "RoPE parameters by type of layer .`full_attention`., but an EAGLE-3 head has one",
    ),
    ({"eagle_config": {"use_aux_hidden_state": False}}, "sets `use_aux_hidden_state` to False"),
    (lossy(verifier_accept_k=5), "sets `verifier_accept_k` to 5, which is lossy"),
    (lossy(accept_tolerance=0.1), r"sets `accept_tolerance` to 0\.1, which is lossy"),
]
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"vocab_size": "gone"}, "has no `vocab_size`"),
    ({"hidden_size": "wide"}, "not a valid `llama` configuration"),
    ({"draft_vocab_size": 0}, "`draft_vocab_size` as 0: must be an integer >= 1"),
    ({"draft_vocab_size": 61}, "`draft_vocab_size` of 61, more than its `vocab_size` of 60"),
    ({"target_hidden_size": "x"}, "`target_hidden_size` as 'x'"),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": 2}}, "as 2: must be a list"),
    ({"eagle_config": [2]}, r"`eagle_config` as \[2\]: must be an object"),
    ({"speculators_config": "x"}, "`speculators_config` as 'x': must be an object"),
    ({"norm_output": "yes"}, "`norm_output` as 'yes': must be true or false"),
    ({"layer_types": ["sliding_attention"]}, "`sliding_window` as None"),
    ({"speculators_model_type": "eagle3"}, "does not say `norm_before_residual`"),
    ({"rope_theta": None}, "invalid RoPE {'rope_theta': None"),
    ({"rope_theta": -1}, "the angles of RoPE of .* are not finite"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "angles .* are not finite"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": "x"}}, "invalid RoPE .*'factor': 'x'"),
    ({"partial_rotary_factor": 2}, r"rotates 32 numbers .* an even number in 2\.\.16"),
    ({"partial_rotary_factor": 0}, "rotates 0 numbers of each attention head"),
]


@pytest.mark.parametrize(
    ("changes", "message", "error"),
    [
        *((*case, UnsupportedModelError) for case in REFUSED),
        *((*case, CheckpointError) for case in WRONG),
    ],
)
def test_other_configurations_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str, error: type[Exception]
) -> None:
    folder = save_head(tmp_path, **SIZES)
    change_config(folder, **changes)
    with pytest.raises(error, match=message):
        read_eagle3_config(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fc": lambda _: None}, "1 missing tensors, for example `fc.weight`"),
        ({"midlayer.q_norm.weight": lambda _: torch.ones(16)}, "1 unexpected .*`layers.0.q_norm"),
        ({"o_proj": lambda w: w[:, 1:]}, r"1 mismatched .*o_proj.weight \[32, 63\] in place of"),
        ({"d2t": lambda _: None}, "lack `d2t`, which maps the 23 ids"),
        ({"d2t": lambda d: d[1:]}, r"`d2t` in .* is torch.int64 \[22\]: must be one integer for"),
        ({"d2t": lambda d: d.float()}, "`d2t` in .* is torch.float32"),
        (
            {"d2t": lambda d: d + 60},
            r"maps 23 ids to 23 different ids in \d+\.\.\d+: .* in 0\.\.59",
        ),
        (
            {"d2t": lambda d: -torch.arange(23)},
            "maps 23 ids to 1 different ids in 0..0: must be 23",
        ),
    ],
)
def test_weights_that_do_not_fit(
    tmp_path: Path, changes: dict[str, Callable[[Tensor], Tensor | None]], message: str
) -> None:
    folder = save_head(tmp_path, hidden=HIDDEN, vocabulary=VOCABULARY, drafted=23)
    change_weights(folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        read(folder)


@pytest.mark.parametrize("backend", host_backends())
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["fc.weight", "layers.0.mlp.up_proj.weight", "embed_tokens"])
def test_weights_that_are_not_finite(tmp_path: Path, backend: str, value: float, name: str) -> None:
    sizes = {**SIZES, "layout": "speculators", "target_hidden_size": HIDDEN}
    folder = save_head(tmp_path, **sizes, drafted=23)
    change_weights(folder, **{name: lambda w: torch.full_like(w, value).where(w == w.max(), w)})
    with pytest.raises(CheckpointError, match=rf"`{name}.*` in .* is not finite in torch.float32"):
        load(folder, backend)


@pytest.mark.parametrize("backend", host_backends())
def test_a_head_with_outputs_that_are_not_finite(tmp_path: Path, backend: str) -> None:
    """Its weights are finite, their products are not."""
    folder = save_head(tmp_path, **SIZES)
    change_weights(folder, gate_proj=lambda w: w.abs() * 1e30, up_proj=lambda w: w * 1e30)
    with pytest.raises(UnsupportedModelError, match=r"head gives .* not finite in torch.float32"):
        load(folder, backend)

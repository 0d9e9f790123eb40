"""The configuration in a GGUF file: equal to the `config.json` it was made from, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.models.checkpoint import check_generation_config, parse_config, read_config
from foretoken.models.families import FAMILIES
from foretoken.models.gguf.config import (
    ARCHITECTURES,
    generation_values,
    llama3_factors,
    stored_sizes,
)
from foretoken.models.gguf.names import parameter_name, parameters, row_order, tensor_name
from foretoken.models.gguf.reader import read_gguf
from tests.models.gguf_files import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    Stored,
    Typed,
    model_metadata,
    model_tensors,
    real_file,
    write,
)

FACTORS = "rope_freqs.weight"


def save(folder: Path, architecture: str = "llama", tied: bool = False, **changes: Any) -> Path:
    metadata = model_metadata(architecture, **changes)
    return write(folder / "m.gguf", metadata, model_tensors(architecture, tied=tied))


def module_of(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        config = parse_config(path, read_config(path)["model_type"])
        return AutoModelForCausalLM.from_config(config)


def test_architectures_are_families() -> None:
    assert {architecture.model_type for architecture in ARCHITECTURES.values()} <= FAMILIES.keys()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_file_has_the_parameters_of_transformers_module(
    tmp_path: Path, architecture: str, tied: bool
) -> None:
    path = save(tmp_path, architecture, tied)
    found = {name: tensor.shape for name, tensor in parameters(read_gguf(path)).items()}
    module = module_of(path)
    assert found == {name: tuple(p.shape) for name, p in module.named_parameters()}
    assert module.config.tie_word_embeddings is tied
    assert all(tensor_name(name) in read_gguf(path).tensors for name in found)


def test_values(tmp_path: Path) -> None:
    path = save(tmp_path, attention__key_length=HEAD_DIM, rope__dimension_count=HEAD_DIM)
    config = parse_config(path, "llama")
    assert (config.rms_norm_eps, config.max_position_embeddings) == (1e-6, 128)
    assert (config.head_dim, config.num_key_value_heads) == (HEAD_DIM, KV_HEADS)
    assert config.rope_parameters == {"rope_theta": 10000.0, "rope_type": "default"}
    assert config.architectures == ["LlamaForCausalLM"]
    assert (config.eos_token_id, config.bos_token_id) == (258, None)
    assert str(config.dtype) == "torch.float32"
    check_generation_config(path)
    assert generation_values(read_gguf(path))["eos_token_id"] == [258, 259]
    assert stored_sizes(read_gguf(path)).layers == LAYERS


def test_further_ends(tmp_path: Path) -> None:
    metadata = {**model_metadata("llama"), "tokenizer.ggml.eot_token_id": 5}
    path = write(tmp_path / "m.gguf", metadata, model_tensors("llama"))
    assert generation_values(read_gguf(path))["eos_token_id"] == [5, 258, 259]


def test_mistral(tmp_path: Path) -> None:
    path = save(tmp_path, "llama", attention__sliding_window=40)
    config = parse_config(path, read_config(path)["model_type"])
    assert (config.model_type, config.sliding_window) == ("mistral", 40)
    path = save(tmp_path, "mistral3")
    assert read_config(path)["sliding_window"] is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope__freq_base": None}, {"rope_theta": 10000.0, "rope_type": "default"}),
        ({"rope__freq_base": 1e6}, {"rope_theta": 1e6, "rope_type": "default"}),
        ({"rope__scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"rope__scaling__type": "linear", "rope__scaling__factor": 2.5},
            {"rope_type": "linear", "factor": 2.5},
        ),
        (
            {
                "rope__scaling__type": "yarn", "rope__scaling__factor": 4.0,
                "rope__scaling__original_context_length": 32, "rope__scaling__yarn_beta_fast": 24.0,
            },
            {
                "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
                "beta_fast": 24.0,
            },
        ),
    ],
)  # fmt: skip
def test_rope(tmp_path: Path, changes: dict[str, Any], expected: dict[str, Any]) -> None:
    path = save(tmp_path, "qwen2", **changes)
    assert read_config(path)["rope_parameters"] == {"rope_theta": 10000.0, **expected}
    assert parse_config(path, "qwen2").rope_parameters["rope_type"] == expected["rope_type"]


def with_factors(folder: Path, factors: Any, kind: str = "F32") -> Path:
    data = np.asarray(factors, np.float32).tobytes()
    tensors = model_tensors("llama") | {FACTORS: Stored((len(factors),), kind, data)}
    metadata = model_metadata("llama", rope__freq_base=500000.0)
    return write(folder / "m.gguf", metadata, tensors)


def test_factors_of_llama_3(tmp_path: Path) -> None:
    """The factors that llama.cpp's converter writes give the frequencies of Transformers."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    factors = llama3_factors(500000.0, HEAD_DIM, 32.0)
    path = with_factors(tmp_path, factors)
    assert FACTORS not in parameters(read_gguf(path))
    config = parse_config(path, "llama")
    assert config.rope_parameters["rope_type"] == "llama3"
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500000.0 ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    np.testing.assert_allclose(frequencies.numpy(), plain / factors, rtol=1e-6)
    path = with_factors(tmp_path, [1.0] * (HEAD_DIM // 2))
    assert read_config(path)["rope_parameters"]["rope_type"] == "default"


@pytest.mark.parametrize("factors", [[1, 1, 2, 8], [1, 1, 1, np.nan], [0, 0, 0, 0], [1, 8]])
def test_other_factors(tmp_path: Path, factors: list[float]) -> None:
    with pytest.raises(UnsupportedModelError, match=f"`{FACTORS}`"):
        read_config(with_factors(tmp_path, factors))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "experts": ({"expert_count": 8}, "`llama.expert_count` as 8, which is not supported"),
    "soft cap": ({"final_logit_softcapping": 30.0}, "softcapping` as 30.0"),
    "heads that differ": ({"attention__head_count_kv": [1, 2]}, r"as \[1, 2\], which is not"),
    "values": ({"attention__value_length": 16}, "`llama.attention.value_length` as 16"),
    "partial": ({"rope__dimension_count": 4}, "`llama.rope.dimension_count` as 4"),
    "long": ({"rope__scaling__type": "longrope"}, "as 'longrope', which is not supported"),
    "multiplier": ({"rope__scaling__yarn_log_multiplier": 1.0}, "yarn_log_multiplier` as 1.0"),
    "sections": ({"rope__dimension_sections": [1, 1, 2, 0]}, "dimension_sections"),
    "bidirectional": ({"attention__causal": False}, "`llama.attention.causal` as False"),
    "windows": ({"attention__sliding_window": 9, "attention__sliding_window_pattern": 2},
                "sliding_window_pattern` as 2"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported(tmp_path: Path, case: str) -> None:
    changes, message = REFUSED[case]
    with pytest.raises(UnsupportedModelError, match=message):
        read_config(save(tmp_path, **changes))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"block_count": None}, "has no key `llama.block_count`"),
    "text": ({"block_count": "2"}, "`llama.block_count` as '2': must be a whole number"),
    "zero": ({"attention__head_count": 0}, "head_count` as 0: must be a whole number in 1.."),
    "negative": ({"context_length": -1}, "context_length` as -1"),
    "truth": ({"context_length": True}, "context_length` as True"),
    "layers": ({"block_count": 10**9}, f"as 1000000000: must be at most {LAYERS}"),
    "width": ({"embedding_length": 64}, r"`token_embd.weight` of shape \[260, 32\]"),
    "inner": ({"feed_forward_length": 2**31 - 1}, "gives `intermediate_size` as 2147483647"),
    "heads": ({"attention__head_count": 3}, "a multiple of `attention.head_count`, 3"),
    "kv heads": ({"attention__head_count_kv": 3}, "must be a divisor of 4"),
    "head size": ({"attention__key_length": 2**20 + 2}, "gives `head_dim` as 1048578"),
    "odd": ({"attention__key_length": 7}, "`llama.attention.key_length` as 7: must be even"),
    "vocabulary": ({"vocab_size": 7}, "vocab_size` as 7: must be 260"),
    "epsilon": ({"attention__layer_norm_rms_epsilon": float("nan")}, "must be a number above 0"),
    "theta": ({"rope__freq_base": float("inf")}, "must be a number above 0"),
    "factor": ({"rope__scaling__type": "linear", "rope__scaling__factor": 0.5}, "at least 1"),
    "window": ({"attention__sliding_window": "x"}, "sliding_window` as 'x'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_values_that_are_wrong(tmp_path: Path, case: str) -> None:
    changes, message = WRONG[case]
    path = save(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_config(path)
    assert f"`{path}`" in str(caught.value)


@pytest.mark.parametrize("architecture", ["gemma3", "phi3", "qwen2moe"])
def test_other_architectures(tmp_path: Path, architecture: str) -> None:
    path = save(tmp_path, architecture)
    message = (
        f"`{architecture}`, which is not supported as GGUF; supported are llama, mistral3, qwen2"
    )
    with pytest.raises(UnsupportedModelError, match=message):
        read_config(path)


def test_files_that_hold_no_model(tmp_path: Path) -> None:
    metadata, tensors = model_metadata("llama"), model_tensors("llama")
    path = write(tmp_path / "m.gguf", metadata | {"general.type": "adapter"}, tensors)
    with pytest.raises(UnsupportedModelError, match=r"has .adapter. as `general.type`"):
        read_config(path)
    path = write(tmp_path / "m.gguf", metadata, {})
    with pytest.raises(CheckpointError, match=r"has no tensor `token_embd.weight`"):
        read_config(path)
    path = write(tmp_path / "m.gguf", {"x": 1}, tensors)
    with pytest.raises(CheckpointError, match=r"`general.architecture` as None"):
        read_config(path)
    path = write(tmp_path / "m.gguf", metadata, tensors | {"blk.0.ssm_a": Stored((4,))})
    with pytest.raises(UnsupportedModelError, match=r"the tensor `blk.0.ssm_a`"):
        parameters(read_gguf(path))
    path = write(tmp_path / "m.gguf", metadata | {"tokenizer.ggml.eos_token_id": 260}, tensors)
    with pytest.raises(
        CheckpointError, match=r"eos_token_id` as 260: must be a token id in 0..259"
    ):
        check_generation_config(path)
    path = write(tmp_path / "m.gguf", metadata | {"tokenizer.ggml.eot_token_id": "x"}, tensors)
    with pytest.raises(CheckpointError, match=r"eot_token_id` as 'x'"):
        check_generation_config(path)


def biases(parts: str, layers: int = LAYERS) -> dict[str, Stored]:
    heads = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS, "output": 4}
    return {
        f"blk.{i}.attn_{part}.bias": Stored((heads[part] * HEAD_DIM,))
        for i in range(layers)
        for part in parts.split()
    }


def test_biases(tmp_path: Path) -> None:
    def saved(architecture: str, more: dict[str, Stored], without: str = "") -> Path:
        tensors = model_tensors(architecture) | more
        tensors.pop(without, None)
        return write(tmp_path / "m.gguf", model_metadata(architecture), tensors)

    path = saved("llama", biases("q k v output"))
    assert read_config(path)["attention_bias"] is True
    found = {name: tensor.shape for name, tensor in parameters(read_gguf(path)).items()}
    assert found == {name: tuple(p.shape) for name, p in module_of(path).named_parameters()}
    for more in (biases("q k v"), biases("q k v output", layers=1)):
        with pytest.raises(UnsupportedModelError, match=r"of 8 possible .* `blk.0.attn_q.bias`"):
            read_config(saved("llama", more))
    with pytest.raises(UnsupportedModelError, match=r"no `mistral` of Transformers"):
        read_config(saved("mistral3", biases("q k v output")))
    with pytest.raises(CheckpointError, match=r"lacks the tensor `blk.1.attn_v.bias`"):
        read_config(saved("qwen2", {}, without="blk.1.attn_v.bias"))
    with pytest.raises(CheckpointError, match=r"has the tensor `blk.0.attn_output.bias`"):
        read_config(saved("qwen2", biases("output")))


def test_names_and_their_inverse() -> None:
    assert parameter_name("blk.12.attn_q_norm.weight") == "model.layers.12.self_attn.q_norm.weight"
    assert tensor_name("lm_head.weight") == "output.weight"
    for name in ("blk.x.attn_q.weight", "blk.01.attn_q.weight", "attn_q.weight", "blk.1.output",
                 "blk.1.token_embd.weight", "output.weight.bias.x", "blk.1.ssm_a"):  # fmt: skip
        assert parameter_name(name) is None
    for name in ("model.layers.1.mlp.weight", "lm_head", "model.layers.x.mlp.up_proj.weight"):
        assert tensor_name(name) is None


def test_rows_that_the_converter_moved() -> None:
    """Against Transformers' own inverse of the converter."""
    from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

    values = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}
    processor = LlamaTensorProcessor(values)
    for part, rows in (("q", 48), ("k", 16)):
        stored = np.arange(rows * 5).reshape(rows, 5)
        name = f"model.layers.0.self_attn.{part}_proj.weight"
        expected = processor.process(stored, f"blk.0.attn_{part}.weight").weights
        order = row_order("llama", name, values)
        assert order is not None
        assert np.array_equal(stored[order], expected)
        assert row_order("qwen2", name, values) is None
    assert row_order("llama", "model.layers.0.self_attn.v_proj.weight", values) is None
    assert row_order("llama", "model.layers.0.self_attn.q_norm.weight", values) is None


def test_one_number_for_all_layers(tmp_path: Path) -> None:
    kv = [Typed(4, KV_HEADS)] * LAYERS
    assert read_config(save(tmp_path, attention__head_count_kv=kv))["num_key_value_heads"] == 2


def test_a_real_file() -> None:
    path = real_file()
    config = parse_config(path, read_config(path)["model_type"])
    assert (config.model_type, config.hidden_size, config.head_dim) == ("llama", 576, 64)
    found = {name: tensor.shape for name, tensor in parameters(read_gguf(path)).items()}
    assert found == {name: tuple(p.shape) for name, p in module_of(path).named_parameters()}
    assert generation_values(read_gguf(path))["eos_token_id"] == [0, 2]

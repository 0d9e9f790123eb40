"""Models from GGUF files: the same as from safetensors, and lossless under speculation.

Weights stay in the file's formats; what their products are is shown in `native/test_quantised.py`.
"""

from __future__ import annotations

import functools
import json
import logging
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.heads import save_head
from foretoken import LLM, SamplingParams
from foretoken.errors import CheckpointError, ConfigError, UnsupportedModelError
from foretoken.models import CausalLM, load_model
from foretoken.models.gguf.names import parameter_name, row_order
from foretoken.models.gguf.reader import read_gguf
from foretoken.models.gguf.weights import GgufWeights
from foretoken.models.loader import load_plain
from foretoken.ops.backends.native.stack import NativeStack
from foretoken.ops.formats import BLOCKS
from foretoken.ops.stack import Blocks, Dense, Joined, Linear, Stack, map_linears, parts_of
from foretoken.outputs import RequestOutput
from tests.models import families
from tests.models.gguf_models import (
    END,
    HEADS,
    MIXES,
    SIZES,
    VOCABULARY,
    WINDOW,
    Written,
    permuted,
    tensor_name,
)
from tests.models.walk import logits_of, walk
from tests.native.libraries import native_backend
from tests.ops.weights import MINIMUM_AT, nibbles, put_half
from tests.support.kernels import needs_kernels

pytestmark = needs_kernels

# Model type, `general.architecture`, settings.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "llama", {}),
    "llama, tied": ("llama", "llama", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", "qwen2", {}),
    "qwen3": ("qwen3", "qwen3", {}),
    "mistral": ("mistral", "llama", {"sliding_window": WINDOW}),
    "mistral3": ("mistral", "mistral3", {"sliding_window": WINDOW}),
}
PLAIN = ("F32", "F16", "BF16")
BACKENDS = ["native", "torch"]
FLIPS = 2e-2
"""Relative to the largest logit: an ulp in a sum may round an activation to the next code."""
ROUNDING = 6e-2
"""The error of 8-bit activations in a model of two layers, relative to the largest logit."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def write(family: str, mix: str, seed: int = 0) -> Written:
        model_type, architecture, overrides = FAMILIES[family]
        folder = tmp_path_factory.mktemp("gguf")
        return Written(folder, model_type, mix, architecture, seed=seed, **overrides)

    return write


def text_of(length: int, seed: int = 1) -> list[int]:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (length,), generator=random).tolist()


def load(path: Path, backend: str = "native") -> CausalLM:
    model = load_model(path, device="cpu", backend=backend)
    assert model.runs_in_kernels == (backend == "native")
    return model


def error_of(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape
    return ((found.double() - wanted.double()).abs().max() / wanted.abs().max()).item()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mix", PLAIN)
@pytest.mark.parametrize("family", FAMILIES)
def test_plain_numbers_are_the_model_from_safetensors(
    written: Any, family: str, mix: str, backend: str
) -> None:
    """In native kernels to the bit."""
    model, text = written(family, mix), text_of(30)
    found, same = (logits_of(load(path, backend), text) for path in (model.file, model.folder))
    assert error_of(found, same) <= (0 if backend == "native" else 1e-5)
    assert error_of(found, model.exact_logits(text)) <= 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mix", [mix for mix in MIXES if mix not in PLAIN])
@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_are_the_model_in_float64(written: Any, family: str, mix: str, backend: str) -> None:
    """Close to the model that rounds rows before products, less close to the one that does not."""
    model, text = written(family, mix), text_of(30)
    found = logits_of(load(model.file, backend), text)
    assert error_of(found, model.exact_logits(text)) <= FLIPS
    assert 1e-4 < error_of(found, model.exact_logits(text, rounds=False)) <= ROUNDING


def in_order(index: NDArray[Any], heads: int) -> NDArray[Any]:
    return index


def whole_matrix(index: NDArray[Any], heads: int) -> NDArray[Any]:
    """The order of one head, for all rows."""
    return permuted(index, 1)


@pytest.mark.parametrize("order", [in_order, whole_matrix])
@pytest.mark.parametrize("mix", ["F32", "K mix"])
def test_the_comparison_sees_another_order_of_rows(tmp_path: Path, mix: str, order: Any) -> None:
    model, text = Written(tmp_path, "llama", mix, order=order), text_of(30)
    assert error_of(logits_of(load(model.file), text), model.exact_logits(text)) > 0.1


def swapped(kind: str, blocks: Tensor) -> None:
    codes = nibbles(kind, blocks)
    codes.copy_(codes >> 4 | codes << 4)


def doubled(kind: str, blocks: Tensor) -> None:
    if kind in MINIMUM_AT:
        minimum = blocks[..., MINIMUM_AT[kind] :][..., :2].contiguous().view(torch.float16)
        put_half(blocks, MINIMUM_AT[kind], 2 * minimum[..., 0])


@pytest.mark.parametrize("change", [swapped, doubled])
def test_kernels_that_read_blocks_otherwise_are_not_used(written: Any, change: Any) -> None:
    """The order of nibbles, or minima. The kernels are given changed blocks instead."""

    def changed(part: Any) -> Any:
        rows = part.rows.clone()
        change(part.kind, rows.unflatten(1, (-1, BLOCKS[part.kind].nbytes)))
        return part._replace(rows=rows)

    def load_stack(stack: Stack, *sizes: int, deterministic: bool) -> NativeStack:
        def linear(one: Linear) -> Linear:
            parts = tuple(map(changed, parts_of(one.weight)))
            return one._replace(weight=Joined(parts) if len(parts) > 1 else parts[0])

        return NativeStack(map_linears(stack, linear), *sizes, deterministic=deterministic)

    message = "With weights stored as .*Q4_K.* the kernels of backend `native` give logits that"
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(written("llama", "K mix").file, device="cpu", backend=native_backend(load_stack))


@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_rows_are_those_of_the_converter(written: Any, family: str) -> None:
    model = written(family, "F32")
    names = dict(model.module.named_parameters())
    assert {parameter_name(tensor_name(name)) for name in names} == names.keys()
    config = model.module.config.to_dict()
    for name, parameter in names.items():
        order_N = row_order(model.architecture, name, config)
        is_turned = "q_proj" in name or "k_proj" in name
        assert (order_N is not None) == (is_turned and family not in ("qwen2", "qwen3"))
        if order_N is not None:
            heads = HEADS if "q_proj" in name else SIZES["num_key_value_heads"]
            assert np.array_equal(permuted(np.arange(len(parameter)), heads)[order_N],
                                  np.arange(len(parameter)))  # fmt: skip


@pytest.mark.parametrize("mix", ["Q8_0", "K mix", "F16"])
def test_weights_stay_in_the_file_s_formats(written: Any, tmp_path: Path, mix: str) -> None:
    """Weights that kernels have packed are not kept; the embedding is read from the mapped file."""
    model = written("llama", mix)
    path = Path(shutil.copy(model.file, tmp_path))
    loaded = load(path)
    stack: Stack = loaded.network.stack
    embedding = loaded.embedding
    kinds = {"F16": "float16"}
    wanted = kinds.get(mix, model.kinds["model.embed_tokens.weight"])
    kept = embedding.rows if isinstance(embedding, Blocks) else embedding.values
    assert (embedding.kind if isinstance(embedding, Blocks) else str(kept.dtype)[6:]) == wanted
    for part in [p for layer in stack.layers for p in parts_of(layer.mixer.qkv.weight)]:
        assert (part.rows if isinstance(part, Blocks) else part.values).is_meta
    assert loaded.module is None
    before = kept[0].clone()
    change_first(path, "token_embd.weight", 0x11)
    assert not torch.equal(kept[0], before), "it is the file's own memory"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mix", ["F16", "Q8_0", "K mix"])
def test_rows_of_the_embedding_are_read_again_after_their_memory_was_freed(
    written: Any, mix: str, backend: str
) -> None:
    model, text = written("llama, tied", mix), text_of(30)
    loaded = load(model.file, backend)  # which has freed it once
    wanted = logits_of(loaded, text)
    weights = GgufWeights(read_gguf(model.file), model.module)
    held = (loaded.embedding, weights.weight("model.embed_tokens.weight"))
    rows = [one.rows if isinstance(one, Blocks) else one.values for one in held]
    assert rows[0].data_ptr() == rows[1].data_ptr()
    weights.release()
    assert torch.equal(logits_of(loaded, text), wanted)
    assert torch.equal(logits_of(load(model.file, backend), text), wanted)


@pytest.mark.parametrize("mix", ["F32", "K mix"])
def test_a_gguf_file_takes_no_random_weights(written: Any, mix: str) -> None:
    with pytest.raises(ConfigError, match=r"`load_format` is 'dummy': must be .*for a GGUF file"):
        LLM(str(written("llama", mix).file), load_format="dummy")


@pytest.mark.parametrize("mix", ["F32", "Q8_0", "K mix"])
def test_any_schedule_gives_the_same_bits(written: Any, mix: str) -> None:
    """Chunks, decodes and failed verifications, next to each other."""
    model = load(written("qwen2", mix).file)
    texts = [text_of(22, seed) for seed in range(3)]
    first, again = (walk(model, texts, seed, 16, fill=torch.nan) for seed in (1, 2))
    for rows, others, text in zip(first, again, texts, strict=True):
        whole = logits_of(model, text)
        for seen in (rows, others):
            assert seen
            assert all(torch.equal(row, whole[position]) for position, row in seen.items())


def test_the_module_of_a_file_is_its_numbers(written: Any) -> None:
    """`foretoken audit` compares an engine with it."""
    model = written("llama", "K mix")
    module, text = load_plain(model.file), text_of(20)
    assert families.same_weights(module, model.module)
    wanted = model.exact_logits(text, rounds=False)
    assert error_of(families.plain_logits(module, text), wanted) <= 1e-5


MATRICES = ("blk.0.ffn_up.weight", "blk.1.ffn_up.weight", "token_embd.weight")
DAMAGED = [*product(("F32", "BF16", "Q8_0"), BACKENDS, MATRICES)]


@pytest.mark.parametrize(("mix", "backend", "name"), DAMAGED)
def test_a_number_that_is_not_finite_is_a_damaged_file(
    tmp_path: Path, mix: str, backend: str, name: str
) -> None:
    """In any layer, also those that the check of kernels does not read."""
    model = Written(tmp_path, "qwen2", mix)
    change_first(model.file, name, 0xFF)
    with pytest.raises(CheckpointError, match=r"NaN or infinite|not finite"):
        load_model(model.file, device="cpu", backend=backend)


@pytest.mark.parametrize("name", ["blk.0.attn_norm.weight", "blk.1.attn_q.bias"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_vector_that_is_not_finite_is_a_damaged_file(
    tmp_path: Path, backend: str, name: str
) -> None:
    model = Written(tmp_path, "qwen2", "Q8_0")
    change_first(model.file, name, 0xFF)
    with pytest.raises(CheckpointError, match=r"(norm.weight|q_proj.bias)` in `.*` is not finite"):
        load_model(model.file, device="cpu", backend=backend)


def change_first(path: Path, name: str, byte: int) -> None:
    """The bytes of the first number of a tensor, or of its first scale; 255 makes it NaN."""
    reader = gguf.GGUFReader(str(path), "r+")
    (tensor,) = (tensor for tensor in reader.tensors if tensor.name == name)
    size = {"F32": 4}.get(tensor.tensor_type.name, 2)
    tensor.data.reshape(-1).view(np.uint8)[:size] = byte
    reader.data.flush()


# ---------------------------------------------------------------------------- engines

PROMPTS = ["def add(a, b):", "x", "import os\nimport sys\n" * 4, "for i in range(10): print(i)"]
GREEDY = SamplingParams(temperature=0, max_tokens=40)
HEAD: dict[str, Any] = {"hidden": 256, "vocabulary": VOCABULARY, "aux_layers": (0, 1)}


def build(path: Path, speculation: dict[str, Any] | None = None, **options: Any) -> LLM:
    defaults = {"block_size": 4, "max_num_seqs": 3, "max_num_batched_tokens": 32}
    return LLM(str(path), speculation, **{**defaults, **options})


def run(llm: LLM, prompts: list[Any], params: Any) -> list[list[int]]:
    step = llm.engine.step

    def checked_step() -> Any:
        changed = step()
        llm.engine.check_integrity()
        return changed

    llm.engine.step = checked_step  # type: ignore[method-assign]
    outputs: list[RequestOutput] = llm.generate(prompts, params)
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [sample.token_ids for output in outputs for sample in output.outputs]


@pytest.fixture(scope="module")
def drafts(written: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    gguf_draft = written("qwen3", "Q8_0", 1)
    head = save_head(tmp_path_factory.mktemp("head"), **HEAD)
    few = save_head(tmp_path_factory.mktemp("few"), **HEAD, drafted=99)
    return {
        "GGUF draft": {"model": str(gguf_draft.file), "num_speculative_tokens": 3},
        "safetensors draft": {"model": str(gguf_draft.folder), "num_speculative_tokens": 3},
        "greedy draft": {"model": str(gguf_draft.file), "draft_sample_method": "greedy"},
        "ngram": {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 5},
        "suffix": {"method": "suffix", "num_speculative_tokens": 5},
        "eagle3": {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3},
        "eagle3, some ids": {"method": "eagle3", "model": str(few), "num_speculative_tokens": 2},
    }


KINDS = [
    "GGUF draft", "safetensors draft", "greedy draft", "ngram", "suffix", "eagle3",
    "eagle3, some ids",
]  # fmt: skip


@pytest.mark.parametrize("mix", ["K mix", "Q8_0", "F16", "blocks and plain"])
@pytest.mark.parametrize("kind", KINDS)
def test_speculative_greedy_text_is_plain_greedy_text(
    written: Any, drafts: dict[str, Any], kind: str, mix: str
) -> None:
    file = written("llama", mix).file
    plain = run(build(file), PROMPTS, GREEDY)
    llm = build(file, drafts[kind])
    assert run(llm, PROMPTS, GREEDY) == plain
    assert llm.metrics.num_draft_tokens > 0
    assert len({tuple(tokens) for tokens in plain}) == len(PROMPTS)
    alone = [run(build(file, drafts[kind]), [prompt], GREEDY)[0] for prompt in PROMPTS[:2]]
    assert alone == plain[:2]


@pytest.mark.parametrize("kind", [None, "GGUF draft", "ngram", "eagle3"])
def test_a_seeded_text_does_not_depend_on_other_requests(
    written: Any, drafts: dict[str, Any], kind: str | None
) -> None:
    file, speculation = written("llama", "K mix").file, drafts[kind] if kind else None
    params = [
        SamplingParams(temperature=0.8, max_tokens=24, seed=100 + i, top_p=0.9 if i % 2 else 1.0)
        for i in range(len(PROMPTS))
    ]
    wanted = run(build(file, speculation), PROMPTS, params)
    assert run(build(file, speculation), PROMPTS, params) == wanted, "a seed reproduces"
    assert run(build(file, speculation), PROMPTS[::-1], params[::-1]) == wanted[::-1]
    wide = build(file, speculation, max_num_seqs=64, max_num_batched_tokens=512)
    assert run(wide, PROMPTS, params) == wanted
    one = build(file, speculation)
    pairs = zip(PROMPTS, params, strict=True)
    assert [run(one, [prompt], param)[0] for prompt, param in pairs] == wanted
    others = [SamplingParams(temperature=0.8, max_tokens=24, seed=7 + i) for i in range(4)]
    assert run(build(file, speculation), PROMPTS, others) != wanted


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("mix", ["K mix", "F16"])
def test_drafts_from_the_file_itself_are_all_accepted(
    written: Any, mix: str, temperature: float
) -> None:
    """The draft model's rounds give the bits of the target's passes."""
    file = str(written("llama", mix).file)
    llm = build(Path(file), {"model": file, "num_speculative_tokens": 3})
    run(llm, PROMPTS, SamplingParams(temperature=temperature, max_tokens=41, seed=3))
    assert llm.metrics.num_accepted_tokens == llm.metrics.num_draft_tokens > 0


def test_a_checkpoint_takes_drafts_from_a_file(written: Any, drafts: dict[str, Any]) -> None:
    folder = written("llama", "F32").folder
    plain = run(build(folder), PROMPTS, GREEDY)
    llm = build(folder, drafts["GGUF draft"])
    assert run(llm, PROMPTS, GREEDY) == plain
    assert llm.metrics.num_draft_tokens > 0
    assert run(build(written("llama", "F32").file), PROMPTS, GREEDY) == plain


@pytest.mark.parametrize("mix", ["K mix", "BF16"])
def test_a_random_head_drafts_for_a_file(
    written: Any, drafts: dict[str, Any], mix: str, tmp_path: Path
) -> None:
    """A head without an output layer borrows the file's, in the file's format."""
    from safetensors.torch import load_file, save_file

    file = written("llama", mix).file
    head = save_head(tmp_path / "head", **HEAD)
    tensors = load_file(head / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, head / "model.safetensors")
    llm = build(file, {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3})
    assert run(llm, PROMPTS, GREEDY) == run(build(file), PROMPTS, GREEDY)
    assert llm.metrics.num_draft_tokens > 0


@pytest.mark.parametrize("mix", ["K mix", "F16"])
def test_a_head_that_kernels_lack_runs_in_stock_operators(
    written: Any, tmp_path: Path, mix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its target gives float32 states, whatever the formats of the file."""
    file = written("llama", mix).file
    head = save_head(tmp_path / "head", **HEAD, head_dim=8)
    with caplog.at_level(logging.INFO, "foretoken"):
        llm = build(file, {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3})
    assert "The EAGLE-3 head runs in stock operators: head sizes are [8]" in caplog.text
    assert run(llm, PROMPTS, GREEDY) == run(build(file), PROMPTS, GREEDY)


def test_a_file_is_served_in_stock_operators(written: Any, drafts: dict[str, Any]) -> None:
    """One request at a time: stock operators may round rows differently in other batches."""
    file = written("llama", "Q8_0").file
    llm = build(file, drafts["ngram"], backend="torch")
    tokens = run(llm, PROMPTS[2:3], GREEDY)  # a prompt of several passes, the first without logits
    assert 0 < len(tokens[0]) <= 40
    assert llm.metrics.num_draft_tokens > 0


def test_a_conversation_with_a_file(written: Any) -> None:
    """Rendered by the template in the file, ended by the end token of the file."""
    model = written("llama", "K mix")
    llm = build(model.file)
    message = {"role": "user", "content": "b a"}
    (output,) = llm.chat([message], GREEDY)
    text = "<user>b a<assistant>"
    assert llm.tokenizer.decode(output.prompt_token_ids) == text
    assert output.outputs[0].token_ids == run(llm, [text], GREEDY)[0]
    assert llm.tokenizer.eos_token_id == END
    assert 256 in output.prompt_token_ids, "the one merge of the file: a space and an a"


def test_a_folder_with_one_file_is_its_model(written: Any, tmp_path: Path) -> None:
    model = written("llama", "Q8_0")
    (tmp_path / "only.gguf").symlink_to(model.file)
    assert run(build(tmp_path), PROMPTS[:1], GREEDY) == run(build(model.file), PROMPTS[:1], GREEDY)


def test_a_checkpoint_s_configuration_wins_over_files_next_to_it(written: Any) -> None:
    """The folder of a checkpoint that also holds a GGUF file is the checkpoint."""
    model = written("llama", "F32")
    assert json.loads((model.folder / "config.json").read_text())["model_type"] == "llama"
    (model.folder / "beside.gguf").symlink_to(model.file)
    try:
        assert isinstance(load(model.folder).embedding, Dense)
        assert load(model.folder).module is None
    finally:
        (model.folder / "beside.gguf").unlink()

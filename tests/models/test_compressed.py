"""Checkpoints of compressed-tensors on a CPU: read as stored, run natively, or refused by name.

What products with such weights are is shown in `native/test_quantised.py`.
"""

from __future__ import annotations

import functools
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from foretoken import LLM, SamplingParams
from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.models import CausalLM, load_model
from foretoken.models.checkpoint import check_weights
from foretoken.models.compressed import CompressedTensors
from foretoken.models.compressed_scheme import unsupported_reason
from foretoken.models.families import stays_compressed
from foretoken.models.loader import load_plain
from foretoken.ops.stack import Dense, Grouped, Stack, linears, parts_of
from tests.models import families
from tests.models.compressed_models import VOCABULARY, Scheme, Written, packed
from tests.models.families import change_config, change_tensors
from tests.models.walk import logits_of
from tests.support.kernels import needs_kernels

pytestmark = needs_kernels

INT = "int-quantized"
SCHEMES = [
    *(Scheme(bits, strategy) for bits in (4, 8) for strategy in ("tensor", "channel")),
    *(Scheme(bits, "group", size) for bits in (4, 8) for size in (32, 64)),
    Scheme(8, "tensor", format=INT), Scheme(8, "channel", format=INT),
    Scheme(8, "group", 32, INT), Scheme(8, "group", 64, INT),
]  # fmt: skip
FLIPS = 5e-2
"""Root mean squared difference, relative to the deviation: an ulp in a sum may round an activation
to the next code."""


def name_of(scheme: Scheme) -> str:
    return f"{scheme.format[:4]} {scheme.bits} {scheme.strategy} {scheme.size or ''}".strip()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def write(family: str, scheme: Scheme) -> Written:
        return Written(tmp_path_factory.mktemp("compressed"), family, scheme)

    return write


def text_of(length: int) -> list[int]:
    random = torch.Generator().manual_seed(1)
    return torch.randint(VOCABULARY, (length,), generator=random).tolist()


def error_of(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape
    difference = (found.double() - wanted.double()).square().mean().sqrt()
    return (difference / wanted.double().std()).item()


def load(folder: Path, backend: str = "native") -> CausalLM:
    return load_model(folder, device="cpu", backend=backend)


def class_of(model: CausalLM) -> str:
    return type(model.network).__name__


def stack_of(model: CausalLM) -> Stack:
    network: Any = model.network
    stack: Stack = network.stack
    return stack


# --------------------------------------------------------------------------- what is read


@pytest.mark.parametrize("scheme", SCHEMES, ids=name_of)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logits_are_those_of_the_stored_numbers(written: Any, family: str, scheme: Scheme) -> None:
    """In float64, of rounded rows; they are less close to those of rows that are not rounded."""
    model, text = written(family, scheme), text_of(40)
    native, stock = load(model.folder), load(model.folder, "torch")
    assert (class_of(native), class_of(stock)) == ("NativeStack", "StockStack")
    found, same = logits_of(native, text), logits_of(stock, text)
    wanted = model.exact_logits(text)
    assert error_of(found, wanted) <= FLIPS
    assert error_of(same, wanted) <= FLIPS
    assert error_of(found, same) <= FLIPS
    plain = model.exact_logits(text, rounds=False)
    assert error_of(found, plain) > 2 * error_of(found, wanted)


@pytest.mark.parametrize("scheme", [SCHEMES[0], SCHEMES[5], SCHEMES[-1]], ids=name_of)
@pytest.mark.parametrize("part", ["_scale", "codes"])
def test_the_comparison_sees_rows_in_another_order(
    written: Any, tmp_path: Path, scheme: Scheme, part: str
) -> None:
    """The rows of the codes, or of the scales, of one matrix are reversed."""
    model, text = written("llama", scheme), text_of(40)
    folder = Path(shutil.copytree(model.folder, tmp_path / "changed"))
    suffix = part if part == "_scale" else "_packed" if scheme.format != INT else ""

    def turn(tensors: dict[str, Tensor]) -> None:
        tensors[f"{MATRIX}{suffix}"] = tensors[f"{MATRIX}{suffix}"].flip(0)

    change_tensors(folder, turn)
    error = error_of(logits_of(load(folder), text), model.exact_logits(text))
    assert (error > 2 * FLIPS) == (part == "codes" or scheme.strategy != "tensor")


@pytest.mark.parametrize("scheme", SCHEMES, ids=name_of)
def test_matrices_stay_codes_and_are_kept_once(written: Any, scheme: Scheme) -> None:
    model = load(written("llama", scheme).folder)
    stack = stack_of(model)
    for name, linear in linears(stack):
        for part in parts_of(linear.weight):
            if name == "head":
                assert isinstance(part, Dense)
                assert not part.rounds
                continue
            assert isinstance(part, Grouped)
            assert part.codes.dtype is (torch.uint8 if scheme.bits == 4 else torch.int8)
            assert part.codes.is_meta
    assert isinstance(stack.embedding, Dense)
    assert stack.embedding.values.dtype is torch.bfloat16
    assert model.module is None


@pytest.mark.parametrize("scheme", SCHEMES, ids=name_of)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_plain_module_has_the_stored_numbers(written: Any, family: str, scheme: Scheme) -> None:
    """To the bit; `foretoken audit` compares an engine with it."""
    model = written(family, scheme)
    assert families.same_weights(load_plain(model.folder), model.module)


@pytest.mark.parametrize("scheme", [Scheme(4, "group", 32), Scheme(8, "channel")], ids=name_of)
def test_the_output_layer_may_be_codes_too(tmp_path: Path, scheme: Scheme) -> None:
    model, text = Written(tmp_path, "llama", scheme, ignore=("model.embed_tokens",)), text_of(40)
    loaded = load(tmp_path)
    assert class_of(loaded) == "NativeStack"
    assert isinstance(stack_of(loaded).head.weight, Grouped)
    assert error_of(logits_of(loaded, text), model.exact_logits(text)) <= FLIPS


# ------------------------------------------------------------- what kernels lack, with a warning


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_an_embedding_of_codes_runs_in_stock_operators(
    tmp_path: Path, bits: int, is_tied: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = Written(
        tmp_path, "llama", Scheme(bits, "channel"), ignore=(), tie_word_embeddings=is_tied
    )
    loaded, text = load(tmp_path), text_of(40)
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert "The model runs in stock operators, slower" in record.message
    assert f"the embedding is stored as int{bits}" in record.message
    assert class_of(loaded) == "StockStack"
    assert error_of(logits_of(loaded, text), model.exact_logits(text)) <= FLIPS


@pytest.mark.parametrize("size", [16, 48])
@pytest.mark.parametrize("scheme", [Scheme(4, "group"), Scheme(8, "group", 0, INT)], ids=name_of)
def test_groups_of_odd_sizes_run_in_stock_operators(
    tmp_path: Path, scheme: Scheme, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = Written(tmp_path, "llama", scheme._replace(size=size))
    loaded, text = load(tmp_path), text_of(40)
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert f"has groups of {size}: no multiple of 32" in record.message
    assert class_of(loaded) == "StockStack"
    assert error_of(logits_of(loaded, text), model.exact_logits(text)) <= FLIPS


@pytest.mark.parametrize("scheme", [Scheme(4, "group", 32), Scheme(8, "channel")], ids=name_of)
def test_a_tied_checkpoint_may_hold_its_output_layer_again(tmp_path: Path, scheme: Scheme) -> None:
    model, text = Written(tmp_path, "llama", scheme, tie_word_embeddings=True), text_of(40)
    wanted = logits_of(load(tmp_path), text)
    assert error_of(wanted, model.exact_logits(text)) <= FLIPS

    def copy_head(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    change_tensors(tmp_path, copy_head)
    assert torch.equal(logits_of(load(tmp_path), text), wanted)


# ------------------------------------------------------------------------------- damaged files

MATRIX = "model.layers.1.mlp.up_proj.weight"
Tensors = dict[str, Tensor]


def without(suffix: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(MATRIX + suffix)


def with_part(suffix: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Any]:
    def edit(tensors: Tensors) -> None:
        tensors[MATRIX + suffix] = change(tensors[MATRIX + suffix]).contiguous()

    return edit


def with_number(value: float) -> Callable[[Tensor], Tensor]:
    def put(scale: Tensor) -> Tensor:
        scale[-1, -1] = value
        return scale

    return put


def with_plain(tensors: Tensors) -> None:
    tensors[MATRIX] = torch.ones(384, 192)


SCALE, PACKED, SHAPE = "_scale", "_packed", "_shape"
DAMAGES: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "no scale": (without(SCALE), SCALE),
    "no shape": (without(SHAPE), SHAPE),
    "no codes": (without(PACKED), ""),
    "nothing of it": (lambda t: [t.pop(MATRIX + s) for s in (SCALE, PACKED, SHAPE)], ""),
    "scale of three dimensions": (with_part(SCALE, lambda s: s[..., None]), SCALE),
    "scale of too few rows": (with_part(SCALE, lambda s: s[:-1]), SCALE),
    "scale of too many rows": (with_part(SCALE, lambda s: torch.cat([s, s])), SCALE),
    "scale of no columns": (with_part(SCALE, lambda s: s[:, :0]), SCALE),
    "scale of no rows": (with_part(SCALE, lambda s: s[:0]), SCALE),
    "scale of groups that do not divide": (with_part(SCALE, lambda s: s[:, :5]), SCALE),
    "scale NaN": (with_part(SCALE, with_number(torch.nan)), SCALE),
    "scale infinite": (with_part(SCALE, with_number(-torch.inf)), SCALE),
    "codes of one dimension": (with_part(PACKED, lambda p: p.flatten()), PACKED),
    "codes of too few words": (with_part(PACKED, lambda p: p[:, :-1]), PACKED),
    "codes of too many words": (with_part(PACKED, lambda p: torch.cat([p, p[:, :1]], 1)), PACKED),
    "codes of no words": (with_part(PACKED, lambda p: p[:, :0]), PACKED),
    "codes of too few rows": (with_part(PACKED, lambda p: p[:-1]), PACKED),
    "codes of another dtype": (with_part(PACKED, Tensor.long), PACKED),
    "shape of one number": (with_part(SHAPE, lambda s: s[0]), ""),
    "shape of three numbers": (with_part(SHAPE, lambda s: torch.cat([s, s[:1]])), ""),
    "shape of no numbers": (with_part(SHAPE, lambda s: s[:0]), ""),
    "shape turned": (with_part(SHAPE, lambda s: s.flip(0)), ""),
    "shape of fractions": (with_part(SHAPE, lambda s: s * 1.5), SHAPE),
    "shape NaN": (with_part(SHAPE, lambda s: s * torch.nan), SHAPE),
    "shape negative": (with_part(SHAPE, lambda s: -s), ""),
    "numbers and codes": (with_plain, ""),
}


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_tensor_is_named(written: Any, tmp_path: Path, damage: str, backend: str) -> None:
    change, suffix = DAMAGES[damage]
    source = written("llama", Scheme(4, "group", 32)).folder
    folder = Path(shutil.copytree(source, tmp_path / "damaged"))
    load(folder, backend)
    change_tensors(folder, change)
    with pytest.raises(CheckpointError, match=MATRIX.replace(".", r"\.") + suffix):
        load(folder, backend)
    with pytest.raises(CheckpointError, match=MATRIX.replace(".", r"\.") + suffix):
        load_plain(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("_scale"), f"`{MATRIX}` is stored as torch.int8, without scales"),
        (with_part("", Tensor.short), f"`{MATRIX}` is stored as torch.int16: must be int8"),
        (with_part("", lambda codes: codes[:-1]), f"mismatched tensors, for example `{MATRIX}`"),
    ],
)
def test_codes_that_are_not_packed_are_int8_with_scales(
    written: Any, tmp_path: Path, change: Any, message: str
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(written("llama", Scheme(8, "channel", format=INT)).folder, folder)
    change_tensors(folder, change)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def parts(rows: int, inputs: int, bits: int) -> Tensors:
    codes = torch.arange(rows * inputs).view(rows, inputs) % 2**bits - 2 ** (bits - 1)
    shape, scale = torch.tensor([rows, inputs]), torch.ones(rows, 1)
    return {"w_packed": packed(codes, bits), "w_scale": scale, "w_shape": shape}


def stored(folder: Path, tensors: Tensors) -> CompressedTensors:
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return CompressedTensors(check_weights(folder, plain=False))


@pytest.mark.parametrize(("inputs", "bits"), [(34, 4), (36, 4), (33, 8), (34, 8), (35, 8)])
def test_the_last_word_of_a_row_may_be_half_full(tmp_path: Path, inputs: int, bits: int) -> None:
    weight = stored(tmp_path, parts(3, inputs, bits)).weight("w")
    assert isinstance(weight, Grouped)
    assert weight.shape == (3, inputs)
    codes = weight.codes
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(1).to(torch.int8) - 8
    wanted = torch.arange(3 * inputs).view(3, inputs) % 2**bits - 2 ** (bits - 1)
    assert torch.equal(codes.long(), wanted)


@pytest.mark.parametrize("inputs", [31, 33, 1])
def test_rows_of_an_odd_number_of_four_bits_are_refused(tmp_path: Path, inputs: int) -> None:
    """Two codes share a byte, and a row begins with a whole byte."""
    with pytest.raises(CheckpointError, match=r"`w_packed` is torch.int32 .* not a matrix of"):
        stored(tmp_path, parts(3, inputs, 4)).weight("w")


@pytest.mark.parametrize("shape", [[3], [0, 32], [3, 0], [-3, 32], [3, 32, 1], []])
def test_a_shape_that_is_no_matrix_is_refused(tmp_path: Path, shape: list[int]) -> None:
    tensors = parts(3, 32, 4) | {"w_shape": torch.tensor(shape, dtype=torch.int64)}
    with pytest.raises(CheckpointError, match="`w`"):
        stored(tmp_path, tensors).weight("w")


# ------------------------------------------------------------------------ schemes not read here

GROUP_0 = ("config_groups", "group_0")
WEIGHTS, INPUTS = (*GROUP_0, "weights"), (*GROUP_0, "input_activations")
EIGHT = {"num_bits": 8, "type": "int", "dynamic": True, "symmetric": True, "strategy": "token"}
TAKEN: list[tuple[tuple[str, ...], Any]] = [
    ((), None),
    (("sparsity_config",), {}),
    (INPUTS, EIGHT),
    (INPUTS, {"num_bits": 8, "dynamic": True}),
    *(((*WEIGHTS, "actorder"), value) for value in (None, False, "static", "weight")),
]
REFUSED: list[tuple[tuple[str, ...], Any, str]] = [
    (("format",), "float-quantized", "its format is `float-quantized`"),
    (("format",), "marlin-24", "its format is `marlin-24`"),
    (("format",), None, "its format is `None`"),
    *(
        ((key,), {"num_bits": 8}, f"it has a `{key}`")
        for key in ("kv_cache_scheme", "sparsity_config", "transform_config")
    ),
    (("config_groups",), {}, "not given one by one"),
    (("config_groups",), None, "not given one by one"),
    (("config_groups",), ["Linear"], "not given one by one"),
    (("config_groups", "W4A16"), ["Linear"], "names of presets"),
    ((*GROUP_0, "output_activations"), EIGHT, "outputs are quantised"),
    (WEIGHTS, None, "weights are `None` of None bits"),
    ((*WEIGHTS, "type"), "float", "weights are `float` of 4 bits"),
    ((*WEIGHTS, "num_bits"), 2, "weights are `int` of 2 bits"),
    ((*WEIGHTS, "symmetric"), False, "zero points"),
    ((*WEIGHTS, "strategy"), "block", "scales are by `block`"),
    ((*WEIGHTS, "strategy"), None, "scales are by `None`"),
    ((*WEIGHTS, "actorder"), "group", "in another order"),
    (INPUTS, {**EIGHT, "num_bits": 4}, "not symmetric, dynamic int8"),
    (INPUTS, {**EIGHT, "type": "float"}, "not symmetric, dynamic int8"),
    (INPUTS, {**EIGHT, "dynamic": False}, "not symmetric, dynamic int8"),
    (INPUTS, {**EIGHT, "symmetric": False}, "not symmetric, dynamic int8"),
    (INPUTS, "W8A8", "not symmetric, dynamic int8"),
]


def edited(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    scheme: dict[str, Any] = Scheme(4, "group", 32).config(("lm_head",))
    place = scheme
    for key in path[:-1]:
        place = place[key]
    if path:
        place[path[-1]] = value
    return scheme


@pytest.mark.parametrize(("path", "value"), TAKEN)
def test_other_ways_to_state_the_same_scheme_are_read(path: tuple[str, ...], value: Any) -> None:
    config = families.make_config("llama", {"quantization_config": edited(path, value)})
    assert unsupported_reason(edited(path, value)) is None
    assert stays_compressed(config)


@pytest.mark.parametrize(("path", "value", "message"), REFUSED)
def test_another_scheme_is_left_to_transformers(
    path: tuple[str, ...], value: Any, message: str
) -> None:
    reason = unsupported_reason(edited(path, value))
    assert reason is not None
    assert message in reason
    assert not stays_compressed(
        families.make_config("llama", {"quantization_config": edited(path, value)})
    )


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("gemma", {}),
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
    ],
)
def test_a_model_that_is_no_stack_is_left_to_transformers(
    family: str, overrides: dict[str, Any]
) -> None:
    quantisation = {"quantization_config": edited((), None)}
    assert not stays_compressed(families.make_config(family, {**overrides, **quantisation}))
    assert stays_compressed(families.make_config("llama", quantisation))


@pytest.mark.parametrize("change", [REFUSED[0], ((*WEIGHTS, "symmetric"), False, "")])
def test_transformers_quantiser_names_its_package(
    written: Any, tmp_path: Path, change: tuple[tuple[str, ...], Any, str]
) -> None:
    """The package is not installed here."""
    folder = tmp_path / "model"
    shutil.copytree(written("llama", Scheme(4, "group", 32)).folder, folder)
    change_config(folder, quantization_config=edited(*change[:2]))
    message = r"`quant_method`: compressed-tensors\) cannot be loaded here: .*compressed.tensors"
    with pytest.raises(UnsupportedModelError, match=message):
        load(folder)


# ------------------------------------------------------------------------------------- engines


@pytest.mark.parametrize("scheme", [Scheme(4, "group", 32), Scheme(8, "channel")], ids=name_of)
def test_drafts_of_the_checkpoint_itself_are_all_accepted(written: Any, scheme: Scheme) -> None:
    """Looked-up drafts change no token."""
    folder = str(written("llama", scheme).folder)
    prompts: list[Any] = [{"prompt_token_ids": text_of(n)} for n in (3, 9, 20)]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    texts = []
    for speculation in (None, {"model": folder, "num_speculative_tokens": 3}, {"method": "ngram"}):
        llm = LLM(folder, speculation, num_blocks=32)
        texts.append([o.outputs[0].token_ids for o in llm.generate(prompts, params)])
        if speculation and "model" in speculation:
            assert llm.metrics.num_accepted_tokens == llm.metrics.num_draft_tokens > 0
    assert texts[0] == texts[1] == texts[2]
    assert len({tuple(text) for text in texts[0]}) == 3

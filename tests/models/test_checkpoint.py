"""Broken, missing and hostile checkpoints: one clear error each, without a traceback."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foretoken import LLM, SamplingParams
from foretoken.errors import CheckpointError, ConfigError, ForetokenError, UnsupportedModelError
from foretoken.models import CausalLM, TargetView, load_model, load_tokenizer, resolve_checkpoint
from tests.models import families
from tests.models.families import change_config
from tests.models.hub import use
from tests.support.checkpoints import save_checkpoint, save_tokenizer


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.save_model(tmp_path_factory.mktemp("whole"), "llama", {})


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    families.save_model(folder, "llama", {}, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def load(folder: Path | str, **kwargs: object) -> CausalLM:
    view = TargetView(module=True)
    return load_model(folder, device="cpu", backend="torch", view=view, **kwargs)  # type: ignore[arg-type]


WEIGHTS, GENERATION = "model.safetensors", "generation_config.json"
Damage = Callable[[Path], object]


def rewritten(change: Callable[[bytes], bytes]) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / WEIGHTS
        path.write_bytes(change(path.read_bytes()))

    return damage


def text_in(name: str, text: str) -> Damage:
    return lambda folder: (folder / name).write_text(text)


def without(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def configured(**changes: object) -> Damage:
    return lambda folder: change_config(folder, **changes)


def with_entry(**entry: Any) -> Damage:
    """One tensor of float32, as the header describes it, with these changes."""
    whole = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **entry}
    header = json.dumps({"w": {k: v for k, v in whole.items() if v != "gone"}}).encode()
    return rewritten(lambda _: len(header).to_bytes(8, "little") + header + bytes(4))


BROKEN: dict[str, tuple[Damage, str]] = {
    "no dtype": (with_entry(dtype="gone"), "corrupt header"),
    "no shape": (with_entry(shape=None), "corrupt header"),
    "three offsets": (with_entry(data_offsets=[0, 4, 8]), "corrupt header"),
    "truncated": (
        rewritten(lambda data: data[:-100]),
        r"model.safetensors` is truncated: expected \d+ bytes, found \d+",
    ),
    "truncated in its header": (
        rewritten(lambda data: data[:50]), r"truncated: expected more than \d+ bytes, found 50",
    ),
    "appended to": (
        rewritten(lambda data: data + b"x"), r"corrupt: expected \d+ bytes, found \d+",
    ),
    "garbage": (rewritten(lambda _: b"\xff" * 4096), "not a safetensors file"),
    "garbage in its header": (
        rewritten(lambda data: data[:8] + b"x" * 32 + data[40:]), "corrupt header",
    ),
    "empty": (rewritten(lambda _: b""), r"not a safetensors file \(0 bytes\)"),
    "a pointer of git lfs": (
        text_in(WEIGHTS, "version https://git-lfs.github.com/spec/v1\n"), "git lfs pull",
    ),
    "only pickled weights": (
        lambda folder: (folder / WEIGHTS).rename(folder / "pytorch_model.bin"),
        "pytorch_model.bin.*Convert them to safetensors",
    ),
    "no weights": (without(WEIGHTS), "no `model.safetensors`"),
    "no config": (without("config.json"), "config.json` is missing"),
    "bad JSON": (text_in("config.json", "{"), "not valid JSON"),
    "a list": (text_in("config.json", "[]"), "must hold a JSON object"),
    "no model type": (text_in("config.json", "{}"), "no `model_type`"),
    "a bad value": (
        configured(hidden_size="large"),
        "not a valid `llama` configuration: .*'hidden_size': .*(int|str)",
    ),
    "another vocabulary": (configured(vocab_size=100), "do not fit"),
    "a list for quantization": (
        configured(quantization_config=["awq"]), "not a valid `llama` configuration: 'list'",
    ),
    "bad JSON of generation": (
        text_in(GENERATION, '{"eos_token_id": [1, 2]'), f"{GENERATION}` is not valid JSON",
    ),
    "a list of generation": (
        text_in(GENERATION, "[1, 2]"), f"{GENERATION}` must hold a JSON object",
    ),
    "a bad end": (
        text_in(GENERATION, '{"eos_token_id": [1, "2"]}'),
        rf"{GENERATION}` gives `eos_token_id` as \[1, '2'\]: it must be a token id",
    ),
    "an empty end": (
        text_in(GENERATION, '{"eos_token_id": ""}'),
        f"{GENERATION}` gives `eos_token_id` as '': it must be a token id",
    ),
    "a bad value of generation": (
        text_in(GENERATION, '{"cache_implementation": "spiral"}'),
        f"{GENERATION}` is not a valid generation configuration",
    ),
    "more layers": (
        configured(num_hidden_layers=3), "`num_hidden_layers` as 3: the weights have 2 layers",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_broken_folder(whole: Path, tmp_path: Path, case: str) -> None:
    damage, message = BROKEN[case]
    folder = Path(shutil.copytree(whole, tmp_path / "model"))
    damage(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(folder)
    assert "Traceback" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_missing_shard(sharded: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sharded, tmp_path / "model"))
    load(folder)
    victim = sorted(folder.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(CheckpointError, match=f"lacks 1 of .*`{victim.name}`"):
        load(folder)


def test_shard_without_its_tensor(sharded: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sharded, tmp_path / "model"))
    first, second, *_ = sorted(folder.glob("*.safetensors"))
    shutil.copy(first, second)
    with pytest.raises(CheckpointError, match=f"{second.name}` lacks the tensor"):
        load(folder)


def dangling(path: Path) -> Path:
    """A link to nothing, as the hub's cache has for a file that was not downloaded."""
    path.unlink(missing_ok=True)
    path.symlink_to("../../blobs/0123")
    return path


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "shard"])
def test_weights_that_are_links_to_nothing(
    whole: Path, sharded: Path, tmp_path: Path, name: str
) -> None:
    folder = Path(shutil.copytree(whole if name in os.listdir(whole) else sharded, tmp_path / "m"))
    path = sorted(folder.glob("*.safetensors"))[1] if name == "shard" else folder / name
    message = f"{path.name}` is a link to `../../blobs/0123`, which is not there: .* Download the"
    dangling(path)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


SETTINGS = ["config.json", "generation_config.json", "adapter_config.json"]
TOKENIZERS = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]


@pytest.mark.parametrize("name", [*SETTINGS, *TOKENIZERS])
def test_settings_that_are_links_to_nothing(whole: Path, tmp_path: Path, name: str) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "model"))
    save_tokenizer(folder)
    dangling(folder / name)
    with pytest.raises(CheckpointError, match=f"{name}` is a link to .* is not there"):
        (load_tokenizer if name in TOKENIZERS else load)(folder)


def test_what_is_not_read_may_be_anything(tmp_path: Path) -> None:
    """Links to nothing and to themselves, folders and pipes, named as weights and settings."""
    save_checkpoint(tmp_path)
    for name in ("other.safetensors", "model.safetensors.index.json", "vocab.json", "merges.txt"):
        dangling(tmp_path / name)
    (tmp_path / "loop.safetensors").symlink_to("loop.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    os.mkfifo(tmp_path / "pipe.safetensors")
    (output,) = LLM(str(tmp_path), num_blocks=64).generate("a", SamplingParams(max_tokens=2))
    assert output.outputs[0].token_ids


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_what_is_read_must_be_a_file(whole: Path, tmp_path: Path, name: str) -> None:
    """Reading a pipe would wait for its writer."""
    for make in (os.mkfifo, os.mkdir):
        folder = Path(shutil.copytree(whole, tmp_path / make.__name__))
        (folder / name).unlink()
        make(folder / name)
        with pytest.raises(CheckpointError, match=f"{name}` is not a file"):
            load(folder)


ANY = "lacks 1|cannot be read|is not a file|not a file in"
SHARDS = [(shard, ANY) for shard in ("", "..", "x" * 300, "\0", 7, None, "config.json/x")]
SHARDS += [(f"{place}/other.safetensors", "not a file in the same folder") for place in ("..", "")]


@pytest.mark.parametrize(("shard", "message"), SHARDS)
@pytest.mark.parametrize("every", [True, False])
def test_an_index_of_files_that_cannot_be(
    sharded: Path, tmp_path: Path, shard: object, message: str, every: bool
) -> None:
    folder = Path(shutil.copytree(sharded, tmp_path / "model"))
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    places = index["weight_map"]
    places |= dict.fromkeys(places if every else ["model.norm.weight"], shard)
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        load(folder)


OWN_CODE = {
    "architectures": ["MineForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_mine.MineForCausalLM"},
}
ADAPTER = text_in(
    "adapter_config.json", '{"peft_type": "LORA", "base_model_name_or_path": "someone/base"}'
)
UNSUPPORTED: dict[str, tuple[Damage, str]] = {
    "own code": (configured(model_type="mine", **OWN_CODE), "its own code"),
    "own code of a known type": (configured(**OWN_CODE), "its own code"),
    "unknown type": (
        configured(model_type="llama99", architectures=["Llama99ForCausalLM"]),
        "no causal language model of type `llama99`",
    ),
    "another head": (
        configured(architectures=["LlamaForSequenceClassification"]),
        "LlamaForSequenceClassification",
    ),
    "quantised": (
        configured(quantization_config={"quant_method": "awq", "bits": 4}),
        r"`quant_method`: awq.*requires gptqmodel",
    ),
    "adapter": (ADAPTER, "adapter_config.json`: LORA, for `someone/base`.*merge_and_unload"),
    "only an adapter": (
        lambda folder: (ADAPTER(folder), without("config.json")(folder)),
        "adapter_config.json`: LORA",
    ),
    "encoder and decoder": (
        text_in("config.json", '{"model_type": "t5"}'), "no causal language model of type `t5`",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_unsupported_folder(whole: Path, tmp_path: Path, case: str) -> None:
    change, message = UNSUPPORTED[case]
    folder = Path(shutil.copytree(whole, tmp_path / "model"))
    change(folder)
    (folder / "modeling_mine.py").write_text("raise SystemExit('remote code ran')")
    with pytest.raises(UnsupportedModelError, match=message):
        load(folder)


def same_weights(one: CausalLM, other: CausalLM) -> bool:
    return families.same_weights(one.module, other.module)


def test_code_next_to_a_known_architecture_is_ignored(whole: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "model"))
    change_config(folder, auto_map={"AutoModelForCausalLM": "modeling_mine.LlamaForCausalLM"})
    (folder / "modeling_mine.py").write_text("raise SystemExit('remote code ran')")
    assert same_weights(load(folder), load(whole))


def forbid(monkeypatch: pytest.MonkeyPatch, name: str | None, *methods: str) -> None:
    """Refuse calls to paths of this name, or to all, as the system does if the user is not root."""
    for method in methods:
        plain = getattr(Path, method)

        def call(self: Path, *args: Any, plain: Any = plain, **options: Any) -> Any:
            if name in (None, self.name):
                raise PermissionError(13, "Permission denied", str(self))
            return plain(self, *args, **options)

        monkeypatch.setattr(Path, method, call)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_that_may_not_be_read(
    whole: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    forbid(monkeypatch, name, "open")
    with pytest.raises(CheckpointError, match=f"{name}` cannot be read: Permission denied"):
        load(whole)


@pytest.mark.parametrize("read", [load, load_tokenizer])
def test_a_folder_that_may_not_be_searched(
    whole: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], object]
) -> None:
    forbid(monkeypatch, None, "is_file", "iterdir")
    with pytest.raises(CheckpointError, match="cannot be read: Permission denied"):
        read(whole)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tiny-pyton", "Did you mean `tiny-python`?"),
        ("nobody/nothing", "HF_HUB_OFFLINE forbids a download"),
        ("./no/such/folder", "Give a folder"),
        ("", "No model ``"),
    ],
)
def test_names_of_no_model(name: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=r"No model") as caught:
        resolve_checkpoint(name)
    assert message in str(caught.value)


def test_a_file_is_not_a_folder(whole: Path) -> None:
    with pytest.raises(CheckpointError, match="is a file"):
        resolve_checkpoint(whole / "config.json")


def test_hub_cache_is_read_without_network(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = tmp_path / "models--some--model"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("0" * 40)
    shutil.copytree(whole, repo / "snapshots" / ("0" * 40))
    use(monkeypatch, "http://127.0.0.1:9", tmp_path)
    found = resolve_checkpoint("some/model", local_files_only=True)
    assert found.samefile(repo / "snapshots" / ("0" * 40))


@pytest.mark.parametrize("dtype", ["float8", "float64", torch.float64, torch.int8])
def test_other_dtypes_are_refused(whole: Path, dtype: object) -> None:
    with pytest.raises(ConfigError, match="dtype"):
        load(whole, dtype=dtype)


@pytest.mark.parametrize("length", [0, 65])
def test_a_length_out_of_bounds(whole: Path, length: int) -> None:
    with pytest.raises(ConfigError, match="max_model_len"):
        load(whole, max_model_len=length)


def test_nothing_is_printed(whole: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load(whole)
    with pytest.raises(ForetokenError):
        load("no-such-model")
    assert capfd.readouterr() == ("", "")


def copied(whole: Path, folder: Path, **changes: object) -> Path:
    shutil.copytree(whole, folder, dirs_exist_ok=True)
    change_config(folder, **changes)
    return folder


@pytest.mark.parametrize("window", [0, 4096])
def test_a_window_that_the_family_ignores(whole: Path, tmp_path: Path, window: int) -> None:
    network: Any = load(copied(whole, tmp_path, sliding_window=window)).network
    assert {layer.mixer.options.sliding_window for layer in network.stack.layers} == {None}


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("window", [0, -3])
def test_a_window_of_no_tokens(tmp_path: Path, window: int, backend: str) -> None:
    folder = families.save_model(tmp_path, "mistral", {})
    change_config(folder, sliding_window=window)
    with pytest.raises(ConfigError, match=f"`options.sliding_window` is {window}"):
        load_model(folder, device="cpu", backend=backend)


def test_a_tensor_in_two_files_is_the_one_that_transformers_takes(
    sharded: Path, tmp_path: Path
) -> None:
    shutil.copytree(sharded, tmp_path, dirs_exist_ok=True)
    index = tmp_path / "model.safetensors.index.json"
    described = json.loads(index.read_text())
    name = "model.layers.1.mlp.up_proj.weight"
    own = described["weight_map"][name]
    other = next(file for file in described["weight_map"].values() if file != own)
    tensors = load_file(tmp_path / other)
    tensors[name] = torch.randn_like(load_file(tmp_path / own)[name])
    save_file(tensors, tmp_path / other, {"format": "pt"})
    by_file = sorted(described["weight_map"].items(), key=lambda item: item[1], reverse=True)
    index.write_text(json.dumps({**described, "weight_map": dict(by_file)}))
    module, plain = load(tmp_path).module, families.plain_model(tmp_path)
    assert families.same_weights(module, plain)


@pytest.mark.parametrize("eps", [float("nan"), float("inf")])
def test_a_configuration_with_a_number_that_is_not_finite(
    whole: Path, tmp_path: Path, eps: float
) -> None:
    with pytest.raises(UnsupportedModelError, match=r"not finite|differs"):
        load(copied(whole, tmp_path, rms_norm_eps=eps))


def test_architectures_that_are_no_list(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"`architectures` .* is 5: must be a list"):
        load(copied(whole, tmp_path, architectures=5))

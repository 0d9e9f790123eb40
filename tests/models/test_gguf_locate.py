"""GGUF files by path, by folder, and on the hub by name or quantisation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from foretoken.errors import CheckpointError, ConfigError
from foretoken.models import load_tokenizer, resolve_checkpoint
from foretoken.models.gguf.reader import split_names
from foretoken.models.locate import HubFile, hub_file, only_model
from tests.models.gguf_files import model_metadata, model_tensors, write
from tests.models.hub import Hub, cached_files, go_offline, use

SET = split_names("big-Q8_0-00001-of-00002.gguf")


def save(folder: Path, *names: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        write(folder / name, model_metadata("llama"), model_tensors("llama"))
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    names = ("m-Q4_K_M.gguf", "m-IQ4_XS.gguf", "mmproj-m-Q8_0.gguf", "README.md", "sub/m.f16.gguf")
    hub = Hub({"some/model-GGUF": save(tmp_path / "repository", *names, *SET)})
    with hub.served() as url:
        use(monkeypatch, url, tmp_path / "cache")
        yield hub


def test_a_path(tmp_path: Path) -> None:
    folder = save(tmp_path / "x", "m.gguf", *SET)
    assert resolve_checkpoint(folder / "m.gguf") == folder / "m.gguf"
    assert resolve_checkpoint(str(folder / SET[1])) == folder / SET[0]
    assert load_tokenizer(folder / "m.gguf").eos_token == "<|end|>"
    with pytest.raises(CheckpointError, match=r"none.gguf` is not there: give the path"):
        resolve_checkpoint(folder / "none.gguf")
    with pytest.raises(ConfigError, match=r"`revision` is 'v1': must be left out"):
        resolve_checkpoint(folder / "m.gguf", revision="v1")
    (folder / "m.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"is a file: give the folder .* or a GGUF file"):
        resolve_checkpoint(folder / "m.bin")


def test_a_folder(tmp_path: Path) -> None:
    folder = save(tmp_path / "x", "mmproj-m.gguf", *SET)
    assert resolve_checkpoint(folder) == folder / SET[0]
    save(folder, "other.gguf")
    with pytest.raises(CheckpointError, match=r"has 2 GGUF models: name one of them. It has `big-"):
        resolve_checkpoint(folder)
    (folder / "config.json").write_text("{}")
    assert resolve_checkpoint(folder) == folder


def test_names_on_the_hub() -> None:
    assert hub_file("a/b/c.gguf") == HubFile("a/b", file="c.gguf")
    assert hub_file("a/b/c/d.GGUF") == HubFile("a/b", file="c/d.GGUF")
    assert hub_file("a/b:Q4_K_M") == HubFile("a/b", tag="Q4_K_M")
    local = ("/a/b/c.gguf", "./a/b.gguf", "../a/b.gguf", "a/../b.gguf", "~/a/b.gguf", "./a/b:Q4_0")
    for name in ("a/b", "b:Q4_K_M", "c.gguf", "b/c.gguf", "a/b:", "a/b/c:d.gguf", *local):
        assert hub_file(name) is None, name


@pytest.mark.parametrize(
    ("tag", "expected"), [("q4_k_m", "m-Q4_K_M.gguf"), ("Q8_0", SET[0]), ("F16", "sub/m.f16.gguf")]
)
def test_a_quantisation(tag: str, expected: str) -> None:
    names = ["m-Q4_K_M.gguf", "sub/m.f16.gguf", "m-Q8_0.mmproj", "mmproj-Q8_0.gguf", *SET]
    assert only_model("x", names, tag) == expected


def test_a_quantisation_that_there_is_not() -> None:
    with pytest.raises(CheckpointError, match=r"no GGUF model of `4_K_M`. It has `m-Q4_K_M.gguf`"):
        only_model("x", ["m-Q4_K_M.gguf"], "4_K_M")
    with pytest.raises(CheckpointError, match=r"`x` has no GGUF model"):
        only_model("x", ["README.md"], "Q8_0")
    with pytest.raises(CheckpointError, match=r"has 2 GGUF models of `Q8_0`: name one"):
        only_model("x", ["a-Q8_0.gguf", "b-Q8_0.gguf"], "Q8_0")


def test_only_one_file_is_downloaded(hub: Hub, tmp_path: Path) -> None:
    path = resolve_checkpoint("some/model-GGUF:Q4_K_M")
    assert path.name == "m-Q4_K_M.gguf"
    assert load_tokenizer(path) is not None
    assert cached_files(tmp_path / "cache") == hub.downloads == {"m-Q4_K_M.gguf"}
    named = resolve_checkpoint("some/model-GGUF/sub/m.f16.gguf", weights=False, revision="v1")
    assert (named.name, named.parent.parent) == ("m.f16.gguf", path.parent)


def test_all_parts_are_downloaded(hub: Hub, tmp_path: Path) -> None:
    path = resolve_checkpoint("some/model-GGUF:Q8_0")
    assert path.name == SET[0]
    assert cached_files(tmp_path / "cache") == {*SET}


def test_without_a_network(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    path = resolve_checkpoint("some/model-GGUF:Q4_K_M")
    assert resolve_checkpoint("some/model-GGUF:Q4_K_M", local_files_only=True) == path
    go_offline(monkeypatch)
    assert resolve_checkpoint("some/model-GGUF/m-Q4_K_M.gguf") == path
    assert resolve_checkpoint("some/model-GGUF:Q4_K_M") == path
    with pytest.raises(CheckpointError, match=r"no GGUF model of `Q8_0`. It has `m-Q4_K_M.gguf`"):
        resolve_checkpoint("some/model-GGUF:Q8_0")
    with pytest.raises(CheckpointError, match=r"No model `other/model`.*not in the local cache"):
        resolve_checkpoint("other/model:Q8_0")


def test_what_the_hub_does_not_have(hub: Hub) -> None:
    with pytest.raises(CheckpointError, match=r"has no GGUF model of `Q2_K`. It has `big-"):
        resolve_checkpoint("some/model-GGUF:Q2_K")
    with pytest.raises(CheckpointError, match=r"has no file `none.gguf`"):
        resolve_checkpoint("some/model-GGUF/none.gguf")
    with pytest.raises(CheckpointError, match=r"No model `other/model`.*has no such repository"):
        resolve_checkpoint("other/model:Q8_0")
    with pytest.raises(CheckpointError, match=r"has no revision `v2`"):
        resolve_checkpoint("some/model-GGUF:Q4_K_M", revision="v2")

"""Hub ids and GGUF files: found, downloaded from a hub that the test serves, or refused by name."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM, SamplingParams
from foretoken.errors import CheckpointError, ConfigError, UnsupportedModelError
from foretoken.models import load_tokenizer, resolve_checkpoint
from foretoken.models.gguf.reader import split_names
from foretoken.models.locate import HubFile, hub_file, only_model
from tests.models import families
from tests.models.gguf_files import model_metadata, model_tensors, write
from tests.models.hub import Hub, cached_files, commit_of, go_offline, use
from tests.support.checkpoints import save_checkpoint, save_tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=12)
WEIGHTS = "model.safetensors"
SETTINGS = {
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "chat_template.jinja",
}  # fmt: skip


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = families.save_model(tmp_path_factory.mktemp("repository"), "llama", {})
    save_tokenizer(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    for name in ("pytorch_model.bin", "model.pt", "modeling.py", "consolidated.safetensors"):
        (folder / name).write_bytes(b"not for us")
    for name in ("onnx/model.safetensors", "original/config.json"):
        (folder / name).parent.mkdir()
        (folder / name).write_bytes(b"not for us")
    return folder


@pytest.fixture
def hub(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with `some/model`, and an empty cache."""
    hub = Hub({"some/model": repository})
    with hub.served() as url:
        use(monkeypatch, url, tmp_path / "cache")
        yield hub


SCRIPT = """
import sys
import time
from foretoken import LLM, SamplingParams
llm = LLM("some/target", {"model": "some/draft", "revision": "v1"}, num_blocks=64)
print(llm.generate("import os", SamplingParams(temperature=0, max_tokens=12))[0].outputs[0].text)
print(llm.metrics.num_drafts > 0)
"""


def test_a_target_and_its_draft_from_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a user's process: settings in the environment, progress on the error stream."""
    pair = ("tiny-python", "tiny-python-draft")
    hub = Hub(dict(zip(("some/target", "some/draft"), map(resolve_checkpoint, pair), strict=True)))
    hub.delay = 0.6
    with hub.served() as url:
        hub_settings = {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        bars = {"TQDM_POSITION": "-1"}  # though this is no terminal
        command = [sys.executable, "-c", SCRIPT]
        environment = {**os.environ, **hub_settings, **bars}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    llm = LLM(*pair[:1], {"model": pair[1]}, num_blocks=64)
    (expected,) = llm.generate("import os", GREEDY)
    assert done.stdout == f"{expected.outputs[0].text}\nTrue\n"
    assert "Fetching" in done.stderr
    assert hub.downloads == {*SETTINGS, WEIGHTS}

    # The second time there is no network: the cache suffices.
    use(monkeypatch, hub.url, tmp_path / "hub")
    again = LLM("some/target", {"model": "some/draft", "revision": "v1"}, num_blocks=64)
    assert again.generate("import os", GREEDY)[0].outputs[0].text == expected.outputs[0].text


def test_only_what_is_read_is_downloaded(
    hub: Hub, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    folder = resolve_checkpoint("some/model", weights=False)
    assert cached_files(tmp_path / "cache") == SETTINGS
    assert resolve_checkpoint("some/model").samefile(folder)
    assert cached_files(tmp_path / "cache") == hub.downloads == {*SETTINGS, WEIGHTS}
    if time.monotonic() - began < 0.5:
        assert capfd.readouterr() == ("", ""), "too quick for bars"


@pytest.mark.parametrize("revision", ["main", "v1", commit_of("some/model")])
def test_a_revision(hub: Hub, revision: str) -> None:
    folder = resolve_checkpoint("some/model", revision=revision)
    assert folder.name == commit_of("some/model")
    asked = len(hub.requests)
    assert resolve_checkpoint("some/model", revision=revision, local_files_only=True) == folder
    assert len(hub.requests) == asked


def test_a_revision_that_does_not_exist(hub: Hub) -> None:
    with pytest.raises(CheckpointError, match="`some/model` has no revision `v2`"):
        resolve_checkpoint("some/model", revision="v2")


@pytest.mark.parametrize("name", ["tiny-python", "folder"])
def test_a_revision_of_something_other_than_a_hub_id(name: str, repository: Path) -> None:
    place = str(repository) if name == "folder" else name
    with pytest.raises(ConfigError, match=r"`revision` is 'v1': must be left out: .* not a hub id"):
        LLM(place, revision="v1")


REFUSALS = {
    "missing": (
        (401, "RepoNotFound"),
        "No model `some/model`.*has no such public repository. If it is priv",
    ),
    "gated": ((403, "GatedRepo"), "is gated: accept its terms at http.*`hf auth login`"),
    "forbidden": ((403, ""), "refuses access to `some/model`.*`hf auth login`"),
    "broken": ((500, ""), r"cannot be reached \(.*500.*Try again with a network"),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_what_the_hub_refuses(hub: Hub, kind: str) -> None:
    hub.refusals["some/model"], message = REFUSALS[kind]
    with pytest.raises(CheckpointError, match=message) as caught:
        resolve_checkpoint("some/model")
    assert "\n" not in str(caught.value)


def test_a_name_close_to_one_in_the_cache(hub: Hub) -> None:
    resolve_checkpoint("some/model", weights=False)
    with pytest.raises(CheckpointError, match=r"Did you mean `some/model`, which is in the local"):
        resolve_checkpoint("some/modle")


@pytest.mark.parametrize("setting", ["HF_HUB_OFFLINE", "local_files_only"])
def test_nothing_in_the_cache_while_downloads_are_forbidden(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    options: Any = {}
    if setting == "HF_HUB_OFFLINE":
        go_offline(monkeypatch)
    else:
        options = {"local_files_only": True}
    with pytest.raises(CheckpointError, match=f"not in the local cache, and `?{setting}`? forbids"):
        LLM("some/model", **options)
    assert not hub.requests


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "http://127.0.0.1:9", tmp_path)
    with pytest.raises(CheckpointError, match=r"http://127\.0\.0\.1:9 cannot be reached \("):
        resolve_checkpoint("some/model")


def test_a_body_that_breaks_off_is_never_loaded(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.cut = 100
    with pytest.raises(CheckpointError, match=r"download of `some/model`.*failed \(.*has size"):
        resolve_checkpoint("some/model")
    assert WEIGHTS not in cached_files(tmp_path / "cache")
    go_offline(monkeypatch)
    with pytest.raises(CheckpointError, match="has only a part of `some/model`"):
        resolve_checkpoint("some/model")
    use(monkeypatch, hub.url, tmp_path / "cache")
    hub.cut = 0
    assert (resolve_checkpoint("some/model") / WEIGHTS).is_file()


def test_a_cache_without_weights(hub: Hub, repository: Path, tmp_path: Path) -> None:
    """A repository of pickles, or a cache that another program filled in part."""
    bare = shutil.copytree(repository, tmp_path / "bare", ignore=lambda *_: [WEIGHTS])
    hub.repositories["some/pickles"] = bare
    with pytest.raises(CheckpointError, match="no weights of `some/pickles` in safetensors"):
        resolve_checkpoint("some/pickles")


def test_a_full_disk(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import file_download

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(file_download, "http_get", fail)
    with pytest.raises(CheckpointError, match=r"The disk is full: `some/model` cannot.*HF_HOME"):
        resolve_checkpoint("some/model")


def test_another_tokenizer(hub: Hub, tmp_path: Path) -> None:
    """From a hub id without its weights, from a folder, and from a folder without one."""
    target = save_checkpoint(tmp_path / "target", tokenizer=False)
    llm = LLM(target, tokenizer="some/model", num_blocks=64)
    assert WEIGHTS not in cached_files(tmp_path / "cache")
    (output,) = llm.generate("abc", GREEDY)
    assert output.prompt_token_ids == llm.tokenizer.encode("abc")
    save_tokenizer(tmp_path / "other")
    assert LLM(target, tokenizer=tmp_path / "other", num_blocks=64).tokenizer is not None
    with pytest.raises(ConfigError, match=r"`tokenizer` is .*with tokenizer files"):
        LLM(target, tokenizer=target)


def test_paths_and_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_checkpoint(tmp_path / "model")
    monkeypatch.setenv("HOME", str(tmp_path))
    for model in (folder, "~/model", Path("~/model")):
        llm = LLM(model, {"model": model}, num_blocks=64)
        assert llm.config.model == str(model)
        llm.generate("abc", GREEDY)


# GGUF files: by path, by folder, and on the hub by name or quantisation.
SET = split_names("big-Q8_0-00001-of-00002.gguf")


def save(folder: Path, *names: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        write(folder / name, model_metadata("llama"), model_tensors("llama"))
    return folder


@pytest.fixture
def gguf_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
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


def test_a_quantisation_that_does_not_exist() -> None:
    with pytest.raises(CheckpointError, match=r"no GGUF model of `4_K_M`. It has `m-Q4_K_M.gguf`"):
        only_model("x", ["m-Q4_K_M.gguf"], "4_K_M")
    with pytest.raises(CheckpointError, match=r"`x` has no GGUF model"):
        only_model("x", ["README.md"], "Q8_0")
    with pytest.raises(CheckpointError, match=r"has 2 GGUF models of `Q8_0`: name one"):
        only_model("x", ["a-Q8_0.gguf", "b-Q8_0.gguf"], "Q8_0")


def test_only_one_file_is_downloaded(gguf_hub: Hub, tmp_path: Path) -> None:
    path = resolve_checkpoint("some/model-GGUF:Q4_K_M")
    assert path.name == "m-Q4_K_M.gguf"
    assert load_tokenizer(path) is not None
    assert cached_files(tmp_path / "cache") == gguf_hub.downloads == {"m-Q4_K_M.gguf"}
    named = resolve_checkpoint("some/model-GGUF/sub/m.f16.gguf", weights=False, revision="v1")
    assert (named.name, named.parent.parent) == ("m.f16.gguf", path.parent)


def test_all_parts_are_downloaded(gguf_hub: Hub, tmp_path: Path) -> None:
    path = resolve_checkpoint("some/model-GGUF:Q8_0")
    assert path.name == SET[0]
    assert cached_files(tmp_path / "cache") == {*SET}


def test_without_a_network(gguf_hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    path = resolve_checkpoint("some/model-GGUF:Q4_K_M")
    assert resolve_checkpoint("some/model-GGUF:Q4_K_M", local_files_only=True) == path
    go_offline(monkeypatch)
    assert resolve_checkpoint("some/model-GGUF/m-Q4_K_M.gguf") == path
    assert resolve_checkpoint("some/model-GGUF:Q4_K_M") == path
    with pytest.raises(CheckpointError, match=r"no GGUF model of `Q8_0`. It has `m-Q4_K_M.gguf`"):
        resolve_checkpoint("some/model-GGUF:Q8_0")
    with pytest.raises(CheckpointError, match=r"No model `other/model`.*not in the local cache"):
        resolve_checkpoint("other/model:Q8_0")


def test_files_that_the_hub_does_not_have(gguf_hub: Hub) -> None:
    with pytest.raises(CheckpointError, match=r"has no GGUF model of `Q2_K`. It has `big-"):
        resolve_checkpoint("some/model-GGUF:Q2_K")
    with pytest.raises(CheckpointError, match=r"has no file `none.gguf`"):
        resolve_checkpoint("some/model-GGUF/none.gguf")
    with pytest.raises(CheckpointError, match=r"No model `other/model`.*has no such public"):
        resolve_checkpoint("other/model:Q8_0")
    with pytest.raises(CheckpointError, match=r"has no revision `v2`"):
        resolve_checkpoint("some/model-GGUF:Q4_K_M", revision="v2")


def test_a_head_in_the_place_of_a_model_is_named_with_its_option() -> None:
    with pytest.raises(UnsupportedModelError, match=r"is an EAGLE-3 head .* the method `eagle3`"):
        LLM("tiny-python-eagle3")

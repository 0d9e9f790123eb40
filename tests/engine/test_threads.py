"""How many threads compute: cores counted once, quotas kept, everyone told."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken import LLM, SamplingParams
from foretoken.engine import threads
from foretoken.engine.threads import set_threads, usable_cores
from foretoken.errors import ConfigError
from foretoken.native import library
from tests.support.kernels import needs_kernels

REASON = "they were not built: run `python -m foretoken.native.build` (needs g++)"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Six logical processors on four cores, of which 0, 1, 2 and 4 may be used; no quota."""
    for cpu, siblings in enumerate(["0,3", "1,4", "2", "0,3", "1,4", "5"]):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    monkeypatch.setattr(threads, "_CPUS", tmp_path)
    monkeypatch.setattr(threads, "_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: {0, 1, 2, 4})
    return tmp_path


def test_hyper_threads_count_once(machine: Path) -> None:
    assert usable_cores() == 3


def test_processors_of_unknown_topology_count_each(machine: Path) -> None:
    for cpu in (0, 1, 4):
        (machine / f"cpu{cpu}" / "topology" / "thread_siblings_list").unlink()
    assert usable_cores() == 4


def test_systems_without_affinity_use_all(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(threads.os, "sched_getaffinity")
    monkeypatch.setattr(threads.os, "cpu_count", lambda: 6)
    assert usable_cores() == 4
    monkeypatch.setattr(threads.os, "cpu_count", lambda: None)
    assert usable_cores() == 1


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ("max 100000", 3),
        ("200000 100000", 2),
        ("190000 100000", 1),
        ("50000 100000", 1),
        ("800000 100000", 3),
        ("", 3),
    ],
)
def test_a_quota_bounds_them(machine: Path, quota: str, cores: int) -> None:
    (machine / "cpu.max").write_text(quota + "\n")
    assert usable_cores() == cores


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """What the native pool is told; threads are as before afterwards."""
    told: list[int] = []
    before, real = torch.get_num_threads(), library.set_num_threads

    def tell(count: int) -> None:
        told.append(count)
        real(count)

    monkeypatch.setattr(library, "set_num_threads", tell)
    yield told
    torch.set_num_threads(before)
    if library.missing() is None:
        real(1)


@needs_kernels
@pytest.mark.parametrize(
    ("asked", "openmp", "count"), [(1, 8, 1), (2, 1, 2), (5, 1, 5), (None, 8, 3), (None, 2, 2)]
)
def test_everyone_is_told(
    machine: Path,
    native: list[int],
    monkeypatch: pytest.MonkeyPatch,
    asked: int | None,
    openmp: int,
    count: int,
) -> None:
    monkeypatch.setattr(threads, "_OPENMP_THREADS", openmp)
    assert set_threads(asked, native_target=False) == count
    assert (native, torch.get_num_threads()) == ([count], count)
    assert set_threads(asked, native_target=True) == count
    assert (native, torch.get_num_threads()) == ([count, count], 1)


def test_without_kernels_openmp_gets_them(
    native: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "missing", lambda: REASON)
    assert set_threads(2, native_target=False) == 2
    assert (native, torch.get_num_threads()) == ([], 2)


@needs_kernels
def test_the_option_reaches_them_is_logged_and_changes_no_token(
    target: Path, native: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "foretoken")
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=20, ignore_eos=True)
    texts = []
    for count, backend, openmp in ((1, "auto", 1), (2, "native_cpu", 1), (2, "torch_cpu", 2)):
        llm = LLM(str(target), threads=count, backend=backend, num_blocks=64)
        assert (native[-1], torch.get_num_threads()) == (count, openmp)
        assert f"Threads: {count}, PyTorch's: {openmp}; for the whole process." in caplog.messages
        caplog.clear()
        texts.append(llm.generate("abc " * 30, params)[0].outputs[0].token_ids)
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("value", [0, -1, 1025, True, "2", 1.5])
def test_other_numbers_are_refused(target: Path, value: Any) -> None:
    with pytest.raises(ConfigError, match="`threads` is") as caught:
        LLM(str(target), threads=value)
    assert caught.value.field == "threads"


def test_without_kernels_the_engine_says_so_and_runs_on(
    target: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    params = SamplingParams(temperature=0, max_tokens=12)
    expected = LLM(str(target), num_blocks=64).generate("abc", params)[0].outputs[0].token_ids
    monkeypatch.setattr(library, "missing", lambda: REASON)
    speculation = {"model": str(target), "num_speculative_tokens": 2}
    with caplog.at_level(logging.WARNING, "foretoken"):
        llm = LLM(str(target), speculation, num_blocks=64)
    (record,) = caplog.records
    said = f"Backend `torch_cpu`, without native kernels: {REASON}."
    assert (record.levelname, record.getMessage()) == ("WARNING", said)
    assert llm.engine.runner.model.fused is None
    assert llm.generate("abc", params)[0].outputs[0].token_ids == expected


def test_kernels_that_are_asked_for_and_missing_are_an_error(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "missing", lambda: REASON)
    with pytest.raises(ConfigError) as caught:
        LLM(str(target), backend="native_cpu")
    assert caught.value.field == "backend"
    assert REASON in str(caught.value)

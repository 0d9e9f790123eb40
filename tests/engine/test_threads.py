"""How many threads compute: cores counted once, quotas kept, everyone told."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foretoken import LLM, SamplingParams
from foretoken.engine.build import EngineParts
from foretoken.engine.request import Share
from foretoken.engine.threads import StepThreads, usable_cores
from foretoken.errors import ConfigError
from foretoken.ops import Backend, get_backend, unavailable
from tests.engine.doubles import Double, llm_of
from tests.support.kernels import needs_kernels


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Six logical processors on four cores, of which 0, 1, 2 and 4 may be used; no quota."""
    for cpu, siblings in enumerate(["0,3", "1,4", "2", "0,3", "1,4", "5"]):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    return tmp_path


def cores_of(machine: Path, **system: Any) -> int:
    system = system or {"sched_getaffinity": lambda process: {0, 1, 2, 4}}
    return usable_cores(machine, machine / "cpu.max", SimpleNamespace(**system))


def test_hyper_threads_count_once(machine: Path) -> None:
    assert cores_of(machine) == 3


def test_processors_of_unknown_topology_count_each(machine: Path) -> None:
    for cpu in (0, 1, 4):
        (machine / f"cpu{cpu}" / "topology" / "thread_siblings_list").unlink()
    assert cores_of(machine) == 4


def test_systems_without_affinity_use_all(machine: Path) -> None:
    assert cores_of(machine, cpu_count=lambda: 6) == 4
    assert cores_of(machine, cpu_count=lambda: None) == 1


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
    assert cores_of(machine) == cores


@pytest.fixture(autouse=True)
def _threads_are_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    if unavailable("native") is None:
        get_backend("native").set_num_threads(1)


class Told:
    def __init__(self, **options: int) -> None:
        self.counts: list[int] = []
        self.options = options

    def __call__(self, asked: int | None, backend: Backend, **given: Any) -> StepThreads:
        def tell(count: int) -> None:
            self.counts.append(count)
            backend.set_num_threads(count)

        told: Any = Double(backend, set_num_threads=tell)
        return StepThreads(asked, told, **given, **self.options)


@pytest.mark.parametrize(
    ("asked", "openmp", "count"), [(1, 8, 1), (2, 1, 2), (5, 1, 5), (None, 8, 3), (None, 2, 2)]
)
def test_backend_and_pytorch_get_the_count(asked: int | None, openmp: int, count: int) -> None:
    backend, told = get_backend("torch"), Told(openmp_threads=openmp, cores=3)
    assert told(asked, backend, native_target=False).max_threads == count
    assert (told.counts, torch.get_num_threads()) == ([count], count)
    assert told(asked, backend, native_target=True).max_threads == count
    assert (told.counts, torch.get_num_threads()) == ([count, count], 1)


class Machine:
    """A clock, and steps that take as long as `cost` says for their threads and rows."""

    def __init__(self, asked: int | None = None) -> None:
        self.now, self.cost = 0.0, quiet
        self.threads = StepThreads(
            asked, get_backend("torch"), False, lambda: self.now, openmp_threads=2, cores=2
        )

    def step(self, rows: int = 1, prompt: int = 0) -> int:
        request: Any = None
        share = Share(request, 0, 0, prompt or 1, rows - 1, True, 0)
        with self.threads.during([share]):
            self.now += self.cost(torch.get_num_threads(), prompt or rows)
        return torch.get_num_threads()

    def steps(self, count: int, rows: int = 1) -> list[int]:
        return [self.step(rows) for _ in range(count)]


def quiet(threads: int, rows: int) -> float:
    return rows / threads


def busy(threads: int, rows: int) -> float:
    """Every parallel loop waits for its slowest thread."""
    return rows * (10.0 if threads > 1 else 1.2)


def helpless(threads: int, rows: int) -> float:
    """Rows too few for more than one thread."""
    return rows / threads if rows > 8 else 1.0 + threads


def test_the_faster_of_one_and_all_threads_is_taken_and_taken_again() -> None:
    machine = Machine()
    assert machine.steps(6) == [2, 1] * 3
    assert set(machine.steps(60)) == {2}
    machine.cost = busy
    assert machine.steps(10)[3:] == [1] * 7
    busy_steps = machine.steps(2000)
    assert 2 <= busy_steps.count(2) <= 6  # ever rarer, and one slow step each
    assert machine.step(prompt=9) == 1
    machine.cost = quiet
    assert machine.steps(4200)[-1] == 2
    assert machine.steps(10_000).count(1) <= 40


def test_a_machine_that_is_busy_from_the_start_gets_one_thread_at_once() -> None:
    machine = Machine()
    machine.cost = busy
    assert machine.steps(60).count(2) == 2
    assert (machine.step(prompt=9), machine.steps(60, rows=4).count(2)) == (1, 1)


@pytest.mark.parametrize(("later", "least", "most"), [(quiet, 900, 1000), (busy, 2, 4)])
def test_prompts_alone_get_all_threads_again_once_these_do_not_collapse(
    later: Callable[[int, int], float], least: int, most: int
) -> None:
    """Without decode steps: an engine that only reads prompts, or has some in every step."""
    machine = Machine()
    machine.cost = busy
    machine.steps(60)
    machine.cost = later
    assert least <= [machine.step(prompt=9 + i % 20) for i in range(1000)].count(2) <= most


def test_trials_of_a_count_that_collapses_cost_a_twentieth_at_most() -> None:
    machine = Machine()
    machine.cost = lambda threads, rows: 125.0 if threads > 1 else 1.0
    machine.steps(10)
    assert machine.steps(10_000).count(2) <= 4


def test_steps_of_each_size_choose_on_their_own() -> None:
    machine = Machine()
    machine.cost = helpless
    for _ in range(10):
        machine.steps(1, rows=1), machine.steps(1, rows=40)
    assert [(machine.step(1), machine.step(40), machine.step(1, prompt=9)) for _ in range(40)] == [
        (1, 2, 2)
    ] * 40


@pytest.mark.parametrize("asked", [1, 2, 3])
def test_a_number_that_was_asked_for_is_kept(asked: int) -> None:
    machine = Machine(asked)
    machine.cost = busy if asked > 1 else quiet
    assert machine.steps(200) == [asked] * 200
    torch.set_num_threads(4)  # by somebody else
    assert machine.step() == asked


def test_without_a_number_the_engine_chooses_and_says_so(
    target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "foretoken")
    told = Told(openmp_threads=2, cores=2)
    llm = llm_of(EngineParts(step_threads=told), target, num_blocks=64)
    assert "Threads of the process: 2 or 1, the faster; of PyTorch: 1." in caplog.messages
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=30, ignore_eos=True)
    alone = LLM(str(target), num_blocks=64, threads=1)
    tokens = llm.generate("abc", params)[0].outputs[0].token_ids
    assert {1, 2} == set(told.counts[1:])
    assert tokens == alone.generate("abc", params)[0].outputs[0].token_ids


@needs_kernels
def test_the_option_reaches_them_is_logged_and_changes_no_token(
    target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "foretoken")
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=20, ignore_eos=True)
    texts = []
    for count, backend, openmp in ((1, "auto", 1), (2, "native", 1), (2, "torch", 2)):
        told = Told()
        parts = EngineParts(step_threads=told)
        llm = llm_of(parts, target, threads=count, backend=backend, num_blocks=64)
        assert (told.counts, torch.get_num_threads()) == ([count], openmp)
        assert f"Threads of the process: {count}; of PyTorch: {openmp}." in caplog.messages
        caplog.clear()
        texts.append(llm.generate("abc " * 30, params)[0].outputs[0].token_ids)
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("value", [0, -1, 1025, True, "2", 1.5])
def test_other_numbers_are_refused(target: Path, value: Any) -> None:
    with pytest.raises(ConfigError, match="`threads` is") as caught:
        LLM(str(target), threads=value)
    assert caught.value.field == "threads"

"""A short trial (`make trial`): every case once, and that it can fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.common import TARGET
from foretoken import LLM
from foretoken.engine.worker import Turns
from foretoken.ops import unavailable
from tests.long import documented, trial
from tests.long.trial import SHORT, Child, collapse


@pytest.fixture
def _threads_come_back() -> Iterator[None]:
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


BACKENDS = [
    pytest.param(
        "native", marks=pytest.mark.skipif(bool(unavailable("native")), reason="no kernels")
    ),
    "torch",
]


@pytest.mark.usefixtures("_threads_come_back")
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_threads(backend: str) -> None:
    report = trial.share_llm(trial.load(backend), 0.5, SHORT[:2])
    assert report["failures"] == []
    assert report["calls_of_the_other"] >= 1


class NoTurns(Turns):
    def __enter__(self) -> None:
        pass

    def __exit__(self, *raised: object) -> None:
        pass


class WithoutTurns(LLM):
    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._turns = NoTurns("LLM")


@pytest.mark.usefixtures("_threads_come_back")
def test_two_threads_without_turns_fail() -> None:
    llm = WithoutTurns(TARGET, trial.SPECULATION, backend="torch", max_num_seqs=8)
    assert trial.share_llm(llm, 0.5, SHORT[:1])["failures"]


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("backend", BACKENDS[:1])
def test_signals(backend: str) -> None:
    row, failures = trial.signals(backend, 4)
    assert failures == []
    assert row.values["partial_tokens"] > 0  # type: ignore[operator]


@pytest.mark.usefixtures("forked")
def test_one_signal_ends_a_loop_of_calls() -> None:
    assert trial.loops("torch", 2)[1] == []


@pytest.mark.usefixtures("forked")
def test_forks() -> None:
    assert trial.forks("torch", 1)[1] == []


@pytest.mark.usefixtures("_threads_come_back")
def test_a_busy_neighbour() -> None:
    with trial.busy(True):
        report = trial.measure_speed("torch", 0.1, 1)
    assert report["tokens_per_s"].keys() == {"default", "one"}
    assert min(*report["tokens_per_s"].values())[0] > 0


def test_a_collapse_is_a_failure() -> None:
    assert collapse([40.0, 41.0, 5.0], [60.0, 50.0, 45.0]) == []
    assert "8.0 tokens/s" in collapse([8.0], [45.0])[0]


@pytest.mark.parametrize(
    ("code", "said"),
    [("import os; os.abort()", "ended with -6"), ('print(\'{"failures": ["x"]}\')', "x")],
)
def test_what_ends_badly_is_told(code: str, said: str) -> None:
    class Bad(Child):
        program = ("-c", code)

    failures: list[str] = []
    with Bad("threads", "torch") as child:
        child.report(failures)
    assert said in failures[0]


def test_a_command_of_the_documents_runs_and_may_fail(tmp_path: Path) -> None:
    right = documented.Documented("x.md", "foretoken --version")
    wrong = documented.Documented("x.md", "foretoken bench --no-such-option")
    refused = documented.Documented("x.md", wrong.line, ("Error: ...",))
    assert documented.run(right, tmp_path) == documented.run(refused, tmp_path) == []
    (told,) = documented.run(wrong, tmp_path)
    assert told.startswith("foretoken bench --no-such-option (x.md): exit code 2: ")

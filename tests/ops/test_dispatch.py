"""The dispatcher: the parts of a backend, and the names of backends."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from foretoken.errors import ConfigError
from foretoken.ops import (
    BACKENDS,
    DRAFT,
    TARGET,
    Backend,
    Noise,
    Rows,
    Verdict,
    VerifyBatch,
    get_backend,
    unavailable,
)
from foretoken.ops.dispatch import Kernels
from tests.project.source import imports, modules
from tests.support.asynchronous import PATIENCE
from tests.support.cases import drafts_of, host_backends, make_params

OPS = ("process_logits", "sample", "draft", "verify", "evidence", "logprobs", "attention")
STEPS = get_backend("torch")._kernels.steps


def test_unknown_and_former_names() -> None:
    for ask in (get_backend, unavailable):
        with pytest.raises(ConfigError, match="one of reference, torch, native, triton"):
            ask("nonesuch")
        for wrong in (None, 3):
            with pytest.raises(ConfigError, match=f"is {wrong}: must be one of reference"):
                ask(wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="called `torch` now"):
        get_backend("torch_cpu")
    with pytest.raises(ConfigError, match="called `native` now"):
        get_backend("native_cpu")


@pytest.mark.parametrize("name", host_backends())
def test_an_op_has_one_file_name_in_every_backend(name: str) -> None:
    """`diff` of two folders shows what differs.
    Native's kernels are in C++: what calls them fits into one file.
    """
    backend = get_backend(name)
    assert backend is get_backend(name)
    files = {"process_logits": "process", "logprobs": "process"}
    files |= {"draft": "sample", "evidence": "verify"}
    lent = {("native", "attention"), ("native", "evidence"), ("triton", "evidence")}
    for op in OPS:
        lender = "torch" if (name, op) in lent else name
        home, _, file = getattr(backend._kernels, op).__module__.rpartition(".")
        assert home == f"foretoken.ops.backends.{lender}"
        calls_native = lender == "native" and file == "sampling"
        assert calls_native or file == files.get(op, op)
    lender = "torch" if name == "reference" else name
    assert backend._kernels.steps.__module__ == f"foretoken.ops.backends.{lender}.steps"


def test_backends_leave_checks_to_the_dispatcher() -> None:
    """All except stacks, which are called without the dispatcher."""
    inside = [m for name, m in modules().items() if name.startswith("foretoken.ops.backends.")]
    assert len(inside) > 30
    inside = [m for m in inside if m.name.rpartition(".")[2] != "stack"]
    checking = [m.name for m in inside if "foretoken.ops.checks" in imports(m, type_checking=True)]
    assert checking == []


class Recorder:
    """In place of a backend's functions: records calls and arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def backend(self) -> Backend:
        def noting(name: str) -> Any:
            return lambda *given: self.calls.append((name, given))

        return Backend("noting", Kernels(*map(noting, OPS), STEPS))


def test_kernels_get_checked_arguments_and_no_refused_ones() -> None:
    recorder = Recorder()
    ops = recorder.backend()
    rows = Rows(torch.zeros(2, 8), make_params(2), torch.arange(2))
    noise = Noise(torch.arange(2), torch.arange(2), DRAFT)
    batch = VerifyBatch(
        torch.zeros(2, 8), rows.params, *(torch.arange(2),) * 2, drafts_of([[]] * 2)
    )
    ops.process_logits(rows)
    ops.sample(rows, noise)
    ops.draft(rows, noise, None)
    ops.verify(batch)
    verdict = Verdict(torch.zeros(2, 1).long(), *(torch.zeros(2).long(),) * 2)
    ops.evidence(batch, verdict, torch.arange(2))
    ops.logprobs(rows, torch.arange(2), 3)
    ops.logprobs(rows.logits_NV, torch.arange(2), 3)
    names = ["process_logits", "sample", "draft", "verify", "evidence", "logprobs"]
    names.append("logprobs")
    assert [name for name, _ in recorder.calls] == names
    assert recorder.calls[1][1] == (rows, noise)
    ops.set_num_threads(2)  # there is nothing to set
    wrong = rows._replace(slot_N=torch.tensor([0, 2]))
    for call in (
        lambda: ops.process_logits(wrong),
        lambda: ops.sample(wrong, noise),
        lambda: ops.draft(rows, noise._replace(streams=TARGET), None),
        lambda: ops.verify(batch._replace(slot_B=torch.tensor([0, 2]))),
        lambda: ops.evidence(batch, verdict, torch.arange(3)),
        lambda: ops.logprobs(wrong, torch.arange(2), 3),
    ):
        with pytest.raises(ConfigError):
            call()
    assert len(recorder.calls) == len(names)
    promised = batch._replace(slot_B=torch.tensor([0, 2]), values_fit=True)
    ops.verify(promised)  # the promise is believed
    assert recorder.calls[-1] == ("verify", (promised,))


def test_the_number_of_threads_reaches_the_kernels() -> None:
    told: list[int] = []
    kernels = Kernels(*[lambda *_: None] * len(OPS), STEPS, set_num_threads=told.append)  # type: ignore[list-item]
    Backend("telling", kernels).set_num_threads(3)
    assert told == [3]


WITHOUT = """
import sys
sys.modules["triton"] = None  # as if it were not installed
from foretoken.ops import BACKENDS, get_backend, unavailable
print([name for name in BACKENDS if unavailable(name)], unavailable("triton"))
"""


def test_a_backend_says_why_it_is_missing_without_what_is_missing() -> None:
    command = [sys.executable, "-c", WITHOUT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    assert "'triton'" in done.stdout
    assert "the package `triton` is not installed" in done.stdout
    assert set(BACKENDS) >= set(host_backends())

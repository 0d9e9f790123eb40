"""Stock operators: on any device, batches in parts of any size, filters of any width."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch

from foretoken.ops import get_backend
from foretoken.ops.backends.torch import __file__ as package
from tests.support.elsewhere import DEVICE, Elsewhere
from tests.support.oracle import compare_batch, outcome, random_case
from tests.support.wide_rows import compare_wide

STOCK = get_backend("torch")
CPU = torch.device("cpu")
HOST_READS = {
    "attention.py": 3,  # block lists are planned on the host, once per batch for all layers
    "process.py": 1,  # `topk` takes a number
    "steps.py": 3,  # on a CPU only, where reading a number does not wait
    "verify.py": 2,  # a rule that is not stated is an error; sizes of evidence, on a CPU alone
}
"""Where the backend makes Python numbers of tensors, which waits for a device; and how often."""


def cases() -> list[dict[str, object]]:
    """Arguments of `random_case`: every rule, filter and kind of noise, with edits and without."""
    return [
        {"vocabulary": 40, "seed": 1, "junk": True},
        {"vocabulary": 1500, "seed": 2, "edited": False, "fp64_noise": True},
        {"vocabulary": 1500, "seed": 4, "junk": True, "dtype": torch.bfloat16},
    ]


@pytest.mark.parametrize("arguments", cases())
def test_it_runs_where_its_tensors_are(arguments: dict[str, object]) -> None:
    """No tensor of the computation is on the host."""
    case = random_case(**arguments)  # type: ignore[arg-type]
    with Elsewhere():
        compare_batch(STOCK, case, device=DEVICE)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("arguments", cases())
def test_it_runs_on_a_gpu(arguments: dict[str, object]) -> None:
    case = random_case(**arguments)  # type: ignore[arg-type]
    compare_batch(STOCK, case, device=torch.device("cuda"))


def test_a_tensor_of_the_host_is_noticed() -> None:
    with Elsewhere():
        there = torch.zeros(3).to(DEVICE)
        assert (there + 1).cpu().tolist() == [1, 1, 1]
        with pytest.raises(RuntimeError, match="some on the host"):
            there + torch.zeros(3)


def test_few_numbers_are_read_by_python() -> None:
    """`if x.any():` and boolean indexing wait, too; they stand where less work is worth a wait."""
    read = re.compile(r"\.(cpu|tolist|item)\(|(?<![.\w])(int|float|bool)\(|\bnumpy\b")
    sources = Path(package).parent.glob("*.py")
    found = {path.name: len(read.findall(path.read_text(encoding="utf-8"))) for path in sources}
    assert {name: count for name, count in found.items() if count} == HOST_READS


@pytest.mark.parametrize("vocabulary", [40, 1500])
def test_rows_in_parts_are_decided_as_together(
    vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within any bound on memory: one row at a time, some rows, or all."""
    case = random_case(vocabulary, 5, num_requests=12, num_slots=12, junk=True)
    whole = outcome(STOCK, case)
    process = importlib.import_module("foretoken.ops.backends.torch.process")
    evidence = importlib.import_module("foretoken.ops.backends.torch.verify")
    for rows in (1, 3):
        limits = (
            (process, "_CHUNK", max(vocabulary, 1024)),
            (evidence, "_MAX_LOGITS", 4 * vocabulary),
        )
        for module, name, logits in limits:
            monkeypatch.setattr(module, name, rows * logits)
        parts = outcome(STOCK, case, whole)
        for name, wanted in whole.decisions.items():
            assert torch.equal(parts.decisions[name], wanted), name
        told = (parts.values["evidence"], whole.values["evidence"])
        torch.testing.assert_close(*told, equal_nan=True)


@pytest.mark.parametrize("turn", range(8))
def test_rows_of_every_shape_are_filtered_as_the_oracle_does(turn: int) -> None:
    """Ties, far tails, dropped blocks, signed zeros; wide nuclei, and top-k of nearly all."""
    decisions, near_ties = compare_wide(turn, STOCK, 3000, CPU)
    assert near_ties <= 0.02 * decisions

"""The kernels for GPUs give the oracle's tokens and counts, in Triton's interpreter and on a GPU.

The interpreter takes a fraction of a second per launch: few small batches, all in one process, and
most of them in `make trial`. What is compared is in `tests/support/oracle.py`, the batches are
in `tests/support/interpreted.py`.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from typing import Any

import pytest
import torch

from foretoken.ops import Rule, get_backend
from tests.support import interpreted
from tests.support.interpreted import CASES, CHOICES, OFF, compare
from tests.support.interpreter import chosen, few_each_time, interpret
from tests.support.layouts import KINDS, compare_layouts
from tests.support.oracle import compare_batch, random_case
from tests.support.pieces import compare_pieces

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


FEW = ("5, every rule", "2100, likeliest: 0", CHOICES)


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(interpret(interpreted.__name__, *chosen(request)))
    return found


@needs_triton
@pytest.mark.parametrize("name", few_each_time([*CASES, CHOICES], FEW))
def test_interpreted_kernels_decide_as_the_oracle(results: dict[str, Any], name: str) -> None:
    assert results[name]["failure"] is None, results[name]["failure"]


@needs_triton
def test_few_decisions_were_excluded(results: dict[str, Any]) -> None:
    decisions = sum(result["decisions"] for result in results.values())
    assert decisions > 25 * len(results)
    assert sum(result["near_ties"] for result in results.values()) <= 0.02 * decisions


@needs_triton
@needs_gpu
@pytest.mark.parametrize("name", CASES)
def test_compiled_kernels_decide_as_the_oracle(name: str) -> None:
    outcome = compare(name, get_backend("triton"), torch.device("cuda"))
    assert outcome["failure"] is None, outcome["failure"]


@needs_triton
@needs_gpu
def test_choices_with_fp64_noise_on_a_gpu() -> None:
    choices = importlib.import_module("tests.support.argmax64")
    _, left = choices.compare_choices(60_000, torch.device("cuda"))
    assert left < 12_000


@needs_triton
@needs_gpu
@pytest.mark.parametrize("vocabulary", [1, 5, 999, 1024, 1025, 4097, 8193])
def test_larger_batches_on_a_gpu(vocabulary: int) -> None:
    backend, device = get_backend("triton"), torch.device("cuda")
    decisions = near_ties = 0
    for seed in range(8):
        case = random_case(
            vocabulary, seed, dtype=(torch.float32, torch.bfloat16, torch.float16)[seed % 3],
            draft_dtype=(torch.float32, torch.bfloat16)[seed % 2], junk=seed % 4 == 3,
            fp64_noise=seed % 2 == 1, fixed={"rule": list(Rule)[seed // 2]} if seed < 4 else None,
        )  # fmt: skip
        tally = compare_batch(backend, case, device=device)
        decisions, near_ties = decisions + tally.decisions, near_ties + tally.near_ties
    assert near_ties <= 0.02 * decisions


@needs_triton
@needs_gpu
def test_compiled_kernels_are_kept_apart_by_what_they_were_compiled_for() -> None:
    """Misaligned addresses, other strides, sizes of 1, and both dtypes of token ids, in turns."""
    fixed = {**OFF, "rule": Rule.STANDARD, "temperature": 1.0}
    cases = [
        random_case(vocabulary, seed, num_requests=3, num_slots=4, most=2, fixed=fixed)
        for vocabulary, seed in ((1025, 61), (1025, 62), (1, 64))
    ]
    layouts = [((), False), (("logits",), False), (("edits",), False), (KINDS, True), ((), False)]
    tally = compare_layouts(get_backend("triton"), cases, layouts, torch.device("cuda"))
    assert tally.decisions > 90 * len(layouts)
    assert tally.near_ties <= 0.02 * tally.decisions


@needs_triton
@needs_gpu
@pytest.mark.parametrize("vocabulary", [1, 1025, 5000])
def test_a_batch_and_its_pieces_get_one_verdict_on_a_gpu(vocabulary: int) -> None:
    for seed in range(12):
        fixed = {**OFF, "rule": Rule.STANDARD} if seed % 2 else None
        kinds: Any = {"junk": seed % 4 == 3, "fp64_noise": seed % 3 == 2, "fixed": fixed}
        sizes: Any = {"num_requests": 18, "num_slots": 20, "most": 4}
        dtype = (torch.float32, torch.bfloat16)[seed % 2]
        case = random_case(vocabulary, seed, dtype=dtype, **sizes, **kinds)
        compare_pieces(case, get_backend("triton"), torch.device("cuda"))

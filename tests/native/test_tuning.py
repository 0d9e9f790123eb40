"""How a decoder fetches its weights: measured, reported, and without effect on what it computes."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from foretoken.models import CausalLM, load_model
from foretoken.ops.backends.native import library, stack
from foretoken.ops.backends.native.stack import NativeStack
from foretoken.ops.stack import Stack, linears
from tests.models import families
from tests.models.walk import walk
from tests.support.kernels import needs_kernels

pytestmark = needs_kernels

# No size is a multiple of a vector or of a panel, and panels are odd in number.
SIZES = {"head_dim": 16, "hidden_size": 36, "intermediate_size": 53, "vocab_size": 301}


def load(folder: Path) -> CausalLM:
    return load_saved(families.save_model(folder, "llama", SIZES))


def load_saved(folder: Path) -> CausalLM:
    model = load_model(folder, device="cpu", backend="native")
    assert isinstance(model.network, NativeStack)
    return model


def packed_numbers(own: Stack) -> dict[str, int]:
    """Numbers in the panels of each matrix, by name; a panel has outputs of both gate and up."""
    variant = library.choose_variant(library.this_machine())[0] or ""
    panel = 64 if "v4" in variant else 16 if "v3" in variant else 8
    numbers: dict[str, int] = {}
    for name, (weight, *_) in linears(own):
        outputs, inputs = weight.shape
        panels = -(-outputs // panel) if name != "gate_up" else -(-outputs // 2 // (panel // 2))
        numbers[name] = numbers.get(name, 0) + panels * panel * inputs
    return numbers


def test_how_weights_are_fetched_changes_no_bit(tmp_path: Path) -> None:
    """Passes of one row, of a few and of several tiles, with one thread and with two."""
    model = load(tmp_path)
    network = model.network
    assert isinstance(network, NativeStack)
    texts = [[(7 * i + j) % 301 for j in range(22)] for i in range(4)]
    seen = []
    try:
        for one_row, few_rows in itertools.product(range(len(stack.FETCHES)), repeat=2):
            network.set_fetches(one_row, few_rows)
            for threads in (1, 2):
                library.set_num_threads(threads)
                rows = walk(model, texts, 1, 16, fill=torch.nan)
                alone = walk(model, texts[:1], 2, 16, fill=torch.nan)
                seen.append([torch.stack([r[p] for p in sorted(r)]) for r in (*rows, *alone)])
    finally:
        library.set_num_threads(1)
    for found in seen:
        assert all(torch.equal(a, b) for a, b in zip(found, seen[0], strict=True))


def test_weights_of_bfloat16_take_half_the_memory_and_give_the_same_bits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A matrix with one weight that needs more bits is kept in float32: one logit differs."""
    folder = families.save_model(tmp_path, "llama", {**SIZES, "intermediate_size": 2048})
    file, found = folder / "model.safetensors", []
    weights = {name: w.bfloat16().float() for name, w in load_file(file).items()}
    texts = [[(7 * i + j) % 301 for j in range(22)] for i in range(4)]
    for excess in (0.0, 2.0**-20):
        weights["lm_head.weight"][7, 3] = 1 + excess
        save_file(weights, file, {"format": "pt"})
        caplog.clear()
        with caplog.at_level(logging.DEBUG, "foretoken"):
            model = load_saved(folder)
        assert isinstance(model.network, NativeStack)
        numbers = packed_numbers(model.network.stack)
        size = 2 * sum(numbers.values()) + (2 * numbers["head"] if excess else 0)
        measured = {line for line in caplog.messages if line.startswith("Weights of ")}
        assert {line.split(",")[0] for line in measured} == {f"Weights of {size / 2**20:.1f} MiB"}
        rows = [row for seen in walk(model, texts, 1, 16) for row in seen.values()]
        found.append(torch.stack(rows))
    differs_V = (found[0] != found[1]).any(dim=0)
    assert differs_V.nonzero().flatten().tolist() == [7]


def test_times_of_tiny_weights_have_three_digits() -> None:
    """Rounded to microseconds, times within 3 % of each other could read 0.003 and 0.004 ms."""
    few = stack.describe_fetches(0, (4e-7, 3.51e-6))
    assert few == {"taken": "no hint", "no hint": 0.0004, "cached": 0.00351}
    slow = stack.describe_fetches(1, (9.8765, 1.23456e-3))
    assert slow == {"taken": "cached", "no hint": 9880.0, "cached": 1.23}


def test_the_choice_is_measured_and_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "foretoken"):
        model = load(tmp_path)
    assert isinstance(model.network, NativeStack)
    size = 4 * sum(packed_numbers(model.network.stack).values())
    tuning = stack.tunings()[f"{size / 2**20:.1f} MiB"]
    for rows in ("1 row", "6 rows"):
        measured = {name: float(tuning[rows][name]) for name in stack.FETCHES}
        assert min(measured.values()) > 0
        assert measured[str(tuning[rows]["taken"])] <= 1.06 * min(measured.values())
        assert any(f"{rows}, ms: {tuning[rows]}" in line for line in caplog.messages)

"""The GPU's decoder computes what Transformers does, in Triton's interpreter.

What is compared is in `tests/models/interpreted_decoder.py`, all in one process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

import torch

from foretoken.ops.backends.triton.decoder.epilogue import Epilogue
from foretoken.ops.backends.triton.decoder.tiles import MOST_ROWS, Shape, gated_tile
from tests.models import interpreted_decoder
from tests.models.interpreted_decoder import CASES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def failures() -> dict[str, str | None]:
    run = subprocess.run(
        [sys.executable, "-m", interpreted_decoder.__name__],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert run.returncode == 0, run.stderr
    found: dict[str, str | None] = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", CASES)
def test_interpreted_decoder(failures: dict[str, str | None], name: str) -> None:
    assert failures[name] is None, failures[name]


@pytest.mark.parametrize("rows", [MOST_ROWS + 1, 192, 193, 256, 257, 320, 384])
def test_a_gated_tile_holds_all_rows(rows: int) -> None:
    tile = gated_tile(Shape(14336, 4096, Epilogue.SILU), rows, 132)
    assert tile is not None
    assert tile.rows + tile.more_rows >= rows
    assert tile.block_n * (tile.rows + tile.more_rows) <= 384 * 128  # float32, of an SM's registers
    ring = tile.stages * 2 * tile.block_k * (tile.block_n + tile.rows + tile.more_rows)
    assert tile.stages >= 3
    assert ring <= 200 << 10
    assert gated_tile(Shape(14336 + 32, 4096, Epilogue.SILU), rows, 132) is None


def test_gate_and_up_arrive_by_turns() -> None:
    pytest.importorskip("triton.experimental.gluon")
    from foretoken.ops.backends.triton.decoder.gated import weight_map

    weight = torch.arange(64, dtype=torch.bfloat16)[:, None].expand(64, 64).contiguous()
    blocks = weight_map(weight, 32, 64)
    arrived = weight.as_strided(blocks.shape, blocks.strides).reshape(64, 64)[:, 0].tolist()
    assert blocks.block_shape == [2, 2, 8, 64]
    turns = [(half, turn) for turn in range(4) for half in (0, 32)]
    assert arrived == [half + 8 * turn + i for half, turn in turns for i in range(8)]

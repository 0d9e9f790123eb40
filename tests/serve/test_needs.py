"""Memory for a replica of a quantised model: the bytes of its file."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from foretoken.models.locate import PACKAGED, resolve_checkpoint
from foretoken.serve.fleet.needs import compute_needs
from tests.models.compressed_models import Scheme
from tests.models.compressed_models import Written as WrittenCompressed
from tests.models.gguf_models import Written
from tests.serve.test_fleet_config import GIB, model

REST = 2 * GIB
"""The cache and the process: see `test_memory_is_that_of_weights_and_cache_and_process`."""


def memory(path: Path, **engine: Any) -> int:
    return compute_needs(model({"model": str(path), **engine}), has_gpus=False).memory


@pytest.mark.parametrize("mix", ["F32", "F16", "Q8_0", "K mix"])
def test_a_gguf_file_is_counted_as_it_is(tmp_path: Path, mix: str) -> None:
    """For any `dtype`: the size of the file, without its header and tokenizer."""
    written = Written(tmp_path, "llama", mix)
    size, numbers = written.file.stat().st_size, written.module.num_parameters()
    found = memory(written.file) - REST
    assert size - 20_000 < found <= size
    assert found == memory(written.file, dtype="bfloat16") - REST
    assert (found < 1.1 * numbers) == (mix in ("Q8_0", "K mix"))


@pytest.mark.parametrize("bits", [4, 8])
def test_compressed_tensors_are_counted_as_they_are(tmp_path: Path, bits: int) -> None:
    written = WrittenCompressed(tmp_path, "llama", Scheme(bits, "group", 32))
    size = (tmp_path / "model.safetensors").stat().st_size
    assert memory(tmp_path) - REST == size
    assert size < 1.3 * bits / 8 * written.module.num_parameters()


def test_a_draft_in_a_file_is_counted_with_its_target(tmp_path: Path) -> None:
    target, draft = (Written(tmp_path / mix, "llama", mix).file for mix in ("F16", "Q8_0"))
    both = memory(target, speculative_config={"method": "draft_model", "model": str(draft)})
    assert both == memory(target) + memory(draft) - REST


@pytest.mark.skipif(find_spec(PACKAGED["smollm2-135m"].module) is None, reason="needs its package")
def test_a_packaged_model_is_a_file() -> None:
    size = resolve_checkpoint("smollm2-135m").stat().st_size
    found = compute_needs(model({"model": "smollm2-135m"}), has_gpus=False).memory - REST
    assert 0.95 * size < found <= size

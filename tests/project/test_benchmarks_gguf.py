"""GGUF files that engines are compared on, read back by the format's own package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

gguf = pytest.importorskip("gguf", reason="needs the package that writes GGUF files")
from benchmarks import gguf_models  # noqa: E402  (it imports the package)

TINY = gguf_models.Shape(256, 16, 512, 2, 1, head_size=128, vocabulary=300, context=64)


@pytest.mark.parametrize("kind", ["Q4_K_M", "Q8_0"])
def test_a_random_model_reads_back_with_its_shapes_and_spreads(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    gguf_models.write_random(path, TINY, kind)
    reader = gguf.GGUFReader(path)
    assert len(reader.fields["tokenizer.ggml.tokens"].contents()) == TINY.vocabulary
    assert reader.fields["qwen3.attention.key_length"].contents() == TINY.head_size
    found = {tensor.name: tensor for tensor in reader.tensors}
    expected = list(gguf_models.tensors(TINY, kind))
    assert list(found) == [tensor.name for tensor in expected]
    for tensor in expected:
        there = found[tensor.name]
        assert tuple(reversed(there.shape)) == tensor.shape
        numbers = gguf.quants.dequantize(there.data, there.tensor_type)
        assert numbers.shape == tensor.shape
        if tensor.std:
            assert numbers.std() == pytest.approx(tensor.std, rel=0.05), tensor
            assert abs(numbers.mean()) < 0.05 * tensor.std
        else:
            assert (numbers == 1).all()


def test_the_mix_is_llama_cpps_recipe() -> None:
    """Of 28 layers: the first and last eighths, and every third between."""
    better = [layer for layer in range(28) if gguf_models.more_bits(layer, 28)]
    assert better == [0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 24, 25, 26, 27]
    types = {
        t.name: t.type.name for t in gguf_models.tensors(gguf_models.SHAPES["qwen3-4b"], "Q4_K_M")
    }
    assert types["token_embd.weight"] == types["blk.0.attn_v.weight"] == "Q6_K"
    assert types["blk.4.ffn_down.weight"] == types["blk.0.ffn_up.weight"] == "Q4_K"


def test_a_conversion_keeps_the_numbers_and_the_rest(tmp_path: Path) -> None:
    source, path = tmp_path / "a.gguf", tmp_path / "b.gguf"
    gguf_models.write_random(source, TINY, "Q4_K_M")
    gguf_models.convert(source, path, "Q8_0")
    before, after = gguf.GGUFReader(source), gguf.GGUFReader(path)
    skipped = {"general.file_type", "GGUF.kv_count"}

    def fields(reader: Any) -> dict[str, Any]:
        return {k: v.contents() for k, v in reader.fields.items() if k not in skipped}

    assert fields(before) == fields(after)
    assert after.fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q8_0
    for old, new in zip(before.tensors, after.tensors, strict=True):
        assert (old.name, *old.shape) == (new.name, *new.shape)
        assert new.tensor_type.name == ("Q8_0" if len(new.shape) > 1 else "F32")
        given, found = (gguf.quants.dequantize(t.data, t.tensor_type) for t in (old, new))
        assert np.abs(given - found).max() <= np.abs(given).max() / 200

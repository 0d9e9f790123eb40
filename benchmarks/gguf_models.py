"""GGUF files that engines are compared on: one type of weights made from another, and random ones.

`python -m benchmarks.gguf_models --out FOLDER --convert FILE.gguf --type Q8_0` dequantises every
matrix of a file and quantises it again; metadata and vectors stay. `--random qwen3-0.6b` writes
random weights in the real model's shapes and types, block by block, for what only their number of
bytes decides: such a model says nonsense, with finite logits of the usual spread.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import LlamaFileType

LOGIT_STD = 2.0
FILE_TYPES = {
    "Q8_0": LlamaFileType.MOSTLY_Q8_0,
    "Q4_0": LlamaFileType.MOSTLY_Q4_0,
    "Q4_1": LlamaFileType.MOSTLY_Q4_1,
    "Q4_K_M": LlamaFileType.MOSTLY_Q4_K_M,
    "BF16": LlamaFileType.MOSTLY_BF16,
}
CONVERTIBLE = ("Q8_0", "Q4_0", "Q4_1")  # what the package can quantise to
NORMAL, CONTROL, UNUSED = 1, 3, 5  # GGUF's token types
END = "<|im_end|>"


@dataclass(frozen=True)
class Shape:
    """A decoder of Qwen3's kind: norms of queries and keys, the head tied to the embedding."""

    hidden: int
    layers: int
    inner: int
    heads: int
    kv_heads: int
    head_size: int = 128
    vocabulary: int = 151_936
    context: int = 40_960


RECIPES = {  # of random weights: the usual type, and that of what gets more bits
    "Q8_0": (Type.Q8_0, Type.Q8_0),
    "Q4_K_M": (Type.Q4_K, Type.Q6_K),
    "BF16": (Type.BF16, Type.BF16),
}
SHAPES = {
    "qwen3-0.6b": Shape(1024, 28, 3072, 16, 8),
    "qwen3-1.7b": Shape(2048, 28, 6144, 16, 8),
    "qwen3-4b": Shape(2560, 36, 9728, 32, 8),
}


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file: name, shape as NumPy has it, type; its numbers' spread."""

    name: str
    shape: tuple[int, ...]
    type: Type
    std: float = 0.0  # 0: all ones

    @property
    def byte_shape(self) -> tuple[int, ...]:
        return tuple(gguf.quant_shape_to_byte_shape(self.shape, self.type))


def more_bits(layer: int, layers: int) -> bool:
    """Whether llama.cpp's recipe gives a layer's values and down projection Q6_K in Q4_K_M."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def tensors(shape: Shape, kind: str) -> Iterator[Tensor]:
    """Every tensor of a file of one of the `RECIPES`."""
    usual, better = RECIPES[kind]
    width, kv = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    # The tied head reads a normed vector: its products have this spread.
    head_std = LOGIT_STD / shape.hidden**0.5
    yield Tensor("token_embd.weight", (shape.vocabulary, shape.hidden), better, head_std)
    yield Tensor("output_norm.weight", (shape.hidden,), Type.F32)
    for layer in range(shape.layers):
        mixed = better if more_bits(layer, shape.layers) else usual
        matrices = {
            "attn_q": (width, shape.hidden, usual),
            "attn_k": (kv, shape.hidden, usual),
            "attn_v": (kv, shape.hidden, mixed),
            "attn_output": (shape.hidden, width, usual),
            "ffn_gate": (shape.inner, shape.hidden, usual),
            "ffn_up": (shape.inner, shape.hidden, usual),
            "ffn_down": (shape.hidden, shape.inner, mixed),
        }
        vectors = {
            "attn_norm": shape.hidden,
            "ffn_norm": shape.hidden,
            "attn_q_norm": shape.head_size,
            "attn_k_norm": shape.head_size,
        }
        for part, (rows, columns, kind_of) in matrices.items():
            yield Tensor(f"blk.{layer}.{part}.weight", (rows, columns), kind_of, columns**-0.5)
        for part, size in vectors.items():
            yield Tensor(f"blk.{layer}.{part}.weight", (size,), Type.F32)


def q8_0(blocks: np.ndarray, std: float) -> None:
    numbers = blocks[:, 2:].view(np.int8)
    np.maximum(numbers, -127, out=numbers)  # a quantiser never writes -128
    blocks[:, :2] = half(std / 73.3)  # of -127 to 127


def q4_k(blocks: np.ndarray, std: float) -> None:
    """Scales from 32 to 63, minima of the same size: numbers around 0."""
    scales = blocks[:, 4:12:2] & 31 | 32
    low, high = scales[:, :2], scales[:, 2:]
    scale_N8 = np.concatenate([low, high, low, high], axis=1)
    first, last = scale_N8[:, :4], scale_N8[:, 4:]
    blocks[:, 4:8] = first | (last >> 4) << 6
    blocks[:, 8:12] = blocks[:, 4:8]
    blocks[:, 12:16] = last & 15 | (last & 15) << 4
    d = std / (48.4 * 4.61)  # of such scales, of 0 to 15
    # The minimum of a sub-block is its scale times 7.5, the middle of 0 to 15.
    blocks[:, :2], blocks[:, 2:4] = half(d), half(7.5 * d)


def q6_k(blocks: np.ndarray, std: float) -> None:
    """Scales of a size from 64 to 127 and any sign."""
    scales = blocks[:, 192:208]
    sign = np.where(scales & 128, -1, 1).astype(np.int8)
    blocks[:, 192:208] = ((scales & 63 | 64).view(np.int8) * sign).view(np.uint8)
    blocks[:, 208:] = half(std / (97.3 * 18.5))  # of such scales, of -32 to 31


def bf16(blocks: np.ndarray, std: float) -> None:
    """Whole numbers from -128 to 127, scaled."""
    numbers = blocks[:, :1].view(np.int8) * np.float32(std / 73.9)
    blocks.view(np.uint16)[:] = numbers.view(np.uint32) >> 16


def half(number: float) -> np.ndarray:
    """The bytes of a number in half precision."""
    return np.array([number], dtype=np.float16).view(np.uint8)


FILL: dict[Type, Callable[[np.ndarray, float], None]] = {
    Type.Q8_0: q8_0,
    Type.Q4_K: q4_k,
    Type.Q6_K: q6_k,
    Type.BF16: bf16,
}


def random_numbers(tensor: Tensor, rng: np.random.Generator) -> np.ndarray:
    """Random blocks of the tensor's type, or ones."""
    if not tensor.std:
        return np.ones(tensor.shape, dtype=np.float32)
    count = int(np.prod(tensor.byte_shape))
    blocks = np.frombuffer(bytearray(rng.bytes(count)), dtype=np.uint8)
    FILL[tensor.type](blocks.reshape(-1, gguf.GGML_QUANT_SIZES[tensor.type][1]), tensor.std)
    return blocks.reshape(tensor.byte_shape)


def describe(writer: Any, shape: Shape, kind: str) -> None:
    """Write shapes and a vocabulary of that size: bytes, one pair, and names that no text has."""
    writer.add_name("random weights")
    writer.add_file_type(FILE_TYPES[kind])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_size)
    writer.add_value_length(shape.head_size)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    known = [*byte_characters(), "ab", END]
    filler = [f"<unused {i}>" for i in range(shape.vocabulary - len(known))]
    kinds = [*[NORMAL] * (len(known) - 1), CONTROL, *[UNUSED] * len(filler)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(known + filler)
    writer.add_token_types(kinds)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(len(known) - 1)
    writer.add_add_bos_token(False)


def byte_characters() -> list[str]:
    """The characters that stand for bytes in a byte-level vocabulary, byte 0 first."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = iter(range(256, 512))
    return [chr(byte if byte in shown else next(hidden)) for byte in range(256)]


def write(writer: Any, found: list[Tensor], numbers: Callable[[Tensor], np.ndarray]) -> None:
    """Write a described file: one tensor in memory at a time."""
    for tensor in found:
        size = int(np.prod(tensor.byte_shape if tensor.type != Type.F32 else tensor.shape))
        size *= 4 if tensor.type == Type.F32 else 1
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), size, tensor.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in found:
        writer.write_tensor_data(numbers(tensor))
    writer.close()


def write_random(path: Path, shape: Shape, kind: str, seed: int = 0) -> None:
    """Write a model of random weights."""
    writer = gguf.GGUFWriter(path, "qwen3")
    describe(writer, shape, kind)
    rng = np.random.default_rng(seed)
    write(writer, list(tensors(shape, kind)), lambda tensor: random_numbers(tensor, rng))


def convert(source: Path, path: Path, kind: str) -> None:
    """Write a file's model with its matrices in another type; those in it already stay."""
    reader = gguf.GGUFReader(source)
    wanted = Type[kind]
    given = {tensor.name: tensor for tensor in reader.tensors}
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not re.match(r"GGUF\.|general\.(architecture|file_type)$", name):
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    writer.add_file_type(FILE_TYPES[kind])

    def as_tensor(name: str) -> Tensor:
        shape = tuple(int(size) for size in reversed(given[name].shape))
        return Tensor(name, shape, wanted if len(shape) > 1 else given[name].tensor_type)

    def numbers(tensor: Tensor) -> np.ndarray:
        old = given[tensor.name]
        if old.tensor_type == tensor.type:
            return np.asarray(old.data)
        plain = gguf.quants.dequantize(old.data, old.tensor_type)
        return np.asarray(gguf.quants.quantize(plain, tensor.type))

    write(writer, [as_tensor(name) for name in given], numbers)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the files")
    parser.add_argument("--convert", type=Path, nargs="*", default=[], metavar="FILE.gguf")
    parser.add_argument("--type", choices=CONVERTIBLE, default="Q8_0", help="to convert to")
    parser.add_argument("--random", nargs="*", default=[], choices=SHAPES, metavar="SHAPE")
    parser.add_argument(
        "--kinds", nargs="+", choices=RECIPES, default=["Q4_K_M", "Q8_0"], help="of random weights"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for source in options.convert:
        name = re.sub(r"\.[A-Z][0-9A-Z_]+$", "", source.stem)
        path = options.out / f"{name}.{options.type}.gguf"
        convert(source, path, options.type)
        print(f"wrote {path}")
    for name in options.random:
        for kind in options.kinds:
            path = options.out / f"{name}.{kind}.gguf"
            write_random(path, SHAPES[name], kind)
            print(f"wrote {path}")


if __name__ == "__main__":
    main()

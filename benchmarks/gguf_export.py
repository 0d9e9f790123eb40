"""Checkpoints of Llama models as GGUF files, which llama.cpp reads: same weights, in float32.

`python -m benchmarks.gguf_export --out FOLDER` writes those of the embedded pair.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file

from benchmarks.common import DRAFT, TARGET
from foretoken.errors import ConfigError
from foretoken.models import resolve_checkpoint

NORMAL, CONTROL = 1, 3  # GGUF's token types
OUTSIDE_LAYERS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
IN_LAYERS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def export(name: str, out: Path) -> Path:
    """Write `out/<name>.gguf` from the checkpoint of that name.

    Raises:
        ConfigError: it is no plain Llama: other model types, scaled RoPE.
    """
    folder = resolve_checkpoint(name)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    rope = config["rope_parameters"]
    if config["model_type"] != "llama" or rope["rope_type"] != "default":
        kind = f"{config['model_type']}, RoPE {rope['rope_type']}"
        raise ConfigError("model", kind, "a llama with default RoPE, which this export knows")
    path = out / f"{name}.gguf"
    out.mkdir(parents=True, exist_ok=True)
    writer = _package().GGUFWriter(path, "llama")
    describe(writer, name, config, json.loads((folder / "tokenizer.json").read_text("utf-8")))
    for tensor, numbers in tensors(folder / "model.safetensors", config):
        writer.add_tensor(tensor, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _package() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ImportError("llama.cpp reads GGUF files; to write them: pip install gguf") from error
    return gguf


def describe(writer: Any, name: str, config: dict[str, Any], tokenizer: dict[str, Any]) -> None:
    """Write shapes and the byte-level vocabulary."""
    writer.add_name(name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        add(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    ids = tokenizer["model"]["vocab"]
    special = {added["id"] for added in tokenizer["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if ids[token] in special else NORMAL for token in tokens])
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])


def tensors(path: Path, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """GGUF's name and float32 numbers of every tensor of a checkpoint of one file."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, tensor in load_file(path).items():
        numbers = tensor.float().numpy()
        found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
        if found is None:
            yield OUTSIDE_LAYERS[name], numbers
            continue
        part = IN_LAYERS[found[2]]
        if part in heads:
            numbers = interleave(numbers, heads[part])
        yield f"blk.{found[1]}.{part}.weight", numbers


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection, [heads · D, in], in the order of llama.cpp's RoPE.

    A checkpoint's RoPE turns rows i and i + D/2 of a head together, llama.cpp's 2i and 2i + 1.
    """
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the files")
    out = parser.parse_args().out
    for name in (TARGET, DRAFT):
        print(f"wrote {export(name, out)}")


if __name__ == "__main__":
    main()

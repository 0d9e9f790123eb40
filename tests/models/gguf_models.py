"""Small random models as GGUF files and, with the same numbers, as checkpoints in safetensors.

Files are written by the `gguf` package, in the layout of llama.cpp's converter. Belongs here: which
tensor is in which format, and what it stands for. Does not: files that are wrong
(`test_gguf_reader.py`), what is compared (`test_gguf_models.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from foretoken.models.tokenizer import load_tokenizer
from foretoken.ops.formats import BLOCKS, round_rows
from tests.models import families
from tests.models.gguf_files import finish
from tests.ops.weights import random_blocks

VOCABULARY, END, HEADS, KV_HEADS, HEAD_SIZE = 260, 257, 4, 2, 64
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 512, "head_dim": HEAD_SIZE,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "num_hidden_layers": 2,
    "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": END,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
WINDOW = 5
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip

# By the last name of a tensor; the rest is in the last format.
MIXES: dict[str, dict[str, str]] = {
    **{kind: {"": kind} for kind in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_1")},
    "K mix": {
        "attn_v": "Q6_K", "ffn_down": "Q6_K", "output": "Q6_K", "token_embd": "Q5_K", "": "Q4_K",
    },
    "blocks and plain": {"attn_k": "F16", "ffn_down": "BF16", "output": "F32", "": "Q8_0"},
}  # fmt: skip


def tensor_name(parameter: str) -> str:
    """As llama.cpp has it."""
    path, _, leaf = parameter.rpartition(".")
    if path in NAMES:
        return f"{NAMES[path]}.{leaf}"
    layer, _, part = path.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{NAMES[part]}.{leaf}"


def permuted(rows: NDArray[Any], heads: int) -> NDArray[Any]:
    """`LlamaModel.permute` of llama.cpp's converter."""
    shape = (heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return rows.reshape(shape).swapaxes(1, 2).reshape(rows.shape)


def kind_of(name: str, mix: Mapping[str, str]) -> str:
    stem = name.split(".")[-2]
    return next(kind for key, kind in mix.items() if not key or key == stem)


class Written:
    """A model in both layouts.
    file:    the GGUF file
    folder:  the checkpoint, float32, of the numbers that are in the file
    module:  Transformers' own, with the same numbers
    kinds:   format by parameter
    """

    def __init__(
        self,
        folder: Path,
        family: str,
        mix: str,
        architecture: str | None = None,
        *,
        seed: int = 0,
        order: Callable[[NDArray[Any], int], NDArray[Any]] = permuted,
        **overrides: Any,
    ) -> None:
        from transformers import AutoModelForCausalLM

        folder.mkdir(parents=True, exist_ok=True)
        self.architecture = architecture or family
        self.file, self.folder = folder / f"model-{mix}.gguf", folder / "checkpoint"
        config = families.make_config(family, {**SIZES, **overrides})
        self.module: Any = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
        self.kinds: dict[str, str] = {}
        random = torch.Generator().manual_seed(seed)
        writer = gguf.GGUFWriter(str(self.file), self.architecture)
        self._describe(writer, config)
        for name, parameter in self.module.named_parameters():
            heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2], 0)
            is_turned = heads and self.architecture in ("llama", "mistral3")
            index = np.arange(len(parameter))
            order_N = order(index, heads) if is_turned else index
            kind = "F32" if parameter.ndim == 1 else kind_of(tensor_name(name), MIXES[mix])
            self.kinds[name] = kind
            numbers, stored = _random_tensor(parameter, kind, random, order_N)
            parameter.copy_(numbers)
            writer.add_tensor(tensor_name(name), stored, raw_dtype=gguf.GGMLQuantizationType[kind])
        finish(writer)
        self.module.save_pretrained(self.folder)
        load_tokenizer(self.file).save_pretrained(self.folder)

    def _describe(self, writer: gguf.GGUFWriter, config: Any) -> None:
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(HEAD_SIZE)
        writer.add_value_length(HEAD_SIZE)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_vocab_size(config.vocab_size)
        if config.model_type == "mistral":
            writer.add_sliding_window(config.sliding_window)
        alphabet = sorted(_alphabet())
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list([*alphabet, "Ġa", "<|end|>"])
        writer.add_token_types([1] * (len(alphabet) + 1) + [3])
        writer.add_token_merges(["Ġ a"])
        writer.add_eos_token_id(END)
        writer.add_chat_template(TEMPLATE)

    def exact_logits(self, tokens: list[int], *, rounds: bool = True) -> torch.Tensor:
        """[n, V] in float64, by Transformers; rounds: rows are rounded before weights in blocks."""
        import copy

        module = copy.deepcopy(self.module).double()
        module.set_attn_implementation("eager")
        if rounds:
            for name, child in module.named_modules():
                kind = self.kinds.get(f"{name}.weight", self.kinds["model.embed_tokens.weight"])
                if isinstance(child, nn.Linear) and kind in BLOCKS:
                    child.register_forward_pre_hook(lambda _, args: (round_rows(args[0]),))
        return families.plain_logits(module, tokens)


def _alphabet() -> list[str]:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel.alphabet()


def _random_tensor(
    like: torch.Tensor, kind: str, random: torch.Generator, order_N: NDArray[np.int64]
) -> tuple[torch.Tensor, NDArray[Any]]:
    numbers = torch.randn(like.shape, generator=random)
    numbers = 1 + 0.3 * numbers if like.ndim == 1 else numbers * 1.5 * like.shape[-1] ** -0.5
    whole, file_kind = numbers.numpy(), gguf.GGMLQuantizationType[kind]
    if kind.endswith("_K"):  # the package reads them alone
        blocks = random_blocks(kind, like.shape[0], like.shape[1], random)
        stored: NDArray[Any] = blocks.numpy()
    else:
        stored = gguf.quants.quantize(whole[order_N], file_kind)
    read = gguf.quants.dequantize(stored, file_kind).reshape(like.shape)
    found = np.empty_like(whole)
    found[order_N] = read
    return torch.from_numpy(found), stored

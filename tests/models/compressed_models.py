"""Small random models as checkpoints of compressed-tensors, and their numbers stated plainly.

Belongs here: which tensors such a checkpoint has, and what they stand for; nothing of ours reads or
writes them. Does not: what is wrong with a file, what is compared (`test_compressed.py`).
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from foretoken.ops.formats import round_rows
from tests.models import families

VOCABULARY = 96
SIZES: dict[str, dict[str, Any]] = {
    # Rows are multiples of 32, 48 and 64; none of those that heads give is 256.
    "llama": {
        "hidden_size": 192, "intermediate_size": 384, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 48,
    },
    # Beyond what the check of kernels looks at, in every direction.
    "qwen3": {
        "hidden_size": 512, "intermediate_size": 320, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 64,
    },
}  # fmt: skip
SCALES = {"tensor": torch.bfloat16, "channel": torch.float16, "group": torch.bfloat16}
"""The dtype of stored scales, by strategy."""


class Scheme(NamedTuple):
    """How the matrices of a checkpoint are stored.
    size:   numbers of a group, of strategy `group`
    format: `pack-quantized` or `int-quantized`
    """

    bits: int
    strategy: str
    size: int = 0
    format: str = "pack-quantized"

    def config(self, ignore: tuple[str, ...]) -> dict[str, Any]:
        """The `quantization_config` that llm-compressor would write."""
        weights = {
            "num_bits": self.bits, "type": "int", "symmetric": True, "strategy": self.strategy,
            "group_size": self.size or None, "actorder": None, "block_structure": None,
            "dynamic": False, "observer": "minmax", "observer_kwargs": {},
        }  # fmt: skip
        group = {"input_activations": None, "output_activations": None, "targets": ["Linear"]}
        return {
            "config_groups": {"group_0": {**group, "weights": weights}},
            "format": self.format, "quant_method": "compressed-tensors", "ignore": [*ignore],
            "kv_cache_scheme": None, "quantization_status": "compressed",
        }  # fmt: skip


def packed(codes: Tensor, bits: int) -> Tensor:
    """Codes in words of 32 bits, the first in the lowest bits, each with half its range added."""
    count, (rows, numbers) = 32 // bits, codes.shape
    words = np.zeros((rows, -(-numbers // count)), dtype=np.uint32)
    for i in range(numbers):
        added = (codes[:, i].numpy().astype(np.int64) + 2 ** (bits - 1)).astype(np.uint32)
        words[:, i // count] |= added << np.uint32(bits * (i % count))
    return torch.from_numpy(words.view(np.int32))


def random_codes(
    shape: tuple[int, int], scheme: Scheme, random: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales as they are stored, and the numbers that they stand for."""
    (rows, numbers), bound = shape, 2 ** (scheme.bits - 1)
    codes = torch.randint(-bound, bound, shape, generator=random, dtype=torch.int8)
    groups = {"tensor": (1,), "channel": (rows, 1)}.get(scheme.strategy)
    sizes = groups or (rows, numbers // scheme.size)
    scale = (torch.rand(sizes, generator=random) + 0.5) * 2.6 / (bound * numbers**0.5)
    scale = scale.to(SCALES[scheme.strategy])
    each = scale.float().reshape(-1, 1) if groups else scale.float()
    size = numbers // each.shape[1]
    wide = each.expand(rows, -1).repeat_interleave(size, dim=1)
    return codes, scale, codes.float() * wide


class Written:
    """A checkpoint, its float32 module in Transformers, and the names of matrices in codes."""

    def __init__(
        self,
        folder: Path,
        family: str,
        scheme: Scheme,
        *,
        ignore: tuple[str, ...] = ("lm_head", "model.embed_tokens"),
        **overrides: Any,
    ) -> None:
        from transformers import AutoModelForCausalLM

        self.folder, self.scheme = folder, scheme
        config = families.make_config(
            family, {"vocab_size": VOCABULARY, **SIZES[family], **overrides}
        )
        self.module: Any = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
        self.stored: set[str] = set()
        random, tensors = torch.Generator().manual_seed(0), dict[str, Tensor]()
        for name, parameter in self.module.named_parameters():
            layer = name.rpartition(".")[0]
            if parameter.ndim == 2 and layer not in ignore:
                self.stored.add(layer)
                tensors |= self._matrix(name, parameter, random)
                continue
            noise = torch.randn(parameter.shape, generator=random)
            is_gain = parameter.ndim == 1
            plain = (1 + 0.3 * noise if is_gain else noise * parameter.shape[-1] ** -0.5).bfloat16()
            tensors[name] = plain
            parameter.copy_(plain.float())
        self.module.config.save_pretrained(folder)
        families.change_config(folder, quantization_config=scheme.config(ignore))
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    def _matrix(self, name: str, parameter: Tensor, random: torch.Generator) -> dict[str, Tensor]:
        codes, scale, numbers = random_codes(tuple(parameter.shape), self.scheme, random)
        parameter.copy_(numbers)
        if self.scheme.format == "int-quantized":
            return {name: codes, f"{name}_scale": scale}
        return {
            f"{name}_packed": packed(codes, self.scheme.bits),
            f"{name}_scale": scale,
            f"{name}_shape": torch.tensor(parameter.shape),
        }

    def exact_logits(self, tokens: list[int], *, rounds: bool = True) -> Tensor:
        """[n, V] in float64, by Transformers; rounds: rows are rounded before matrices in codes."""
        module = copy.deepcopy(self.module).double()
        module.set_attn_implementation("eager")
        for name, child in module.named_modules():
            is_tied = name == "lm_head" and child.weight is module.model.embed_tokens.weight
            is_stored = ("model.embed_tokens" if is_tied else name) in self.stored
            if rounds and isinstance(child, nn.Linear) and is_stored:
                child.register_forward_pre_hook(lambda _, args: (round_rows(args[0]),))
        return families.plain_logits(module, tokens)

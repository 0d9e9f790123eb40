"""A head in four or eight bits: the checkpoints that the package ships.

`python -m training.pack_head HEAD OUT --bits 4` reads a trained head and writes it as
compressed-tensors (`pack-quantized`, symmetric, groups of 32 with half-precision scales).

Belongs here: choosing the scales, and the layout of the file. Does not: reading it
(`foretoken.models.compressed`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 32
WORD = 32  # bits that codes are packed into
_TRIED = 41  # scales of a group, from 0.7 to 1.2 of the one that its largest number asks for


def quantise(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes int8 [out, in], and scales float16 [out, groups], of least squared error.

    Codes are from -8 (of eight bits: -128) to 7 (127). A group's scale may be negative, so that its
    largest number gets the least code, whatever its sign.
    """
    bound = 2 ** (bits - 1)
    grouped = weight.float().unflatten(1, (-1, GROUP))
    most, place = grouped.abs().max(-1)
    sign = torch.where(grouped.gather(-1, place[..., None])[..., 0] < 0, 1.0, -1.0)
    best = torch.full(most.shape, torch.inf)
    codes, scales = torch.zeros_like(grouped), torch.zeros_like(most)
    for part in torch.linspace(0.7, 1.2, _TRIED).tolist():
        for candidate in (most / (bound - 1) * part, sign * most / bound * part):
            scale = candidate.half().float()
            safe = torch.where(scale == 0, 1.0, scale)[..., None]
            tried = (grouped / safe).round().clamp(-bound, bound - 1)
            error = (tried * scale[..., None] - grouped).square().sum(-1)
            better = error < best
            best = torch.where(better, error, best)
            codes = torch.where(better[..., None], tried, codes)
            scales = torch.where(better, scale, scales)
    return codes.flatten(1).to(torch.int8), scales.half()


def packed(codes: Tensor, bits: int) -> Tensor:
    """Codes in words of 32 bits, the first in the lowest, each with half its range added: int32."""
    count = WORD // bits
    added = (codes.long() + 2 ** (bits - 1)).unflatten(1, (-1, count))
    words = (added << (bits * torch.arange(count))).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def pack(tensors: dict[str, Tensor], bits: int) -> dict[str, Tensor]:
    """Every matrix in so many bits; norms in float32; the map of ids that is read."""
    stored = dict[str, Tensor]()
    for name, tensor in tensors.items():
        if name == "t2d":  # says what d2t says, 49 KB of SmolLM2's
            continue
        if tensor.dim() == 2:
            codes, scales = quantise(tensor, bits)
            stored[f"{name}_packed"], stored[f"{name}_scale"] = packed(codes, bits), scales
            stored[f"{name}_shape"] = torch.tensor(tensor.shape)
        else:
            stored[name] = tensor.float() if tensor.is_floating_point() else tensor
    return stored


def scheme(bits: int) -> dict[str, object]:
    """The `quantization_config` of such a checkpoint."""
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group"}
    group = {"targets": ["Linear"], "weights": {**weights, "group_size": GROUP}}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "input_activations": None}},
        "ignore": [],
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Write the packed head.

    Args:
        argv: the command line's arguments; None: those of this process.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("head", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--bits", type=int, choices=(4, 8), required=True)
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    config = json.loads((options.head / "config.json").read_text(encoding="utf-8"))
    config |= {"quantization_config": scheme(options.bits), "dtype": "float32"}
    text = json.dumps(config, indent=2) + "\n"
    (options.out / "config.json").write_text(text, encoding="utf-8")
    file = options.out / "model.safetensors"
    save_file(
        pack(load_file(options.head / "model.safetensors"), options.bits), file, {"format": "pt"}
    )
    print(f"{file}: {file.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()

"""Random weights of the right shapes: `--load-format dummy`, for measuring speed without weights.

Belongs here: filling a module built from `config.json` alone. Does not: checking it.
"""

from __future__ import annotations

from typing import Any

import torch

_LOGIT_STD = 2.0


def build_dummy(
    model_class: Any,
    config: Any,
    *,
    attn_implementation: str,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
) -> Any:
    """A module with the family's own random initialisation, seeded; the caller's state is kept.

    The initial logits of such models are nearly flat (standard deviation 0.02 * sqrt(hidden), 0.3
    at hidden size 256), so that every argmax is a near-tie; `sharpen` mends that afterwards.
    """
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.device(device):
        torch.manual_seed(seed)
        return model_class._from_config(
            config, attn_implementation=attn_implementation, dtype=dtype
        )


def sharpen(module: Any, logits_NV: torch.Tensor) -> None:
    """Scale the output embedding so that logits like these get a standard deviation of 2.

    Tied input embeddings are scaled with it, which the first norm undoes. Left alone if the model
    has no output embedding or its logits are already as spread.
    """
    head = module.get_output_embeddings()
    std = logits_NV.float().std().item()
    if head is not None and 0 < std < _LOGIT_STD:
        with torch.no_grad():
            head.weight.mul_(_LOGIT_STD / std)

"""The optimiser and its learning rate, of every model that is trained here."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor


def adamw(weights: Iterable[Tensor], lr: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW with decay on matrices only (norm gains and biases have one dimension)."""
    weights = list(weights)
    groups = [
        {"params": [w for w in weights if w.ndim >= 2], "weight_decay": weight_decay},
        {"params": [w for w in weights if w.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8, fused=weights[0].is_cuda)


def learning_rate(step: int, steps: int, peak: float, warmup: int, floor: float = 0.02) -> float:
    """Linear warmup, then a cosine from `peak` to `floor · peak`."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Write `lr` to every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr

"""Optimisers and their learning rate, of every model that is trained here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

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


class HeadOptimizer:
    """Muon (Jordan 2024) for the matrices inside the layer, AdamW for the rest.

    Args:
        weights: by name; the matrix `apart` is AdamW's: its rows are tokens.
        muon_share: Muon's learning rate in units of AdamW's; 0 is AdamW for all.
    """

    def __init__(
        self, weights: Mapping[str, Tensor], apart: str, weight_decay: float, muon_share: float
    ) -> None:
        inner = {n for n, w in weights.items() if w.ndim == 2 and n != apart and muon_share}
        others = [w for n, w in weights.items() if n not in inner]
        self._parts: list[tuple[torch.optim.Optimizer, float]] = []
        self._parts.append((adamw(others, 0.0, weight_decay), 1.0))
        if inner:
            matrices = [weights[name] for name in sorted(inner)]
            muon = torch.optim.Muon(
                matrices, lr=0.0, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
            )
            self._parts.append((muon, muon_share))

    def step(self, lr: float) -> None:
        """One step at this rate; gradients are gone then."""
        for optimizer, share in self._parts:
            set_learning_rate(optimizer, lr * share)
            optimizer.step()
            optimizer.zero_grad()

    def state(self) -> dict[str, Tensor]:
        """All that it remembers."""
        return {
            f"{part}.{i}.{name}": value
            for part, (optimizer, _) in enumerate(self._parts)
            for i, kept in optimizer.state_dict()["state"].items()
            for name, value in kept.items()
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` gave."""
        for part, (optimizer, _) in enumerate(self._parts):
            kept: dict[int, dict[str, Tensor]] = {}
            for name, value in state.items():
                of_part, i, what = name.split(".")
                if int(of_part) == part:
                    kept.setdefault(int(i), {})[what] = value
            optimizer.load_state_dict({**optimizer.state_dict(), "state": kept})


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

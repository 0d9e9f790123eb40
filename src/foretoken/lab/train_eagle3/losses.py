"""What training minimises: how often drafts will be refused.

Shape suffixes: N rows, V ids that the head drafts, J steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

# Numbers of a piece of logits: its copies in float32 shall fit a CPU's cache, or be few on a GPU.
_PIECE = {"cpu": 1 << 20, "cuda": 1 << 27}


def loss_of(kind: str, overlaps: Sequence[Tensor], cross_entropies: Sequence[Tensor]) -> Tensor:
    """A scalar, of each step's `overlap` or `cross_entropy` [N].

    `kl`: the mean cross-entropy. `tv`: 1 - the mean overlap, which is the rate of refusals.
    `length`: 1 - accepted drafts per step; draft j counts where all before it were accepted, too.
    """
    if kind == "kl":
        return torch.stack(list(cross_entropies)).mean()
    rate_JN = torch.stack(list(overlaps))
    return 1 - (rate_JN.cumprod(dim=0) if kind == "length" else rate_JN).mean()


def overlap(logits_NV: Tensor, p_NV: Tensor, temperature: float) -> Tensor:
    """sum(min(p, q)) of each row, [N] float32: the chance that a draft is accepted.

    q is the softmax of `logits_NV / temperature`. p has what the target gives to these ids.
    """
    return _by_rows("overlap", logits_NV, p_NV, temperature)


def cross_entropy(logits_NV: Tensor, p_NV: Tensor, temperature: float) -> Tensor:
    """-sum(p log q) of each row in nats, [N] float32: KL(p, q) but for what no head can change."""
    return _by_rows("cross_entropy", logits_NV, p_NV, temperature)


def compile_losses() -> None:
    """Fuse their operators, which takes a C compiler, and half a minute once."""
    for name, rows in _ROWS.items():
        _ROWS[name] = torch.compile(rows)


def _by_rows(name: str, logits_NV: Tensor, p_NV: Tensor, temperature: float) -> Tensor:
    scale = torch.full((), 1 / temperature, device=logits_NV.device)  # a number is compiled in
    found: Tensor = _RowFunction.apply(logits_NV, p_NV, scale, name)  # type: ignore[no-untyped-call]
    return found


class _RowFunction(Function):
    """A number of each row, with its slope from the same pass, in the logits' dtype.

    So nothing as large as the logits is kept but that slope: PyTorch's own would keep five.
    """

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, p_NV: Tensor, scale: Tensor, name: str) -> Tensor:
        """[N]"""
        size = max(1, _PIECE[logits_NV.device.type] // logits_NV.shape[1])
        found_N = logits_NV.new_empty(len(logits_NV), dtype=torch.float32)
        slope_NV = torch.empty_like(logits_NV)
        for i in range(0, len(logits_NV), size):
            at = slice(i, i + size)
            found_N[at], slope_NV[at] = _ROWS[name](logits_NV[at], p_NV[at], scale)
        ctx.save_for_backward(slope_NV)
        return found_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """Of the logits alone: the target is frozen."""
        [slope_NV], [gradient_N] = ctx.saved_tensors, gradients
        return slope_NV * gradient_N[:, None].to(slope_NV.dtype), None, None, None


def _overlap_rows(logits_NV: Tensor, p_NV: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    q_NV = (logits_NV.float() * scale).softmax(-1)
    counted_NV = q_NV * (q_NV < p_NV)  # where q is the smaller, more of it helps
    slope_NV = counted_NV - q_NV * counted_NV.sum(-1, keepdim=True)
    return torch.minimum(p_NV, q_NV).sum(-1), (slope_NV * scale).to(logits_NV.dtype)


def _cross_entropy_rows(logits_NV: Tensor, p_NV: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    log_q_NV = (logits_NV.float() * scale).log_softmax(-1)
    slope_NV = log_q_NV.exp() * p_NV.sum(-1, keepdim=True) - p_NV
    return -(p_NV * log_q_NV).sum(-1), (slope_NV * scale).to(logits_NV.dtype)


_ROWS = {"overlap": _overlap_rows, "cross_entropy": _cross_entropy_rows}

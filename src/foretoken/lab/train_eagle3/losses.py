"""What training minimises: how often drafts will be refused.

Shape suffixes: B texts, S positions of a text, V ids that the head drafts, J steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

# Numbers of a piece of logits: its copies in float32 shall fit a CPU's cache, or be few on a GPU.
_PIECE = {"cpu": 1 << 20, "cuda": 1 << 27}


def loss_of(kind: str, overlaps: Sequence[Tensor], cross_entropies: Sequence[Tensor]) -> Tensor:
    """A scalar, of each step's `agreement`.

    `kl`: the mean cross-entropy. `tv`: 1 - the mean overlap, which is the rate of refusals.
    `length`: 1 - accepted drafts per step; draft j counts where all before it were accepted, too.
    """
    if kind == "kl":
        return torch.stack(list(cross_entropies)).mean()
    rate_JBS = torch.stack(list(overlaps))
    return 1 - (rate_JBS.cumprod(dim=0) if kind == "length" else rate_JBS).mean()


def agreement(
    logits_BSV: Tensor, p_BSV: Tensor, temperature: float, rows: Rows | None = None
) -> tuple[Tensor, Tensor]:
    """How well q suits p at each position, float32: sum(min(p, q)), the chance that a draft is
    accepted, [B, S]; and the cross-entropy -sum(p log q) in nats, [B, S], which is KL(p, q) but for
    what no head can change.

    q is the softmax of `logits_BSV / temperature`. p has what the target gives to these ids; only
    its last dimension need be dense.
    """
    scale = torch.full((), 1 / temperature, device=logits_BSV.device)  # a number is compiled in
    overlap_BS, entropy_BS = _Agreement.apply(  # type: ignore[no-untyped-call]
        logits_BSV, p_BSV, scale, rows or Rows()
    )
    return overlap_BS, entropy_BS


class _Agreement(Function):
    """Both numbers of each row with their slopes from the same pass, in the logits' dtype.

    So nothing as large as the logits is kept but these: PyTorch's own would keep ten.
    """

    @staticmethod
    def forward(
        ctx: Any, logits_BSV: Tensor, p_BSV: Tensor, scale: Tensor, rows: Rows
    ) -> tuple[Tensor, ...]:
        """[B, S] twice"""
        size = max(1, _PIECE[logits_BSV.device.type] // logits_BSV[0].numel())
        pieces = torch.split(logits_BSV, size), torch.split(p_BSV, size)
        found = [rows.measure(*both, scale) for both in zip(*pieces, strict=True)]
        whole = [
            torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*found, strict=True)
        ]
        *numbers, slope_BSV, other_BSV = whole
        ctx.save_for_backward(slope_BSV, other_BSV)
        ctx.rows = rows
        return tuple(numbers)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """Of the logits alone: the target is frozen."""
        return ctx.rows.weigh(*ctx.saved_tensors, *gradients), None, None, None


def _measure(
    logits_BSV: Tensor, p_BSV: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Overlap and cross-entropy [B, S], and their slopes [B, S, V] by the logits."""
    log_q_BSV = (logits_BSV.float() * scale).log_softmax(-1)
    q_BSV = log_q_BSV.exp()
    counted_BSV = q_BSV * (q_BSV < p_BSV)  # where q is the smaller, more of it helps
    overlap_slope = counted_BSV - q_BSV * counted_BSV.sum(-1, keepdim=True)
    entropy_slope = q_BSV * p_BSV.sum(-1, keepdim=True) - p_BSV
    overlap_BS, entropy_BS = torch.minimum(p_BSV, q_BSV).sum(-1), -(p_BSV * log_q_BSV).sum(-1)
    first, other = overlap_slope * scale, entropy_slope * scale
    return overlap_BS, entropy_BS, first.to(logits_BSV.dtype), other.to(logits_BSV.dtype)


def _weigh(one_BSV: Tensor, other_BSV: Tensor, by_one_BS: Tensor, by_other_BS: Tensor) -> Tensor:
    """The slope of what is made of both numbers, by the slopes of that."""
    found_BSV = one_BSV * by_one_BS[..., None] + other_BSV * by_other_BS[..., None]
    return found_BSV.to(one_BSV.dtype)


class Rows(NamedTuple):
    """What runs over all logits; their operators may be fused."""

    measure: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor]] = _measure
    weigh: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = _weigh

"""What attention kernels are given: every tensor under a name. See `triton/records.py`."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class HeadInputs(NamedTuple):
    """How the q and k that a layer's product gave become those that attend.

    First RMSNorm of each head, if there are weights; then rotary embedding in the half-split layout
    (Transformers' `rotate_half`) of the first R of D dimensions. All in float32, rounded once, to
    the dtype of the cache.

    cos_PR, sin_PR: float32 [P, R / 2], contiguous, any scaling of attention in them; P is at least
                    the longest length
    q_norm_D, k_norm_D: any float dtype, or both None. The weight itself: a model that multiplies by
                    1 + w has that computed once
    eps:            of the norms
    """

    cos_PR: Tensor
    sin_PR: Tensor
    q_norm_D: Tensor | None = None
    k_norm_D: Tensor | None = None
    eps: float = 1e-6
